"""A process group of torch.distributed as such: what it is called, how its calls are run.

Every call goes through `_submit`: it is numbered, compared in check mode, traced, and run in the
engine's order of calls, without autograd.


XXX All calls of torch.distributed on a process group, over the kernels of an engine.

Kernels see contiguous, detached tensors; what is not, is staged. Both our transports look like this
to torch.


XXX The nccl group beside a transport's group: CUDA tensors of the same ranks go there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import GroupName

from unisono.comm import call as calls
from unisono.comm.arguments import check_no_overlap
from unisono.comm.call import Call
from unisono.comm.engines.base import Engine, How, Ticket
from unisono.comm.engines.queued import TransportEngine
from unisono.comm.groups import GroupEntry
from unisono.comm.health import failures, watchdog
from unisono.comm.health import trace as tracing
from unisono.comm.perform import Performer, Transfer
from unisono.comm.reductions import PLAIN_DTYPES, check_op
from unisono.comm.torch import staging
from unisono.comm.torch.staging import OPS, Targets, cut_evenly, cut_rows, source
from unisono.comm.torch.work import DoneWork, TransportWork
from unisono.errors import UnisonoError

Tickets = Sequence[Ticket | None]
Kernel = Callable[[How], Tickets]


class CallingGroup(dist.ProcessGroup):
    """Identity and order of calls of a group whose kernels are those of `unisono_engine`.

    Args:
        engine: kernels of the group.
        ranks: world ranks of the group.
        timeout: deadline of a call where none is given.
        backend: name under which the transport is registered.
        deadline_s: what the environment says instead of `timeout`; asked for before the ranks meet.
    """

    unisono_engine: Engine
    """The blocking kernels, called directly by `Communicator`."""

    def __init__(
        self,
        engine: Engine,
        ranks: Sequence[int],
        timeout: timedelta,
        backend: str,
        deadline_s: float | None,
    ) -> None:
        super().__init__(engine.rank, engine.size)  # type: ignore[call-arg]
        self.unisono_engine = engine
        self.options = SimpleNamespace(_timeout=timeout, backend=backend)
        self._ranks = tuple(ranks)
        self._backend = backend
        self._group_name: str | None = None
        self._calls: Performer | None = None
        """How calls are run; made with the first one, when the group has its name."""
        self._deadline_s = deadline_s
        self._group_desc = "undefined"

    # -- what the group is ----------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Name of the backend."""
        return self._backend

    def name(self) -> str:
        """Name of the backend."""
        return self._backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self.inner_group(device)

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> GroupName:
        """Name under which torch.distributed knows the group."""
        if self._group_name is None:
            raise UnisonoError("this process group has no name yet")
        return GroupName(self._group_name)

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    @property
    def group_desc(self) -> str:
        """Description of the group."""
        return self._group_desc

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of later calls."""
        self.options._timeout = timeout

    def inner_group(self, device: torch.device) -> Any:
        """Return a process group of the same ranks for tensors on `device`."""
        raise UnisonoError.because(
            f"a collective on a {device.type} tensor in a {self._backend} group",
            f"{self._backend} moves CPU tensors",
            None,
            "x.cpu(), or a group of another backend",
        )

    @property
    def failure(self) -> BaseException | None:
        """Why the group cannot be used any more."""
        engine = self.unisono_engine
        return engine.cause if isinstance(engine, TransportEngine) else None

    def shutdown(self) -> None:
        """Leave the group; calls under way end first. Called by `destroy_process_group`."""
        if dist.is_initialized() and dist.group.WORLD is self:
            watchdog.stop()
        if isinstance(self.unisono_engine, TransportEngine):
            self.unisono_engine.close()

    def abort(self) -> None:
        """Break the group: calls under way and later ones fail on all ranks."""
        if isinstance(self.unisono_engine, TransportEngine):
            self.unisono_engine.fail(UnisonoError("the group was aborted"))
            self.unisono_engine.cancel("the group was aborted")

    # -- how calls are run ----------------------------------------------------------------------

    def _submit(
        self,
        name: str,
        kernel: Kernel,
        targets: Targets,
        opts: Any,
        *,
        kind: str = "",
        root: int | None = None,
        brought: Sequence[Tensor] = (),
    ) -> Work:
        """Run `kernel` in the group's order: now if the caller waits, else behind its back."""
        is_async = bool(getattr(opts, "asyncOp", True))
        calls = self._calls or self._introduce()
        x = brought[0] if brought else None
        call = Call(
            name,
            calls._entry.name,
            calls._entry.key,
            0,
            None if x is None else x.shape,
            None if x is None else x.dtype,
            kind,
            root,
            is_async=is_async,
        )
        if tracing.recorder is not None:
            call.sent = sum(t.numel() * t.element_size() for t in brought)
            call.received = sum(t.numel() * t.element_size() for t in targets.wanted)
        timeout_s = self._timeout_s(opts)
        if not is_async:

            def run(async_op: bool, deadline: float) -> None:
                kernel({"async_op": async_op, "timeout_s": deadline})

            calls._perform(Transfer(call, run, targets.deliver), timeout_s)
            return DoneWork(targets.wanted)
        _ = call.site  # whoever waits for it, in another thread, could not look it up
        waited = self.unisono_engine.waited_ns or 0
        calls._begin(call, is_collective=True, deadline=timeout_s)
        with calls._inside(call, timeout_s, is_taken=False):
            calls._entry.collectives = call.number = calls._entry.collectives + 1
            tickets = kernel({"async_op": True, "timeout_s": timeout_s})
        return self._under_way(call, tickets, targets, timeout_s, waited)

    def _message(
        self, name: str, x: Tensor, to: tuple[int, ...] = (), source: tuple[int, ...] = ()
    ) -> Call:
        """Take down a message of torch.distributed; it has no number, as only two ranks make it."""
        entry = (self._calls or self._introduce())._entry
        call = Call(name, entry.name, f"{entry.key}/messages", 0, x.shape, x.dtype)
        call.sends_to, call.receives_from = to, source
        calls.latest_call = call
        return call

    def _under_way(
        self,
        note: Call,
        tickets: Tickets,
        targets: Targets,
        timeout_s: float | None = None,
        waited: int | None = None,
    ) -> Work:
        """Return the call as torch.distributed sees it; its end delivers what was received."""
        deadline = self._timeout_s(None) if timeout_s is None else timeout_s

        def ended() -> None:
            targets.deliver()
            note.done = True
            recorder = tracing.recorder
            if recorder is not None and note.t_start:
                note.wait_ns = (self.unisono_engine.waited_ns or 0) - (waited or 0)
                note.algorithm = self.unisono_engine.last_algorithm
                recorder.add(note, self._ranks[self.rank()])

        under_way = [ticket for ticket in tickets if ticket is not None]
        if not under_way:
            ended()
            return DoneWork(targets.wanted)

        def report(error: TimeoutError, seconds: float) -> BaseException:
            return failures.timed_out(note, self._ranks, seconds, error)

        return TransportWork(under_way, targets.wanted, deadline, ended, report)

    def _introduce(self) -> Performer:
        """With its first call a group gets its name, and this rank begins to answer for itself.

        The calls of torch have numbers of their own, apart from those of a communicator's verbs.
        """
        if isinstance(self.unisono_engine, TransportEngine):
            self.unisono_engine.check_usable()
        entry = GroupEntry(self, self._ranks, made_by_us=False)
        entry.name = f"{entry.name}/torch"
        entry.key = f"{entry.key}/c10d"
        entry.turn = None
        self._calls = calls = Performer()
        calls._entry, calls._engine, calls._closed = entry, self.unisono_engine, False
        calls.rank, calls.size, calls.ranks = self.rank(), self.size(), self._ranks
        calls.device, calls.timeout_s = torch.device("cpu"), self._timeout_s(None)
        return calls

    @property
    def unisono_calls(self) -> int:
        """How many collectives torch.distributed has begun on this group."""
        return 0 if self._calls is None else self._calls._entry.collectives

    def _timeout_s(self, opts: Any) -> float:
        """Return the deadline of a call: its own, the environment's, the group's."""
        given = staging.given_timeout_s(opts)
        if given is not None:
            return given
        return self._deadline_s or self.options._timeout.total_seconds()


# torch's stubs disagree with torch about the names of these arguments; callers pass them by place.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false


Method = TypeVar("Method", bound=Callable[..., Any])


def _by_device(method: Method) -> Method:
    """Send calls with tensors of another device to the inner group for that device."""

    @functools.wraps(method)
    def routed(self: TransportProcessGroup, *args: Any, **kwargs: Any) -> Any:
        x = args[0]
        while isinstance(x, (list, tuple)) and x:
            x = x[0]
        if isinstance(x, Tensor) and not x.is_cpu:
            return getattr(self.inner_group(x.device), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return routed  # type: ignore[return-value]


class TransportProcessGroup(CallingGroup):
    """What torch.distributed calls on a group."""

    # -- reductions -----------------------------------------------------------------------------

    @_by_device
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        if opts is None:
            return self._reduce("all_reduce", _listed(tensors), opts)
        x, calls, op = tensors[0], self._calls, OPS.get(opts.reduceOp.op)
        is_usual = len(tensors) == 1 and x.dtype in PLAIN_DTYPES and x.layout is torch.strided
        if calls is None or op is None or opts.asyncOp or not is_usual or not x.is_contiguous():
            return self._reduce("all_reduce", _listed(tensors), opts)
        # One plain tensor that the caller waits for: the shortest way, for small ones.
        check_op(op, x.dtype)
        engine, entry, nbytes = self.unisono_engine, calls._entry, x.numel() * x.element_size()
        call = Call("all_reduce", entry.name, entry.key, 0, x.shape, x.dtype, op)
        call.sent = call.received = nbytes
        timeout_s: float = opts.timeout.total_seconds()
        transfer = Transfer(
            call,
            lambda async_op, deadline: engine.all_reduce_(
                x, op, async_op=async_op, timeout_s=deadline
            ),
            lambda: None,
        )
        own_s = self._deadline_s or self.options._timeout.total_seconds()  # may have been changed
        calls._perform(transfer, timeout_s if timeout_s > 0 else own_s)
        return DoneWork(tensors)

    @_by_device
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        return self._reduce("all_reduce", _listed(tensors), opts)

    @_by_device
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Replace each tensor on the root by its reduction; leaves the others' as they are."""
        root = staging.check_member(int(opts.rootRank), self.size(), "dst", "reduce")
        return self._reduce("reduce", _listed(tensors), opts, root)

    def _reduce(self, name: str, xs: list[Tensor], opts: Any, root: int | None = None) -> Work:
        op, engine = staging.op_name(opts), self.unisono_engine
        for x in xs:
            staging.check_dense(x)
            check_no_overlap(x, name)
            check_op(op, x.dtype)

        targets = Targets(xs, keep=True)

        def kernel(how: How) -> Tickets:
            if root is None:
                return [engine.all_reduce_(x, op, **how) for x in targets.tensors]
            return [engine.reduce_(x, root, op, **how) for x in targets.tensors]

        return self._submit(name, kernel, targets, opts, kind=op, root=root, brought=xs)

    @_by_device
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Fill each output with the reduction of this rank's input over all ranks."""
        return self._reduce_scatter(list(outputs), inputs, opts)

    @_by_device
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill `output` with the reduction of this rank's piece of `input` over all ranks."""
        pieces = cut_evenly(source(input), self.size(), "reduce_scatter")
        return self._reduce_scatter([output], [pieces], opts)

    @_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do `reduce_scatter_single` for each pair."""
        pieces = [cut_evenly(source(x), self.size(), "reduce_scatter") for x in inputs]
        return self._reduce_scatter(list(outputs), pieces, opts)

    def _reduce_scatter(
        self, outs: list[Tensor], ins: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        op, engine = staging.op_name(opts), self.unisono_engine
        staging.check_pairs(outs, ins, "reduce_scatter")
        for out, blocks in zip(outs, ins, strict=True):
            check_op(op, out.dtype)
            staging.check_one_each(blocks, self.size(), "input", "reduce_scatter")
            staging.check_one_dtype((out, *blocks), "reduce_scatter")
            staging.check_same_bytes([out], [blocks[self.rank()]], "reduce_scatter")

        targets = Targets(outs)
        dense = [[source(block) for block in blocks] for blocks in ins]

        def kernel(how: How) -> Tickets:
            pairs = zip(targets.tensors, dense, strict=True)
            return [engine.reduce_scatter(out, blocks, op, **how) for out, blocks in pairs]

        brought = [block for blocks in ins for block in blocks]
        return self._submit("reduce_scatter", kernel, targets, opts, kind=op, brought=brought)

    # -- moves ----------------------------------------------------------------------------------

    @_by_device
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Replace each tensor by the root's."""
        xs, engine = _listed(tensors), self.unisono_engine
        root = staging.check_member(int(opts.rootRank), self.size(), "src", "broadcast")
        for x in xs:
            check_no_overlap(x, "broadcast")

        targets = Targets(xs, keep=True)

        def kernel(how: How) -> Tickets:
            return [engine.broadcast_(x, root, **how) for x in targets.tensors]

        return self._submit("broadcast", kernel, targets, opts, root=root, brought=xs)

    @_by_device
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill the outputs with the inputs of all ranks."""
        return self._all_gather(outputs, list(inputs), opts)

    @_by_device
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill `output` with the inputs of all ranks, one after the other."""
        return self._all_gather_into([output], [input], opts)

    @_by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do `all_gather_single` for each pair."""
        return self._all_gather_into(list(outputs), list(inputs), opts)

    @_by_device
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill `output_lists[q][i]` with input `i` of rank `q`."""
        for row in output_lists:
            staging.check_pairs(row, inputs, "all_gather_coalesced")
        outputs = [[row[i] for row in output_lists] for i in range(len(inputs))]
        return self._all_gather(outputs, list(inputs), opts)

    def _all_gather(self, outputs: Sequence[Sequence[Tensor]], xs: list[Tensor], opts: Any) -> Work:
        engine = self.unisono_engine
        staging.check_pairs(outputs, xs, "all_gather")
        for outs, x in zip(outputs, xs, strict=True):
            staging.check_one_each(outs, self.size(), "output", "all_gather")
            staging.check_one_dtype((x, *outs), "all_gather")
            staging.check_same_bytes([outs[self.rank()]], [x], "all_gather")

        targets = Targets([out for outs in outputs for out in outs])
        rows = [targets.tensors[i * self.size() : (i + 1) * self.size()] for i in range(len(xs))]
        dense = [source(x) for x in xs]

        def kernel(how: How) -> Tickets:
            pairs = zip(rows, dense, strict=True)
            return [engine.all_gather(outs, x, **how) for outs, x in pairs]

        return self._submit("all_gather", kernel, targets, opts, brought=xs)

    def _all_gather_into(self, outs: list[Tensor], xs: list[Tensor], opts: Any) -> Work:
        engine, size = self.unisono_engine, self.size()
        staging.check_pairs(outs, xs, "all_gather")
        for out, x in zip(outs, xs, strict=True):
            staging.check_joined(out, x, size, "all_gather")

        targets = Targets(outs)
        rows = [cut_evenly(out, size, "all_gather") for out in targets.tensors]
        dense = [source(x) for x in xs]

        def kernel(how: How) -> Tickets:
            pairs = zip(rows, dense, strict=True)
            return [engine.all_gather(pieces, x, **how) for pieces, x in pairs]

        return self._submit("all_gather", kernel, targets, opts, brought=xs)

    @_by_device
    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Fill the outputs of the root with the inputs of all ranks."""
        x, engine = inputs[0], self.unisono_engine
        root = staging.check_member(int(opts.rootRank), self.size(), "dst", "gather")
        outs = list(outputs[0]) if self.rank() == root else None
        if outs is not None:
            staging.check_one_each(outs, self.size(), "output", "gather")
            staging.check_one_dtype((x, *outs), "gather")

        targets, dense = Targets(outs or []), source(x)
        received = targets.tensors if outs is not None else None

        def kernel(how: How) -> Tickets:
            return [engine.gather(received, dense, root, **how)]

        return self._submit("gather", kernel, targets, opts, root=root, brought=[x])

    @_by_device
    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Fill the output of each rank with its input on the root."""
        out, engine = outputs[0], self.unisono_engine
        root = staging.check_member(int(opts.rootRank), self.size(), "src", "scatter")
        ins = list(inputs[0]) if self.rank() == root else None
        if ins is not None:
            staging.check_one_each(ins, self.size(), "input", "scatter")
            staging.check_one_dtype((out, *ins), "scatter")

        targets = Targets([out])
        sent = [source(block) for block in ins] if ins is not None else None

        def kernel(how: How) -> Tickets:
            return [engine.scatter(targets.tensors[0], sent, root, **how)]

        return self._submit("scatter", kernel, targets, opts, root=root, brought=ins or [])

    @_by_device
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill output `q` with what rank `q` has for this rank."""
        engine, outs, ins = self.unisono_engine, list(outputs), list(inputs)
        staging.check_one_each(outs, self.size(), "output", "all_to_all")
        staging.check_one_each(ins, self.size(), "input", "all_to_all")
        staging.check_one_dtype((*outs, *ins), "all_to_all")

        targets, dense = Targets(outs), [source(block) for block in ins]

        def kernel(how: How) -> Tickets:
            return [engine.all_to_all(targets.tensors, dense, **how)]

        return self._submit("all_to_all", kernel, targets, opts, brought=ins)

    @_by_device
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Exchange blocks of rows; no sizes means equal blocks."""
        engine, size, x = self.unisono_engine, self.size(), source(input)
        staging.check_one_dtype((output, x), "all_to_all_single")
        ins = cut_rows(x, input_split_sizes, size, "all_to_all_single input")
        staging.row_sizes(output, output_split_sizes, size, "all_to_all_single output")

        targets = Targets([output])
        outs = cut_rows(targets.tensors[0], output_split_sizes, size, "output")

        def kernel(how: How) -> Tickets:
            return [engine.all_to_all(outs, ins, **how)]

        return self._submit("all_to_all", kernel, targets, opts, brought=[x])

    def barrier(self, opts: Any = None) -> Work:
        """Return when all ranks have come."""
        engine = self.unisono_engine

        def kernel(how: How) -> Tickets:
            return [engine.barrier(**how)]

        return self._submit("barrier", kernel, Targets([]), opts)

    # Names of the same calls in other releases of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- messages -------------------------------------------------------------------------------

    @_by_device
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group."""
        staging.check_member(dst, self.size(), "dst", "send")
        x = source(tensors[0])
        note = self._message("send", x, to=(dst,))
        ticket = self.unisono_engine.exchange(
            [(dst, x)], [], tag, async_op=True, timeout_s=self._timeout_s(None)
        )
        return self._under_way(note, [ticket], Targets([x]))

    @_by_device
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group."""
        staging.check_member(src, self.size(), "src", "recv")
        targets = Targets(tensors[:1])
        note = self._message("recv", tensors[0], source=(src,))
        ticket = self.unisono_engine.exchange(
            [], [(src, targets.tensors[0])], tag, async_op=True, timeout_s=self._timeout_s(None)
        )
        return self._under_way(note, [ticket], targets)

    @_by_device
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from whoever sends one first."""
        if not isinstance(self.unisono_engine, TransportEngine):
            raise UnisonoError("a receive in a group of one rank: there is nobody to send")
        targets = Targets(tensors[:1])
        anybody = tuple(rank for rank in range(self.size()) if rank != self.rank())
        note = self._message("recv", tensors[0], source=anybody)
        ticket = self.unisono_engine.receive_any(targets.tensors[0], tag)
        return self._under_way(note, [ticket], targets)


def _listed(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


class NcclBeside:
    """Makes an nccl group of the same ranks when it is first asked for.

    Args:
        store: store of the group, under a prefix of this group alone.
        rank: own rank in the group.
        size: ranks of the group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._group: Any = None

    def group(self, timeout: timedelta) -> Any:
        """Return the nccl group. Collective over the ranks when it is made."""
        if self._group is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(
                dist.PrefixStore("nccl", self._store), self._rank, self._size, options
            )
        return self._group

    def shutdown(self) -> None:
        """End the group, if there is one."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None
