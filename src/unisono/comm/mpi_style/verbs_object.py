"""Collectives for Python objects: the lower-case verbs. They pickle, so small things only.

Each object is signed by its rank (`seal.py`), and nothing else is unpickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.comm import seal
from unisono.comm.arguments import check_rank
from unisono.comm.mpi_style.constants import SUM, Op, as_op
from unisono.comm.mpi_style.performing import Performer
from unisono.errors import PartitionError


class ObjectVerbs(Performer):
    """Python objects of all ranks. Collective over the communicator."""

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of `root` on every rank."""
        comm = self._comm
        check_rank(root, comm.size, "root", "bcast")
        mine = self._pickled(obj if comm.rank == root else None)
        length = self._agree([mine.numel()])[root][0]
        work = mine if comm.rank == root else mine.new_empty(length)
        came = self._result(lambda verbs: verbs.broadcast_(work, root))
        return self._unpickled(came, root)

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank."""
        mine = self._pickled(obj)
        sizes = [n for (n,) in self._agree([mine.numel()])]
        joined: Tensor = self._result(lambda verbs: verbs.all_gather(mine, 0, sizes))
        return [self._unpickled(part, src) for src, part in enumerate(joined.split(sizes))]

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on `root`, None on the others."""
        comm, mine = self._comm, self._pickled(obj)
        check_rank(root, comm.size, "root", "gather")
        sizes = [n for (n,) in self._agree([mine.numel()])]
        joined: Tensor | None = self._result(lambda verbs: verbs.gather(mine, root, 0, sizes))
        if joined is None:
            return None
        return [self._unpickled(part, src) for src, part in enumerate(joined.split(sizes))]

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return object r of the sequence of `root` on rank r; the others may pass None."""
        comm = self._comm
        check_rank(root, comm.size, "root", "scatter")
        parts: list[Tensor] = []
        if comm.rank == root and sendobj is not None:
            parts = [self._pickled(obj) for obj in sendobj]
        lengths = [part.numel() for part in parts][: comm.size]
        counts = [*lengths, *([0] * (comm.size - len(lengths)))]
        found, *sizes = self._agree([len(parts), *counts])[root]
        if found != comm.size:
            raise PartitionError.because(
                f"scatter of {found} objects from rank {root}",
                f"{comm.size} ranks",
                f"{found} != {comm.size}",
                "one object a rank",
            )
        whole = torch.cat(parts) if comm.rank == root else None
        like = ((sizes[comm.rank],), torch.uint8)
        came = self._result(lambda verbs: verbs.scatter(whole, root, 0, sizes, like=like))
        return self._unpickled(came, root)

    def allreduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        """Return the objects of all ranks combined in rank order, on every rank.

        `op` is a constant of MPI or a function of two objects.
        """
        if isinstance(op, Op) or not callable(op) or type(op).__module__.startswith("mpi4py"):
            op = as_op(op, "allreduce").combine
        return functools.reduce(op, self.allgather(sendobj))

    def _pickled(self, obj: Any) -> Tensor:
        raw = bytearray(seal.dump_object(self._comm, obj))
        return torch.frombuffer(raw, dtype=torch.uint8).to(self._comm.device)

    def _unpickled(self, raw: Tensor, source: int) -> Any:
        return seal.load_object(self._comm, raw.cpu().numpy().tobytes(), source)
