"""Elastic jobs of ranks that a program such as `srun` starts: some may die, and nodes with them.

The coordinator lives beside the supervisor, and all ranks come to it by TCP. A rank that dies is
started again by its agent, as long as its node is there.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from unisono.launch.elastic.coordinator import Coordinator
from unisono.launch.elastic.hub import Hub
from unisono.launch.elastic.settings import Invitation
from unisono.launch.elastic.supervisor import LOOK_S, address_of_job, write_event
from unisono.launch.places.mailbox import Plan
from unisono.launch.places.program import ProgramRanks


class ElasticProgramRanks(ProgramRanks):
    """The ranks of one attempt that goes on without those that died."""

    def __init__(self, directory: Path, plan: Plan, attempt: int, *args: Any, **rest: Any) -> None:
        super().__init__(directory, plan, attempt, *args, **rest)
        given = plan.elastic or {}
        self._stall_s: float = given["stall_s"]
        self._secret = bytes.fromhex(given["secret"])
        self._coordinator = Coordinator(plan.ranks, given["least"])
        self._is_closing = threading.Event()
        self._has_joined = False
        self._hub: Hub | None = None
        self._thread: threading.Thread | None = None
        self._leavers: set[int] | None = None
        """Ranks whose loops have ended together; None as long as they train."""

    def start(self) -> None:
        """Start the program, with a coordinator beside it."""
        self._hub = hub = Hub(
            self._coordinator,
            secret=self._secret,
            on_event=lambda what, rank: write_event(self._dir, hub, what, rank),
            listen_at=address_of_job(),
            adds_guests=False,
        )
        host, port = hub.far or ("", 0)
        path = _invitation_path(self._dir, self._attempt)
        Invitation(host=host, port=port, secret=self._secret.hex()).write(path)
        self._thread = threading.Thread(target=self._coordinate, args=(hub,), name="unisono-hub")
        self._thread.start()
        super().start()

    def close(self, *, at_once: bool | None) -> None:
        """Leave neither the program nor the coordinator behind."""
        try:
            super().close(at_once=at_once)
        finally:
            if self._hub is not None and self._thread is not None:
                self._is_closing.set()
                self._thread.join()
                self._hub.close()
                _invitation_path(self._dir, self._attempt).unlink()
        if any(state.state == "failed" for state in self.states):
            self.mistake = ""  # a rank that fails leaves its loop, too: its error says more

    def _coordinate(self, hub: Hub) -> None:
        """Serve members; nobody else touches the coordinator."""
        coordinator, next_look = self._coordinator, 0.0
        while not self._is_closing.is_set():
            hub.turn(LOOK_S)
            self._has_joined |= bool(hub.seats)
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + LOOK_S
            for number in list(coordinator.retired):
                hub.dismiss(number)
            for number in hub.late(self._stall_s):
                hub.dismiss(number, is_late=True)
            self.mistake = self.mistake or coordinator.error or ""
            if coordinator.phase == "over" and self._leavers is None:
                self._leavers = {member.rank for member in coordinator.members.values()}

    def is_good(self) -> bool:
        """Whether all that have trained to the end have returned; some may have died after it."""
        if self._leavers is None:
            if super().is_good() and not self._has_joined:
                self.mistake = (
                    "the ranks have returned without training: each is a world of one\n"
                    "HINT: for step in unisono.train.elastic(model, optimizer, data, ...) in the "
                    "function; elastic=False for all other trainings"
                )
            return False
        ends = [state for state in self.states if state.rank in self._leavers]
        have_ended = all(state.is_over and state.state != "failed" for state in ends)
        return have_ended and any(state.is_good for state in ends)

    def is_bad(self) -> bool:
        """Whether the program has failed, or nobody is left."""
        states = self.states
        is_lost = all(state.state in ("died", "stopped") for state in states)
        has_failed = any(state.state == "failed" for state in states)
        return bool(self.mistake) or has_failed or is_lost or self._coordinator.phase == "lost"


def _invitation_path(directory: Path, attempt: int) -> Path:
    return directory / f"invitation-{attempt}.json"


def address_for(directory: Path, attempt: int) -> str:
    """Return where a rank of an attempt finds its coordinator."""
    found = Invitation.read(_invitation_path(directory, attempt))
    return f"{found.host}:{found.port}"
