"""The verbs for Python objects: pickled by cloudpickle, small things only."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from unisono.comm.arguments import check_rank
from unisono.comm.calling import Caller
from unisono.comm.raw import bytes_of
from unisono.comm.verbs_move import MoveVerbs


class ObjectVerbs(MoveVerbs, Caller):
    """Python objects between the ranks of a communicator."""

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank. Collective."""
        mine = self._pickled(obj)
        sizes = self._byte_counts(mine, timeout_s)
        joined = self.all_gather(mine, sizes=sizes, timeout_s=timeout_s)
        return [_unpickled(part) for part in joined.split(sizes)]

    def gather_object(
        self, obj: Any, dst: int = 0, *, timeout_s: float | None = None
    ) -> list[Any] | None:
        """Return the objects of all ranks on rank `dst`, None on the others. Collective."""
        check_rank(dst, self.size, "dst", "gather_object")
        mine = self._pickled(obj)
        sizes = self._byte_counts(mine, timeout_s)
        joined = self.gather(mine, dst, sizes=sizes, timeout_s=timeout_s)
        return None if joined is None else [_unpickled(part) for part in joined.split(sizes)]

    def broadcast_object(self, obj: Any, src: int = 0, *, timeout_s: float | None = None) -> Any:
        """Return the object of rank `src` on every rank; the others' is ignored. Collective."""
        check_rank(src, self.size, "src", "broadcast_object")
        mine = self._pickled(obj) if self.rank == src else self._pickled(None)
        sizes = self._byte_counts(mine, timeout_s)
        like = ((sizes[src],), torch.uint8)
        sent = mine if self.rank == src else None
        return _unpickled(self.broadcast(sent, src, like=like, timeout_s=timeout_s))

    def all_equal(self, value: Any, *, timeout_s: float | None = None) -> bool:
        """Return whether all ranks hold an equal value: same type and content. Collective.

        Tensors are compared by dtype, shape and bits, other values by their pickled form; only a
        digest travels.
        """
        digest = hashlib.sha256(_canonical(value)).digest()
        words = [int.from_bytes(digest[i : i + 7], "big") for i in range(0, 28, 7)]
        everybody = self.all_gather_ints(words, timeout_s=timeout_s)
        return all(other == everybody[0] for other in everybody)

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


def _unpickled(raw: Tensor) -> Any:
    return pickle.loads(raw.cpu().numpy().tobytes())


def _canonical(value: Any) -> bytes:
    if isinstance(value, Tensor):
        flat = bytes_of(value.detach().cpu().contiguous())
        return f"{value.dtype}{list(value.shape)}".encode() + flat.numpy().tobytes()
    if isinstance(value, dict):
        return b"{" + b",".join(_canonical(k) + _canonical(v) for k, v in value.items()) + b"}"
    if isinstance(value, list | tuple):
        return type(value).__name__.encode() + b"[" + b",".join(map(_canonical, value)) + b"]"
    return cloudpickle.dumps(value)
