"""A whole script as the function of a rank, run as its `__main__`; or one function of a file."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono.errors import PlatformError, an

__all__ = ["call_function", "check_script", "nearest_first", "run_module", "run_script"]


def check_script(path: str) -> str:
    """Return the absolute path of a script, or raise `PlatformError` if there is none."""
    script = Path(path)
    if not script.is_file():
        is_folder = script.is_dir()
        folder = script if is_folder else script.parent
        scripts = nearest_first(path, sorted(str(p) for p in folder.glob("*.py")))
        raise PlatformError.because(
            f"unisono run {path}",
            "that is a directory" if is_folder else f"no such file from {Path.cwd()}",
            None,
            f"scripts there: {', '.join(scripts[:8])}" if scripts else "the path of a script",
        )
    return str(script.absolute())


def nearest_first(word: str, names: Sequence[str]) -> list[str]:
    """Return `names` with those that look like `word` at the front."""
    near = difflib.get_close_matches(word, names, n=3)
    return [*near, *(name for name in names if name not in near)]


def run_script(path: str, args: Sequence[str]) -> None:
    """Run the file at `path` as `__main__` with `sys.argv = [path, *args]`."""
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    _main(lambda: runpy.run_path(path, run_name="__main__"))


def run_module(name: str, args: Sequence[str]) -> None:
    """Run module `name` as `__main__`, as `python -m` does."""
    sys.argv = [name, *args]
    sys.path.insert(0, str(Path.cwd()))
    _main(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _main(body: Callable[[], object]) -> None:
    """Run `body`; a script that exits with code 0 has succeeded."""
    try:
        body()
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def call_function(
    place: str, name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """Call the function `name` of a module, or of the file at `place`; return its value as text.

    The text and not the value: its classes may be known to ranks only.
    """
    if place.endswith(".py"):
        module = _import_file(Path(place))
    else:
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(place)
    function: Any = functools.reduce(getattr, name.split("."), module)
    value = function(*args, **kwargs)
    if inspect.isgenerator(value) or inspect.iscoroutine(value):
        raise PlatformError.because(
            f"unisono run {place}:{name}",
            f"{an(type(value).__name__)}: calling the function runs nothing",
            None,
            "a function that runs it to its end",
        )
    return None if value is None else repr(value)


def _import_file(path: Path) -> ModuleType:
    """Import the file at `path`, whose neighbours it may import in turn."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
