"""Verbs that copy whole blocks: Bcast, Allgather, Gather, Scatter, and those with counts."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.comm.arguments import check_rank
from unisono.comm.mpi_style.buffers import (
    Blocks,
    Buffer,
    Counted,
    as_tensor,
    assign,
    check_alike,
    cut,
    unpack_counts,
)
from unisono.comm.mpi_style.chunking import check_axis
from unisono.comm.mpi_style.constants import InPlace, is_in_place
from unisono.comm.mpi_style.performing import Performer
from unisono.comm.mpi_style.request import Request
from unisono.errors import PartitionError


class GatherVerbs(Performer):
    """Copies of blocks. Collective over the communicator; counts are rows along the axis."""

    def Bcast(self, buf: Buffer, root: int = 0) -> None:
        """Fill `buf` on every rank with the values of `root`."""
        self._bcast(buf, root, "Bcast", blocking=True)

    def Ibcast(self, buf: Buffer, root: int = 0) -> Request:
        """Start `Bcast`."""
        return self._bcast(buf, root, "Ibcast", blocking=False)

    def Allgather(self, sendbuf: Buffer | InPlace, recvbuf: Counted, recv_axis: int = 0) -> None:
        """Fill `recvbuf` on every rank with the blocks of all, joined along `recv_axis`."""
        self._allgather(sendbuf, recvbuf, recv_axis, "Allgather", blocking=True)

    def Iallgather(
        self, sendbuf: Buffer | InPlace, recvbuf: Counted, recv_axis: int = 0
    ) -> Request:
        """Start `Allgather`."""
        return self._allgather(sendbuf, recvbuf, recv_axis, "Iallgather", blocking=False)

    def Allgatherv(self, sendbuf: Buffer | InPlace, recvbuf: Counted, recv_axis: int = 0) -> None:
        """Like `Allgather`; rank i's rows go to `displs[i]` of `(recvbuf, counts, displs)`.

        Without counts the rows follow each other.
        """
        self._allgather(sendbuf, recvbuf, recv_axis, "Allgatherv", blocking=True)

    def Iallgatherv(
        self, sendbuf: Buffer | InPlace, recvbuf: Counted, recv_axis: int = 0
    ) -> Request:
        """Start `Allgatherv`."""
        return self._allgather(sendbuf, recvbuf, recv_axis, "Iallgatherv", blocking=False)

    def Gather(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Counted | None,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> None:
        """Fill `recvbuf` on `root` with the blocks of all ranks; the others may pass None.

        Blocks are cut along `axis` of `sendbuf` and joined along `recv_axis` (default: `axis`):
        `recvbuf.swapaxes(0, recv_axis)` is the `sendbuf.swapaxes(0, axis)` one after the other.
        """
        self._gather(sendbuf, recvbuf, root, axis, recv_axis, "Gather", blocking=True)

    def Igather(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Counted | None,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> Request:
        """Start `Gather`."""
        return self._gather(sendbuf, recvbuf, root, axis, recv_axis, "Igather", blocking=False)

    def Gatherv(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Counted | None,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> None:
        """Like `Gather`, blocks of any lengths; `(recvbuf, counts, displs)` on `root`."""
        self._gather(sendbuf, recvbuf, root, axis, recv_axis, "Gatherv", blocking=True)

    def Igatherv(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Counted | None,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> Request:
        """Start `Gatherv`."""
        return self._gather(sendbuf, recvbuf, root, axis, recv_axis, "Igatherv", blocking=False)

    def Scatter(
        self,
        sendbuf: Counted | None,
        recvbuf: Buffer | InPlace,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> None:
        """Fill `recvbuf` of rank r with part r of `sendbuf` on `root`: the inverse of `Gather`.

        `sendbuf` is cut along `axis`; the parts lie along `recv_axis` (default: `axis`) of
        `recvbuf`. Only `root` needs a `sendbuf`.
        """
        self._scatter(sendbuf, recvbuf, root, axis, recv_axis, "Scatter", blocking=True)

    def Iscatter(
        self,
        sendbuf: Counted | None,
        recvbuf: Buffer | InPlace,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> Request:
        """Start `Scatter`."""
        return self._scatter(sendbuf, recvbuf, root, axis, recv_axis, "Iscatter", blocking=False)

    def Scatterv(
        self,
        sendbuf: Counted | None,
        recvbuf: Buffer | InPlace,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> None:
        """Like `Scatter`, parts of any lengths; `(sendbuf, counts, displs)` on `root`."""
        self._scatter(sendbuf, recvbuf, root, axis, recv_axis, "Scatterv", blocking=True)

    def Iscatterv(
        self,
        sendbuf: Counted | None,
        recvbuf: Buffer | InPlace,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> Request:
        """Start `Scatterv`."""
        return self._scatter(sendbuf, recvbuf, root, axis, recv_axis, "Iscatterv", blocking=False)

    def _bcast(self, buf: Buffer, root: int, verb: str, *, blocking: bool) -> Request:
        comm = self._comm
        check_rank(root, comm.size, "root", verb)
        x = as_tensor(buf, verb, "buf")
        work = self._staged(x)

        def deliver(_: Tensor) -> None:
            if work is not x and comm.rank != root:
                assign(x, work)

        return self._perform(lambda verbs: verbs.broadcast_(work, root), deliver, blocking)

    def _allgather(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Counted,
        recv_axis: int,
        verb: str,
        *,
        blocking: bool,
    ) -> Request:
        comm = self._comm
        recv, counts, displs = unpack_counts(recvbuf, verb, "recvbuf")
        recv = recv.reshape(1) if recv.dim() == 0 else recv
        send = None if is_in_place(sendbuf) else _rows(as_tensor(sendbuf, verb, "sendbuf"))
        axis = check_axis(recv_axis, (recv if send is None else send).dim(), verb, "recv_axis")
        if counts is None and send is not None and verb.endswith("v"):
            counts = [n for (n,) in self._agree([send.shape[axis]])]
        if counts is None:
            return self._allgather_equal(send, recv, axis, verb, blocking=blocking)
        blocks = cut(recv, axis, counts, displs, comm.size, verb, "recvbuf")
        mine = blocks.block(comm.rank) if send is None else send
        check_alike(mine, blocks.block(comm.rank), verb)
        work = self._staged(mine)
        return self._perform(
            lambda verbs: verbs.all_gather(work, axis, blocks.counts),
            lambda joined: _spread(blocks, joined),
            blocking,
        )

    def _allgather_equal(
        self, send: Tensor | None, recv: Tensor, axis: int, verb: str, *, blocking: bool
    ) -> Request:
        comm = self._comm
        if send is None:
            rows = _equal_share(recv, axis, comm.size, verb)
            send = recv.narrow(axis, comm.rank * rows, rows)
        check_alike(send, recv, verb, comm.size)
        _check_joined(send, recv, axis, comm.size, verb)
        work, sizes = self._staged(send), [send.shape[axis]] * comm.size
        return self._perform(
            lambda verbs: verbs.all_gather(work, axis, sizes),
            lambda joined: assign(recv, joined),
            blocking,
        )

    def _gather(
        self,
        sendbuf: Buffer | InPlace,
        recvbuf: Counted | None,
        root: int,
        axis: int,
        recv_axis: int | None,
        verb: str,
        *,
        blocking: bool,
    ) -> Request:
        comm = self._comm
        check_rank(root, comm.size, "root", verb)
        target, given = self._place(recvbuf, axis, recv_axis, root, verb, "recvbuf")
        if is_in_place(sendbuf):
            if target is None:
                raise PartitionError.because(
                    f"{verb}(IN_PLACE, ...) on rank {comm.rank}", f"the root is rank {root}"
                )
            share = None if given else _equal_share(target, 0, comm.size, verb)
            send = given.block(root) if given else target.narrow(0, root * (share or 0), share or 0)
        else:
            send = _rows(as_tensor(sendbuf, verb, "sendbuf"))
            send = send.swapaxes(0, check_axis(axis, send.dim(), verb))
        if verb.endswith("v"):
            counts = given.counts if given else (-1,) * comm.size
            rows = self._agree([send.shape[0], *counts])
            lengths = tuple(row[0] for row in rows)
            _check_counts(rows[root][1:], lengths, root, verb, "recvbuf")
        else:
            lengths = (send.shape[0],) * comm.size
            if target is not None:
                check_alike(send, target, verb, comm.size)
                _check_joined(send, target, 0, comm.size, verb)
        blocks = given
        if blocks is None and target is not None and verb.endswith("v"):
            blocks = cut(target, 0, lengths, None, comm.size, verb, "recvbuf")
        work = self._staged(send)

        def deliver(joined: Tensor | None) -> None:
            if joined is not None and blocks is not None:
                _spread(blocks, joined)
            elif joined is not None and target is not None:
                assign(target, joined)

        return self._perform(lambda verbs: verbs.gather(work, root, 0, lengths), deliver, blocking)

    def _scatter(
        self,
        sendbuf: Counted | None,
        recvbuf: Buffer | InPlace,
        root: int,
        axis: int,
        recv_axis: int | None,
        verb: str,
        *,
        blocking: bool,
    ) -> Request:
        comm = self._comm
        check_rank(root, comm.size, "root", verb)
        whole, given = self._place(sendbuf, axis, None, root, verb, "sendbuf")
        if is_in_place(recvbuf):
            if whole is None:
                raise PartitionError.because(
                    f"{verb}(..., IN_PLACE) on rank {comm.rank}", f"the root is rank {root}"
                )
            share = given.counts[root] if given else _equal_share(whole, 0, comm.size, verb)
            target = torch.empty_like(whole.narrow(0, 0, share))
        else:
            recv = _rows(as_tensor(recvbuf, verb, "recvbuf"))
            along = axis if recv_axis is None else recv_axis
            target = recv.swapaxes(0, check_axis(along, recv.dim(), verb, "recv_axis"))
        if verb.endswith("v"):
            counts = given.counts if given else (-1,) * comm.size
            rows = self._agree([target.shape[0], *counts])
            lengths = tuple(row[0] for row in rows)
            _check_counts(rows[root][1:], lengths, root, verb, "sendbuf")
        else:
            lengths = (target.shape[0],) * comm.size
        if whole is not None:
            blocks = given or cut(whole, 0, lengths, None, comm.size, verb, "sendbuf")
            if not verb.endswith("v"):
                check_alike(target, whole, verb, comm.size)
            whole = self._staged(torch.cat([blocks.block(rank) for rank in range(comm.size)]))
        like = (tuple(target.shape), target.dtype)
        return self._perform(
            lambda verbs: verbs.scatter(whole, root, 0, lengths, like=like),
            lambda part: assign(target, part),
            blocking,
        )

    def _place(
        self,
        buffer: Counted | None,
        axis: int,
        recv_axis: int | None,
        root: int,
        verb: str,
        what: str,
    ) -> tuple[Tensor | None, Blocks | None]:
        """Return the buffer of `root` with the axis in front, and its blocks if counts came too."""
        if self._comm.rank != root:
            return None, None
        if buffer is None:
            raise PartitionError.because(f"{verb}: {what}=None", f"rank {root} is the root")
        x, counts, displs = unpack_counts(buffer, verb, what)
        x = _rows(x)
        front = x.swapaxes(
            0, check_axis(axis if recv_axis is None else recv_axis, x.dim(), verb, "axis")
        )
        if counts is None:
            return front, None
        return front, cut(front, 0, counts, displs, self._comm.size, verb, what)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1) if x.dim() == 0 else x


def _spread(blocks: Blocks, joined: Tensor) -> None:
    """Write blocks that follow each other to their places."""
    for rank, part in enumerate(joined.split(list(blocks.counts), blocks.axis)):
        assign(blocks.block(rank), part)


def _equal_share(x: Tensor, axis: int, size: int, verb: str) -> int:
    rows = x.shape[axis]
    if rows % size:
        raise PartitionError.because(
            f"{verb} of {rows} rows in equal shares",
            f"{size} ranks",
            f"{rows} % {size} = {rows % size}",
            f"{verb}v with counts: comm.counts_displs_shape(shape, axis)",
        )
    return rows // size


def _check_joined(send: Tensor, recv: Tensor, axis: int, size: int, verb: str) -> None:
    """Refuse a receive buffer in whose shape the joined blocks do not fit."""
    wanted = [*send.shape]
    wanted[axis] *= size
    if axis and list(recv.shape) != wanted:
        raise PartitionError.because(
            f"{verb} of {list(send.shape)} along axis {axis} into {list(recv.shape)}",
            f"{size} blocks joined along axis {axis} have shape {wanted}",
            f"{list(recv.shape)} != {wanted}",
            f"torch.empty({wanted})",
        )


def _check_counts(
    counts: tuple[int, ...], lengths: tuple[int, ...], root: int, verb: str, what: str
) -> None:
    """Refuse alike on all ranks counts of the root that are not what the ranks hold."""
    if counts != lengths and any(n >= 0 for n in counts):
        wrong = next(r for r, (a, b) in enumerate(zip(counts, lengths, strict=True)) if a != b)
        raise PartitionError.because(
            f"{verb}: {what} counts={list(counts)} on root {root}",
            f"the ranks' own buffers have {list(lengths)} rows",
            f"rank {wrong}: {counts[wrong]} != {lengths[wrong]}",
        )
