"""A process group of torch.distributed as such: what it is called, how its calls are run.

Every call goes through `_submit`: it is numbered, compared in check mode, traced, and run in the
engine's order of calls, without autograd.
"""

from __future__ import annotations

import time
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
from unisono.comm import checking, failures, tracing, watchdog
from unisono.comm.call import Call
from unisono.comm.engine import Engine, Ticket
from unisono.comm.transports import staging
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
        self._key = "c10d"
        self._title = ""
        """Name in traces and reports; other numbers than those of a communicator's calls."""
        self._deadline_s = deadline_s
        self._group_desc = "undefined"
        self.unisono_calls = 0
        """How many collectives torch.distributed has begun on this group."""

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
        self._key = f"{name}/c10d"

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
        note = self._enter(name, kind, root, brought, targets.wanted, is_async)
        timeout_s = self._timeout_s(opts)
        waited = self.unisono_engine.waited_ns or 0
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a third of the price of torch.no_grad()
        try:
            if checking.is_enabled() and self.size() > 1:
                note.is_checked = True
                checking.verify(note, self.rank(), self._ranks, timeout_s)
            tickets = kernel({"async_op": is_async, "timeout_s": timeout_s})
        except TimeoutError as error:
            raise failures.timed_out(note, self._ranks, timeout_s, error) from None
        finally:
            torch._C._set_grad_enabled(grad_mode)
        return self._under_way(note, tickets, targets, timeout_s, waited)

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
        self._introduce()
        self.unisono_calls = number = self.unisono_calls + 1
        note = Call(
            op=name,
            seq=number,
            number=number,
            group=self._title,
            key=self._key,
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
        elif is_async or checking.is_enabled():  # another thread could not look it up
            _ = note.site
        calls.set_latest(note)
        return note

    def _message(
        self, name: str, x: Tensor, to: tuple[int, ...] = (), source: tuple[int, ...] = ()
    ) -> Call:
        """Take down a message of torch.distributed; it has no number, as only two ranks make it."""
        self._introduce()
        note = Call(name, self._title, f"{self._key}/messages", 0, x.shape, x.dtype)
        note.sends_to, note.receives_from = to, source
        calls.set_latest(note)
        return note

    def _under_way(
        self,
        note: Call,
        tickets: Tickets,
        targets: Targets,
        timeout_s: float | None = None,
        waited: int | None = None,
    ) -> Work:
        """Return the call as torch.distributed sees it; what has come is delivered at its end."""
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

    def _introduce(self) -> None:
        """With its first call a group gets its name, and this rank begins to answer for itself."""
        if self._title:
            return
        is_world = dist.is_initialized() and dist.group.WORLD is self
        members = f"ranks {','.join(map(str, self._ranks))} ({self._backend})"
        self._title = f"{'world' if is_world else members}/torch"
        if self.size() > 1:
            watchdog.ensure()

    def _timeout_s(self, opts: Any) -> float:
        """Return the deadline of a call: its own, the environment's, the group's."""
        given = staging.given_timeout_s(opts)
        if given is not None:
            return given
        return self._deadline_s or self.options._timeout.total_seconds()
