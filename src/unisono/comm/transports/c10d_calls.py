"""A process group of torch.distributed as such: what it is called, how its calls are run.

Every call goes through `_submit`: it is numbered, compared in check mode, traced, and run in the
engine's order of calls, without autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import GroupName

from unisono.comm import call as calls
from unisono.comm import failures, tracing, watchdog
from unisono.comm.call import Call
from unisono.comm.engine import Engine, Ticket
from unisono.comm.groups import GroupEntry
from unisono.comm.perform import Performer, Transfer
from unisono.comm.transports import staging
from unisono.comm.transports.nccl import NcclBeside
from unisono.comm.transports.queued import TransportEngine
from unisono.comm.transports.staging import Targets
from unisono.comm.transports.work import DoneWork, TransportWork
from unisono.errors import UnisonoError


class How(TypedDict):
    """How a kernel is run: whether it is only started, and until when."""

    async_op: bool
    timeout_s: float


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
        store: store under a prefix of this group alone, for an nccl group beside it.
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
        self._group_name: str | None = None
        self._calls: Performer | None = None
        """How calls are run; made with the first one, when the group has its name."""
        self._deadline_s = deadline_s
        self._group_desc = "undefined"
        self._nccl = NcclBeside(store, engine.rank, engine.size)

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
        """Return a process group of the same ranks for tensors on `device`.

        That of nccl, made when first asked for, serves CUDA tensors; nothing serves others.
        """
        if device.type == "cuda" and dist.is_nccl_available():
            return self._nccl.group(self.options._timeout)
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
        self._nccl.shutdown()
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
