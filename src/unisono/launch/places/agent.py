"""The parent of one rank on some host: started there by `srun`, `mpiexec` or us, one each.

    python -m unisono.launch.places.agent DIRECTORY ATTEMPT [TOLD]

It turns what the rank says and how it ends, SIGKILL included, into files of the job's directory,
passes signals on, and obeys the orders it finds there. It unpickles nothing of the user's. Its
place among the ranks is told by the starter's variables, or in JSON; so is the address of the
coordinator of an elastic job (`places/elastic.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from unisono.environment import Environment, detect
from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.places.mailbox import CANCEL, PAYLOAD, Mailbox, Plan, pause_s
from unisono.launch.pool import verdict
from unisono.launch.pool.client import RankProcess, spawn_rank
from unisono.launch.pool.monitor import RankMonitor
from unisono.launch.pool.protocol import RankState, read_available
from unisono.launch.pool.surroundings import MISLEADING, common_variables, rank_variables
from unisono.launch.supervisor import COLLECT_S
from unisono.processes import process_start

_OF_OTHERS = (*MISLEADING, "RANK", "UNISONO_RUN_ID")
"""What may be left from another launcher: the starter's own variables tell our place."""


class Agent(RankMonitor):
    """Watches over one rank from its start to its end.

    Args:
        mail: files of the attempt, here.
        plan: plain facts of the job.
        place: of the rank, among all.
        node: what users call this host.
        more: variables for the rank, besides those of the plan.
    """

    def __init__(
        self, mail: Mailbox, plan: Plan, place: Environment, node: str, more: Mapping[str, str]
    ) -> None:
        super().__init__(signal.Signals[plan.stack_signal])
        self._mail = mail
        self._dir = mail.dir
        self._plan = plan
        self._place = place
        self._node = node
        self._more = more
        self._signals: list[int] = []
        self._is_dismissed = False
        self._stop_reason = ""
        self._interrupted_until: float | None = None
        self._heeded = {signal.Signals[name] for name in (*plan.stop_signals, plan.stack_signal)}
        self._heeded.add(signal.SIGTERM)
        self._take_signals()
        self._rank = self._start()
        if mail.attempt:
            line = f"--- attempt {mail.attempt} on {self._rank.known.host}\n"
            self._rank.log.write(line.encode())

    def run(self) -> int:
        """Stay until the rank has ended; return the exit code that tells the starter how."""
        began = time.monotonic()
        while (rank := self._rank).is_running and not rank.known.is_bad and not self._stop_reason:
            self._listen_for(pause_s(time.monotonic() - began))
            if self._is_dismissed:
                self.finish()
                break
            if rank.known.is_bad:
                self.make_good(rank)
        known = rank.known
        if known.is_good and (self._is_dismissed or not rank.is_running):
            self._end()
            self._mail.write_state(known)
            return 0
        if known.state != "died" and known.failed is None:
            self.note_places(is_deadline=self._stop_reason == "deadline")
        elif self._was_ended_by_starter():
            known.note("stopped")
        if known.failed is None:
            self._mail.write_state(known)
        # Not before the others have learned of it, or shown where they stand, too.
        self.step_until(lambda: not rank.is_running, COLLECT_S)
        self._wait_for_others()
        self._end()
        return 1

    def make_good(self, rank: RankProcess) -> None:
        """Start another rank in place of a bad one, where the job goes on without it."""

    def _wait_for_others(self) -> None:
        """Stay, after an interrupt, until all ranks have ended: who starts us ends all with us."""
        while (
            self._interrupted_until is not None
            and not self._stop_reason
            and time.monotonic() < self._interrupted_until
        ):
            self._listen_for(0.05)

    def _listen_for(self, seconds: float) -> None:
        """Take what comes from the rank, and what it or we are told."""
        self.wait(seconds)
        self._heed_signals()
        self._heed_orders()
        self._look_for_launcher()

    def _was_ended_by_starter(self) -> bool:
        """Whether the rank was killed after another had failed: that is how starters clean up.

        Others that have noticed its end already do not count: their reports are consequences.
        """
        code = self._rank.known.exit_code
        if self._rank.known.state != "died" or code not in (-signal.SIGKILL, -signal.SIGTERM):
            return False
        is_cause = verdict.is_own if code == -signal.SIGKILL else attrgetter("is_bad")
        return any(map(is_cause, self._states()))

    def _take_signals(self) -> None:
        read, write = os.pipe()
        for fd in (read, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in self._heeded:
            signal.signal(number, lambda n, _frame: self._signals.append(n))
        self.listen(read, lambda: read_available(read) != b"")

    def _start(self) -> RankProcess:
        """Start the rank; signals wait until it is ready for them."""
        plan, place = self._plan, self._place
        more = {**plan.env, **self._more}
        variables = common_variables(os.environ, threads=plan.cpus_per_rank, more=more)
        variables |= rank_variables(place, plan.run_id, self._dir, self._mail.attempt)
        job_files.check_ours(self._dir / PAYLOAD)
        payload_fd = os.open(self._dir / PAYLOAD, os.O_RDONLY | os.O_NOFOLLOW)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._heeded)
        try:
            rank = spawn_rank(
                place.rank,
                place.size,
                payload_fd=payload_fd,
                env=variables,
                job_dir=self._dir,
                # By these an MPI library in the rank talks to who started it.
                kept_fds=(int(os.environ["PMI_FD"]),)
                if os.environ.get("PMI_FD", "").isdigit()
                else (),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(payload_fd)
        rank.known.attempt, rank.known.node = self._mail.attempt, self._node
        rank.known.pid, rank.known.pid_start = rank.pid, process_start(rank.pid)
        self.watch(rank)
        self._mail.write_state(rank.known)
        return rank

    def heard(self, rank: RankProcess, news: Any) -> None:
        if (value := rank.value()) is not None and "state" in news:
            self._mail.write_value(rank.rank, value)
        if "preempt" in news:
            self._mail.order(preempt=news["preempt"])
        if "state" in news or "finishing_s" in news:
            self._mail.write_state(rank.known)

    def _heed_signals(self) -> None:
        """Pass signals on. TERM after a failure elsewhere is the starter ending the world."""
        while self._signals:
            number = signal.Signals(self._signals.pop(0))
            if number is signal.SIGTERM and self._is_over():
                self._stop_reason = "another rank failed"
            else:
                self._rank.signal(number)

    def _is_over(self) -> bool:
        return self._is_cancelled() or any(state.is_bad for state in self._states())

    def _is_cancelled(self) -> bool:
        return (self._dir / CANCEL).exists()

    def _states(self) -> list[RankState]:
        return self._mail.read_states(self._plan.ranks)

    def _heed_orders(self) -> None:
        for order in self._mail.new_orders():
            if "stop" in order:
                self._stop_reason = str(order["stop"])
            elif "finish" in order:
                self._is_dismissed = True
            elif "interrupt" in order:
                self._interrupted_until = time.monotonic() + float(order["interrupt"])
                self._rank.order(interrupt=order["interrupt"])
            elif "stack" in order:
                self._rank.signal(signal.Signals[self._plan.stack_signal])
            elif order.get("preempt") == self._rank.rank:
                self._rank.signal(signal.SIGTERM)

    def _look_for_launcher(self) -> None:
        if self._plan.launcher is None:
            return
        host, pid, start = self._plan.launcher
        if host == self._rank.known.host and process_start(pid) != start:
            self._stop_reason = "the launcher is gone"
            self._mail.order(stop=self._stop_reason)  # other hosts cannot see it

    def _end(self) -> None:
        """Stop the rank if it still runs, and take its last output."""
        self.end_all(self._plan.grace_s)
        self.close()


def _refuse(mail: Mailbox, place: Environment, error: PlatformError) -> int:
    """Report an error that keeps the rank from being started."""
    state = RankState(rank=place.rank, attempt=mail.attempt, host=socket.gethostname())
    summary = f"PlatformError: {str(error).splitlines()[0]}"
    traceback = f"unisono.errors.PlatformError: {error}\n"
    mail.write_failure(state, summary=summary, traceback=traceback, lost="")
    return 1


def main() -> int:
    """Be the agent that the command line and the environment describe."""
    mail = Mailbox(Path(sys.argv[1]), int(sys.argv[2]))
    told = json.loads(sys.argv[3]) if sys.argv[3:] else {}
    node = told.pop("name", os.environ.get("SLURMD_NODENAME", ""))
    kind, more = Agent, dict[str, str]()
    if (address := told.pop("elastic", None)) is not None:
        from unisono.launch.places.elastic import ElasticAgent as kind

        more["UNISONO_ELASTIC"] = address
    if told:
        place = Environment(kind="unisono", **told)
    else:
        place = detect({n: value for n, value in os.environ.items() if n not in _OF_OTHERS})
    try:
        job_files.check_ours(mail.dir)
        plan = Plan.read(mail.dir)
        plan.check_versions()
    except PlatformError as error:
        return _refuse(mail, place, error)
    return kind(mail, plan, place, node, more).run()


if __name__ == "__main__":
    sys.exit(main())
