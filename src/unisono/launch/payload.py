"""Functions, arguments and return values on their way between processes.

Functions of `__main__`, of notebooks and closures travel by value, importable ones by reference.
What cannot be pickled is named by its path inside the object.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from unisono.errors import PlatformError
from unisono.launch.caution import warn
from unisono.launch.parcel import Parcel, Pickler, packed_bytes

LARGE_BYTES = 64 << 20
"""A call larger than this is worth a warning."""
_MAX_DEPTH = 8


def dump_call(
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Parcel:
    """Pack a call for the ranks, or raise `PlatformError` naming what cannot travel."""
    with _by_value_if_not_importable(fn):
        try:
            call = Parcel.of((fn, tuple(args), dict(kwargs)), _Pickler)
        except Exception as error:
            parts = {_name(fn): fn, **_named_arguments(args, kwargs)}
            path, culprit = _first_unpicklable(parts) or (_name(fn), fn)
            raise PlatformError.because(
                f"unisono.run({_name(fn)}, ...) sends the function and its arguments to each rank",
                f"{path} is a {type(culprit).__qualname__} that cannot be pickled",
                f"{type(error).__name__}: {error}",
                f"make {path} inside the function, or pass what it is made from",
            ) from error
        if (size := call.nbytes()) > LARGE_BYTES:
            _warn_of_size(size, {_name(fn): fn, **_named_arguments(args, kwargs)})
    return call


def _named_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments by the paths under which messages name them."""
    return {
        **{f"args[{i}]": value for i, value in enumerate(args)},
        **{f"kwargs[{key!r}]": value for key, value in kwargs.items()},
    }


def _warn_of_size(size: int, parts: Mapping[str, object]) -> None:
    """Say which part of a call makes it large."""
    sizes = {path: packed_bytes(value, _Pickler) for path, value in parts.items()}
    largest = max(sizes, key=lambda path: sizes[path])
    warn(
        f"each rank is sent {size / 2**20:,.0f} MB, of which {largest} is "
        f"{sizes[largest] / 2**20:,.0f} MB; load it inside the function, or pass its path"
    )


def load_call(call: Parcel) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """Undo `dump_call`."""
    return call.load()


def dump_value(value: object, file: int | None = None) -> Parcel:
    """Pack a return value, a long one in `file`; tensors of other devices travel as CPU tensors.

    Raises `TypeError` that names the path of the part that cannot be pickled.
    """
    try:
        return Parcel.of(value, _ValuePickler, file=file)
    except OSError:
        raise  # no memory left for it
    except Exception as error:
        path, culprit = _first_unpicklable({"result": value}) or ("result", value)
        raise TypeError(
            f"the return value cannot be pickled: {path} is a {type(culprit).__qualname__} "
            f"({type(error).__name__}: {error})"
        ) from None


class _Pickler(Pickler):
    """Takes modules with a class of their own, such as `torch.backends.cudnn`, by name."""

    def reducer_override(self, obj: Any) -> Any:
        is_special = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if is_special and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


class _PlainPickler(_Pickler):
    """Puts nothing aside."""

    has_parts = False


class _ValuePickler(_Pickler):
    """Moves tensors to the CPU on their way."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _PlainPickler(buffer).dump(value)
    return buffer.getvalue()


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle an exception; None if it does not survive the journey there and back."""
    try:
        data = _dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def load_exception(data: bytes | None) -> BaseException | None:
    """Undo `dump_exception`; None if this process cannot build the exception."""
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def _name(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _first_unpicklable(parts: Mapping[str, object]) -> tuple[str, object] | None:
    """Return path and value of the innermost part that cannot be pickled."""
    seen: set[int] = set()

    def search(path: str, value: object, depth: int) -> tuple[str, object] | None:
        if id(value) in seen or _pickles(value):
            return None
        seen.add(id(value))
        if depth < _MAX_DEPTH:
            for child_path, child in _children(path, value):
                found = search(child_path, child, depth + 1)
                if found is not None:
                    return found
        return path, value

    for path, value in parts.items():
        found = search(path, value, 0)
        if found is not None:
            return found
    return None


def _pickles(value: object) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of `value` with their paths."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{i}]", child) for i, child in enumerate(value))
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            with contextlib.suppress(ValueError):
                yield name, cell.cell_contents
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield name, value.__globals__[name]
    elif isinstance(value, types.MethodType):
        yield path.rpartition(".")[0] or path, value.__self__
    elif not isinstance(value, (type, types.ModuleType)):
        yield from (
            (f"{path}.{name}", child) for name, child in getattr(value, "__dict__", {}).items()
        )


@contextlib.contextmanager
def _by_value_if_not_importable(fn: object) -> Iterator[None]:
    """Let cloudpickle take a function by value when a rank could not import its module."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    registered = cloudpickle.list_registry_pickle_by_value()
    if module is None or module.__name__ in registered or _is_importable(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: types.ModuleType) -> bool:
    """Whether a fresh interpreter with our `sys.path` finds this module under its name."""
    name = module.__name__
    if name == "__main__" or name in sys.builtin_module_names:
        return True  # by value anyway, or always there
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = name.split(".")
    for i in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            return _has_other_finder(name)
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)
    return spec is not None and (file is None or spec.origin is None or spec.origin == file)


def _has_other_finder(name: str) -> bool:
    """Whether an import hook that a fresh interpreter would have too (frozen) knows the module."""
    return importlib.machinery.FrozenImporter.find_spec(name) is not None
