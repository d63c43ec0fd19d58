"""A `torch.distributed` process group over an engine: what both our transports look like to torch.

Every call goes through `_submit`: it is numbered, compared in check mode, traced, and run in order,
in the caller's thread or behind it. Kernels see contiguous, detached tensors and run without
autograd.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from unisono.comm import call as calls
from unisono.comm import checking, tracing
from unisono.comm.call import Call
from unisono.comm.engine import Engine
from unisono.comm.transports import staging
from unisono.comm.transports.jobs import Job, JobQueue
from unisono.comm.transports.queued import QueuedEngine
from unisono.comm.transports.staging import Targets, cut_evenly, cut_rows, source
from unisono.comm.transports.work import TicketWork, TransportWork
from unisono.errors import UnisonoError

Method = TypeVar("Method", bound=Callable[..., Any])
Kernel = Callable[[float], Any]


def _by_device(method: Method) -> Method:
    """Send calls with tensors of another device to the inner group for that device."""

    @functools.wraps(method)
    def routed(self: TransportProcessGroup, *args: Any, **kwargs: Any) -> Any:
        x = staging.first_tensor(args)
        if x is not None and x.device.type not in ("cpu", "meta"):
            return getattr(self.inner_group(x.device), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return routed  # type: ignore[return-value]


class TransportProcessGroup(dist.ProcessGroup):
    """All that torch.distributed calls on a group, over the kernels of `unisono_engine`.

    Args:
        engine: kernels of the group.
        jobs: order of its calls.
        ranks: world ranks of the group.
        timeout: deadline of a call where none is given.
        backend: name under which the transport is registered.
    """

    unisono_engine: Engine
    """The blocking kernels, called directly by `Communicator`."""

    def __init__(
        self,
        engine: Engine,
        jobs: JobQueue,
        ranks: Sequence[int],
        timeout: timedelta,
        backend: str,
    ) -> None:
        super().__init__(engine.rank, engine.size)
        self.unisono_engine = engine
        self.options = SimpleNamespace(_timeout=timeout, backend=backend)
        self._jobs = jobs
        self._ranks = tuple(ranks)
        self._backend = backend
        self._group_name: str | None = None
        self._group_desc = "undefined"
        self._numbers = itertools.count(1)

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
        return self

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        """Name under which torch.distributed knows the group."""
        if self._group_name is None:
            raise UnisonoError("this process group has no name yet")
        return self._group_name

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

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

    def shutdown(self) -> None:
        """Leave the group; calls under way end first. Called by `destroy_process_group`."""
        if isinstance(self.unisono_engine, QueuedEngine):
            self.unisono_engine.close()
        else:
            self._jobs.close(10.0)

    def abort(self) -> None:
        """Break the group: calls under way and later ones fail on all ranks."""
        if isinstance(self.unisono_engine, QueuedEngine):
            self.unisono_engine.fail(UnisonoError("the group was aborted"))
            self.unisono_engine.cancel("the group was aborted")

    # -- reductions -----------------------------------------------------------------------------

    @_by_device
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        return self._reduce("allreduce", _listed(tensors), opts)

    @_by_device
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        return self._reduce("allreduce_coalesced", _listed(tensors), opts)

    @_by_device
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Replace each tensor on the root by its reduction; leaves the others' as they are."""
        return self._reduce("reduce", _listed(tensors), opts, int(opts.rootRank))

    def _reduce(self, name: str, xs: list[Tensor], opts: Any, root: int | None = None) -> Work:
        op, engine = staging.op_name(opts), self.unisono_engine

        def kernel(timeout_s: float) -> None:
            targets = Targets(xs, keep=True)
            for x in targets.tensors:
                if root is None:
                    engine.all_reduce_(x, op, async_op=False, timeout_s=timeout_s)
                else:
                    engine.reduce_(x, root, op, async_op=False, timeout_s=timeout_s)
            targets.deliver()

        return self._submit(name, kernel, xs, opts, kind=op, root=root, brought=xs)

    @_by_device
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Fill each output with the reduction of this rank's input over all ranks."""
        return self._reduce_scatter("reduce_scatter", list(outputs), inputs, opts)

    @_by_device
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill `output` with the reduction of this rank's piece of `input` over all ranks."""
        pieces = cut_evenly(source(input), self.size(), "reduce_scatter")
        return self._reduce_scatter("reduce_scatter_single", [output], [pieces], opts)

    @_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do `reduce_scatter_single` for each pair."""
        pieces = [cut_evenly(source(x), self.size(), "reduce_scatter") for x in inputs]
        name = "reduce_scatter_single_coalesced"
        return self._reduce_scatter(name, list(outputs), pieces, opts)

    def _reduce_scatter(
        self, name: str, outs: list[Tensor], ins: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        op, engine = staging.op_name(opts), self.unisono_engine
        for out, blocks in zip(outs, ins, strict=True):
            staging.check_same_bytes([out], [blocks[self.rank()]], name)

        def kernel(timeout_s: float) -> None:
            targets = Targets(outs)
            for out, blocks in zip(targets.tensors, ins, strict=True):
                dense = [source(block) for block in blocks]
                engine.reduce_scatter(out, dense, op, async_op=False, timeout_s=timeout_s)
            targets.deliver()

        brought = [block for blocks in ins for block in blocks]
        return self._submit(name, kernel, outs, opts, kind=op, brought=brought)

    # -- moves ----------------------------------------------------------------------------------

    @_by_device
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Replace each tensor by the root's."""
        xs, root, engine = _listed(tensors), int(opts.rootRank), self.unisono_engine

        def kernel(timeout_s: float) -> None:
            targets = Targets(xs, keep=True)
            for x in targets.tensors:
                engine.broadcast_(x, root, async_op=False, timeout_s=timeout_s)
            targets.deliver()

        return self._submit("broadcast", kernel, xs, opts, root=root, brought=xs)

    @_by_device
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill the outputs with the inputs of all ranks."""
        return self._all_gather("allgather", outputs, list(inputs), opts)

    @_by_device
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill `output` with the inputs of all ranks, one after the other."""
        return self._all_gather_into("all_gather_single", [output], [input], opts)

    @_by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do `all_gather_single` for each pair."""
        name = "all_gather_single_coalesced"
        return self._all_gather_into(name, list(outputs), list(inputs), opts)

    @_by_device
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill `output_lists[q][i]` with input `i` of rank `q`."""
        outputs = [[row[i] for row in output_lists] for i in range(len(inputs))]
        return self._all_gather("allgather_coalesced", outputs, list(inputs), opts)

    def _all_gather(
        self, name: str, outputs: Sequence[Sequence[Tensor]], xs: list[Tensor], opts: Any
    ) -> Work:
        engine = self.unisono_engine
        for outs, x in zip(outputs, xs, strict=True):
            staging.check_same_bytes([outs[self.rank()]], [x], name)

        def kernel(timeout_s: float) -> None:
            for outs, x in zip(outputs, xs, strict=True):
                targets = Targets(outs)
                engine.all_gather(targets.tensors, source(x), async_op=False, timeout_s=timeout_s)
                targets.deliver()

        flat = [out for outs in outputs for out in outs]
        return self._submit(name, kernel, flat, opts, brought=xs)

    def _all_gather_into(
        self, name: str, outs: list[Tensor], xs: list[Tensor], opts: Any
    ) -> Work:
        engine, size = self.unisono_engine, self.size()
        for out, x in zip(outs, xs, strict=True):
            piece = cut_evenly(out.detach().reshape(-1), size, name)[0]
            staging.check_same_bytes([piece], [x], name)

        def kernel(timeout_s: float) -> None:
            targets = Targets(outs)
            for out, x in zip(targets.tensors, xs, strict=True):
                pieces = cut_evenly(out, size, name)
                engine.all_gather(pieces, source(x), async_op=False, timeout_s=timeout_s)
            targets.deliver()

        return self._submit(name, kernel, outs, opts, brought=xs)

    @_by_device
    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Fill the outputs of the root with the inputs of all ranks."""
        root, x, engine = int(opts.rootRank), inputs[0], self.unisono_engine
        outs = list(outputs[0]) if self.rank() == root else None

        def kernel(timeout_s: float) -> None:
            targets = Targets(outs or [])
            received = targets.tensors if outs is not None else None
            engine.gather(received, source(x), root, async_op=False, timeout_s=timeout_s)
            targets.deliver()

        return self._submit("gather", kernel, outs or [], opts, root=root, brought=[x])

    @_by_device
    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Fill the output of each rank with its input on the root."""
        root, out, engine = int(opts.rootRank), outputs[0], self.unisono_engine
        ins = list(inputs[0]) if self.rank() == root else None

        def kernel(timeout_s: float) -> None:
            targets = Targets([out])
            sent = [source(block) for block in ins] if ins is not None else None
            engine.scatter(targets.tensors[0], sent, root, async_op=False, timeout_s=timeout_s)
            targets.deliver()

        return self._submit("scatter", kernel, [out], opts, root=root, brought=ins or [])

    @_by_device
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill output `q` with what rank `q` has for this rank."""
        engine, outs, ins = self.unisono_engine, list(outputs), list(inputs)

        def kernel(timeout_s: float) -> None:
            targets = Targets(outs)
            dense = [source(block) for block in ins]
            engine.all_to_all(targets.tensors, dense, async_op=False, timeout_s=timeout_s)
            targets.deliver()

        return self._submit("alltoall", kernel, outs, opts, brought=ins)

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
        ins = cut_rows(x, input_split_sizes, size, "all_to_all_single input")
        cut_rows(output.detach(), output_split_sizes, size, "all_to_all_single output")

        def kernel(timeout_s: float) -> None:
            targets = Targets([output])
            outs = cut_rows(targets.tensors[0], output_split_sizes, size, "output")
            engine.all_to_all(outs, ins, async_op=False, timeout_s=timeout_s)
            targets.deliver()

        return self._submit("all_to_all_single", kernel, [output], opts, brought=[x])

    def barrier(self, opts: Any = None) -> Work:
        """Return when all ranks have come."""
        engine = self.unisono_engine

        def kernel(timeout_s: float) -> None:
            engine.barrier(async_op=False, timeout_s=timeout_s)

        return self._submit("barrier", kernel, [], opts)

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
        x = source(tensors[0])
        ticket = self.unisono_engine.exchange(
            [(dst, x)], [], tag, async_op=True, timeout_s=self._timeout_s(None)
        )
        return TicketWork(ticket, [x], self._timeout_s(None)) if ticket else self._done([x])

    @_by_device
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group."""
        targets = Targets(tensors[:1])
        ticket = self.unisono_engine.exchange(
            [], [(src, targets.tensors[0])], tag, async_op=True, timeout_s=self._timeout_s(None)
        )
        if ticket is None:
            targets.deliver()
            return self._done(tensors)
        return TicketWork(ticket, tensors[:1], self._timeout_s(None), targets.deliver)

    @_by_device
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from whoever sends one first."""
        if not isinstance(self.unisono_engine, QueuedEngine):
            raise UnisonoError("a receive in a group of one rank: there is nobody to send")
        targets = Targets(tensors[:1])
        ticket = self.unisono_engine.receive_any(targets.tensors[0], tag)
        return TicketWork(ticket, tensors[:1], self._timeout_s(None), targets.deliver)

    # -- how calls are run ----------------------------------------------------------------------

    def _submit(
        self,
        name: str,
        kernel: Kernel,
        outputs: Sequence[Tensor],
        opts: Any,
        *,
        kind: str = "",
        root: int | None = None,
        brought: Sequence[Tensor] = (),
    ) -> Work:
        """Run `kernel` in the group's order: now if the caller waits, else behind its back."""
        is_async = bool(getattr(opts, "asyncOp", True))
        note = self._enter(name, kind, root, brought, outputs, is_async)
        run = partial(self._execute, note, kernel, self._timeout_s(opts))
        if not is_async:
            self._jobs.run(run)
            return self._done(outputs)
        if isinstance(self.unisono_engine, QueuedEngine):
            self.unisono_engine.check_usable()
        job = Job(run)
        work = TransportWork(self._jobs, job, outputs)
        self._jobs.post(job)
        return work

    def _enter(
        self,
        name: str,
        kind: str,
        root: int | None,
        brought: Sequence[Tensor],
        outputs: Sequence[Tensor],
        is_async: bool,
    ) -> Call:
        """Take down a call of torch.distributed; the one place where all of them pass."""
        x = brought[0] if brought else None
        note = Call(
            op=name,
            group=self._group_desc if self._group_name is None else self._group_name,
            key=f"{self._group_name}/c10d",
            seq=next(self._numbers),
            shape=tuple(x.shape) if x is not None else None,
            dtype=x.dtype if x is not None else None,
            kind=kind,
            root=root,
            is_async=is_async,
        )
        if tracing.recorder is not None:
            note.t_start = time.perf_counter_ns()
            note.sent = sum(t.numel() * t.element_size() for t in brought)
            note.received = sum(t.numel() * t.element_size() for t in outputs)
            if tracing.recorder.call_sites:
                _ = note.site
        elif checking.is_enabled():
            _ = note.site
        calls.set_latest(note)
        return note

    def _execute(self, note: Call, kernel: Kernel, timeout_s: float) -> None:
        """Run a call, in whichever thread."""
        if checking.is_enabled() and self.size() > 1:
            checking.verify(note, self.rank(), self._ranks, timeout_s)
        waited = getattr(self.unisono_engine, "waited_ns", 0)
        with torch.no_grad():
            kernel(timeout_s)
        note.done = True
        recorder = tracing.recorder
        if recorder is not None and note.t_start:
            note.wait_ns = getattr(self.unisono_engine, "waited_ns", 0) - waited
            note.algorithm = getattr(self.unisono_engine, "last_algorithm", self._backend)
            recorder.add(note, self._ranks[self.rank()])

    def _timeout_s(self, opts: Any) -> float:
        """Return the deadline of a call: its own, the environment's, the group's."""
        given = staging.given_timeout_s(opts)
        if given is not None:
            return given
        text = os.environ.get("UNISONO_TIMEOUT_S")
        return float(text) if text else self.options._timeout.total_seconds()

    def _done(self, outputs: Sequence[Tensor]) -> Work:
        return TransportWork(self._jobs, Job.finished(), outputs)


def _listed(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
