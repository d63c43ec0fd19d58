"""Functions, arguments and return values, packed for other processes.

Functions of `__main__`, of notebooks and closures travel by value, importable ones by reference.
What cannot be pickled is named by its path inside the object.

The content of large tensors and arrays is not pickled: it is copied once into a file, and once from
there into memory of the process that unpickles. The file has no name (`memfd`): it disappears with
the last process that has it open. Between hosts the same bytes are a file with a name.

    count, length of the pickle, then kind, offset and length of each large part; pickle; parts
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.machinery
import inspect
import io
import mmap
import os
import pickle
import struct
import sys
import tempfile
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from unisono.errors import PlatformError, an
from unisono.launch.job_files import appearing_whole
from unisono.launch.logs import warn

if TYPE_CHECKING:
    import torch

LARGE_BYTES = 64 << 20
"""A larger call causes a warning."""
APART_BYTES = 1 << 16
"""Parts of at least this size travel beside the pickle."""
ROOM = 64
"""Bytes at the beginning of a nameless file that are reserved for its user."""
_ALIGN = 64
_CHUNK = 1 << 30
_COPIED_BYTES = 8 << 20
_HEAD = struct.Struct("<2Q")
_PART = struct.Struct("<?2Q")
_MAX_DEPTH = 8
_FINDERS = (importlib.machinery.PathFinder, importlib.machinery.FrozenImporter)
_by_value: Counter[str] = Counter()
"""Modules that are pickled by value at the moment, and by how many threads."""
_registering = threading.Lock()


class Pickler(cloudpickle.Pickler):
    """Collects the bytes of large tensors and arrays in `parts`."""

    has_parts = True
    """False pickles everything as usual."""

    def __init__(self, file: io.BytesIO) -> None:
        self.parts: list[tuple[bool, memoryview]] = []
        """For each whether it is a storage of torch, and its bytes."""
        self._storage: pickle.PickleBuffer | None = None
        self._alive: list[Any] = []
        super().__init__(file, buffer_callback=self._put_aside if self.has_parts else None)

    def _put_aside(self, buffer: pickle.PickleBuffer) -> bool:
        """Collect a part; return whether to pickle it in place instead."""
        raw = buffer.raw()
        if raw.nbytes < APART_BYTES:
            return True
        self.parts.append((buffer is self._storage, raw))
        return False

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object; cloudpickle decides about all others."""
        is_special = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if is_special and sys.modules.get(obj.__name__) is obj:  # such as torch.backends.cudnn
            return importlib.import_module, (obj.__name__,)
        torch = sys.modules.get("torch")
        if torch is not None and self.has_parts:
            if isinstance(obj, torch.storage.TypedStorage) and _is_large(obj._untyped_storage):
                return _typed_storage, (obj._untyped_storage, obj.dtype)
            if isinstance(obj, torch.UntypedStorage) and _is_large(obj):
                self._alive.append(obj)
                self._storage = pickle.PickleBuffer(_bytes_of(obj))
                return _same, (self._storage,)
        return super().reducer_override(obj)


class PlainPickler(Pickler):
    """Pickles everything in place."""

    has_parts = False


class _ValuePickler(Pickler):
    """Pickles tensors of devices as tensors of the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return on_cpu(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU that has no history; a parameter stays one."""
    from torch.nn import Parameter

    copy = tensor.detach().cpu()
    if isinstance(tensor, Parameter):
        return Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def dumps(value: object) -> bytes:
    """Pickle a value, all of it in one piece."""
    buffer = io.BytesIO()
    PlainPickler(buffer).dump(value)
    return buffer.getvalue()


def _is_large(storage: Any) -> bool:
    return storage.device.type == "cpu" and storage.nbytes() >= APART_BYTES


def _bytes_of(storage: Any) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the memory of a storage of torch, which has to stay alive meanwhile.

    By its address: a storage of which numpy has seen a view could not be resized ever after.
    """
    return (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _same(storage: Any) -> Any:
    """Return a storage that was made and filled before the unpickling."""
    return storage


class Parcel:
    """A packed value. It can be unpacked any number of times, also from a copy of its file.

    Args:
        fd: the file that holds it.
        offset: where it begins in the file.
        is_owner: whether to close the file with this parcel.

    Attributes:
        fd: the file that holds it.
        end: where it ended in the file when it was packed.
    """

    end = 0

    def __init__(self, fd: int, offset: int = 0, *, is_owner: bool = False) -> None:
        self.fd = fd
        self._offset = offset
        self._close = weakref.finalize(self, os.close, fd) if is_owner else None

    @classmethod
    def of(
        cls, value: object, pickler: type[Pickler] = Pickler, *, file: int | None = None
    ) -> Parcel:
        """Pack a value into `file`, or into a nameless one of its own.

        The value may be changed afterwards.
        """
        body = io.BytesIO()
        writer = pickler(body)
        writer.dump(value)
        fd, offset = (nameless_file(), ROOM) if file is None else (file, 0)
        parcel = cls(fd, offset, is_owner=file is None)
        os.ftruncate(fd, 0)
        head = _HEAD.pack(len(writer.parts), body.tell())
        end = _HEAD.size + len(writer.parts) * _PART.size
        for number, (is_torch, raw) in enumerate([(False, body.getbuffer()), *writer.parts]):
            place = -(-end // _ALIGN) * _ALIGN
            end = place + raw.nbytes
            if number:
                head += _PART.pack(is_torch, place, raw.nbytes)
            _write(fd, raw, offset + place)
        _write(fd, memoryview(head), offset)
        parcel.end = offset + end
        return parcel

    def save(self, path: Path) -> None:
        """Copy its file, to the end, to a private one, which appears whole."""
        with appearing_whole(path) as draft:
            target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                copy_file(self.fd, self._offset, os.fstat(self.fd).st_size, target)
            finally:
                os.close(target)

    def load(self) -> Any:
        """Unpack the value; it shares no memory with the parcel."""
        count, length = _HEAD.unpack(self._read(0, _HEAD.size))
        table = self._read(_HEAD.size, count * _PART.size)
        begin = -(-(_HEAD.size + len(table)) // _ALIGN) * _ALIGN
        parts = map(self._part, _PART.iter_unpack(table))
        return pickle.loads(self._read(begin, length), buffers=parts)

    def close(self) -> None:
        """Let the file go."""
        if self._close is not None:
            self._close()

    def _part(self, entry: tuple[Any, ...]) -> Any:
        """Read a large part into memory of its own, when the unpickler asks for it."""
        is_torch, place, length = entry
        if is_torch:
            import torch

            part: Any = torch.UntypedStorage(length)
            self._read_into(memoryview(_bytes_of(part)).cast("B"), place)
        else:
            part = mmap.mmap(-1, length)
            self._read_into(memoryview(part), place)
        return part

    def _read(self, place: int, length: int) -> memoryview:
        if length < APART_BYTES:
            whole = memoryview(bytearray(length))
        else:
            whole = memoryview(mmap.mmap(-1, length))  # not filled with zeros first
        self._read_into(whole, place)
        return whole

    def _read_into(self, target: memoryview, place: int) -> None:
        done = 0
        while done < target.nbytes:
            at = self._offset + place + done
            count = os.preadv(self.fd, [target[done : done + _CHUNK]], at)
            if count == 0:
                raise EOFError(f"{target.nbytes - done} bytes are missing at the end of a parcel")
            done += count


def nameless_file() -> int:
    """Return a new file without a name, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("unisono", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def copy_file(source: int, begin: int, end: int, target: int) -> None:
    """Copy a range of a file to the beginning of another one."""
    place = 0
    while begin + place < end:
        data = os.pread(source, min(_COPIED_BYTES, end - begin - place), begin + place)
        if not data:
            raise EOFError(f"{end - begin - place} bytes are missing at the end of a file")
        _write(target, memoryview(data), place)
        place += len(data)


def _write(fd: int, raw: memoryview, offset: int) -> None:
    flat = raw.cast("B") if raw.format != "B" or raw.ndim != 1 else raw
    done = 0
    while done < flat.nbytes:
        done += os.pwrite(fd, flat[done : done + _CHUNK], offset + done)


def dump_call(
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Parcel:
    """Pack a call for the ranks, or raise `PlatformError` naming what cannot be pickled."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    with taken_by_value([] if module is None or is_importable(module) else [module]):
        try:
            call = Parcel.of((fn, tuple(args), dict(kwargs)))
        except Exception as error:
            parts = {f"args[{i}]": value for i, value in enumerate(args)}
            parts = {name: fn, **parts, **{f"kwargs[{k!r}]": v for k, v in kwargs.items()}}
            path, culprit = first_unpicklable(parts) or (name, fn)
            raise PlatformError.because(
                f"unisono.run({name}, ...) sends the function and its arguments to each rank",
                f"{path} is {an(type(culprit).__qualname__)} that cannot be pickled",
                f"{type(error).__name__}: {error}",
                f"make {path} inside the function, or pass what it is made from",
            ) from error
    if call.end > LARGE_BYTES:
        warn(
            f"each rank is sent {call.end / 2**20:,.0f} MB: load large data inside {name}, or pass "
            "its path"
        )
    return call


def dump_value(value: object, file: int | None = None) -> Parcel:
    """Pack a return value, into `file` if there is one; tensors of devices become CPU tensors.

    Raises `TypeError` that names the path of the part that cannot be pickled.
    """
    try:
        return Parcel.of(value, _ValuePickler, file=file)
    except OSError:
        raise  # no memory left for it
    except Exception as error:
        path, culprit = first_unpicklable({"result": value}) or ("result", value)
        raise TypeError(
            f"the return value cannot be pickled: {path} is {an(type(culprit).__qualname__)} "
            f"({type(error).__name__}: {error})"
        ) from None


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle an exception; return None if it cannot be unpickled again."""
    try:
        data = dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def load_exception(data: bytes | None) -> BaseException | None:
    """Undo `dump_exception`; return None if that fails here."""
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def first_unpicklable(parts: Mapping[str, object]) -> tuple[str, object] | None:
    """Return path and value of the innermost part that cannot be pickled."""
    visited: set[int] = set()

    def search(path: str, value: object, depth: int) -> tuple[str, object] | None:
        if id(value) in visited:
            return None
        with suppress(Exception):
            dumps(value)
            return None
        visited.add(id(value))
        if depth < _MAX_DEPTH:
            for child_path, child in _children(path, value):
                if (deeper := search(child_path, child, depth + 1)) is not None:
                    return deeper
        return path, value

    deeper = (search(path, value, 0) for path, value in parts.items())
    return next((culprit for culprit in deeper if culprit is not None), None)


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of `value` with their paths."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{i}]", child) for i, child in enumerate(value))
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            with suppress(ValueError):
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
def taken_by_value(modules: Iterable[types.ModuleType]) -> Iterator[None]:
    """Pickle what is defined in these modules by value inside the block.

    Several threads may do that at the same time: the last one ends it.
    """
    ours: list[types.ModuleType] = []
    with _registering:
        registered = cloudpickle.list_registry_pickle_by_value().difference(_by_value)
        for module in modules:
            if module.__name__ not in registered:
                cloudpickle.register_pickle_by_value(module)
                _by_value[module.__name__] += 1
                ours.append(module)
    try:
        yield
    finally:
        with _registering:
            for module in ours:
                _by_value[module.__name__] -= 1
                if not _by_value[module.__name__]:
                    del _by_value[module.__name__]
                    cloudpickle.unregister_pickle_by_value(module)


def is_importable(module: types.ModuleType, finders: Sequence[Any] = _FINDERS) -> bool:
    """Whether a fresh interpreter with our `sys.path` finds this module under its name.

    `finders` are the import hooks that it has.
    """
    name = module.__name__
    if name == "__main__" or name in sys.builtin_module_names:
        return True  # by value anyway, or always there
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = name.split(".")
    for i in range(len(parts)):
        parent = ".".join(parts[: i + 1])
        specs = (finder.find_spec(parent, path) for finder in finders)
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)
    return spec is not None and (file is None or spec.origin is None or spec.origin == file)
