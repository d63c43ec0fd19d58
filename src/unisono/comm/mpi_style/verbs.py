"""The verbs of MPI over a `Communicator`: collectives, Python objects, messages.

A collective is written once, as a `Plan`: what to call on a `Communicator`, and what to do with the
result. The verb makes it and waits; its twin with an `I` makes it on `Communicator.start` and hands
out a `Request`.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from unisono.comm.arguments import check_rank, dense
from unisono.comm.communicator import Communicator
from unisono.comm.mpi_style import constants
from unisono.comm.mpi_style.buffers import (
    Blocks,
    Buffer,
    Counted,
    Sent,
    as_tensor,
    assign,
    check_alike,
    check_axis,
    check_shape,
    counts_displs,
    cut,
    equal_share,
    unpack_counts,
)
from unisono.comm.mpi_style.constants import SUM, InPlace, Op, as_op
from unisono.comm.mpi_style.messages import Messages, Request, Status
from unisono.comm.perform import Pending
from unisono.comm.reductions import reduce_in_rank_order
from unisono.errors import PartitionError, explain
from unisono.expect import expect, expect_int, is_integer

S = TypeVar("S", bound="Verbs")
P = ParamSpec("P")
Part = tuple[Any, int, str]
"""A buffer, the axis along which it is cut or joined, and its name."""


class Plan(NamedTuple):
    """A collective that is ready to be made."""

    start: Callable[[Any], Any]
    """Makes a verb of a `Communicator`, or of its `start`."""
    deliver: Callable[[Any], None]
    """Writes the result into the caller's buffer."""


def _verb(
    plan: Callable[Concatenate[S, str, P], Plan], name: str = "", doc: str | None = None
) -> Callable[Concatenate[S, P], None]:
    """Return the blocking verb of a plan, whose first argument is the name of the verb."""
    name = name or plan.__name__

    def verb(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        start, deliver = plan(self, name, *args, **kwargs)
        deliver(start(self._comm))

    return _described(verb, plan, name, doc or plan.__doc__, "None")


def _also(
    verb: Callable[Concatenate[S, P], None], name: str, doc: str
) -> Callable[Concatenate[S, P], None]:
    """Return another verb of the same plan."""
    return _verb(inspect.unwrap(verb), name, doc)


def _started(verb: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], Request]:
    """Return the twin of a verb that does not wait."""
    plan: Callable[Concatenate[S, str, P], Plan] = inspect.unwrap(verb)
    name = verb.__name__

    def started(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Request:
        start, deliver = plan(self, name, *args, **kwargs)
        pending: Pending[Any] = start(self._comm.start)
        return Request(pending.done, lambda: deliver(pending.wait()))

    return _described(started, plan, f"I{name.lower()}", f"Start `{name}`.", "Request")


def _described(made: Any, plan: Any, name: str, doc: str | None, returns: str) -> Any:
    """Let a function that was made of a plan look as if it had been written out."""
    signature = inspect.signature(plan)
    shown = [value for key, value in signature.parameters.items() if key != "verb"]
    made.__name__, made.__qualname__, made.__doc__ = name, f"Verbs.{name}", doc
    made.__signature__ = signature.replace(parameters=shown, return_annotation=returns)
    made.__wrapped__ = plan
    return made


class Verbs(ABC):
    """All verbs of MPI. Upper-case ones take buffers, lower-case ones pickle Python objects.

    Collectives are made by all ranks of the communicator; counts are rows along the axis.
    """

    @property
    @abstractmethod
    def _comm(self) -> Communicator: ...

    @property
    @abstractmethod
    def _messages(self) -> Messages: ...

    def _staged(self, x: Tensor) -> Tensor:
        """Return `x` on the device on which the group works; `x` itself where it is there."""
        device = self._comm.device
        return x if x.device.type == device.type else x.to(device)

    @_verb
    def Barrier(self, verb: str) -> Plan:  # noqa: ARG002
        """Return when every rank has called it."""
        return Plan(lambda verbs: verbs.barrier(), lambda _: None)

    Ibarrier = _started(Barrier)

    # -- reductions: `op` is one of ours or mpi4py's ---------------------------------------------

    @_verb
    def Allreduce(self, verb: str, sendbuf: Sent, recvbuf: Buffer, op: object = SUM) -> Plan:
        """Fill `recvbuf` on every rank with the reduction of `sendbuf` (same size) over ranks."""
        recv = as_tensor(recvbuf, verb, "recvbuf")
        send, kind = _operands(sendbuf, recv, op, verb)
        work = recv
        if kind.is_logical or recv.device.type != self._comm.device.type:
            work = _scratch(self._staged(send), kind)
        elif send is not recv:
            assign(recv, send)

        def deliver(_: Tensor) -> None:
            if work is not recv:
                assign(recv, work)

        return Plan(lambda verbs: verbs.all_reduce_(work, kind.reduction), deliver)

    Iallreduce = _started(Allreduce)

    @_verb
    def Reduce(
        self,
        verb: str,
        sendbuf: Sent,
        recvbuf: Buffer | None,
        op: object = SUM,
        root: int = 0,
    ) -> Plan:
        """Fill `recvbuf` on `root` with the reduction over ranks; the others may pass None."""
        comm = self._comm
        root = check_rank(root, comm.size, "root", verb)
        needs_recv = comm.rank == root or constants.is_in_place(sendbuf)
        recv = as_tensor(recvbuf, verb, "recvbuf") if needs_recv else None
        send, kind = _operands(sendbuf, recv, op, verb)
        work = self._staged(send)
        work = work != 0 if kind.is_logical else work

        def deliver(result: Tensor | None) -> None:
            if recv is not None and result is not None:
                assign(recv, result)

        return Plan(lambda verbs: verbs.reduce(work, root, kind.reduction), deliver)

    Ireduce = _started(Reduce)

    @_verb
    def Scan(self, verb: str, sendbuf: Sent, recvbuf: Buffer, op: object = SUM) -> Plan:
        """Fill `recvbuf` of rank r with the reduction over ranks 0 to r."""
        ranks = self._comm.rank + (verb == "Scan")
        recv = as_tensor(recvbuf, verb, "recvbuf")
        send, kind = _operands(sendbuf, recv, op, verb)
        block, sizes = _scratch(self._staged(send), kind).reshape(1, -1), [1] * self._comm.size

        def deliver(rows: Tensor) -> None:
            if ranks:
                total = torch.empty_like(rows[0])
                reduce_in_rank_order(total, list(rows[:ranks].unbind()), kind.reduction)
                assign(recv, total)

        return Plan(lambda verbs: verbs.all_gather(block, 0, sizes), deliver)

    Iscan = _started(Scan)
    Exscan = _also(
        Scan, "Exscan", "Fill `recvbuf` of rank r with the reduction of ranks 0 to r-1; 0's stays."
    )
    Iexscan = _started(Exscan)

    # -- whole blocks ----------------------------------------------------------------------------

    @_verb
    def Bcast(self, verb: str, buf: Buffer, root: int = 0) -> Plan:
        """Fill `buf` on every rank with the values of `root`."""
        comm = self._comm
        root = check_rank(root, comm.size, "root", verb)
        x = as_tensor(buf, verb, "buf")
        work = self._staged(x)

        def deliver(_: Tensor) -> None:
            if work is not x and comm.rank != root:
                assign(x, work)

        return Plan(lambda verbs: verbs.broadcast_(work, root), deliver)

    Ibcast = _started(Bcast)

    @_verb
    def Allgather(self, verb: str, sendbuf: Sent, recvbuf: Counted, recv_axis: int = 0) -> Plan:
        """Fill `recvbuf` on every rank with the blocks of all, joined along `recv_axis`."""
        work, lengths, deliver = self._gathered(
            verb, None, (sendbuf, recv_axis, "sendbuf"), (recvbuf, recv_axis, "recvbuf")
        )
        return Plan(lambda verbs: verbs.all_gather(work, 0, lengths), deliver)

    Iallgather = _started(Allgather)
    Allgatherv = _also(
        Allgather,
        "Allgatherv",
        """Like `Allgather`; rank i's rows go to `displs[i]` of `(recvbuf, counts, displs)`.

        Without counts the rows follow each other.
        """,
    )
    Iallgatherv = _started(Allgatherv)

    @_verb
    def Gather(
        self,
        verb: str,
        sendbuf: Sent,
        recvbuf: Counted | None,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> Plan:
        """Fill `recvbuf` on `root` with the blocks of all ranks; the others may pass None.

        Blocks are cut along `axis` of `sendbuf` and joined along `recv_axis` (default: `axis`):
        `recvbuf.swapaxes(0, recv_axis)` is the `sendbuf.swapaxes(0, axis)` one after the other.
        """
        along = axis if recv_axis is None else recv_axis
        work, lengths, deliver = self._gathered(
            verb, root, (sendbuf, axis, "sendbuf"), (recvbuf, along, "recvbuf")
        )
        return Plan(lambda verbs: verbs.gather(work, root, 0, lengths), deliver)

    Igather = _started(Gather)
    Gatherv = _also(
        Gather,
        "Gatherv",
        "Like `Gather`, blocks of any lengths; `(recvbuf, counts, displs)` on `root`.",
    )
    Igatherv = _started(Gatherv)

    @_verb
    def Scatter(
        self,
        verb: str,
        sendbuf: Counted | None,
        recvbuf: Sent,
        root: int = 0,
        axis: int = 0,
        recv_axis: int | None = None,
    ) -> Plan:
        """Fill `recvbuf` of rank r with part r of `sendbuf` on `root`: the inverse of `Gather`.

        `sendbuf` is cut along `axis`; the parts lie along `recv_axis` (default: `axis`) of
        `recvbuf`. Only `root` needs a `sendbuf`.
        """
        along = axis if recv_axis is None else recv_axis
        target, whole, blocks, lengths = self._rooted(
            verb, root, (recvbuf, along, "recvbuf"), (sendbuf, axis, "sendbuf")
        )
        if whole is not None:
            size = self._comm.size
            blocks = blocks or cut(whole, 0, lengths, None, size, verb, "sendbuf")
            whole = self._staged(torch.cat([blocks.block(rank) for rank in range(size)]))
        like = (tuple(target.shape), target.dtype)
        return Plan(
            lambda verbs: verbs.scatter(whole, root, 0, lengths, like=like),
            lambda part: assign(target, part),
        )

    Iscatter = _started(Scatter)
    Scatterv = _also(
        Scatter,
        "Scatterv",
        "Like `Scatter`, parts of any lengths; `(sendbuf, counts, displs)` on `root`.",
    )
    Iscatterv = _started(Scatterv)

    def _gathered(
        self, verb: str, root: int | None, part: Part, whole: Part
    ) -> tuple[Tensor, tuple[int, ...], Callable[[Tensor | None], None]]:
        """Return the own block, the rows of all ranks, and what writes the joined blocks."""
        block, front, blocks, lengths = self._rooted(verb, root, part, whole)

        def deliver(joined: Tensor | None) -> None:
            if joined is not None and blocks is not None:
                blocks.fill(joined)
            elif joined is not None and front is not None:
                assign(front, joined)

        return self._staged(block), lengths, deliver

    def _rooted(
        self, verb: str, root: int | None, part: Part, whole: Part
    ) -> tuple[Tensor, Tensor | None, Blocks | None, tuple[int, ...]]:
        """Return the own block, the whole buffer and its blocks (if needed), and all ranks' rows.

        Each axis comes to the front. The whole is needed on `root`, on every rank if that is None.
        """
        (part_buffer, part_axis, part_name), (buffer, axis, name) = part, whole
        rank, size = self._comm.rank, self._comm.size
        root = root if root is None else check_rank(root, size, "root", verb)
        front: Tensor | None = None
        blocks: Blocks | None = None
        if root in (None, rank):
            if buffer is None:
                raise PartitionError.because(f"{verb}: {name}=None", f"rank {rank} is the root")
            x, counts, displs = unpack_counts(buffer, verb, name)
            front = _in_front(x, axis, verb)
            if counts is not None:
                blocks = cut(front, 0, counts, displs, size, verb, name)
        if not constants.is_in_place(part_buffer):
            block = _in_front(as_tensor(part_buffer, verb, part_name), part_axis, verb)
        elif front is None:
            raise PartitionError.because(
                f"{verb} with IN_PLACE on rank {rank}", f"the root is rank {root}"
            )
        elif blocks is not None:
            block = blocks.block(rank)
        else:
            share = equal_share(front, 0, size, verb)
            block = front.narrow(0, rank * share, share)
        lengths = self._lengths(block.shape[0], blocks, root, verb, name)
        if front is not None and blocks is not None:
            check_alike(block, blocks.block(rank), verb)
        elif front is not None and verb.endswith("v"):
            blocks = cut(front, 0, lengths, None, size, verb, name)
        elif front is not None:
            check_alike(block, front, verb, size)
            if axis or part_axis:  # in front, another form of the shape is the same memory
                check_shape(front, [sum(lengths), *block.shape[1:]], f"{verb} along axis {axis}")
        return block, front, blocks, lengths

    def _lengths(
        self, rows_here: int, blocks: Blocks | None, root: int | None, verb: str, what: str
    ) -> tuple[int, ...]:
        """Return the rows of all ranks; refuse alike on all of them other counts of the root."""
        size = self._comm.size
        if root is None and blocks is not None:
            return blocks.counts
        if not verb.endswith("v"):
            return (rows_here,) * size
        counts_here = blocks.counts if blocks else [-1] * size
        rows = self._comm._agree(verb, [rows_here, *counts_here], is_pollable=True)
        lengths, counts = tuple(row[0] for row in rows), rows[root or 0][1:]
        if counts != lengths and any(n >= 0 for n in counts):
            wrong = next(r for r, (a, b) in enumerate(zip(counts, lengths, strict=True)) if a != b)
            raise PartitionError.because(
                f"{verb}: {what} counts={list(counts)} on root {root}",
                f"the ranks' own buffers have {list(lengths)} rows",
                f"rank {wrong}: {counts[wrong]} != {lengths[wrong]}",
            )
        return lengths

    # -- a block for every other rank ------------------------------------------------------------

    @_verb
    def Alltoall(
        self,
        verb: str,
        sendbuf: Counted | InPlace,
        recvbuf: Counted,
        send_axis: int = 0,
        recv_axis: int | None = None,
    ) -> Plan:
        """Send block j along `send_axis` to rank j; rank i's becomes block i along `recv_axis`.

        Blocks are cut as `chunk` does. With `recv_axis` (default: `send_axis`) another one, an
        array that is split along `recv_axis` becomes one that is split along `send_axis`.
        """
        rank, size = self._comm.rank, self._comm.size
        recv, recv_counts, recv_displs = unpack_counts(recvbuf, verb, "recvbuf")
        send, send_counts, send_displs = recv, recv_counts, recv_displs
        if not isinstance(sendbuf, InPlace) and not constants.is_in_place(sendbuf):
            send, send_counts, send_displs = unpack_counts(sendbuf, verb, "sendbuf")
        cut_axis = check_axis(send_axis, send.dim(), verb, "send_axis")
        join_axis = cut_axis if recv_axis is None else recv_axis
        join_axis = check_axis(join_axis, recv.dim(), verb, "recv_axis")
        check_alike(send, recv, verb, None)
        if send_counts is None:
            send_counts, send_displs = counts_displs(send.shape[cut_axis], size)
        outgoing = cut(send, cut_axis, send_counts, send_displs, size, verb, "sendbuf")
        target = recv
        if recv_counts is None:
            lengths = [
                n for (n,) in self._comm._agree(verb, [send.shape[join_axis]], is_pollable=True)
            ]
            if cut_axis == join_axis:
                lengths = [counts_displs(n, size)[0][rank] for n in lengths]
            recv_counts = lengths
            shape = list(send.shape)
            shape[cut_axis] = outgoing.counts[rank]
            shape[join_axis] = sum(lengths)
            is_alike = cut_axis == join_axis == 0 and recv.numel() == math.prod(shape)
            if is_alike and list(recv.shape) != shape:
                target = recv.reshape(shape)
            axes = f"cut along {cut_axis}, joined along {join_axis}"
            check_shape(target, shape, f"{verb} of {list(send.shape)}, {axes},")
        incoming = cut(target, join_axis, recv_counts, recv_displs, size, verb, "recvbuf")
        flat = torch.cat([outgoing.block(other).reshape(-1) for other in range(size)])
        work, send_sizes, recv_sizes = self._staged(flat), outgoing.numels(), incoming.numels()

        def deliver(values: Tensor) -> None:
            for other, part in enumerate(values.split(recv_sizes)):
                assign(incoming.block(other), part)
            if target.data_ptr() != recv.data_ptr():
                assign(recv, target)

        return Plan(lambda verbs: verbs.all_to_all(work, send_sizes, recv_sizes), deliver)

    Ialltoall = _started(Alltoall)
    Alltoallv = _also(
        Alltoall, "Alltoallv", "Like `Alltoall`, with `(buffer, counts, displs)` on both sides."
    )
    Ialltoallv = _started(Alltoallv)

    def Alltoallw(self, *_: object, **__: object) -> NoReturn:
        """Refuse: blocks of different datatypes are not offered."""
        hint = "Alltoallv for blocks of one dtype"
        raise NotImplementedError(
            explain("Alltoallw", "one datatype per block is not offered", None, hint)
        )

    Ialltoallw = Alltoallw

    # -- Python objects: each is signed by its rank, and nothing else is unpickled ----------------

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of `root` on every rank."""
        root = check_rank(root, self._comm.size, "root", "bcast")
        return self._comm.broadcast_object(obj, root)

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank."""
        return self._comm.all_gather_object(obj)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on `root`, None on the others."""
        root = check_rank(root, self._comm.size, "root", "gather")
        return self._comm.gather_object(obj, root)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return object r of the sequence of `root` on rank r; the others may pass None."""
        rank, size = self._comm.rank, self._comm.size
        root = check_rank(root, size, "root", "scatter")
        parts: list[Tensor] = []
        if rank == root and sendobj is not None:
            parts = [self._comm._pickled(obj) for obj in sendobj]
        lengths = [part.numel() for part in parts] + [0] * size
        count, *sizes = self._comm._agree(
            "scatter", [len(parts), *lengths[:size]], is_pollable=True
        )[root]
        if count != size:
            raise PartitionError.because(
                f"scatter of {count} objects from rank {root}",
                f"{size} ranks",
                f"{count} != {size}",
                "one object per rank",
            )
        whole = torch.cat(parts) if rank == root else None
        like = ((sizes[rank],), torch.uint8)
        came = self._comm.scatter(whole, root, 0, sizes, like=like)
        return self._comm._unpickled(came, [sizes[rank]], root)[0]

    def allreduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        """Return the objects of all ranks combined in rank order, on every rank.

        `op` is a constant of MPI or a function of two objects.
        """
        if isinstance(op, Op) or not callable(op) or type(op).__module__.startswith("mpi4py"):
            op = as_op(op, "allreduce").combine
        return functools.reduce(op, self.allgather(sendobj))

    # -- messages: made by the two ranks concerned, and of one sender taken in order --------------

    def Send(self, buf: Buffer, dest: int, tag: int = 0) -> None:
        """Send a copy of `buf` to rank `dest`; returns at once, `buf` may be changed."""
        self._send(as_tensor(buf, "Send", "sendbuf").clone(), dest, tag, "Send")

    Bsend = Rsend = Send  # which has a copy in any case

    def Ssend(self, buf: Buffer, dest: int, tag: int = 0) -> None:
        """Send `buf` and return when rank `dest` has received it."""
        self.Issend(buf, dest, tag).Wait()

    def Isend(self, buf: Buffer, dest: int, tag: int = 0) -> Request:
        """Start to send `buf`, which must not change before the request is complete."""
        return self._send(as_tensor(buf, "Isend", "sendbuf"), dest, tag, "Isend")

    Irsend = Isend

    def Ibsend(self, buf: Buffer, dest: int, tag: int = 0) -> Request:
        """Send a copy of `buf`; the request is complete."""
        self.Send(buf, dest, tag)
        return Request.done()

    def Issend(self, buf: Buffer, dest: int, tag: int = 0) -> Request:
        """Start `Ssend`: complete when rank `dest` has received the message."""
        x = as_tensor(buf, "Issend", "sendbuf")
        return self._send(x, dest, tag, "Issend", is_sync=True)

    def Recv(
        self,
        buf: Buffer,
        source: int | None = None,
        tag: int | None = None,
        status: Status | None = None,
    ) -> None:
        """Fill `buf` with the next message of that source and tag.

        With MPI both may be left out, for any, and a shorter message fills the first elements:
        `status.Get_count()` tells how many. Elsewhere the source is named, the tag is that of the
        sender (0 if left out), and the message has the size of `buf`.
        """
        self._receive(as_tensor(buf, "Recv", "buf"), source, tag, "Recv").Wait(status)

    def Irecv(self, buf: Buffer, source: int | None = None, tag: int | None = None) -> Request:
        """Start `Recv`."""
        return self._receive(as_tensor(buf, "Irecv", "buf"), source, tag, "Irecv")

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send a picklable object to rank `dest`; returns at once."""
        expect_int("tag", tag, 0)
        if self._is_peer(dest, "send", "dest"):
            self._messages.send_object(obj, dest, tag)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send a picklable object; it was copied, so the request is complete."""
        self.send(obj, dest, tag)
        return Request.done()

    def recv(
        self,
        buf: bytearray | memoryview | None = None,
        source: int | None = None,
        tag: int | None = None,
        status: Status | None = None,
    ) -> Any:
        """Return the next object of that source and tag; `buf`, room in mpi4py, is not needed."""
        return self.irecv(buf, source, tag).Wait(status)

    def irecv(
        self,
        buf: bytearray | memoryview | None = None,
        source: int | None = None,
        tag: int | None = None,
    ) -> Request:
        """Start `recv`; `Wait` returns the object."""
        if buf is not None and not isinstance(buf, bytearray | memoryview):  # mpi4py's first one
            expect("buf", buf, (bytearray, type(None)), f"recv(source={buf!r}), or recv(None, ...)")
        return self._receive(None, source, tag, "recv")

    def _send(self, x: Tensor, dest: int, tag: int, verb: str, *, is_sync: bool = False) -> Request:
        expect_int("tag", tag, 0)
        if not self._is_peer(dest, verb, "dest"):
            return Request.done()
        return self._messages.send(dense(self._staged(x)), dest, tag, is_sync=is_sync)

    def _receive(
        self, buffer: Tensor | None, source: int | None, tag: int | None, verb: str
    ) -> Request:
        if tag is not None and constants.is_any_tag(tag):
            tag = constants.ANY_TAG
        elif tag is not None:
            expect_int("tag", tag, 0)
        if source is not None and constants.is_any_source(source):
            source = None
        elif source is not None and not self._is_peer(source, verb, "source"):
            return Request.done()
        return self._messages.receive(buffer, source, tag)

    def _is_peer(self, rank: int, verb: str, what: str) -> bool:
        """Check the other rank; False for `PROC_NULL`."""
        if is_integer(rank) and constants.is_proc_null(rank):
            return False
        check_rank(rank, self._comm.size, what, verb)
        return True


def _operands(sendbuf: Sent, recv: Tensor | None, op: object, verb: str) -> tuple[Tensor, Op]:
    """Return the values this rank brings and the reduction, checked against each other."""
    kind = as_op(op, verb)
    if constants.is_in_place(sendbuf) and recv is not None:
        send = recv
    else:
        send = as_tensor(sendbuf, verb, "sendbuf")
        if recv is not None:
            check_alike(send, recv, verb)
    kind.check(send.dtype, verb)
    return send, kind


def _scratch(x: Tensor, kind: Op) -> Tensor:
    """Return a copy in which a reduction can be done: true or false for a logical one."""
    return x != 0 if kind.is_logical else x.clone(memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1) if x.dim() == 0 else x


def _in_front(x: Tensor, axis: int, verb: str, what: str = "axis") -> Tensor:
    """Return `x` with `axis` as its first one; a tensor without dims counts as one row."""
    x = _rows(x)
    return x.swapaxes(0, check_axis(axis, x.dim(), verb, what))
