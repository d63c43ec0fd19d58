"""Elastic jobs of ranks that a program such as `srun` starts: some may die, and nodes with them.

The coordinator lives beside the supervisor, and all ranks come to it by TCP. A rank that dies is
started again by its agent, as long as its node is there.
"""

from __future__ import annotations

import json
import signal
import time
from typing import Any

from unisono.launch.elastic.coordinator import LOST, OVER, Coordinator
from unisono.launch.elastic.hub import Hub
from unisono.launch.elastic.supervisor import (
    LOOK_S,
    NOT_TRAINED,
    TRAIN,
    address_of_job,
    is_stopped,
    let_go,
    write_event,
)
from unisono.launch.places.agent import Agent
from unisono.launch.places.program import LaunchedRanks, ProgramRanks
from unisono.launch.pool.client import RankProcess

STOPPED_S = 0.5
"""How long a rank may stand still, stopped by a signal."""
DEATHS = 20
"""So many deaths of one rank are no accident."""


class ElasticProgramRanks(ProgramRanks):
    """The ranks of one attempt that goes on without those that died."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        given = self._plan.elastic or {}
        self._stall_s: float = given["stall_s"]
        self._secret = bytes.fromhex(given["secret"])
        self._coordinator = Coordinator(self._plan.ranks, given["least"])
        self._has_joined = False
        self._hub: Hub | None = None
        self._leavers: set[int] | None = None
        """Ranks whose loops have ended together; None as long as they train."""

    def start(self) -> None:
        """Start the program, with a coordinator beside it whose address the agents are told."""
        self._hub = hub = Hub(
            self._coordinator,
            secret=self._secret,
            on_event=lambda what, rank: write_event(self._dir, hub, what, rank),
            listen_at=address_of_job(),
            adds_guests=False,
        )
        host, port = hub.far or ("", 0)
        self._command.append(json.dumps({"elastic": f"{host}:{port}"}))
        super().start()

    def close(self, *, at_once: bool | None) -> None:
        try:
            super().close(at_once=at_once)
        finally:
            if self._hub is not None:
                self._hub.close()
                self._hub = None
        if any(state.state == "failed" for state in self.states):
            self.mistake = ""  # a rank that fails leaves its loop, too: its error says more

    def _wait_for_program(self, limit_s: float) -> None:
        """Serve members meanwhile."""
        end, hub, coordinator = time.monotonic() + limit_s, self._hub, self._coordinator
        super()._wait_for_program(0)
        while hub is not None and not self.has_left and (left := end - time.monotonic()) > 0:
            hub.turn(min(left, LOOK_S))
            super()._wait_for_program(0)
        if hub is None:
            return
        self._has_joined |= bool(hub.seats)
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
                self.mistake = f"the ranks have {NOT_TRAINED}\nHINT: {TRAIN}"
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


class ElasticLaunchedRanks(ElasticProgramRanks, LaunchedRanks):
    """The same where this very launcher starts the program."""


class ElasticAgent(Agent):
    """Starts another rank in place of one that died, or that stands still."""

    _deaths = 0
    _stopped_since: float | None = None

    def make_good(self, rank: RankProcess) -> None:
        """Start another rank, unless this one has failed; others do what it was at."""
        self._deaths += 1
        failed = rank.known.failed
        is_wanted = not self._stop_reason and not self._is_cancelled() and self._deaths < DEATHS
        if is_wanted and (failed is None or LOST in failed.summary):
            let_go(self, rank)
            self._rank = self._start()

    def heard(self, rank: RankProcess, news: Any) -> None:
        """Leave what the rank says in files, but for what is no failure here."""
        failed = rank.known.failed
        if failed is not None and OVER in failed.summary:
            rank.known.failed = None
            rank.known.note("stopped")
            self._stop_reason = OVER
        if failed is None or LOST not in failed.summary:
            super().heard(rank, news)

    def _listen_for(self, seconds: float) -> None:
        super()._listen_for(seconds)
        if not self._rank.is_running or not is_stopped(self._rank.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        elif time.monotonic() > self._stopped_since + STOPPED_S:
            self._rank.signal_group(signal.SIGKILL)
