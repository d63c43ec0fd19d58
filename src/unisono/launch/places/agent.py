"""The parent of one rank on some host: started there by `srun`, `mpiexec` or us, one each.

    python -m unisono.launch.places.agent DIRECTORY ATTEMPT [PLACE]

It turns what the rank says and how it ends, SIGKILL included, into files of the job's directory,
passes signals on, and obeys the orders it finds there. It unpickles nothing of the user's. Its
place among the ranks is told by the starter's variables, or in JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from unisono.environment import Environment, detect
from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.elastic.coordinator import LOST, OVER
from unisono.launch.elastic.supervisor import is_stopped
from unisono.launch.places import mailbox
from unisono.launch.places.elastic import address_for
from unisono.launch.places.mailbox import CANCEL, PAYLOAD, Orders, Plan
from unisono.launch.pool.client import RankProcess, spawn_rank
from unisono.launch.pool.monitor import RankMonitor
from unisono.launch.pool.protocol import Failed, RankState, read_available
from unisono.launch.pool.surroundings import MISLEADING, common_variables, rank_variables
from unisono.launch.supervisor import COLLECT_S

STOPPED_S = 0.5
"""How long a rank of an elastic job may stand still, stopped by a signal."""
DEATHS = 20
"""So many deaths of one rank are no accident."""
_OF_OTHERS = (*MISLEADING, "RANK", "UNISONO_RUN_ID")
"""What may be left from another launcher: the starter's own variables tell our place."""


class Agent(RankMonitor):
    """Watches over one rank from its start to its end."""

    def __init__(
        self, directory: Path, attempt: int, plan: Plan, place: Environment, node: str
    ) -> None:
        super().__init__(signal.Signals[plan.stack_signal])
        self._dir = directory
        self._plan = plan
        self._attempt = attempt
        self._node = node
        self._orders = Orders(directory, attempt)
        self._signals: list[int] = []
        self._is_dismissed = False
        self._stop_reason = ""
        self._interrupted_until: float | None = None
        self._heeded = {signal.Signals[name] for name in (*plan.stop_signals, plan.stack_signal)}
        self._heeded.add(signal.SIGTERM)
        self._place, self._deaths = place, 0
        self._stopped_since: float | None = None
        self._take_signals()
        self._rank = self._start(place)

    def run(self) -> int:
        """Stay until the rank has ended; return the exit code that tells the starter how."""
        began = time.monotonic()
        while (rank := self._rank).is_running and not rank.known.is_bad and not self._stop_reason:
            self._listen_for(mailbox.pause_s(time.monotonic() - began))
            if self._is_dismissed:
                self.finish()
                break
            if rank.known.is_bad and self._may_die(rank.known):
                self._replace(rank)
        known, failed = rank.known, rank.known.failed
        if failed is not None and self._plan.elastic is not None and OVER in failed.summary:
            self._end()  # the training was over before this rank could join it
            self._note("stopped")
            return 0
        if known.is_good and (self._is_dismissed or not rank.is_running):
            self._end()
            self._write()
            return 0
        if known.state == "died":
            self._note("stopped" if self._was_ended_by_starter() else "died")
        elif failed is None:
            self.note_places(is_deadline=self._stop_reason == "deadline")
            self._write()
        # Not before the others have learned of it, or shown where they stand, too.
        self.step_until(lambda: not rank.is_running, COLLECT_S)
        self._wait_for_others()
        self._end()
        return 1

    def _may_die(self, known: RankState) -> bool:
        """Whether others of an elastic job do what this rank was at, and a new one can join."""
        is_death = known.failed is None or LOST in known.failed.summary
        self._deaths += 1
        is_wanted = not self._stop_reason and not (self._dir / CANCEL).exists()
        return self._plan.elastic is not None and is_death and is_wanted and self._deaths < DEATHS

    def _replace(self, rank: RankProcess) -> None:
        """Start another rank in place of one that died."""
        if rank.is_running:
            rank.signal_group(signal.SIGKILL)
            rank.collect()
        for fd in rank.outputs:
            while data := read_available(fd):
                rank.log.write(data)
        self.drop(rank)
        self._rank = self._start(self._place)

    def _end_if_stopped(self) -> None:
        """Kill a rank of an elastic job that others wait for in vain."""
        if not self._rank.is_running or not is_stopped(self._rank.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        elif time.monotonic() > self._stopped_since + STOPPED_S:
            self._rank.signal_group(signal.SIGKILL)

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
        if self._plan.elastic is not None:
            self._end_if_stopped()

    def _was_ended_by_starter(self) -> bool:
        """Whether the rank was killed after another had failed: that is how starters clean up.

        Others that have noticed its end already do not count: their reports are consequences.
        """
        code = self._rank.known.exit_code
        if code not in (-signal.SIGKILL, -signal.SIGTERM):
            return False
        is_killed = code == -signal.SIGKILL
        return mailbox.has_failure(self._dir, self._attempt, but_consequences=is_killed)

    def _take_signals(self) -> None:
        read, write = os.pipe()
        for fd in (read, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in self._heeded:
            signal.signal(number, lambda n, _frame: self._signals.append(n))
        self.listen(read, lambda: read_available(read) != b"")

    def _start(self, place: Environment) -> RankProcess:
        """Start the rank; signals wait until it is ready for them."""
        plan = self._plan
        more = plan.env
        if plan.elastic is not None:
            address = address_for(self._dir, self._attempt)
            more = {"MKL_CBWR": "AUTO", **more, "UNISONO_ELASTIC": address}
        variables = common_variables(os.environ, threads=plan.cpus_per_rank, more=more)
        variables |= rank_variables(place, plan.run_id, self._dir, self._attempt)
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
        if self._attempt and not self._deaths:
            rank.log.write(f"--- attempt {self._attempt} on {rank.known.host}\n".encode())
        rank.known.attempt, rank.known.node = self._attempt, self._node
        rank.known.pid, rank.known.pid_start = rank.pid, job_files.process_start(rank.pid)
        self.watch(rank)
        mailbox.write_state(self._dir, rank.known)
        return rank

    def heard(self, rank: RankProcess, news: Any) -> None:
        """Leave what the rank says in files for others."""
        if (value := rank.value()) is not None and "state" in news:
            value.save(mailbox.result_path(self._dir, rank.rank))
        if "preempt" in news:
            self._orders.give(preempt=news["preempt"])
        failed = rank.known.failed
        is_loss = failed is not None and (LOST in failed.summary or OVER in failed.summary)
        if is_loss and self._plan.elastic is not None:
            return  # which is no failure there
        if "state" in news or "finishing_s" in news:
            mailbox.write_state(self._dir, rank.known)

    def _heed_signals(self) -> None:
        """Pass signals on. TERM after a failure elsewhere is the starter ending the world."""
        while self._signals:
            number = signal.Signals(self._signals.pop(0))
            if number is signal.SIGTERM and self._is_over():
                self._stop_reason = "another rank failed"
            else:
                self._rank.signal(number)

    def _is_over(self) -> bool:
        is_cancelled = (self._dir / CANCEL).exists()
        return is_cancelled or mailbox.has_failure(self._dir, self._attempt)

    def _heed_orders(self) -> None:
        for order in self._orders.new():
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
        if host == self._rank.known.host and job_files.process_start(pid) != start:
            self._stop_reason = "the launcher is gone"
            self._orders.give(stop=self._stop_reason)  # other hosts cannot see it

    def _end(self) -> None:
        """Stop the rank if it still runs, and take its last output."""
        self.end_all(self._plan.grace_s)
        self.close()

    def _note(self, state: str) -> None:
        self._rank.known.note(state)
        self._write()

    def _write(self) -> None:
        mailbox.write_state(self._dir, self._rank.known)


def _refuse(directory: Path, attempt: int, place: Environment, error: PlatformError) -> int:
    """Report an error that keeps the rank from being started."""
    text = str(error)
    failed = Failed(
        summary=f"PlatformError: {text.splitlines()[0]}",
        traceback=f"unisono.errors.PlatformError: {text}\n",
        pickled=None,
        is_consequence=False,
    )
    state = RankState(rank=place.rank, attempt=attempt, host=socket.gethostname())
    state.take({"state": "failed", "failed": failed})
    mailbox.write_state(directory, state)
    return 1


def main() -> int:
    """Be the agent that the command line and the environment describe."""
    directory, attempt = Path(sys.argv[1]), int(sys.argv[2])
    if sys.argv[3:]:
        told = json.loads(sys.argv[3])
        node = told.pop("name")
        place = Environment(kind="unisono", **told)
    else:
        node = os.environ.get("SLURMD_NODENAME", "")
        place = detect({n: value for n, value in os.environ.items() if n not in _OF_OTHERS})
    try:
        job_files.check_ours(directory)
        plan = Plan.read(directory)
        plan.check_versions()
    except PlatformError as error:
        return _refuse(directory, attempt, place, error)
    return Agent(directory, attempt, plan, place, node).run()


if __name__ == "__main__":
    sys.exit(main())
