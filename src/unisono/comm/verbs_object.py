"""The verbs for Python objects: pickled by cloudpickle, small things only."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

import cloudpickle
import torch
from torch import Tensor

from unisono.comm.arguments import check_rank
from unisono.comm.calling import Caller
from unisono.comm.pending import Pending
from unisono.comm.raw import bytes_of
from unisono.comm.verbs_move import MoveVerbs

T = TypeVar("T")


class ObjectVerbs(MoveVerbs, Caller):
    """Python objects between the ranks of a communicator.

    With `async_op=True` the lengths are still agreed on before the call returns; the objects
    themselves travel, and are unpickled, by the end of `wait()`.
    """

    @overload
    def all_gather_object(
        self, obj: Any, *, async_op: Literal[False] = False, timeout_s: float | None = None
    ) -> list[Any]: ...
    @overload
    def all_gather_object(
        self, obj: Any, *, async_op: Literal[True], timeout_s: float | None = None
    ) -> Pending[list[Any]]: ...
    def all_gather_object(
        self, obj: Any, *, async_op: bool = False, timeout_s: float | None = None
    ) -> list[Any] | Pending[list[Any]]:
        """Return the objects of all ranks, in rank order, on every rank. Collective."""
        mine = self._pickled(obj)
        sizes = self._byte_counts(mine, timeout_s)
        move = partial(self.all_gather, mine, sizes=sizes, timeout_s=timeout_s)
        return _moved(move, lambda raw: [_unpickled(part) for part in raw.split(sizes)], async_op)

    @overload
    def gather_object(
        self,
        obj: Any,
        dst: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> list[Any] | None: ...
    @overload
    def gather_object(
        self, obj: Any, dst: int = 0, *, async_op: Literal[True], timeout_s: float | None = None
    ) -> Pending[list[Any] | None]: ...
    def gather_object(
        self, obj: Any, dst: int = 0, *, async_op: bool = False, timeout_s: float | None = None
    ) -> list[Any] | Pending[list[Any] | None] | None:
        """Return the objects of all ranks on rank `dst`, None on the others. Collective."""
        check_rank(dst, self.size, "dst", "gather_object")
        mine = self._pickled(obj)
        sizes = self._byte_counts(mine, timeout_s)

        def unpickled(raw: Tensor | None) -> list[Any] | None:
            return None if raw is None else [_unpickled(part) for part in raw.split(sizes)]

        move = partial(self.gather, mine, dst, sizes=sizes, timeout_s=timeout_s)
        return _moved(move, unpickled, async_op)

    def broadcast_object(
        self, obj: Any, src: int = 0, *, async_op: bool = False, timeout_s: float | None = None
    ) -> Any:
        """Return the object of rank `src` on every rank; the others' is ignored. Collective."""
        check_rank(src, self.size, "src", "broadcast_object")
        mine = self._pickled(obj) if self.rank == src else self._pickled(None)
        sizes = self._byte_counts(mine, timeout_s)
        like = ((sizes[src],), torch.uint8)
        sent = mine if self.rank == src else None
        move = partial(self.broadcast, sent, src, like=like, timeout_s=timeout_s)
        return _moved(move, _unpickled, async_op)

    @overload
    def all_equal(
        self, value: Any, *, async_op: Literal[False] = False, timeout_s: float | None = None
    ) -> bool: ...
    @overload
    def all_equal(
        self, value: Any, *, async_op: Literal[True], timeout_s: float | None = None
    ) -> Pending[bool]: ...
    def all_equal(
        self, value: Any, *, async_op: bool = False, timeout_s: float | None = None
    ) -> bool | Pending[bool]:
        """Return whether all ranks hold an equal value: same type and content. Collective.

        Tensors are compared by dtype, shape and bits, dicts and sets in any order, other values by
        their pickled form; only a digest travels.
        """
        digest = hashlib.sha256(_canonical(value)).digest()
        words = [int.from_bytes(digest[i : i + 7], "big") for i in range(0, 28, 7)]
        if not async_op:
            everybody = self.all_gather_ints(words, timeout_s=timeout_s)
            return all(other == everybody[0] for other in everybody)
        mine = torch.tensor([words], device=self.device)
        move = partial(self.all_gather, mine, sizes=[1] * self.size, timeout_s=timeout_s)
        return _moved(move, lambda told: bool((told == told[0]).all()), async_op)

    def all_gather_ints(
        self, values: Sequence[int], *, timeout_s: float | None = None
    ) -> list[tuple[int, ...]]:
        """Return the integers of all ranks, in rank order, on every rank. Collective.

        All ranks bring equally many. The cheapest way to agree on sizes.
        """
        deadline = self._deadline(timeout_s)
        with self._reporting("all_gather_ints", None, deadline):
            return self._engine.all_gather_ints(values, timeout_s=deadline)

    def _pickled(self, obj: Any) -> Tensor:
        raw = bytearray(cloudpickle.dumps(obj))
        return torch.frombuffer(raw, dtype=torch.uint8).to(self.device)

    def _byte_counts(self, mine: Tensor, timeout_s: float | None) -> list[int]:
        counts = self.all_gather_ints([mine.numel()], timeout_s=timeout_s)
        return [count for (count,) in counts]


def _moved(move: Callable[..., Any], finish: Callable[[Any], T], async_op: bool) -> T | Pending[T]:
    """Call a verb and return what `finish` makes of its result: now, or in a `Pending`."""
    if not async_op:
        return finish(move())
    pending = move(async_op=True)
    return Pending(lambda timeout_s: finish(pending.wait(timeout_s)), pending.done)


def _unpickled(raw: Tensor) -> Any:
    return pickle.loads(raw.cpu().numpy().tobytes())


def _canonical(value: Any) -> bytes:
    if isinstance(value, Tensor):
        flat = bytes_of(value.detach().cpu().contiguous())
        return f"{value.dtype}{list(value.shape)}".encode() + flat.numpy().tobytes()
    if isinstance(value, dict):
        items = sorted(_canonical(k) + b":" + _canonical(v) for k, v in value.items())
        return b"{" + b",".join(items) + b"}"
    if isinstance(value, set | frozenset):  # iterated in another order in each process
        return b"set{" + b",".join(sorted(map(_canonical, value))) + b"}"
    if isinstance(value, list | tuple):
        return type(value).__name__.encode() + b"[" + b",".join(map(_canonical, value)) + b"]"
    return cloudpickle.dumps(value)
