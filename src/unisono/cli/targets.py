"""What a command line names: a script, a module, `package.module:function` or `file.py:function`.

Only ranks run the user's files. The launcher finds and parses them, to answer a wrong name before
anything starts; what ranks call is at the end of this file.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import pkgutil
import runpy
import symtable
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.compat.joining import trainers_join
from unisono.errors import PlatformError, an


def named_call(
    target: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> Callable[[], object]:
    """Return the call of a function named on the command line, as ranks make it."""
    place, _, function = target.rpartition(":")
    if not (place and function):
        raise PlatformError.because(
            f"unisono run {target}",
            "no name of a " + ("function" if place else "module or file"),
            hint="unisono run package.module:function, or file.py:function",
        )
    if place.endswith(".py"):
        place = check_script(place)
        source = Path(place)
    else:
        source = find_source(place, f"unisono run {target}")
    if source is not None:
        _check(target, source, function)
    return functools.partial(call_function, place, function, tuple(args), dict(kwargs))


def find_source(module: str, call: str) -> Path | None:
    """Return the file of a module without importing its package; None where it has no source.

    Raises `PlatformError` if no such module can be found from here.
    """
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module.split(".")
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        spec = _spec(name, path)
        if spec is None:
            raise PlatformError.because(
                call,
                f"No module named {name!r} from {Path.cwd()}",
                None,
                _neighbours(name, path) or "package.module:function, importable from here",
            )
        path = spec.submodule_search_locations or []
    file = Path(spec.origin) if spec is not None and spec.origin else None
    return file if file is not None and file.suffix == ".py" else None


def _neighbours(name: str, path: Sequence[str] | None) -> str:
    """Name the modules beside one that is not there, the most alike first."""
    package, dot, _ = name.rpartition(".")
    modules = pkgutil.iter_modules([str(Path.cwd())] if path is None else path)
    names = nearest_first(name, sorted(f"{package}{dot}{module.name}" for module in modules))
    return f"modules there: {', '.join(names[:8])}" if names else ""


def _spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Ask the finders of this interpreter for a module; the working directory comes first."""
    if path is None:
        spec = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
        if spec is not None:
            return spec
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and (spec := find(name, path)) is not None:
            return spec
    return None


def _check(target: str, source: Path, function: str) -> None:
    """Raise `PlatformError` if the file has nothing of that name at its top."""
    call = f"unisono run {target}"
    try:
        with tokenize.open(source) as file:
            text = file.read()
        symbols = symtable.symtable(text, str(source), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise PlatformError.because(call, f"{source.name} is not Python: {error}") from None
    names = {symbol.get_name() for symbol in symbols}
    if function.partition(".")[0] in names or "__getattr__" in names or "import *" in text:
        return
    functions = [s.get_name() for s in symbols if s.is_namespace()]
    public = [name for name in functions if not name.startswith("_")]
    near = difflib.get_close_matches(function, public, n=1)
    raise PlatformError.because(
        call,
        f"no {function!r} in {source}; it has {', '.join(public[:8]) or 'no function'}",
        None,
        f"did you mean {target.rpartition(':')[0]}:{near[0]}?" if near else None,
    )


def check_script(path: str) -> str:
    """Return the absolute path of a script, or raise `PlatformError` if it is not there."""
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
        with trainers_join():
            body()
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def call_function(
    place: str, name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """Call the function `name` of a module, or of the file at `place`; return its value as text.

    The text and not the value: its classes may be known to ranks only. `sys.argv` is `[place]`: the
    launcher's words are not for the user's module, and the function has its own in `args`.
    """
    sys.argv = [place]
    if place.endswith(".py"):
        path = Path(place)
        sys.path.insert(0, str(path.parent))  # its neighbours, which it may import in turn
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no module")
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
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
