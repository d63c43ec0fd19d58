"""`package.module:function` and `file.py:function`: found by reading the source, not by running it.

Only ranks run the user's files. The launcher parses them, to answer a wrong name or wrong arguments
before anything starts.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.machinery
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from unisono.errors import PlatformError


def named_call(
    target: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> Callable[[], object]:
    """Return the call of a function named on the command line, as ranks make it."""
    from unisono.launch import script

    place, _, function = target.rpartition(":")
    if place.endswith(".py"):
        place = script.check_script(place)
        source = Path(place)
    else:
        source = find_source(place, f"unisono run {target}")
    if source is not None:
        _check(target, source, function, args, kwargs)
    return functools.partial(script.call_function, place, function, tuple(args), dict(kwargs))


def find_source(module: str, asked: str) -> Path | None:
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
                asked,
                f"No module named {name!r} from {Path.cwd()}",
                None,
                _neighbours(name, path) or "package.module:function, importable from here",
            )
        path = spec.submodule_search_locations or []
    file = Path(spec.origin) if spec is not None and spec.origin else None
    return file if file is not None and file.suffix == ".py" else None


def _neighbours(name: str, path: Sequence[str] | None) -> str:
    """Name the modules beside one that is not there, the most alike first."""
    from unisono.launch.script import nearest_first

    package, dot, _ = name.rpartition(".")
    found = pkgutil.iter_modules([str(Path.cwd())] if path is None else path)
    names = nearest_first(name, sorted(f"{package}{dot}{module.name}" for module in found))
    return f"modules there: {', '.join(names[:8])}" if names else ""


def _spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Ask the finders of this interpreter for a module; the working directory comes first."""
    if path is None:
        found = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
        if found is not None:
            return found
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and (found := find(name, path)) is not None:
            return found
    return None


def _check(
    target: str,
    source: Path,
    function: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    """Raise `PlatformError` if the file has no such function, or it cannot be called so."""
    asked = f"unisono run {target}"
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except (SyntaxError, ValueError) as error:
        raise PlatformError.because(asked, f"{source.name} is not Python: {error}") from None
    names = _names(tree)
    first, _, rest = function.partition(".")
    if first not in names and None not in names:
        functions = [
            name
            for name, node in names.items()
            if name and isinstance(node, _CALLED) and not name.startswith("_")
        ]
        near = difflib.get_close_matches(function, functions, n=1)
        raise PlatformError.because(
            asked,
            f"no {function!r} in {source}; it has {', '.join(functions[:8]) or 'no function'}",
            None,
            f"did you mean {target.rpartition(':')[0]}:{near[0]}?" if near else None,
        )
    node = names.get(first)
    if isinstance(node, ast.AsyncFunctionDef):
        raise PlatformError.because(
            asked,
            f"{function} is a coroutine function: calling it runs nothing",
            None,
            "a function that calls asyncio.run",
        )
    is_plain = isinstance(node, ast.FunctionDef) and node in tree.body and not node.decorator_list
    if isinstance(node, ast.FunctionDef) and is_plain and not rest:
        _check_arguments(asked, _signature(node.args), function, args, kwargs)


_CALLED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _names(tree: ast.Module) -> dict[str | None, ast.AST]:
    """Return what a module defines at its top, also under conditions; None if there may be more."""
    found: dict[str | None, ast.AST] = {}
    todo: list[ast.AST] = list(reversed(tree.body))
    while todo:
        node = todo.pop()
        if isinstance(node, _CALLED):
            found[None if node.name == "__getattr__" else node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found[None if name == "*" else name] = node
        else:
            for child in ast.walk(node):
                if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                    found[child.id] = child
                elif isinstance(child, (*_CALLED, ast.Import, ast.ImportFrom)):
                    todo.append(child)
    return found


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature that a function with these arguments has; defaults are not known."""
    parameter = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    found: list[inspect.Parameter] = []
    for number, argument in enumerate(plain):
        is_first = number < len(arguments.posonlyargs)
        kind = parameter.POSITIONAL_ONLY if is_first else parameter.POSITIONAL_OR_KEYWORD
        found.append(_parameter(argument.arg, kind, has_default=number >= required))
    if arguments.vararg is not None:
        found.append(_parameter(arguments.vararg.arg, parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        kind = parameter.KEYWORD_ONLY
        found.append(_parameter(argument.arg, kind, has_default=default is not None))
    if arguments.kwarg is not None:
        found.append(_parameter(arguments.kwarg.arg, parameter.VAR_KEYWORD))
    return inspect.Signature(found)


def _parameter(
    name: str, kind: inspect._ParameterKind, *, has_default: bool = False
) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=... if has_default else inspect.Parameter.empty)


def _check_arguments(
    asked: str,
    signature: inspect.Signature,
    function: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        text = str(signature).replace("=Ellipsis", "=...")
        raise PlatformError.because(
            f"{asked} calls {function}{text}",
            f"{len(args)} positional arguments and keywords {sorted(kwargs)}",
            str(error),
            f"{asked} -- 3 lr=0.1, with the arguments of the function behind --",
        ) from None
