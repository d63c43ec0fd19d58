"""The kernels over backends of accelerators (nccl and its kind), which work on streams.

A verb is put behind the work of the current stream and returns. A wait makes the current stream
wait, never the host; what is left to do with the result is put behind that. Deadlines are kept by a
thread (`health.streams`). What the host must know, such as sizes, travels by the engine of a CPU
group of the same ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from unisono.comm import call as calls
from unisono.comm.arguments import bytes_of
from unisono.comm.call import Call
from unisono.comm.engines.base import Blocks, Engine, How, Messages, Ticket
from unisono.comm.engines.gloo import NATIVE_OPS, one_block, spread, swap_flat
from unisono.comm.engines.signature import Compared, Signature, check, sign, sign_blocks
from unisono.comm.health.streams import Lane
from unisono.comm.reductions import reduce_in_rank_order
from unisono.errors import CollectiveMismatch

_REDUCED: frozenset[torch.dtype] = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8),
    )
)
"""Dtypes that backends of accelerators reduce."""
_WIDENED = {torch.int16: torch.int32, torch.bool: torch.uint8}
_BOOL_OPS = {"sum": "max", "or": "max", "max": "max", "product": "min", "and": "min", "min": "min"}
"""Reductions of truth values, as those of the numbers 0 and 1."""
_HALF = (torch.float16, torch.bfloat16)
_GRACE_S = 60.0
"""How much later than ours the deadline of a backend is, which may end the process."""
_LAST_NAP_S = 1e-3


class StreamTicket:
    """A transfer on a stream, and what to do with its result.

    Args:
        engine: the engine that has started it.
        works: what the backend gave for it.
        tensors: memory that must not be used for anything else before it is complete.
        timeout_s: its deadline.
        finish: put behind it on the stream that waits.
    """

    def __init__(
        self,
        engine: StreamEngine,
        works: Sequence[dist.Work | None],
        tensors: Sequence[Tensor],
        timeout_s: float,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.call = calls.latest_call or Call("transfer", engine.backend, engine.lane.key)
        self.call.is_queued = True
        _ = self.call.site  # could not be looked up when the call has returned
        self.began = time.monotonic()
        self.timeout_s = timeout_s
        self.deadline = self.began + timeout_s
        self._works = [work for work in works if work is not None]
        self._passed: torch.Event | None = None
        """Set where a stream that waits for it goes on."""
        self._lane = engine.lane
        self._tensors = list(tensors)
        self._finish = [] if finish is None else [finish]
        self._stream = _current_stream(tensors)
        self._lane.add(self)

    def is_complete(self) -> bool:
        """Whether the device has carried it out."""
        if self._passed is not None:
            return self._passed.query()
        return all(work.is_completed() for work in self._works)

    def done(self) -> bool:
        """Whether the device has carried it out, or its group was given up."""
        return self._lane.cause is not None or self.is_complete()

    def then(self, finish: Callable[[], object]) -> StreamTicket:
        """Do `finish`, too, when it is waited for."""
        self._finish.append(finish)
        return self

    def wait(self, timeout_s: float) -> None:
        """Make the current stream wait; raise only if the group was given up."""
        if self._lane.cause is not None:
            raise self._lane.cause
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s
        if self._works:
            for work in self._works:
                work.wait()
            stream = _current_stream(self._tensors)
            self._passed = stream.record_event()
            if stream != self._stream:
                for x in self._tensors:
                    x.record_stream(stream)
            # What is freed from here on is used again behind the wait; a work holds its tensors.
            self._works.clear()
            self._tensors.clear()
        while self._finish:
            self._finish.pop(0)()


class BarrierTicket(StreamTicket):
    """A barrier: the one transfer for which the host waits."""

    def wait(self, timeout_s: float) -> None:
        """Return when all ranks have carried out what they had put on their streams before."""
        super().wait(timeout_s)
        nap_s = 1e-5
        while not self.done():
            if time.monotonic() > self.deadline + _GRACE_S:
                raise TimeoutError  # no cause is known
            time.sleep(nap_s)
            nap_s = min(1.5 * nap_s, _LAST_NAP_S)
        if self._lane.cause is not None:
            raise self._lane.cause


class StreamEngine(Engine):
    """Kernels of one torch.distributed group on the devices of an accelerator.

    Sums of 16-bit floats are made by the backend in their own dtype. Results are the same bits on
    all ranks as far as the backend promises that.

    Args:
        group: the process group.
        backend: name of its backend for `device`.
        device: a device of the accelerator.
        timeout_s: deadline of the group's calls.
        host: returns the engine of a CPU group of the same ranks; collective when it makes one.
        lane: looks after what is under way.
    """

    has_tags = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        timeout_s: float,
        host: Callable[[], Engine],
        lane: Lane,
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.backend = backend
        self.device_type = device.type
        self._device = device
        self._host = host
        self._is_connected = False
        self._compared = Compared()
        group._get_backend(device).set_timeout(timedelta(seconds=timeout_s + _GRACE_S))
        self.lane = lane

    @property
    def host(self) -> Engine:
        """The engine of the CPU group. The first use may be collective."""
        return self._host()

    def connect(self, timeout_s: float) -> None:
        """Have the backend connect all ranks, which come together on the host first.

        A backend connects at its first call, without our deadline, and all ranks must make it.
        """
        if not self._is_connected:
            self.host.all_gather_ints([0], timeout_s=timeout_s)
            self._is_connected = True
            token = torch.zeros(1, device=self._device)
            work = self.group.allreduce([token], dist.AllreduceOptions())
            self._started([work], [token], timeout_s).wait(timeout_s)

    def _agree(self, signature: Signature, timeout_s: float) -> None:
        """Have all ranks connected, and their calls compared: a backend of streams does not.

        A call that has followed the latest one before is not compared again: nothing is exchanged
        then, and no host waits. A rank that alone makes a new one waits for the others on the host,
        they wait for it on their streams, and what they say of their waits shows the difference.
        What only one rank knows, such as how much it sends, is not compared: such a call could be
        new on some ranks only.
        """
        self.connect(timeout_s)
        if signature.sends:
            signature = Signature(signature.code, 0, signature.digest)
        if calls.latest_call is not None:
            calls.latest_call.signature = signature[:3]
        if not self._compared.is_new(signature):
            return
        try:
            rows = self.host.all_gather_ints(signature[:3], timeout_s=timeout_s)
            check([Signature(row[0], row[1], row[2]) for row in rows], self.lane.ranks)
        except CollectiveMismatch as error:
            self.cause = error  # ranks are at different places in the order of calls
            raise

    def _started(
        self,
        works: Sequence[dist.Work | None],
        tensors: Sequence[Tensor],
        timeout_s: float,
        finish: Callable[[], object] | None = None,
    ) -> StreamTicket:
        return StreamTicket(self, works, tensors, timeout_s, finish)

    # -- reductions -----------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        self._agree(sign("all_reduce", x.dtype, x.nbytes, op=op), how["timeout_s"])
        if not _is_native(x.dtype, op):
            return self._reduced_here(x, [x] * self.size, op, how["timeout_s"])
        options = dist.AllreduceOptions()
        return self._reduced(x, op, options, self.group.allreduce, how["timeout_s"])

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        self._agree(sign("reduce", x.dtype, x.nbytes, op=op, root=dst), how["timeout_s"])
        if not _is_native(x.dtype, op):
            return self._reduced_here(x, [x] * self.size, op, how["timeout_s"])
        options = dist.ReduceOptions()
        options.rootRank = dst
        return self._reduced(x, op, options, self.group.reduce, how["timeout_s"])

    def _reduced_here(self, out: Tensor, ins: Blocks, op: str, timeout_s: float) -> StreamTicket:
        """Fill `out` with the reduction of what ranks have for this one, in their order."""
        blocks = list(out.new_empty((self.size, *out.shape)).unbind())
        ticket = self._swap(blocks, ins, timeout_s)
        self.last_algorithm = "all_to_all"
        return ticket.then(partial(reduce_in_rank_order, out, blocks, op))

    def _reduced(
        self,
        x: Tensor,
        op: str,
        options: Any,
        start: Callable[[list[Tensor], Any], dist.Work],
        timeout_s: float,
    ) -> StreamTicket:
        """Let the backend reduce, in a dtype that it knows."""
        self.last_algorithm = "native"
        work = _encoded(x, op, self.size)
        plain = torch.view_as_real(work) if work.is_complex() else work
        options.reduceOp = _native_op(x.dtype, op)
        ticket = self._started([start([plain], options)], [work, x], timeout_s)
        return ticket.then(partial(_decode_into, x, work, op, self.size))

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        lengths = [block.numel() for block in ins]
        nbytes = sum(lengths) * out.element_size()
        signature = sign("reduce_scatter", out.dtype, nbytes, alike, *lengths, op=op)
        self._agree(signature, how["timeout_s"])
        if len(set(lengths)) > 1 or not _is_native(out.dtype, op):
            return self._reduced_here(out, ins, op, how["timeout_s"])
        self.last_algorithm = "native"
        joined = _encoded(torch.cat([block.reshape(-1) for block in ins]), op, self.size)
        block = joined.new_empty(out.numel())
        options = dist.ReduceScatterOptions()
        options.reduceOp = _native_op(out.dtype, op)
        plain = [torch.view_as_real(x) if x.is_complex() else x for x in (block, joined)]
        work = self.group._reduce_scatter_base(plain[0].view(-1), plain[1].view(-1), options)
        ticket = self._started([work], [block, joined], how["timeout_s"])
        return ticket.then(partial(_decode_into, out.view(-1), block, op, self.size))

    # -- copies ---------------------------------------------------------------------------------

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        self._agree(sign("broadcast", x.dtype, x.nbytes, root=src), how["timeout_s"])
        self.last_algorithm = "native"
        if not x.nbytes:
            return None
        return self._started([spread(self.group, bytes_of(x), src)], [x], how["timeout_s"])

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        """See `Engine`. Blocks of different lengths are broadcasts that the backend joins."""
        lengths = [out.numel() for out in outs]
        nbytes = sum(lengths) * x.element_size()
        self._agree(sign("all_gather", x.dtype, nbytes, alike, *lengths), how["timeout_s"])
        whole, is_even = one_block(outs), len(set(lengths)) == 1
        self.last_algorithm = "native" if is_even and whole is not None else "broadcasts"
        if is_even and whole is not None:
            options = AllgatherOptions()
            works = [self.group._allgather_base(whole, bytes_of(x), options)]
        else:
            outs[self.rank].view(-1).copy_(x.view(-1))
            starts = [
                partial(spread, self.group, bytes_of(out), q)
                for q, out in enumerate(outs)
                if out.numel()
            ]
            works = self._coalesced(starts, x.device)
        return self._started(works, [x, *outs], how["timeout_s"]) if works else None

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> StreamTicket:
        return self.swap_blocks("all_to_all", outs, ins, -1, **how)

    def swap_blocks(
        self, verb: str, outs: Blocks, ins: Blocks, root: int, **how: Unpack[How]
    ) -> StreamTicket:
        self._agree(sign_blocks(verb, outs, ins, root), how["timeout_s"])
        return self._swap(outs, ins, how["timeout_s"])

    def _swap(self, outs: Blocks, ins: Blocks, timeout_s: float) -> StreamTicket:
        self.last_algorithm = "native"
        work, kept, unpack = swap_flat(self.group, outs, ins)
        return self._started([work], [*kept, *ins, *outs], timeout_s, unpack)

    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]
    ) -> Ticket | None:
        """See `Engine`. One batch; a stream carries messages out in order, and would block."""
        if not sends and not recvs:
            return None
        group, me = self.group, self.rank
        starts = {
            **{(src, me): partial(group.recv, [bytes_of(x)], src, tag) for src, x in recvs},
            **{(me, dst): partial(group.send, [bytes_of(x)], dst, tag) for dst, x in sends},
        }
        tensors = [x for _, x in (*sends, *recvs)]
        if self._is_connected:
            works = self._coalesced(list(starts.values()), tensors[0].device)
        else:
            # Only some ranks need come here, and a batch connects all. One by one, in an order of
            # pairs that all ranks share, messages need no batch.
            works = [starts[pair]() for pair in sorted(starts, key=lambda p: (min(p), max(p), p))]
        return self._started(works, tensors, how["timeout_s"])

    def _coalesced(
        self, starts: Sequence[Callable[[], dist.Work]], device: torch.device
    ) -> list[dist.Work]:
        """Start transfers as one, where the backend can."""
        if len(starts) < 2 or not self.group._get_backend(device).supports_coalescing:
            return [start() for start in starts]
        self.group._start_coalescing(device)
        for start in starts:
            start()
        return [self.group._end_coalescing(device)]

    # -- what the host knows --------------------------------------------------------------------

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        """See `Engine`. The host waits: for all that ranks have put on their streams before."""
        self._agree(sign("barrier", torch.uint8, 0), how["timeout_s"])
        token = torch.zeros(1, device=self._device)
        work = self.group.allreduce([token], dist.AllreduceOptions())
        return BarrierTicket(self, [work], [token], how["timeout_s"])

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """See `Engine`. By the CPU group: nothing waits for the device."""
        return self.host.all_gather_ints(values, timeout_s=timeout_s)

    def shared_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout_s: float
    ) -> Tensor:
        """Return zeros on the device; nothing is shared."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self._device)


def _current_stream(tensors: Sequence[Tensor]) -> torch.Stream:
    return torch.accelerator.current_stream(tensors[0].device)


def _is_native(dtype: torch.dtype, op: str) -> bool:
    """Whether a backend can reduce it, if need be as numbers of another dtype."""
    if dtype == torch.bool:
        return op in _BOOL_OPS
    if dtype.is_complex:
        return op in ("sum", "mean")
    return _WIDENED.get(dtype, dtype) in _REDUCED and op not in ("and", "or", "xor")


def _native_op(dtype: torch.dtype, op: str) -> Any:
    return NATIVE_OPS[_BOOL_OPS[op] if dtype == torch.bool else op]


def _encoded(x: Tensor, op: str, size: int) -> Tensor:
    """Return `x` as a backend reduces it; may be `x` itself, changed in place."""
    if op == "sum64":
        return x.to(torch.float64)
    if op == "mean" and x.dtype in _HALF:
        return x.div_(size)  # before: the sum of float16 may exceed its range
    return x.to(_WIDENED.get(x.dtype, x.dtype))


def _decode_into(x: Tensor, work: Tensor, op: str, size: int) -> None:
    """Undo `_encoded` on a result."""
    if op == "mean" and x.dtype not in _HALF:
        work.div_(size)
    if work is not x:
        x.copy_(work)
