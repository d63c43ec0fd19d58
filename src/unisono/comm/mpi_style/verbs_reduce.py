"""Verbs that combine the values of all ranks: Allreduce, Reduce, Scan, Exscan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.arguments import check_rank
from unisono.comm.mpi_style.buffers import Buffer, as_tensor, assign, check_alike
from unisono.comm.mpi_style.constants import SUM, InPlace, Op, as_op, is_in_place
from unisono.comm.mpi_style.performing import Performer
from unisono.comm.mpi_style.request import Request
from unisono.comm.reductions import decode, encode, reduce_in_rank_order


class ReduceVerbs(Performer):
    """Reductions; `op` is one of ours or mpi4py's. Collective over the communicator."""

    def Allreduce(self, sendbuf: Buffer | InPlace, recvbuf: Buffer, op: object = SUM) -> None:
        """Fill `recvbuf` on every rank with the reduction of `sendbuf` (same size) over ranks."""
        self._allreduce(sendbuf, recvbuf, op, "Allreduce", blocking=True)

    def Iallreduce(self, sendbuf: Buffer | InPlace, recvbuf: Buffer, op: object = SUM) -> Request:
        """Start `Allreduce`."""
        return self._allreduce(sendbuf, recvbuf, op, "Iallreduce", blocking=False)

    def Reduce(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Buffer | None,
        op: object = SUM,
        root: int = 0,
    ) -> None:
        """Fill `recvbuf` on `root` with the reduction over ranks; the others may pass None."""
        self._reduce(sendbuf, recvbuf, op, root, "Reduce", blocking=True)

    def Ireduce(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Buffer | None,
        op: object = SUM,
        root: int = 0,
    ) -> Request:
        """Start `Reduce`."""
        return self._reduce(sendbuf, recvbuf, op, root, "Ireduce", blocking=False)

    def Scan(self, sendbuf: Buffer | InPlace, recvbuf: Buffer, op: object = SUM) -> None:
        """Fill `recvbuf` of rank r with the reduction over ranks 0 to r."""
        self._scan(sendbuf, recvbuf, op, "Scan", self._comm.rank + 1, blocking=True)

    def Iscan(self, sendbuf: Buffer | InPlace, recvbuf: Buffer, op: object = SUM) -> Request:
        """Start `Scan`."""
        return self._scan(sendbuf, recvbuf, op, "Iscan", self._comm.rank + 1, blocking=False)

    def Exscan(self, sendbuf: Buffer | InPlace, recvbuf: Buffer, op: object = SUM) -> None:
        """Fill `recvbuf` of rank r with the reduction over ranks 0 to r-1; rank 0's stays."""
        self._scan(sendbuf, recvbuf, op, "Exscan", self._comm.rank, blocking=True)

    def Iexscan(self, sendbuf: Buffer | InPlace, recvbuf: Buffer, op: object = SUM) -> Request:
        """Start `Exscan`."""
        return self._scan(sendbuf, recvbuf, op, "Iexscan", self._comm.rank, blocking=False)

    def _allreduce(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Buffer,
        op: object,
        verb: str,
        *,
        blocking: bool,
    ) -> Request:
        comm = self._comm
        recv = as_tensor(recvbuf, verb, "recvbuf")
        send, kind = _values(sendbuf, recv, op, verb)
        if kind.is_logical or recv.device.type != comm.device.type:
            work = _private(self._staged(send), kind)
        else:
            work = recv
            if send is not recv:
                assign(recv, send)

        def deliver(_: Tensor) -> None:
            if work is not recv:
                assign(recv, work)

        return self._perform(
            lambda verbs: verbs.all_reduce_(work, kind.reduction), deliver, blocking
        )

    def _reduce(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Buffer | None,
        op: object,
        root: int,
        verb: str,
        *,
        blocking: bool,
    ) -> Request:
        comm = self._comm
        check_rank(root, comm.size, "root", verb)
        needs_recv = comm.rank == root or is_in_place(sendbuf)
        recv = as_tensor(recvbuf, verb, "recvbuf") if needs_recv else None
        send, kind = _values(sendbuf, recv, op, verb)
        work = self._staged(send)
        work = work != 0 if kind.is_logical else work

        def deliver(result: Tensor | None) -> None:
            if recv is not None and result is not None:
                assign(recv, result)

        return self._perform(
            lambda verbs: verbs.reduce(work, root, kind.reduction),
            deliver,
            blocking,
        )

    def _scan(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Buffer,
        op: object,
        verb: str,
        ranks: int,
        *,
        blocking: bool,
    ) -> Request:
        """Gather all, and combine the first `ranks` blocks in rank order."""
        comm = self._comm
        recv = as_tensor(recvbuf, verb, "recvbuf")
        send, kind = _values(sendbuf, recv, op, verb)
        flat = _private(self._staged(send), kind).reshape(1, -1)
        block = encode(flat, kind.reduction)

        def deliver(rows: Tensor) -> None:
            if ranks:
                first: Sequence[Tensor] = rows[:ranks].unbind()
                total = torch.empty_like(first[0])
                reduce_in_rank_order(total, list(first), kind.reduction)
                assign(recv, decode(total, kind.reduction, flat.dtype))

        sizes = [1] * comm.size
        return self._perform(lambda verbs: verbs.all_gather(block, 0, sizes), deliver, blocking)


def _values(
    sendbuf: Buffer | InPlace, recv: Tensor | None, op: object, verb: str
) -> tuple[Tensor, Op]:
    """Return the values this rank brings and the reduction, checked against each other."""
    kind = as_op(op, verb)
    if is_in_place(sendbuf) and recv is not None:
        send = recv
    else:
        send = as_tensor(sendbuf, verb, "sendbuf")
        if recv is not None:
            check_alike(send, recv, verb)
    kind.check(send.dtype, verb)
    return send, kind


def _private(x: Tensor, kind: Op) -> Tensor:
    """Return a copy in which a reduction can be done: true or false for a logical one."""
    return x != 0 if kind.is_logical else x.clone(memory_format=torch.contiguous_format)
