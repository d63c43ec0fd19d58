"""`unisono run --compat NAME`: programs that import another library find our spelling of it."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable


def call_with_alias(name: str, function: Callable[[], object]) -> object:
    """Call `function` in a process where `import name` finds `unisono.compat.name`."""
    package = importlib.import_module(f"unisono.compat.{name}")
    sys.modules[name] = package
    for module in pkgutil.iter_modules(package.__path__):
        full_name = f"{package.__name__}.{module.name}"
        importlib.import_module(full_name)
        sys.modules[f"{name}.{module.name}"] = sys.modules[full_name]
    return function()
