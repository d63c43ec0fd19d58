"""Watches ranks that may die and join: the dead are replaced, those that stand still are ended.

An exception in a rank's function ends the job as ever: it would be raised again by the next rank.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.errors import CollectiveMismatch, PlatformError
from unisono.launch.elastic.coordinator import OVER, Coordinator
from unisono.launch.elastic.hub import Hub
from unisono.launch.elastic.settings import RESIZE, Elastic, Invitation
from unisono.launch.job_files import check_ours
from unisono.launch.places.local import LocalRanks
from unisono.launch.pool.client import RankProcess
from unisono.launch.pool.monitor import RankMonitor
from unisono.launch.pool.protocol import Job, read_available
from unisono.launch.supervisor import COLLECT_S

LOOK_S = 0.1
"""Seconds between two looks at ranks for whom others wait."""
EVENTS = "members.jsonl"
"""File of a job with one line for each member that joined, died or was taken away."""
NOT_TRAINED = "returned without training: each rank is a world of one"
"""What ranks do whose function is meant for another kind of run."""
TRAIN = (
    "for step in unisono.train.elastic(model, optimizer, data, ...) in the function; "
    "elastic=False for all other trainings"
)
"""What to try then."""


class ElasticRanks(LocalRanks):
    """The ranks of one attempt, of which new ones are started for those that died."""

    preload = ("torch._dynamo", "unisono.train.exact.run")  # others wait for whoever loads them

    def __init__(self, job: Job, *args: Any, elastic: Elastic, **rest: Any) -> None:
        super().__init__(job, *args, **rest)
        self._elastic = elastic
        self._stdin_rank = None
        self._stall_s = job.platform.comm_timeout_s
        self.coordinator = Coordinator(elastic.most, elastic.least)
        host, invite = elastic.host, elastic.invite
        self.hub = Hub(
            self.coordinator,
            secret=job.secret,
            fence=self._fence,
            on_event=self._note_event,
            listen_at=None if invite is None else job.platform.master_addr or address_of_job(),
        )
        address = self.hub.near if host is None else f"{host.host}:{host.port}"
        self._more["UNISONO_ELASTIC"] = address
        if invite is not None and self.hub.far is not None:
            name, port = self.hub.far
            Invitation(host=name, port=port, secret=job.secret.hex()).write(invite)
        self._is_growing = True
        self._deaths_in_a_row = 0
        self._step_of_death = -1
        self._next_look = 0.0
        self._retired: set[RankProcess] = set()
        chaos = elastic.chaos
        self._random = random.Random(chaos.seed if chaos else 0)
        self._kills_left = chaos.kills if chaos else 0
        self._next_kill: float | None = None
        self._condemned: set[int] = set()
        self.listen(self.hub.fileno(), self.hub.turn)

    def close(self, *, at_once: bool | None = None) -> None:
        try:
            super().close(at_once=at_once)
        finally:
            self.hub.close()

    def heard(self, rank: RankProcess, news: Any) -> None:
        if news.get("state") == "returned":
            self.hub.turn()  # it may have told us so before
            if rank.pid not in self.hub.leavers and self._elastic.host is None:
                found = f"rank {rank.rank} has {NOT_TRAINED}"
                raise PlatformError.because("unisono.run(..., elastic=True)", found, None, TRAIN)
        super().heard(rank, news)

    def resize(self, ranks: int) -> None:
        """Have another number of ranks from the next step on; only in the supervising thread."""
        ranks = max(self._elastic.least, min(ranks, self._elastic.most))
        self.coordinator.reached = self.hub.step
        self.coordinator.resize(ranks + self.hub.guests)
        self.hub.deliver()
        self._say(f"resized to {ranks} ranks")
        self._bring_to_size()

    def _heed_resize(self) -> None:
        path = self._job_dir / RESIZE
        with suppress(OSError, ValueError):
            if path.exists():
                check_ours(path)
                ranks = int(path.read_text())
                path.unlink()
                self.resize(ranks)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for news, take all that has come, and look after those who died or stand still."""
        if not self._is_growing:
            return super().wait(timeout_s)
        is_news = super().wait(LOOK_S if timeout_s is None else min(timeout_s, LOOK_S))
        self._look_after(is_news=is_news)
        self._is_growing = self._is_growing and not self.is_bad()
        return is_news

    def is_good(self) -> bool:
        """Whether all have returned, and whoever was sent away has left."""
        return all(rank.known.is_good for rank in self._ranks)

    def interrupt(self, seconds: float) -> None:
        self._is_growing = False
        super().interrupt(seconds)

    def finish(self) -> None:
        self._is_growing = False
        self.states.sort(key=lambda state: state.rank)  # those of new ranks came last
        super().finish()

    def stop(self, reason: str) -> None:
        self._is_growing = False
        if self.coordinator.phase == "lost":
            self.remark = (
                "  no member is left, and their state with them; max_restarts=1 begins again, "
                "from a checkpoint if the function restores one"
            )
        super().stop(reason)

    def _look_after(self, *, is_news: bool) -> None:
        if self.coordinator.error is not None:
            # A rank that fails leaves its loop, too; then its own error says more.
            self._is_growing = False
            self.step_until(self.is_bad, COLLECT_S)
            if self.is_bad():
                return
            raise CollectiveMismatch.because(
                "the loops of an elastic training",
                self.coordinator.error,
                None,
                "decide by what all members know alike: step.number, step.loss, "
                "unisono.should_stop()",
            )
        self._bury()
        self._part_with_retired()
        if not (is_news and self.coordinator.phase == "holding"):
            self._bring_to_size()  # which takes a while: members that stand still come first
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._heed_resize()
            self._end_who_stands_still()
        self._make_chaos()

    def _bury(self) -> None:
        """Let go of ranks that died, as long as somebody is left."""
        for rank in [rank for rank in self._ranks if rank.known.is_bad]:
            failed = rank.known.failed
            if failed is not None and OVER not in failed.summary:
                continue
            for seat in [s for s in self.hub.seats.values() if s.is_near and s.pid == rank.pid]:
                self.hub.lost(seat)
            if rank in self._retired or self._is_late_newcomer(rank) or failed is not None:
                self._let_go(rank)
                continue
            phase, step = self.coordinator.phase, self.coordinator.step
            self._deaths_in_a_row = self._deaths_in_a_row + 1 if step == self._step_of_death else 1
            self._step_of_death = step
            is_last = phase == "lost" or (
                all(other.known.is_bad for other in self._ranks) and not self.hub.guests
            )
            if is_last or self._deaths_in_a_row > max(8, 4 * self._elastic.most):
                return  # which ends the attempt, with this rank's death as the reason
            self._let_go(rank)

    def _let_go(self, rank: RankProcess) -> None:
        self._retired.discard(rank)
        let_go(self, rank)

    def _is_late_newcomer(self, rank: RankProcess) -> bool:
        """Whether the training is over, and this rank had no part in it."""
        is_over = self.coordinator.phase == "over"
        return is_over and rank.pid not in self.hub.leavers and not rank.known.is_good

    def _part_with_retired(self) -> None:
        """End ranks that are not wanted any more, in good order."""
        for number in list(self.coordinator.retired):
            self.hub.dismiss(number)
        pids = {
            seat.pid
            for number, seat in self.hub.seats.items()
            if seat.is_near and number in self.coordinator.retired
        }
        for rank in self._ranks:
            is_wanted = rank.pid not in pids and not self._is_late_newcomer(rank)
            if not is_wanted and rank.known.failed is None and rank not in self._retired:
                self._retired.add(rank)
                self.states.remove(rank.known)  # it ends as it was told, and is not to blame
                rank.order(stop=True)
                rank.signal_group(signal.SIGTERM)

    def _bring_to_size(self) -> None:
        """Start ranks for those that are missing."""
        if self.coordinator.phase in ("over", "lost") or any(
            rank.known.is_good for rank in self._ranks
        ):
            return
        taken = {rank.rank for rank in self._ranks if rank not in self._retired}
        missing = self.coordinator.target - self.hub.guests - len(taken)
        for place in [p for p in range(self._elastic.most) if p not in taken][: max(0, missing)]:
            self.start_some([place])

    def _fence(self, rank: int, pid: int) -> None:
        """End a process whose connection is gone, so that nothing it was at goes on."""
        for process in self._ranks:
            is_it = process.pid == pid and process.rank == rank and process.is_running
            if is_it and process.known.failed is None and process not in self._retired:
                process.signal_group(signal.SIGKILL)
                self._note_end(process)

    def _end_who_stands_still(self) -> None:
        """Kill ranks that were stopped, and members for whom others have waited too long."""
        for rank in self._ranks:
            if rank.is_running and not rank.known.is_good and is_stopped(rank.pid):
                self._say(f"rank {rank.rank} is ended: it was stopped by a signal")
                rank.signal_group(signal.SIGKILL)
        for number, quiet_s in self.hub.late(self._stall_s).items():
            if (seat := self.hub.seats.get(number)) is not None:
                self._say(f"rank {seat.rank} on {seat.host} is ended: quiet for {quiet_s:.0f} s")
                self.hub.dismiss(number, is_late=True)
                for rank in self._ranks:
                    if seat.is_near and rank.pid == seat.pid:
                        rank.signal_group(signal.SIGKILL)

    def _make_chaos(self) -> None:
        """Kill a rank if it is time to."""
        chaos, now = self._elastic.chaos, time.monotonic()
        if chaos is None or not self._kills_left or self.coordinator.phase == "over":
            return
        if self._next_kill is None:
            self._next_kill = now + chaos.every_s * self._random.uniform(0.2, 1.8)
        here = {number for number, seat in self.hub.seats.items() if seat.is_near}
        here -= self._condemned  # they may take a moment to die; somebody has to stay
        members = here & self.coordinator.members.keys()
        victims = sorted(here if len(members) > 1 else here - members)
        if now < self._next_kill or not victims:
            return
        victim = self._random.choice(victims)
        self._condemned.add(victim)
        # Another one may die at once, or while this death is made good.
        fate = self._random.random()
        soon_s = 0.0 if fate < 0.15 else self._random.uniform(0.0, 0.05)
        self._next_kill = now + soon_s if fate < 0.3 else None
        self._kills_left -= 1
        seat = self.hub.seats[victim]
        number = signal.SIGSTOP if self._random.random() < 0.2 else signal.SIGKILL
        self._say(f"chaos: {number.name} to rank {seat.rank} at step {self.hub.step}")
        with suppress(ProcessLookupError, PermissionError):
            os.kill(seat.pid, number)

    def _note_event(self, what: str, rank: int) -> None:
        """Keep what happened to a member, for people and for the live page."""
        event = write_event(self._job_dir, self.hub, what, rank)
        if what == "died":
            self._say(f"rank {rank} died at step {event['step']}; {event['members']} go on")

    def _say(self, text: str) -> None:
        if self._console.shows_any:
            print(f"unisono: {text}", file=sys.stderr, flush=True)


def let_go(monitor: RankMonitor, rank: RankProcess) -> None:
    """End a rank that is of no more use, read its last output, and forget it."""
    if rank.is_running:
        rank.signal_group(signal.SIGKILL)
        rank.collect()
    for number, fd in enumerate(rank.outputs):
        while data := read_available(fd):
            rank.log.write(data)
            monitor.printed(rank, number, data)
    monitor.drop(rank)


def address_of_job() -> str:
    """Return the address at which other hosts find this one."""
    from unisono.comm import machine  # which loads torch
    from unisono.launch.places.rendezvous import candidates

    return machine.of_job(candidates()) or candidates()[0]


def write_event(job_dir: Path, hub: Hub, what: str, rank: int) -> dict[str, Any]:
    """Keep what happened to a member of a job; return what was written."""
    members = sum(number in hub.seats for number in hub.coordinator.members)
    event = {"what": what, "rank": rank, "step": hub.step, "members": members, "at": time.time()}
    with suppress(OSError), (job_dir / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
    return event


def read_events(job_dir: Path) -> list[dict[str, Any]]:
    """Return what happened to the members of a job, the latest last."""
    with suppress(OSError):
        lines = (job_dir / EVENTS).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]
    return []


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
