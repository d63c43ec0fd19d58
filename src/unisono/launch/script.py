"""A whole script as the function of a rank: each rank runs it as its `__main__`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from unisono.errors import PlatformError

__all__ = ["check_script", "run_module", "run_script"]


def check_script(path: str) -> str:
    """Return the absolute path of a script, or raise `PlatformError` if there is none."""
    script = Path(path)
    if not script.is_file():
        scripts = sorted(p.name for p in Path.cwd().glob("*.py"))
        raise PlatformError.because(
            f"unisono run {path}",
            f"no such file from {Path.cwd()}",
            None,
            f"scripts here: {', '.join(scripts[:8])}" if scripts else "the path of a script",
        )
    return str(script.absolute())


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
