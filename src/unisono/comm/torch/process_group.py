"""A process group of torch.distributed over the kernels of one of our engines.

Kernels see contiguous, detached tensors; what is not, is staged. Every call is numbered, compared
in check mode, traced, and run in the engine's order of calls, without autograd.
"""

# torch's stubs disagree with torch about the names of these arguments; callers pass them by place.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    GroupName,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from unisono import accelerator
from unisono import torch_private as private
from unisono.comm import call as calls
from unisono.comm.arguments import check_rank, is_dense
from unisono.comm.call import Call
from unisono.comm.engines.base import Blocks, Engine, How, Ticket
from unisono.comm.groups import GroupEntry
from unisono.comm.health import trace, watchdog
from unisono.comm.perform import Pending, Performer, PreparedCall
from unisono.comm.reductions import PLAIN_DTYPES, check_op
from unisono.comm.torch import staging
from unisono.comm.torch.entry import entry, message
from unisono.comm.torch.monitored_barrier import MonitoredBarrier
from unisono.comm.torch.staging import OPS, Targets, cut_evenly, cut_rows, source
from unisono.comm.torch.work import AllTickets, DoneWork, TransportWork
from unisono.errors import MeshError, UnisonoError

Kernels = Sequence[Callable[..., Ticket | None]]
"""Kernels of the engine with their tensors; they take `async_op` and `timeout_s`."""
_KEPT_WORKS = 64


class TransportProcessGroup(dist.ProcessGroup):
    """What torch.distributed calls on a group whose kernels are those of `unisono_engine`.

    Args:
        engine: kernels of the group.
        ranks: world ranks of the group.
        timeout: deadline of a call where none is given.
        backend: name under which the transport is registered.
        deadline_s: what the environment says instead of `timeout`; asked for before the ranks meet.
        store: a store of this group alone.
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
        store: dist.Store,
    ) -> None:
        super().__init__(engine.rank, engine.size)  # type: ignore[call-arg]
        self.unisono_engine = engine
        self.options = SimpleNamespace(_timeout=timeout, backend=backend)
        self._ranks = tuple(ranks)
        self._backend = backend
        self._store = store
        self._inner: dict[tuple[str, str], dist.ProcessGroup] = {}
        self._is_coalescing = False
        self._group_name: GroupName | None = None
        self._calls: Performer | None = None
        """How calls are run; made with the first one, when the group has its name."""
        self._deadline_s = deadline_s
        self._group_desc = "undefined"
        self._splits = 0
        self._monitored_barrier = MonitoredBarrier(store, engine.rank, self._ranks)
        self._dropped: deque[TransportWork] = deque(maxlen=_KEPT_WORKS)
        """Works that were not waited for: C++ may hold one whose Python object is gone."""
        self.is_for_torch = False
        """Whether torch.distributed makes the group, which does not know it yet."""
        self.recorded: private.RecordedGroup | None = None
        """Runs calls inside the hooks of torch, such as its flight recorder."""

    # -- what the group is ----------------------------------------------------------------------

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def name(self) -> str:
        """Name of the backend."""
        return self._backend

    getBackendName = name

    @property
    def _device_types(self) -> list[torch.device]:
        if self.is_for_torch and self not in private.known_groups:
            return []  # torch would attach hooks, which a group written in Python never calls
        return [torch.device(kind) for kind in private.backends_of(self) or ("cpu",)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu" or self not in private.known_groups:
            return self
        return self.inner_group(device)._get_backend(device)

    def _set_group_name(self, name: str) -> None:
        self._group_name = GroupName(name)  # the compiler of torch 2.11 cannot trace this call

    @property
    def group_name(self) -> GroupName:
        """Name under which torch.distributed knows the group."""
        if self._group_name is None:
            raise UnisonoError("this process group has no name yet")
        return self._group_name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc
        if self.recorded is None:
            self.recorded = private.recorded_group(self, self._ranks)

    @property
    def group_desc(self) -> str:
        """Description of the group."""
        return self._group_desc

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of later calls."""
        self.options._timeout = timeout
        for group in self._inner.values():
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.unisono_calls

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered from the first one on."""

    def get_group_store(self) -> dist.Store:
        """Return a store of this group alone."""
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,  # noqa: ARG002
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,  # noqa: ARG002
    ) -> dist.ProcessGroup | None:
        """Make a group of some ranks of this one, of the same backend; None on the other ranks.

        Every rank of this group calls it, with the ranks of its own new group.
        """
        self._splits += 1
        members = sorted({self._member(rank, "ranks", "split_group") for rank in ranks})
        if self.rank() not in members:
            return None
        name = group_name or f"{self.group_name}:split:{self._splits}:{members}"
        world_ranks = tuple(self._ranks[rank] for rank in members)
        group = private.new_group(
            name, world_ranks, self._backend, timeout or self.options._timeout
        )
        group._set_group_desc(group_desc or f"{self._group_desc}:split:{self._splits}")
        return group

    def inner_group(self, device: torch.device, use: str = "") -> dist.ProcessGroup:
        """Return the process group of the same ranks for tensors on `device`.

        Made when first asked for, of the backend that was named for the device beside this one
        (`cpu:shm,cuda:nccl`), else of the device's own. Some backends connect all ranks then.

        Args:
            device: where the tensors are.
            use: a word; each has a group of its own, whose streams do not wait for the others'.
        """
        group = self._inner.get((device.type, use))
        if group is None:
            backend = private.backends_of(self).get(device.type) or accelerator.backend(device.type)
            if backend is None or self not in private.known_groups:
                raise UnisonoError.because(
                    f"a collective on a {device.type} tensor in a {self._backend} group",
                    f"{self._backend} moves CPU tensors",
                    None,
                    "x.cpu(), or a group of another backend",
                )
            name = f"{self.group_name}/{device.type}{use}"
            config, timeout = f"{device.type}:{backend}", self.options._timeout
            group = private.new_group(name, self._ranks, config, timeout, is_listed=False)
            self._inner[device.type, use] = group
        return group

    def message_group(self, device: torch.device, sender: int, receiver: int) -> dist.ProcessGroup:
        """Return the inner group for a message.

        A stream carries messages out in order. Those that go up the ranks and those that go down
        have streams of their own, so messages that cross each other pass, also outside a batch.
        """
        up, down = self.inner_group(device), self.inner_group(device, " down")  # in one order
        return down if sender > receiver and not self._is_coalescing else up

    def _start_coalescing(self, device: torch.device) -> None:
        self._is_coalescing = True
        self.inner_group(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        self._is_coalescing = False
        return self.inner_group(device)._end_coalescing(device)

    @property
    def failure(self) -> BaseException | None:
        """Why the group cannot be used any more."""
        return self.unisono_engine.cause

    @property
    def unisono_calls(self) -> int:
        """How many collectives torch.distributed has begun on this group."""
        return 0 if self._calls is None else self._calls._entry.collectives

    def shutdown(self) -> None:
        """Leave the group; calls under way end first. Called by `destroy_process_group`."""
        while self._inner:
            self._inner.popitem()[1].shutdown()
        if dist.is_initialized() and dist.group.WORLD is self:
            watchdog.stop()
        self._dropped.clear()
        self.recorded = None
        self.unisono_engine.close()

    def abort(self) -> None:
        """Break the group: calls under way and later ones fail on all ranks."""
        for group in self._inner.values():
            group.abort()
        self.unisono_engine.fail(UnisonoError("the group was aborted"))
        self.unisono_engine.cancel("the group was aborted")

    # -- how calls are run ----------------------------------------------------------------------

    def _submit(
        self,
        name: str,
        kernels: Kernels,
        targets: Targets,
        opts: Any,
        *,
        kind: str = "",
        root: int | None = None,
        brought: Blocks = (),
    ) -> Work:
        """Run `kernels` in the group's order: now if the caller waits, else behind its back."""
        is_async: bool = opts.asyncOp
        for work in self._dropped:
            work.let_go()
        performer = self._calls or self._introduce()
        entry, x = performer._entry, brought[0] if brought else None
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        call = Call(name, entry.name, entry.key, shape, dtype, kind, root)
        if trace.recorder is not None:
            call.sent = sum(t.nbytes for t in brought)
            call.received = sum(t.nbytes for t in targets.originals)

        def run(**how: Unpack[How]) -> Ticket | None:
            tickets = [kernel(**how) for kernel in kernels]
            under_way = [ticket for ticket in tickets if ticket is not None]
            return AllTickets(under_way) if len(under_way) > 1 else next(iter(under_way), None)

        transfer = PreparedCall(call, run, targets.deliver, self._timeout_s(opts))
        if not is_async:
            performer._perform(transfer)
            return DoneWork(targets.originals)
        _ = call.site  # a wait in another thread could not look it up
        return _as_work(performer._perform(transfer, True), targets, self._dropped)

    def _message(
        self,
        name: str,
        x: Tensor,
        kernel: Callable[[], Ticket | None],
        targets: Targets,
        *,
        to: tuple[int, ...] = (),
        source: tuple[int, ...] = (),
    ) -> Work:
        """Start a message of torch.distributed; it has no number, as only two ranks make it."""
        performer = self._calls or self._introduce()
        entry = performer._entry
        call = Call(name, entry.name, f"{entry.key}/messages", x.shape, x.dtype)
        call.sends_to, call.receives_from = to, source
        calls.latest_call = call
        transfer = PreparedCall(call, kernel, targets.deliver)
        return _as_work(
            Pending(performer, transfer, kernel(), self._timeout_s(None)), targets, None
        )

    def _introduce(self) -> Performer:
        """With its first call a group gets its name, and this rank begins to answer for itself."""
        self.unisono_engine.check_usable()
        self._calls = performer = _Calls(self)
        return performer

    def _timeout_s(self, opts: Any) -> float:
        """Return the deadline of a call: its own, the environment's, the group's."""
        timeout = getattr(opts, "timeout", None)
        if isinstance(timeout, timedelta) and timeout.total_seconds() > 0:
            return timeout.total_seconds()
        return self._deadline_s or self.options._timeout.total_seconds()

    def _root(self, opts: Any, what: str, call: str) -> int:
        """Return the root of a call, checked: torch passes on what it is given."""
        return self._member(int(opts.rootRank), what, call)

    def _member(self, rank: int, what: str, call: str) -> int:
        return check_rank(rank, self.size(), what, f"torch.distributed.{call}")

    def _peer(self, rank: int, what: str, call: str) -> int:
        """Return the other end of a message, which must be another rank."""
        if self._member(rank, what, call) == self.rank():
            raise MeshError.because(
                f"torch.distributed.{call}({what}={rank})",
                f"this is rank {rank} itself",
                None,
                "copy the tensor",
            )
        return rank

    # -- reductions -----------------------------------------------------------------------------

    @entry("all_reduce", "tensors|tensor", AllreduceOptions, "op timeout")
    def allreduce(self, tensors: Blocks, opts: Any) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        x, performer, op = tensors[0], self._calls, OPS.get(opts.reduceOp.op)
        is_usual = len(tensors) == 1 and x.dtype in PLAIN_DTYPES and x.layout is torch.strided
        is_usual = is_usual and is_dense(x)
        if performer is None or op is None or opts.asyncOp or not is_usual:
            return self._reduce("all_reduce", tensors, opts)
        # One plain tensor that the caller waits for: the shortest way, for small ones.
        check_op(op, x.dtype)
        engine, entry = self.unisono_engine, performer._entry
        call = Call("all_reduce", entry.name, entry.key, x.shape, x.dtype, op)
        call.sent = call.received = x.nbytes
        timeout_s: float = opts.timeout.total_seconds()
        if timeout_s <= 0:
            timeout_s = self._deadline_s or self.options._timeout.total_seconds()
        kernel = partial(engine.all_reduce_, x, op)
        performer._perform(PreparedCall(call, kernel, [None].pop, timeout_s))
        return DoneWork(tensors)

    @entry("all_reduce", "tensors", AllreduceCoalescedOptions, "op timeout")
    def allreduce_coalesced(self, tensors: Blocks, opts: Any) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        return self._reduce("all_reduce", tensors, opts)

    @entry("reduce", "tensors|tensor", ReduceOptions, "root op timeout")
    def reduce(self, tensors: Blocks, opts: Any) -> Work:
        """Replace each tensor on the root by its reduction; leaves the others' as they are."""
        return self._reduce("reduce", tensors, opts, self._root(opts, "dst", "reduce"))

    def _reduce(self, name: str, xs: Blocks, opts: Any, root: int | None = None) -> Work:
        op, engine = staging.op_name(opts), self.unisono_engine
        if root is None and xs and xs[0].layout is torch.sparse_coo:
            return self._reduce_sparse(xs, op, opts)
        for x in xs:
            staging.check_dense(x)
            check_op(op, x.dtype)
        targets = Targets(xs, keep=True)
        kernels = [
            partial(engine.all_reduce_, x, op)
            if root is None
            else partial(engine.reduce_, x, root, op)
            for x in targets.tensors
        ]
        return self._submit(name, kernels, targets, opts, kind=op, root=root, brought=xs)

    def _reduce_sparse(self, xs: Blocks, op: str, opts: Any) -> Work:
        """Replace sparse tensors by their sums; how long these are, the ranks say on the way."""
        staging.check_sparse(xs, op)
        performer = self._calls or self._introduce()
        entry, engine = performer._entry, self.unisono_engine

        def reduce_all(*, timeout_s: float) -> None:
            for x in xs:
                staging.all_reduce_sparse_(x, op, engine, timeout_s)

        call = Call("all_reduce", entry.name, entry.key, xs[0].shape, xs[0].dtype, op)
        performer._perform(PreparedCall(call, reduce_all, None, self._timeout_s(opts)))
        return DoneWork(list(xs), self._dropped)

    @entry(
        "reduce_scatter",
        "output_tensors|output input_tensors|input",
        ReduceScatterOptions,
        "op timeout",
    )
    def reduce_scatter(self, outputs: Blocks, inputs: Sequence[Blocks], opts: Any) -> Work:
        """Fill each output with the reduction of this rank's input over all ranks."""
        return self._reduce_scatter(list(outputs), inputs, opts)

    @entry(
        "reduce_scatter",
        "outputTensor|output inputTensor|input",
        ReduceScatterOptions,
        "op timeout",
        is_listed=False,
    )
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        """Fill `output` with the reduction of this rank's piece of `input` over all ranks."""
        pieces = cut_evenly(source(input), self.size(), "reduce_scatter")
        return self._reduce_scatter([output], [pieces], opts)

    @entry("reduce_scatter", "outputs inputs", ReduceScatterOptions)
    def reduce_scatter_single_coalesced(self, outputs: Blocks, inputs: Blocks, opts: Any) -> Work:
        """Do `reduce_scatter_single` for each pair."""
        pieces = [cut_evenly(source(x), self.size(), "reduce_scatter") for x in inputs]
        return self._reduce_scatter(list(outputs), pieces, opts)

    def _reduce_scatter(self, outs: list[Tensor], ins: Sequence[Blocks], opts: Any) -> Work:
        op, engine = staging.op_name(opts), self.unisono_engine
        staging.check_count(outs, len(ins), "output", "reduce_scatter")
        for out, blocks in zip(outs, ins, strict=True):
            check_op(op, out.dtype)
            staging.check_count(blocks, self.size(), "input", "reduce_scatter")
            staging.check_one_dtype((out, *blocks), "reduce_scatter")
            staging.check_same_bytes(out, blocks[self.rank()], "reduce_scatter")
        targets = Targets(outs)
        kernels = [
            partial(engine.reduce_scatter, out, [source(block) for block in blocks], op)
            for out, blocks in zip(targets.tensors, ins, strict=True)
        ]
        brought = [block for blocks in ins for block in blocks]
        return self._submit("reduce_scatter", kernels, targets, opts, kind=op, brought=brought)

    # -- moves ----------------------------------------------------------------------------------

    @entry("broadcast", "tensors|tensor", BroadcastOptions, "root timeout")
    def broadcast(self, tensors: Blocks, opts: Any) -> Work:
        """Replace each tensor by the root's."""
        xs, engine = tensors, self.unisono_engine
        root = self._root(opts, "src", "broadcast")
        targets = Targets(xs, keep=True)
        kernels = [partial(engine.broadcast_, x, root) for x in targets.tensors]
        return self._submit("broadcast", kernels, targets, opts, root=root, brought=xs)

    @entry("all_gather", "output_tensors input_tensors|input_tensor", AllgatherOptions)
    def allgather(self, outputs: Sequence[Blocks], inputs: Blocks, opts: Any) -> Work:
        """Fill the outputs with the inputs of all ranks."""
        return self._all_gather(outputs, list(inputs), opts)

    @entry("all_gather", "output input", AllgatherOptions, is_listed=False)
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        """Fill `output` with the inputs of all ranks, one after the other."""
        return self._all_gather([[output]], [input], opts, is_joined=True)

    @entry("all_gather", "outputs inputs", AllgatherOptions)
    def all_gather_single_coalesced(self, outputs: Blocks, inputs: Blocks, opts: Any) -> Work:
        """Do `all_gather_single` for each pair."""
        return self._all_gather([[out] for out in outputs], list(inputs), opts, is_joined=True)

    @entry("all_gather", "output_lists input_list", AllgatherOptions)
    def allgather_coalesced(
        self, output_lists: Sequence[Blocks], inputs: Blocks, opts: Any
    ) -> Work:
        """Fill `output_lists[q][i]` with input `i` of rank `q`."""
        for row in output_lists:
            staging.check_count(row, len(inputs), "output", "all_gather_coalesced")
        outputs = [[row[i] for row in output_lists] for i in range(len(inputs))]
        return self._all_gather(outputs, list(inputs), opts)

    def _all_gather(
        self, outputs: Sequence[Blocks], xs: list[Tensor], opts: Any, *, is_joined: bool = False
    ) -> Work:
        """Gather each of `xs` into a list of outputs; `is_joined`: one output for all ranks."""
        size, engine = self.size(), self.unisono_engine
        staging.check_count(outputs, len(xs), "output", "all_gather")
        for outs, x in zip(outputs, xs, strict=True):
            staging.check_count(outs, 1 if is_joined else size, "output", "all_gather")
            staging.check_one_dtype((x, *outs), "all_gather")
            block, times = (outs[0], size) if is_joined else (outs[self.rank()], 1)
            staging.check_same_bytes(block, x, "all_gather", times)
        targets = Targets([out for outs in outputs for out in outs])
        rows = [
            cut_evenly(targets.tensors[i], size, "all_gather")
            if is_joined
            else targets.tensors[i * size : (i + 1) * size]
            for i in range(len(xs))
        ]
        kernels = [
            partial(engine.all_gather, outs, source(x)) for outs, x in zip(rows, xs, strict=True)
        ]
        return self._submit("all_gather", kernels, targets, opts, brought=xs)

    @entry("gather", "output_tensors input_tensors|input_tensor", GatherOptions, "root timeout")
    def gather(self, outputs: Sequence[Blocks], inputs: Blocks, opts: Any) -> Work:
        """Fill the outputs of the root with the inputs of all ranks."""
        x = inputs[0]
        root = self._root(opts, "dst", "gather")
        outs = list(outputs[0]) if self.rank() == root else None
        if outs is not None:
            staging.check_count(outs, self.size(), "output", "gather")
            staging.check_one_dtype((x, *outs), "gather")
        targets = Targets(outs or [])
        received = targets.tensors if outs is not None else None
        kernel = partial(self.unisono_engine.gather, received, source(x), root)
        return self._submit("gather", [kernel], targets, opts, root=root, brought=[x])

    @entry("scatter", "output_tensors|output_tensor input_tensors", ScatterOptions, "root timeout")
    def scatter(self, outputs: Blocks, inputs: Sequence[Blocks], opts: Any) -> Work:
        """Fill the output of each rank with its input on the root."""
        out = outputs[0]
        root = self._root(opts, "src", "scatter")
        ins = list(inputs[0]) if self.rank() == root else None
        if ins is not None:
            staging.check_count(ins, self.size(), "input", "scatter")
            staging.check_one_dtype((out, *ins), "scatter")
        targets = Targets([out])
        sent = [source(block) for block in ins] if ins is not None else None
        kernel = partial(self.unisono_engine.scatter, targets.tensors[0], sent, root)
        return self._submit("scatter", [kernel], targets, opts, root=root, brought=ins or [])

    @entry("all_to_all", "output_tensors input_tensors", AllToAllOptions)
    def alltoall(self, outputs: Blocks, inputs: Blocks, opts: Any) -> Work:
        """Fill output `q` with what rank `q` has for this rank."""
        staging.check_count(outputs, self.size(), "output", "all_to_all")
        staging.check_count(inputs, self.size(), "input", "all_to_all")
        staging.check_one_dtype((*outputs, *inputs), "all_to_all")
        targets, ins = Targets(outputs), [source(block) for block in inputs]
        kernel = partial(self.unisono_engine.all_to_all, targets.tensors, ins)
        return self._submit("all_to_all", [kernel], targets, opts, brought=inputs)

    @entry(
        "all_to_all",
        "output input output_split_sizes input_split_sizes",
        AllToAllOptions,
        is_listed=False,
    )
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> Work:
        """Exchange blocks of rows; no sizes means equal blocks."""
        size, x, targets = self.size(), source(input), Targets([output])
        staging.check_one_dtype((output, x), "all_to_all_single")
        ins = cut_rows(x, input_split_sizes, size, "all_to_all_single input")
        outs = cut_rows(targets.tensors[0], output_split_sizes, size, "all_to_all_single output")
        kernel = partial(self.unisono_engine.all_to_all, outs, ins)
        return self._submit("all_to_all", [kernel], targets, opts, brought=[x])

    @entry("barrier", "", BarrierOptions)
    def barrier(self, opts: Any) -> Work:
        """Return when all ranks have come."""
        return self._submit("barrier", [self.unisono_engine.barrier], Targets([]), opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when all ranks have come; else rank 0 names the first that has not, or all."""
        seconds = self._timeout_s(None) if timeout is None else timeout.total_seconds()
        self._monitored_barrier(seconds, wait_all_ranks=wait_all_ranks)

    # Names of the same calls in other releases of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- messages -------------------------------------------------------------------------------

    @message
    def send(self, tensors: Blocks, dstRank: int, tag: int = 0) -> Work:
        """Send a tensor to another rank of the group."""
        dst = self._peer(dstRank, "dst", "send")
        x = source(tensors[0])
        kernel = partial(self.unisono_engine.exchange, [(dst, x)], [], tag, **self._later)
        return self._message("send", x, kernel, Targets([x]), to=(dst,))

    @message
    def recv(self, tensors: Blocks, srcRank: int, tag: int = 0) -> Work:
        """Receive a tensor from another rank of the group."""
        src = self._peer(srcRank, "src", "recv")
        targets = Targets(tensors[:1])
        awaited = [(src, targets.tensors[0])]
        kernel = partial(self.unisono_engine.exchange, [], awaited, tag, **self._later)
        return self._message("recv", tensors[0], kernel, targets, source=(src,))

    @message
    def recv_anysource(self, tensors: Blocks, tag: int = 0) -> Work:
        """Receive the first tensor that comes, from any rank."""
        targets = Targets(tensors[:1])
        others = tuple(rank for rank in range(self.size()) if rank != self.rank())
        kernel = partial(self.unisono_engine.receive_any, targets.tensors[0], tag)
        return self._message("recv", tensors[0], kernel, targets, source=others)

    @property
    def _later(self) -> How:
        return {"async_op": True, "timeout_s": self._timeout_s(None)}


class _Calls(Performer):
    """How calls of torch.distributed on a group are run.

    They have numbers of their own, apart from those of a communicator's verbs.
    """

    def __init__(self, group: TransportProcessGroup) -> None:
        self._entry = entry = GroupEntry(group, group._ranks, made_by_us=False)
        entry.name, entry.key = f"{entry.name}/torch", f"{entry.key}/c10d"
        entry.turn = None
        self._engine, self._closed = group.unisono_engine, False
        self.rank, self.size, self.ranks = group.rank(), group.size(), group._ranks
        self.device, self.timeout_s = torch.device("cpu"), group._timeout_s(None)

    def _translated(self, call: Call, error: Exception, deadline: float) -> Exception:
        """See `Performer`; whether the group is broken, its engine knows."""
        before = self._entry.broken
        translated = super()._translated(call, error, deadline)
        self._entry.broken = before
        return translated

    def _unusable(self, op: str) -> UnisonoError:
        return super()._unusable(op) if self._engine.cause is None else self._engine.unusable()


def _as_work(pending: Pending[Any], targets: Targets, dropped: deque[TransportWork] | None) -> Work:
    """Return a call that was started as torch.distributed sees it."""
    ticket = pending._ticket
    if ticket is None:
        pending.wait()
        return DoneWork(targets.originals, dropped)
    return TransportWork(pending, ticket, targets.originals, dropped)
