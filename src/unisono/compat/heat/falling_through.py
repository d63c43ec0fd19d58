"""Names that HeAT takes from torch: looked up there, so that they are the identical objects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def fall_through(here: str, to: ModuleType) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the module `here` with the rest of its names in `to`.

    >>> import torch
    >>> look_up, names = fall_through(__name__, torch.nn)
    >>> look_up("Linear") is torch.nn.Linear, {"Linear", "fall_through"} <= set(names())
    (True, True)
    """

    def __getattr__(name: str) -> Any:
        if not name.startswith("__") and hasattr(to, name):
            return getattr(to, name)
        raise AttributeError(f"neither {here} nor {to.__name__} has an attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*dir(to), *vars(sys.modules[here])})

    return __getattr__, __dir__
