"""Ranks that have agents as parents, here or on other hosts, supervised over the control channel.

A place says how agents are started: by a program (`program.py`), or as actors of Ray. All else is
the same everywhere. An agent whose connection breaks has `lost_after_s` to reconnect, and its rank
goes on meanwhile; an agent that closes its connection, or is killed, is lost at once.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError
from unisono.launch.channel import Broken, ControlChannel, Listener, new_key
from unisono.launch.elastic.policy import policy_of
from unisono.launch.logs import FAILED, STDIN_VARIABLE, Console, RankLog, RankStream
from unisono.launch.places.agent import Invitation, chunks_of
from unisono.launch.pool import verdict
from unisono.launch.pool.monitor import LONGEST_S
from unisono.launch.pool.payload import Parcel, nameless_file
from unisono.launch.pool.protocol import (
    Failed,
    RankJob,
    RankState,
    RunPlan,
    own_versions,
    read_available,
    write_payload,
)
from unisono.launch.pool.stacks import ANSWER_S, user_threads
from unisono.launch.supervisor import Ranks
from unisono.processes import process_start

LEAVE_S = 15.0
"""Longest time from an order to the end of all agents."""
HUNG_UP_S = 1.0
"""How long an agent may take to reconnect after its connection was closed: that happens when it
ends, but a gateway may also close a connection that seems idle."""
ALL_INTERFACES = "0.0.0.0"


def payload_path(job_dir: Path, plan: RunPlan) -> Path:
    """Return the path of the file with the job of the ranks."""
    return job_dir / f"payload-{plan.run_id}"


@dataclass(eq=False)
class Seat:
    """What the supervisor knows of one rank and its agent."""

    state: RankState
    log: RankLog
    streams: list[RankStream]
    channel: ControlChannel | None = None
    value: Parcel | None = None
    """The return value, as far as it has arrived."""
    value_bytes: int = 0
    stack: str | None = None
    """The latest stack of the rank; None while the question is open."""
    lost_at: float | None = None
    """When it is given up, unless its agent reconnects."""
    left_at: float = 0.0
    """When its connection ended, by the clock of this host."""
    why_lost: str = ""
    is_over: bool = False
    """Whether its agent has sent its last message, or was given up."""

    def send(self, message: dict[str, Any]) -> None:
        """Send the agent a message, unless it has left."""
        if self.channel is not None and not self.is_over:
            self.channel.send(message)


class AgentRanks(Ranks):
    """The ranks of one attempt, each with an agent.

    Args:
        job: of the ranks; None if the directory has the payload already.
        plan: of the run.
        attempt: number of the attempt.
        console: where output is shown.
        job_dir: directory of the run.
        address: where agents find this process; None: on this host only.
    """

    hint = "the host may be out of memory, or gone"
    """What to check when an agent is lost."""

    def __init__(
        self,
        job: RankJob | None,
        plan: RunPlan,
        attempt: int,
        *,
        console: Console,
        job_dir: Path,
        address: str | None = None,
    ) -> None:
        if console.raw_rank is not None and job is not None:
            raise PlatformError.because(
                f'{STDIN_VARIABLE} with on="{job.platform.kind.value}"',
                "ranks of another program, which have no terminal",
                None,
                'on="cpu", where one rank can have it, or on="inline"',
            )
        self._plan = plan
        self._attempt = attempt
        self.policy = policy_of(plan, job_dir, shows=console.shows_any)
        self._console = console
        self._dir = job_dir
        self._directory = None if job is None else job.setting.directory
        self._payload = payload_path(job_dir, plan)
        if job is not None and not self._payload.exists():
            write_payload(job, self._payload)
        self._seats = [
            Seat(
                RankState(rank=rank, attempt=attempt),
                RankLog(job_dir / f"rank-{rank}.log"),
                [console.stream(rank, number) for number in (0, 1)],
            )
            for rank in range(plan.ranks)
        ]
        self.states = [seat.state for seat in self._seats]
        self._channels: dict[ControlChannel, Seat | None] = {}
        self._master: Any = None
        self._key = new_key()
        self._listener = Listener(self._key, address or "127.0.0.1")
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @cached_property
    def invitation(self) -> Invitation:
        """What an agent must know."""
        addresses = [self._listener.address]
        if self._listener.address == ALL_INTERFACES:
            from unisono.launch.places.rendezvous import candidates

            addresses = candidates()
        return Invitation(addresses=addresses, port=self._listener.port, key=self._key.hex())

    @abstractmethod
    def starter_has_ended(self) -> bool:
        """Whether no more agents will come, as those who start them have ended."""

    @abstractmethod
    def end_agents(self) -> None:
        """End all agents, and what started them."""

    def wait(self, timeout_s: float | None) -> bool:
        now = time.monotonic()
        ends = [seat.lost_at - now for seat in self._seats if seat.lost_at is not None]
        limits = [timeout_s, self._listener.seconds_left(), LONGEST_S, *ends]
        self._listener.prepare()
        events = self._selector.select(max(0.0, min(s for s in limits if s is not None)))
        for key, _ in events:
            if key.fileobj is self._listener:
                for channel, news in self._listener.news():
                    self._hear(channel, news)
            else:
                read_available(key.fd)
        self._give_up_lost()
        if self.starter_has_ended() and all(seat.lost_at is None for seat in self._seats):
            self.has_left = all(seat.is_over or seat.channel is None for seat in self._seats)
        return bool(events)

    def wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_write, b".")

    def interrupt(self, seconds: float) -> None:
        self._order(interrupt=seconds)

    def finish(self) -> None:
        self._order(finish=True)
        self.wait_for_agents()

    def stop(self, reason: str) -> None:
        self._order(stop=reason)
        self.wait_for_agents()

    def stacks(self) -> dict[int, str]:
        queried = [seat for seat in self._seats if not seat.is_over and "running" in seat.state.at]
        for seat in queried:
            seat.stack = None
            seat.send({"stack": True})
        end = time.monotonic() + ANSWER_S
        while any(seat.stack is None for seat in queried) and time.monotonic() < end:
            self.wait(max(0.0, end - time.monotonic()))
        return {seat.state.rank: user_threads(seat.stack) for seat in queried if seat.stack}

    def value(self, rank: int) -> Parcel:
        value = self._seats[rank].value
        if value is None:
            raise PlatformError(f"rank {rank} has returned nothing yet")
        return value

    def close(self, *, at_once: bool | None) -> None:
        try:
            if at_once is not None:
                self._order(stop="cancelled" if at_once else "the launcher was interrupted")
                self.wait_for_agents(0.5 if at_once else self._plan.grace_s + 2.0)
        finally:
            self._listener.close()
            for channel in self._channels:
                channel.detach()
            self.end_agents()
            self.starter_has_ended()
            self._end_ranks_here()
            self._selector.close()
            wake_write, self._wake_write = self._wake_write, -1
            os.close(wake_write)
            os.close(self._wake_read)
            for seat in self._seats:
                seat.log.close()
                for stream in seat.streams:
                    stream.close()

    # Messages of agents.

    def _hear(self, channel: ControlChannel, news: list[Any] | Broken | None) -> None:
        seat = self._channels.setdefault(channel, None)
        if news is None:
            if seat is not None:
                seat.lost_at = None
            return
        if isinstance(news, Broken):
            if seat is not None and not seat.is_over:
                limit_s = self._plan.lost_after_s
                if news.was_closed:
                    limit_s = min(limit_s, HUNG_UP_S)
                seat.lost_at, seat.left_at = time.monotonic() + limit_s, time.time()
                how = "ended" if news.was_closed else f"was away for {limit_s:g} s ({news})"
                seat.why_lost = f"was lost: its agent {how}"
            return
        for message in news:
            seat = self._channels[channel]
            if seat is None and "order" in message:
                self.visited(channel, message["order"])
            elif seat is None:
                self._seat(channel, message)
            else:
                self._take(seat, message)

    def visited(self, channel: ControlChannel, order: str) -> None:
        """Answer a process that has the key but is no agent, such as the handle on a job."""
        channel.send({"refused": order})

    def _seat(self, channel: ControlChannel, hello: dict[str, Any]) -> None:
        """Give a new agent its rank."""
        seat = self._seats[hello["rank"]]
        self._channels[channel] = seat
        seat.channel = channel
        seat.state.host, seat.state.node = hello["host"], hello["node"]
        if hello["versions"] != own_versions():
            ours, other = own_versions(), hello["versions"]
            error = PlatformError.because(
                f"a run of Python {ours[0]} with unisono {ours[1]}",
                f"on {seat.state.place}: Python {other[0]} with unisono {other[1]}",
                None,
                "the same environment on all hosts",
            )
            summary = f"PlatformError: {str(error).splitlines()[0]}"
            self._fail(seat, summary, traceback=f"unisono.errors.PlatformError: {error}\n")
            seat.send({"stop": "another version"})
            return
        if self._attempt:
            seat.log.write(f"--- attempt {self._attempt} on {seat.state.host}\n".encode())
        seat.send(
            {
                "plan": self._plan,
                "attempt": self._attempt,
                "payload": str(self._payload),
                "directory": self._directory,
            }
        )
        if self._master is not None:
            seat.send({"master": self._master})

    def _take(self, seat: Seat, message: dict[str, Any]) -> None:
        """Handle a message of an agent."""
        if "output" in message:
            seat.log.write(message["output"])
            seat.streams[message["stream"]].feed(message["output"])
        elif "state" in message:
            self._note(seat, message["state"])
        elif "value" in message:
            if seat.value is None:
                seat.value = Parcel(nameless_file(), is_owner=True)
            seat.value_bytes += os.pwrite(seat.value.fd, message["value"], seat.value_bytes)
        elif "stack" in message:
            seat.stack = message["stack"]
        elif "address" in message:
            self._master = message["address"]
            for other in self._seats:
                if other is not seat:
                    other.send({"master": self._master})
        elif "elastic" in message:
            self.policy.receive(seat.state.rank, message["elastic"])
        elif "wants" in message and seat.channel is not None:
            fd = os.open(self._payload, os.O_RDONLY | os.O_NOFOLLOW)
            seat.channel.stream(_then_closed(chunks_of("payload", fd), fd))
        elif "crash" in message:
            path = self._dir / f"rank-{seat.state.rank}.stack"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:  # noqa: PTH123
                file.write(message["crash"])
        elif "over" in message:
            seat.is_over = True

    def _note(self, seat: Seat, reported: RankState) -> None:
        """Update the state of a rank, with times by the clock of this host.

        A rank that is killed after another has failed is not the cause: starters clean up that way.
        """
        state = seat.state
        is_killed = reported.exit_code in (-signal.SIGKILL, -signal.SIGTERM)
        is_after = any(map(verdict.is_own, self.states)) and not self.policy.replaces
        if reported.state == "died" and is_killed and is_after:
            reported.note("stopped")
        if reported.failed is not None and state.failed is None:
            seat.log.write(FAILED + reported.failed.traceback.encode(errors="replace"))
        at, now = state.at, time.time()
        latest = max(reported.at.values(), default=0.0)
        for word, when in reported.at.items():  # what came together did not happen at once
            at.setdefault(word, now - (latest - when))
        here = {"rank": state.rank, "attempt": state.attempt, "at": at}
        vars(state).update(vars(reported) | here | {"host": state.host, "node": state.node})

    def _fail(self, seat: Seat, summary: str, *, traceback: str = "", hint: str = "") -> None:
        """Record the failure of a rank that cannot report it.

        Of agents that are lost one after the other the first is the cause: starters end the others.
        """
        failed = Failed(
            summary=summary,
            traceback=traceback or summary,
            pickled=None,
            is_consequence=bool(hint) and any(map(verdict.is_own, self.states)),
            lost=hint,
        )
        seat.state.take({"state": "failed", "failed": failed})

    def _give_up_lost(self) -> None:
        now = time.monotonic()
        for seat in sorted(self._seats, key=lambda seat: seat.left_at):
            if seat.lost_at is not None and seat.lost_at <= now:
                seat.lost_at, seat.is_over = None, True
                if seat.channel is not None:
                    self._listener.forget(seat.channel)
                self.lost(seat)

    def lost(self, seat: Seat) -> None:
        """Record that an agent is lost, and its rank with it."""
        if seat.state.is_over:
            return
        if self.policy.replaces:
            seat.state.note("died")
        else:
            self._fail(seat, seat.why_lost, hint=self.hint)

    # Where ranks may die and join.

    def order_rank(self, rank: int, **order: Any) -> None:
        self._seats[rank].send(order)

    def start_rank(self, rank: int) -> bool:
        seat = self._seats[rank]
        if seat.is_over and not self.start_agent(rank):
            return False
        self.forget_rank(rank)
        previous = seat.state
        seat.state = RankState(
            rank=rank, attempt=self._attempt, host=previous.host, node=previous.node
        )
        self.states.append(seat.state)
        seat.value, seat.value_bytes = None, 0
        if seat.is_over:
            seat.channel, seat.is_over = None, False  # it comes with a channel of its own
        else:
            seat.send({"start": True})
        return True

    def start_agent(self, rank: int) -> bool:
        """Replace a lost agent; return whether this place can do that."""
        del rank
        return False

    def end_rank(self, rank: int, *, at_once: bool) -> None:
        seat = self._seats[rank]
        if at_once:
            seat.send({"signal": "SIGKILL"})
        else:
            self.states.remove(seat.state)  # it ends as ordered
            seat.send({"retire": True})

    def forget_rank(self, rank: int) -> None:
        with suppress(ValueError):
            self.states.remove(self._seats[rank].state)

    # Orders to agents.

    def _order(self, **order: Any) -> None:
        for seat in self._seats:
            seat.send(order)

    def wait_for_agents(self, limit_s: float | None = None) -> None:
        """Wait for the last message of all agents; longer where a rank finishes a save."""
        begin = time.monotonic()
        if limit_s is None:
            limit_s = self._plan.grace_s + LEAVE_S
        while any(seat.channel is not None and not seat.is_over for seat in self._seats):
            longest = max(seat.state.finishing_s for seat in self._seats)
            if (remaining_s := begin + limit_s + longest - time.monotonic()) <= 0:
                break
            self.wait(remaining_s)

    def _end_ranks_here(self) -> None:
        """Kill ranks of this host that outlived their agents; a reused process id is left alone."""
        for state in self.states:
            is_here = state.pid and state.host == socket.gethostname()
            if is_here and process_start(state.pid) == state.pid_start:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(state.pid, signal.SIGKILL)


def _then_closed(messages: Any, fd: int) -> Any:
    try:
        yield from messages
    finally:
        os.close(fd)
