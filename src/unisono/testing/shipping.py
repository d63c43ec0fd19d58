"""How a function and its arguments travel to the ranks: by cloudpickle, test code by value.

By value, so that the asserts which pytest rewrote go along with their messages, and so that a test
module need not be importable. Everything else is imported again by the rank, from the same path.
"""

from __future__ import annotations

import inspect
import io
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoError, an
from unisono.launch.pool.payload import (
    PlainPickler,
    first_unpicklable,
    is_importable,
    taken_by_value,
)

_OWN_PACKAGE = __name__.partition(".")[0]
_REWRITING = "AssertionRewritingHook"
"""The loader with which pytest rewrites asserts."""
_MACHINERY = ("__builtins__", "__cached__", "__loader__", "__spec__")


class CannotTravel(UnisonoError, TypeError):
    """A function, fixture or argument that cannot be sent to another process."""


def pack(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    by_value: Sequence[types.ModuleType] = (),
    *,
    alone: bool = False,
) -> bytes:
    """Pickle a call.

    Args:
        function: what to call.
        args: positional arguments.
        kwargs: keyword arguments.
        by_value: modules whose functions and classes are sent as code and not as a name.
        alone: whether to send the keyword arguments alone, for a function that was packed before.

    Raises:
        CannotTravel: names the argument or the global that cannot be pickled.
    """
    value = dict(kwargs) if alone else (function, args, dict(kwargs))
    with taken_by_value(by_value):
        try:
            return _dumps(value, by_value)
        except Exception as error:
            raise _blame(function, args, kwargs, error) from None


class _Pickler(PlainPickler):
    """Leaves behind what pytest and hypothesis hung on test code and what ranks do not need."""

    def __init__(self, file: io.BytesIO, by_value: Iterable[types.ModuleType]) -> None:
        super().__init__(file)
        self._by_value = {module.__name__: module for module in by_value}

    def reducer_override(self, obj: Any) -> Any:
        """Say how an object travels; cloudpickle decides about all that is not named here."""
        if isinstance(obj, types.FunctionType):
            if getattr(obj, "is_hypothesis_test", False):
                return _stand_in, (obj.__qualname__,)  # holds the whole machinery of hypothesis
            return super().reducer_override(_without_marks(obj))
        if isinstance(obj, types.ModuleType) and self._by_value.get(obj.__name__) is obj:
            return _new_module, (obj.__name__,), _contents(obj)
        return super().reducer_override(obj)


def _dumps(value: Any, by_value: Iterable[types.ModuleType]) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, by_value).dump(value)
        return file.getvalue()


def _without_marks(function: types.FunctionType) -> types.FunctionType:
    """Copy a test function without its marks, whose arguments need not be able to travel."""
    if "pytestmark" not in function.__dict__:
        return function
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    copy.__dict__.update({k: v for k, v in function.__dict__.items() if k != "pytestmark"})
    return copy


def _stand_in(name: str) -> Callable[..., Any]:
    def drawn_test(*_args: Any, **_kwargs: Any) -> None:
        raise CannotTravel(f"{name} is drawn by hypothesis; another test cannot call it on a rank")

    return drawn_test


def _new_module(name: str) -> types.ModuleType:
    return types.ModuleType(name)


def _contents(module: types.ModuleType) -> dict[str, Any]:
    """Return the globals of a module that can travel."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _MACHINERY and (inspect.isroutine(value) or _travels(value))
    }


class TestModules:
    """Finds the modules of a test session that must travel by value."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self._visited: dict[str, object] = {}
        self._by_value: dict[str, types.ModuleType] = {}

    def current(self) -> list[types.ModuleType]:
        """Return the modules loaded by now that a rank could not import in the same form."""
        for name, module in sys.modules.copy().items():  # a list could meet an import half-way
            if self._visited.get(name) is module:  # a name may get another module: conftest does
                continue
            self._visited[name] = module
            self._by_value.pop(name, None)
            if isinstance(module, types.ModuleType) and self._travels_by_value(name, module):
                self._by_value[name] = module
        return [m for name, m in self._by_value.items() if sys.modules.get(name) is m]

    def _travels_by_value(self, name: str, module: types.ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] in (_OWN_PACKAGE, "__main__"):
            return False
        path = Path(file)
        if "site-packages" in path.parts:
            return False
        if _is_rewritten(module):
            return True
        finders = [f for f in sys.meta_path if type(f).__name__ != _REWRITING]
        return path.is_relative_to(self._root) and not is_importable(module, finders)


def _is_rewritten(module: types.ModuleType) -> bool:
    """Whether pytest rewrote the asserts of a module (test modules, conftest, registered ones)."""
    loader = getattr(module.__spec__, "loader", None)
    return type(loader).__name__ == _REWRITING


def _blame(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: Exception,
) -> UnisonoError:
    """Find what could not be pickled and say it."""
    name = getattr(function, "__qualname__", repr(function))
    arguments = {f"argument number {i} of {name}": value for i, value in enumerate(args)}
    arguments |= {f"argument {key!r} of {name}": value for key, value in kwargs.items()}
    path, culprit = first_unpicklable({**arguments, name: function}) or (name, function)
    problem = f"{an(type(culprit).__qualname__)} that cannot be sent to another process: {error}"
    if path == name:
        return CannotTravel.because(f"{name} is needed on the ranks", f"it cannot be sent: {error}")
    is_given = path.startswith(tuple(arguments))
    use = f"{path} is needed on the ranks" if is_given else f"{name} uses the global {path!r}"
    hint = f"make it inside {name}, on each rank, or pass plain data"
    return CannotTravel.because(use, problem, hint=hint)


def _travels(value: Any) -> bool:
    try:
        _dumps(value, ())
    except Exception:
        return False
    return True
