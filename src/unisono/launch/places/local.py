"""Ranks as processes of this host: started by the warm server or afresh, heard over pipes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from unisono.environment import Environment
from unisono.launch.elastic.policy import policy_of
from unisono.launch.logs import Console, RankStream, lent_to
from unisono.launch.pool.client import RankProcess, fork_ranks, spawn_rank, why_not
from unisono.launch.pool.monitor import STACKS_S, RankMonitor
from unisono.launch.pool.payload import Parcel, nameless_file
from unisono.launch.pool.protocol import (
    RankJob,
    RunPlan,
    payload_file,
    read_available,
)
from unisono.launch.pool.stacks import user_threads
from unisono.launch.pool.surroundings import rank_variables
from unisono.launch.supervisor import Ranks


class LocalRanks(RankMonitor, Ranks):
    """The ranks of one attempt on this host.

    Args:
        job: their function, arguments and surroundings.
        plan: of the run.
        attempt: number of the attempt.
        console: where their output is shown.
        job_dir: directory of the run.
    """

    def __init__(
        self,
        job: RankJob,
        plan: RunPlan,
        attempt: int,
        *,
        console: Console,
        job_dir: Path,
    ) -> None:
        super().__init__(signal.Signals[plan.stack_signal])
        self._job = job
        self._plan = plan
        self._attempt = attempt
        self._console = console
        self._job_dir = job_dir
        self._payload_fd = payload_file(job)
        self.policy = policy_of(plan, job_dir, shows=console.shows_any)
        self._shared_fds: tuple[int, ...] = ()
        self._stdin_rank = console.raw_rank
        if self.policy.replaces:
            self._shared_fds = nameless_file(), nameless_file()
            self._stdin_rank = None
        self._streams: dict[tuple[RankProcess, int], RankStream] = {}
        self._values: dict[int, Parcel] = {}
        self._at_end = ExitStack()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self.listen(self._wake_read, self._drain)

    def start(self) -> None:
        """Start all ranks; one may read our standard input."""
        self.start_some(range(self._plan.ranks))
        if self._stdin_rank is not None:
            self._at_end.enter_context(lent_to(self._ranks[self._stdin_rank].pid))

    def start_some(self, numbers: Sequence[int]) -> None:
        """Start these ranks and watch them."""
        size, job, ranks = self._plan.ranks, self._job, list[RankProcess]()
        variables_of: list[dict[str, str]] = []
        for n in numbers:
            place = Environment(kind="unisono", rank=n, size=size, local_rank=n, local_size=size)
            variables = rank_variables(place, self._plan.run_id, self._job_dir, self._attempt)
            variables_of.append(variables)
        if why_not(job.platform.spawn_method) is None:
            ranks = fork_ranks(
                variables_of,
                payload_fd=self._payload_fd,
                job_dir=self._job_dir,
                stdin_rank=self._stdin_rank,
                shared_fds=self._shared_fds,
                preload=(*self.policy.preload, *self._job.preload),
            )
            for rank in ranks:
                self.watch(rank)
        for number, variables in zip(numbers, variables_of, strict=True) if not ranks else ():
            self.watch(
                spawn_rank(
                    number,
                    size,
                    payload_fd=self._payload_fd,
                    env={**job.setting.environment, **variables},
                    job_dir=self._job_dir,
                    shared_fds=self._shared_fds,
                    stdin_fd=0 if number == self._stdin_rank else subprocess.DEVNULL,
                )
            )

    def wake(self) -> None:
        with suppress(OSError):  # the supervisor has ended
            os.write(self._wake_write, b".")

    def _drain(self) -> bool:
        read_available(self._wake_read)
        return True

    def interrupt(self, seconds: float) -> None:
        for rank in self._ranks:
            rank.order(interrupt=seconds)

    def stop(self, reason: str) -> None:
        if reason != "cancelled":
            self.note_places(is_deadline=reason == "deadline")
        self.end_all(self._plan.grace_s)

    def stacks(self) -> dict[int, str]:
        dumps = self.raw_stacks(self._ranks, STACKS_S)
        return {rank: user_threads(text) for rank, text in dumps.items()}

    def value(self, rank: int) -> Parcel:
        return self._values[rank]

    def close(self, *, at_once: bool | None = None) -> None:
        self._at_end.close()
        try:
            self.end_all(None if at_once else self._plan.grace_s)
        finally:
            for rank in self._ranks if at_once is None else ():
                if (value := rank.value()) is not None:
                    self._values[rank.rank] = value
            super().close()
            for fd in self._shared_fds:
                os.close(fd)
            wake_write, self._wake_write = self._wake_write, -1
            os.close(wake_write)
            os.close(self._wake_read)
            for stream in self._streams.values():  # which may raise: the pipe behind it is broken
                stream.close()

    def take_news(self, rank: RankProcess, news: Any) -> None:
        """Forward news that are for other ranks."""
        if "elastic" in news:
            self.policy.receive(rank.rank, news["elastic"])
            return
        for other in self._ranks:
            if "address" in news and other is not rank:
                other.order(master=news["address"])

    # Where ranks may die and join.

    def order_rank(self, rank: int, **order: Any) -> None:
        for process in self._at(rank):
            process.order(**order)

    def start_rank(self, rank: int) -> bool:
        self.forget_rank(rank)
        self.start_some([rank])
        return True

    def end_rank(self, rank: int, *, at_once: bool) -> None:
        for process in self._at(rank):
            if at_once:
                process.signal_group(signal.SIGKILL)
            else:
                self.states.remove(process.state)  # it ends as ordered
                process.order(stop=True)
                process.signal_group(signal.SIGTERM)

    def forget_rank(self, rank: int) -> None:
        for process in self._at(rank):
            self.let_go(process)

    def _at(self, rank: int) -> list[RankProcess]:
        return [process for process in self._ranks if process.rank == rank]

    def printed(self, rank: RankProcess, number: int, data: bytes) -> None:
        key = rank, number
        if key not in self._streams:
            self._streams[key] = self._console.stream(rank.rank, number)
        self._streams[key].feed(data)
