"""Verbs in which every rank has a block for every other: Alltoall and Alltoallv."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from unisono.comm.mpi_style.buffers import Blocks, Counted, assign, cut, unpack_counts
from unisono.comm.mpi_style.chunking import check_axis, counts_displs
from unisono.comm.mpi_style.constants import InPlace, is_in_place
from unisono.comm.mpi_style.performing import Performer
from unisono.comm.mpi_style.request import Request
from unisono.errors import PartitionError, explain


class AlltoallVerbs(Performer):
    """Exchanges of blocks. Collective over the communicator."""

    def Alltoall(
        self,
        sendbuf: Counted | InPlace,
        recvbuf: Counted,
        send_axis: int = 0,
        recv_axis: int | None = None,
    ) -> None:
        """Send block j along `send_axis` to rank j; rank i's becomes block i along `recv_axis`.

        Blocks are cut as `chunk` does. With `recv_axis` (default: `send_axis`) another one, an
        array that is split along `recv_axis` becomes one that is split along `send_axis`.
        """
        self._alltoall(sendbuf, recvbuf, send_axis, recv_axis, "Alltoall", blocking=True)

    def Ialltoall(
        self,
        sendbuf: Counted | InPlace,
        recvbuf: Counted,
        send_axis: int = 0,
        recv_axis: int | None = None,
    ) -> Request:
        """Start `Alltoall`."""
        return self._alltoall(sendbuf, recvbuf, send_axis, recv_axis, "Ialltoall", blocking=False)

    def Alltoallv(
        self,
        sendbuf: Counted | InPlace,
        recvbuf: Counted,
        send_axis: int = 0,
        recv_axis: int | None = None,
    ) -> None:
        """Like `Alltoall`, with `(buffer, counts, displs)` on both sides."""
        self._alltoall(sendbuf, recvbuf, send_axis, recv_axis, "Alltoallv", blocking=True)

    def Ialltoallv(
        self,
        sendbuf: Counted | InPlace,
        recvbuf: Counted,
        send_axis: int = 0,
        recv_axis: int | None = None,
    ) -> Request:
        """Start `Alltoallv`."""
        return self._alltoall(sendbuf, recvbuf, send_axis, recv_axis, "Ialltoallv", blocking=False)

    def Alltoallw(self, *_: object, **__: object) -> NoReturn:
        """Refuse: blocks of different datatypes are not offered."""
        raise NotImplementedError(
            explain(
                "Alltoallw",
                "one datatype per block is not offered",
                None,
                "Alltoallv for blocks of one dtype, Communicator.all_to_all([tensor, ...])",
            )
        )

    Ialltoallw = Alltoallw

    def _alltoall(
        self,
        sendbuf: Counted | InPlace,
        recvbuf: Counted,
        send_axis: int,
        recv_axis: int | None,
        verb: str,
        *,
        blocking: bool,
    ) -> Request:
        comm = self._comm
        recv, recv_counts, recv_displs = unpack_counts(recvbuf, verb, "recvbuf")
        if isinstance(sendbuf, InPlace) or is_in_place(sendbuf):
            send, send_counts, send_displs = recv, recv_counts, recv_displs
        else:
            send, send_counts, send_displs = unpack_counts(sendbuf, verb, "sendbuf")
        cut_along = check_axis(send_axis, send.dim(), verb, "send_axis")
        join_along = check_axis(
            cut_along if recv_axis is None else recv_axis, recv.dim(), verb, "recv_axis"
        )
        if send.dtype != recv.dtype:
            raise PartitionError.because(
                f"{verb} of {send.dtype} into {recv.dtype}", "the buffers differ in dtype"
            )
        if send_counts is None:
            send_counts, send_displs = counts_displs(send.shape[cut_along], comm.size)
        outgoing = cut(send, cut_along, send_counts, send_displs, comm.size, verb, "sendbuf")
        view = recv
        if recv_counts is None:
            recv_counts = self._expected(send, cut_along, join_along)
            view = _shaped(recv, send, outgoing, join_along, recv_counts, comm.rank, verb)
        incoming = cut(view, join_along, recv_counts, recv_displs, comm.size, verb, "recvbuf")
        return self._exchange(outgoing, incoming, recv, blocking=blocking)

    def _expected(self, send: Tensor, cut_along: int, join_along: int) -> tuple[int, ...]:
        """Return how many rows along `join_along` come from each rank; asks the ranks."""
        size, rank = self._comm.size, self._comm.rank
        lengths = [n for (n,) in self._agree([send.shape[join_along]])]
        if cut_along != join_along:
            return tuple(lengths)
        return tuple(counts_displs(n, size)[0][rank] for n in lengths)

    def _exchange(
        self, outgoing: Blocks, incoming: Blocks, recv: Tensor, *, blocking: bool
    ) -> Request:
        comm = self._comm
        flat = torch.cat([outgoing.block(rank).reshape(-1) for rank in range(comm.size)])
        work, send_sizes, recv_sizes = self._staged(flat), outgoing.numels(), incoming.numels()

        def deliver(values: Tensor) -> None:
            for rank, part in enumerate(values.split(recv_sizes)):
                assign(incoming.block(rank), part)
            if incoming.tensor.data_ptr() != recv.data_ptr():
                assign(recv, incoming.tensor)

        return self._perform(
            lambda verbs: verbs.all_to_all(work, send_sizes, recv_sizes),
            deliver,
            blocking,
        )


def _shaped(
    recv: Tensor,
    send: Tensor,
    outgoing: Blocks,
    join_along: int,
    counts: tuple[int, ...],
    rank: int,
    verb: str,
) -> Tensor:
    """Return `recv` in the shape of what comes; refuse it where that does not fit."""
    wanted = list(send.shape)
    wanted[outgoing.axis] = outgoing.counts[rank]
    wanted[join_along] = sum(counts)
    if list(recv.shape) == wanted:
        return recv
    if outgoing.axis == join_along == 0 and recv.numel() == torch.Size(wanted).numel():
        return recv.reshape(wanted)
    raise PartitionError.because(
        f"{verb} of {list(send.shape)}, cut along {outgoing.axis} and joined along {join_along}, "
        f"into {list(recv.shape)}",
        f"rank {rank} gets {wanted}",
        f"{list(recv.shape)} != {wanted}",
        f"torch.empty({wanted})",
    )
