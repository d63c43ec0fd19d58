"""A pickled value on its way to another process, with its large parts beside it.

What tensors and arrays hold is not pickled but copied once into a file, and there once into memory
of the process that unpickles. The file has no name (`memfd`): it is gone when the last process
that has it open is, however that ends. Between hosts the same bytes are a file with a name.

    count, length of the pickle, then kind, offset and length of each large part; pickle; parts
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import struct
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle

APART_BYTES = 1 << 16
"""Parts from this length on travel beside the pickle."""
INLINE_BYTES = 1 << 20
"""A parcel up to this length is kept in memory, and may be part of a message."""
ROOM = 64
"""Bytes at the beginning of a nameless file that are left to its user."""
_ALIGN = 64
_CHUNK = 1 << 30
_COPIED_BYTES = 8 << 20
_HEAD = struct.Struct("<2Q")
_PART = struct.Struct("<?2Q")


class Pickler(cloudpickle.Pickler):
    """Puts the bytes of large tensors and arrays aside, in `parts`."""

    has_parts = True
    """False pickles everything as usual."""

    def __init__(self, file: io.BytesIO) -> None:
        self.parts: list[tuple[bool, memoryview]] = []
        """For each whether it is a storage of torch, and its bytes."""
        self._storage: pickle.PickleBuffer | None = None
        self._alive: list[Any] = []
        super().__init__(file, buffer_callback=self._put_aside if self.has_parts else None)

    def _put_aside(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a part; true if it had better be pickled as usual."""
        raw = buffer.raw()
        if raw.nbytes < APART_BYTES:
            return True
        self.parts.append((buffer is self._storage, raw))
        return False

    def reducer_override(self, obj: Any) -> Any:
        """Say how an object travels; cloudpickle decides about all that is not named here."""
        torch = sys.modules.get("torch")
        if torch is not None and self.has_parts:
            if isinstance(obj, torch.storage.TypedStorage) and _is_large(obj._untyped_storage):
                return _typed_storage, (obj._untyped_storage, obj.dtype)
            if isinstance(obj, torch.UntypedStorage) and _is_large(obj):
                self._alive.append(obj)
                self._storage = pickle.PickleBuffer(_bytes_of(obj))
                return _same, (self._storage,)
        return super().reducer_override(obj)


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
    """A value, packed. It can be unpacked any number of times, here or where it was copied to.

    Args:
        data: the bytes, if they are in memory.
        fd: else the file that holds them.
        offset: where they begin in the file.
        is_owner: whether to close the file when this parcel is let go.
    """

    def __init__(
        self, data: bytes | None = None, *, fd: int = -1, offset: int = 0, is_owner: bool = False
    ) -> None:
        self._data = data
        self._fd = fd
        self._offset = offset
        self._close = weakref.finalize(self, os.close, fd) if is_owner else None

    @classmethod
    def of(
        cls, value: object, pickler: type[Pickler] = Pickler, *, file: int | None = None
    ) -> Parcel:
        """Pack a value: in memory if it is short, else in `file`, or in a nameless one of its own.

        The value may be changed afterwards.
        """
        body = io.BytesIO()
        writer = pickler(body)
        writer.dump(value)
        parts = [(False, body.getbuffer()), *writer.parts]
        length = _HEAD.size + len(writer.parts) * _PART.size
        places: list[int] = []
        for _, raw in parts:
            places.append(-(-length // _ALIGN) * _ALIGN)
            length = places[-1] + raw.nbytes
        head = _HEAD.pack(len(writer.parts), parts[0][1].nbytes) + b"".join(
            _PART.pack(is_torch, place, raw.nbytes)
            for (is_torch, raw), place in zip(parts[1:], places[1:], strict=True)
        )
        pieces = [(0, memoryview(head)), *zip(places, (raw for _, raw in parts), strict=True)]
        if length <= INLINE_BYTES:
            whole = bytearray(length)
            for place, raw in pieces:
                whole[place : place + raw.nbytes] = raw
            return cls(bytes(whole))
        fd, offset = (nameless_file(), ROOM) if file is None else (file, 0)
        parcel = cls(fd=fd, offset=offset, is_owner=file is None)
        for place, raw in pieces:
            _write(fd, raw, offset + place)
        return parcel

    @classmethod
    def in_file(cls, path: Path) -> Parcel:
        """Return the parcel that fills the file at `path`."""
        return cls(fd=os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), is_owner=True)

    @property
    def data(self) -> bytes | None:
        """The bytes, if they are in memory."""
        return self._data

    def nbytes(self) -> int:
        """Return how long it is."""
        return len(self._data) if self._data is not None else self._end() - self._offset

    def file(self) -> tuple[int, int]:
        """Return a nameless file that begins with `ROOM` bytes and this parcel, and their end."""
        if self._data is not None:
            self._fd, self._offset = nameless_file(), ROOM
            self._close = weakref.finalize(self, os.close, self._fd)
            _write(self._fd, memoryview(self._data), ROOM)
            self._data = None
        return self._fd, self._end()

    def save(self, path: Path, *, end: int | None = None) -> None:
        """Write it to a private file, which appears whole; `end` if more follows it in its file."""
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(FileNotFoundError):
            draft.unlink()
        target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if self._data is not None:
                _write(target, memoryview(self._data), 0)
            else:
                copy_file(self._fd, self._offset, self._end() if end is None else end, target)
        finally:
            os.close(target)
        draft.replace(path)

    def load(self) -> Any:
        """Unpack the value; it shares no memory with the parcel."""
        count, length = _HEAD.unpack(self._read(0, _HEAD.size))
        table = self._read(_HEAD.size, count * _PART.size)
        begin = -(-(_HEAD.size + len(table)) // _ALIGN) * _ALIGN
        body = self._read(begin, length)
        return pickle.loads(body, buffers=self._parts(_PART.iter_unpack(table)))

    def close(self) -> None:
        """Let the file go."""
        if self._close is not None:
            self._close()

    def _parts(self, table: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the large parts as the unpickler asks for them, each in memory of its own."""
        for is_torch, place, length in table:
            if is_torch:
                import torch

                part: Any = torch.UntypedStorage(length)
                self._read_into(memoryview(_bytes_of(part)).cast("B"), place)
            else:
                part = mmap.mmap(-1, length)
                self._read_into(memoryview(part), place)
            yield part

    def _read(self, place: int, length: int) -> memoryview:
        if length < APART_BYTES:
            whole = memoryview(bytearray(length))
        else:
            whole = memoryview(mmap.mmap(-1, length))  # not filled with zeros in vain
        self._read_into(whole, place)
        return whole

    def _read_into(self, target: memoryview, place: int) -> None:
        if self._data is not None:
            target[:] = self._data[place : place + target.nbytes]
            return
        done = 0
        while done < target.nbytes:
            at = self._offset + place + done
            count = os.preadv(self._fd, [target[done : done + _CHUNK]], at)
            if count == 0:
                raise EOFError(f"{target.nbytes - done} bytes are missing at the end of a parcel")
            done += count

    def _end(self) -> int:
        """Return where it ends in its file."""
        count, length = _HEAD.unpack(self._read(0, _HEAD.size))
        table = self._read(_HEAD.size, count * _PART.size)
        begin = -(-(_HEAD.size + len(table)) // _ALIGN) * _ALIGN
        ends = [place + size for _, place, size in _PART.iter_unpack(table)]
        return self._offset + max([begin + length, *ends])


def packed_bytes(value: object, pickler: type[Pickler] = Pickler) -> int:
    """Return about how many bytes a value takes, without a copy of its large parts."""
    body = io.BytesIO()
    writer = pickler(body)
    writer.dump(value)
    return body.tell() + sum(raw.nbytes for _, raw in writer.parts)


def nameless_file() -> int:
    """Return a new file, in memory where the system has such a thing, that no directory knows."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("unisono", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def copy_file(source: int, begin: int, end: int, target: int) -> None:
    """Copy a stretch of a file to the beginning of another one."""
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
