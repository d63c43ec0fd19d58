"""The parent of one rank on some host: started there by mpiexec, srun or Ray, one for each rank.

    UNISONO_AGENT=INVITATION python -m unisono.launch.places.agent

It connects to the supervisor (`agents.py`), starts the rank, and forwards its messages, its output
and how it ended, SIGKILL included. Orders and signals go the other way. It never unpickles objects
of the user. While the connection is broken the rank goes on; a rank that prints faster than the
network has to wait.
"""

from __future__ import annotations

import json
import math
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.environment import Environment, detect
from unisono.errors import PlatformError
from unisono.launch.channel import Broken, Connection, ControlChannel, dial
from unisono.launch.job_files import check_ours
from unisono.launch.pool.cleanup import make_temporary_directory, remove_left_directories
from unisono.launch.pool.client import RankProcess, spawn_rank
from unisono.launch.pool.monitor import STACKS_S, RankMonitor
from unisono.launch.pool.payload import nameless_file
from unisono.launch.pool.protocol import RunPlan, own_versions, read_available
from unisono.launch.pool.surroundings import MISLEADING, common_variables, rank_variables
from unisono.processes import process_start

INVITATION = "UNISONO_AGENT"
"""Variable with an `Invitation`; ranks do not inherit it."""
_OF_OTHERS = (*MISLEADING, "RANK", "UNISONO_RUN_ID")
"""Variables that another launcher may have left; the starter sets its own."""
_CHUNK = (1 << 20) - 4096  # with what pickle adds, one frame
_DIAL_S = 3.0
"""Longest attempt to connect to one address; news of the rank wait meanwhile."""
_PAUSE_S = 0.2
"""Seconds between two attempts to reach the supervisor."""
CONNECT_S = 60.0
"""Longest wait for a supervisor that has just started this agent."""
LOOK_S = 0.2
"""Seconds between two checks whether a signal has stopped the rank of an elastic run."""
GONE = "the supervisor is gone"
"""Why an agent stops without an order."""
_REFUSED_S = 1.0
"""If its host refuses connections for so long, the supervisor is gone."""


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """Where agents find their supervisor, and the key that lets them in."""

    addresses: Sequence[str]
    port: int
    key: str

    def __str__(self) -> str:
        return json.dumps({"addresses": list(self.addresses), "port": self.port, "key": self.key})

    @classmethod
    def read(cls, text: str) -> Invitation:
        """Undo `str`."""
        return cls(**json.loads(text))

    def dial(self, channel: ControlChannel, timeout_s: float) -> Connection:
        """Connect a channel to the supervisor; raise `OSError` if it does not answer."""
        return dial(channel, bytes.fromhex(self.key), self.addresses, self.port, timeout_s)


class Agent(RankMonitor):
    """The parent of one rank, from start to end.

    Args:
        invitation: where the supervisor is.
        place: of the rank, among all.
        node: name of this host for users; "" if that is its host name.
        environment: variables that the rank inherits.
    """

    def __init__(
        self, invitation: Invitation, place: Environment, node: str, environment: Mapping[str, str]
    ) -> None:
        self._invitation = invitation
        self._channel = ControlChannel()
        self._refused_since = math.inf
        self._reach_until = time.monotonic() + CONNECT_S
        self._is_lost = False
        """Whether the supervisor is gone, or could not be reached for too long."""
        self._place = place
        self._environment = environment
        self._signals: list[int] = []
        self._orders: list[dict[str, Any]] = []
        self._is_finished = False
        self._stop_reason = ""
        self._hears_outputs = True
        self._own_dir: Path | None = None
        self._connect()
        self._send(
            {
                "rank": place.rank,
                "host": socket.gethostname(),
                "node": node,
                "versions": own_versions(),
            }
        )
        welcome = self._wait_for("plan")
        self._plan: RunPlan = welcome["plan"]
        self._attempt: int = welcome["attempt"]
        if welcome["directory"] is not None:
            with suppress(OSError):  # this host may not have it
                os.chdir(welcome["directory"])
        super().__init__(signal.Signals[self._plan.stack_signal])
        self.listen(self._channel.fileno(), self._hear)
        self._forwarded = {signal.SIGTERM, signal.Signals[self._plan.stack_signal]}
        self._forwarded |= {signal.Signals[name] for name in self._plan.stop_signals}
        self._take_signals()
        self._is_elastic = self._plan.elastic is not None
        # Its agent may have to start another rank, which must not see what this one has left.
        self._shared_fds = (nameless_file(), nameless_file()) if self._is_elastic else ()
        self._payload_fd = self._payload(Path(welcome["payload"]))
        self._rank = self._start()

    def run(self) -> str:
        """Supervise the rank to its end; return why it was stopped, "" if it was released."""
        try:
            while not self._is_finished and not self._stop_reason:
                self._turn(LOOK_S if self._is_elastic else None)
                if self._is_elastic:
                    self.kill_stopped()
            if self._is_finished:
                self.finish()
            elif self._stop_reason != "cancelled":
                self.note_places(is_deadline=self._stop_reason == "deadline")
                self._tell()
        finally:
            self._end()
        return self._stop_reason

    def _connect(self) -> None:
        """Connect for the first time; raise `PlatformError` if no supervisor answers."""
        invitation = self._invitation
        while not self._dial():
            if self._is_lost:
                at = ", ".join(f"{name}:{invitation.port}" for name in invitation.addresses)
                raise PlatformError.because(
                    f"an agent on {socket.gethostname()} connects to its supervisor",
                    f"no answer at {at} within {CONNECT_S:g} s",
                    None,
                    "Platform(master_addr=...) with an address that all hosts reach",
                )
            time.sleep(_PAUSE_S)

    def _dial(self) -> bool:
        """Try once to reach the supervisor; return whether it answers, and note if it is gone."""
        now = time.monotonic()
        try:
            self._channel.attach(self._invitation.dial(self._channel, _DIAL_S))
        except ConnectionRefusedError:
            self._refused_since = min(self._refused_since, now)
        except OSError:
            self._refused_since = math.inf
        else:
            self._refused_since = math.inf
            return True
        self._is_lost = now > min(self._reach_until, self._refused_since + _REFUSED_S)
        return False

    def _wait_for(self, word: str) -> dict[str, Any]:
        """Return the next message with this word; for messages before the start of the rank."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while True:
                for order in self._orders:
                    if word in order or "stop" in order:
                        self._orders.remove(order)
                        if word not in order:
                            raise PlatformError(f"stopped before the start: {order['stop']}")
                        return order
                selector.select()
                try:
                    self._orders += self._channel.receive()
                except Broken as error:
                    raise PlatformError(f"the supervisor hung up: {error}") from None

    def _payload(self, path: Path) -> int:
        """Return the file with the job of the rank: the one of the supervisor, or a copy."""
        with suppress(OSError, PlatformError):
            check_ours(path)
            self._dir = path.parent
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._own_dir = self._dir = make_temporary_directory(None)
        self._send({"wants": "payload"})
        fd, place = nameless_file(), 0
        while data := self._wait_for("payload")["payload"]:
            place += os.pwrite(fd, data, place)
        return fd

    def _start(self) -> RankProcess:
        """Start the rank; signals wait until it is ready for them."""
        plan, place = self._plan, self._place
        variables = common_variables(self._environment, threads=plan.cpus_per_rank, more=plan.env)
        variables |= rank_variables(place, plan.run_id, self._dir, self._attempt)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._forwarded)
        try:
            rank = spawn_rank(
                place.rank,
                place.size,
                payload_fd=self._payload_fd,
                env=variables,
                job_dir=self._dir,
                keeps_log=False,
                shared_fds=self._shared_fds,
                has_own_path=True,
                kept_fds=mpi_descriptors(variables),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        rank.state.pid, rank.state.pid_start = rank.pid, process_start(rank.pid)
        self.watch(rank)
        self._tell(rank)
        return rank

    def take_news(self, rank: RankProcess, news: Any) -> None:
        if news.get("state") == "returned":
            self._channel.stream(chunks_of("value", rank.result))
        if "state" in news or "finishing_s" in news or "standing" in news:
            self._tell(rank)
        names = ("address", "elastic")
        if others := {name: news[name] for name in names if name in news}:
            self._send(others)

    def printed(self, rank: RankProcess, number: int, data: bytes) -> None:
        del rank
        self._send({"output": data, "stream": number})

    def _tell(self, rank: RankProcess | None = None) -> None:
        """Report the state of the rank to the supervisor."""
        self._send({"state": (rank or self._rank).state})

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.send(message)

    def _turn(self, timeout_s: float | None) -> None:
        """Handle news of the rank, orders of the supervisor, and signals."""
        was_running = self._rank.is_running
        self._listen_for_room()
        self.wait(timeout_s)
        if was_running and not self._rank.is_running:
            self._tell()
        while self._signals:
            self._rank.signal(self._signals.pop(0))
        while self._orders:
            self._obey(self._orders.pop(0))

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for news at most `timeout_s` and handle all of it; send what is queued.

        Without a connection, try to reach the supervisor again.
        """
        if not self._channel.is_connected and not self._is_lost:
            if self._dial():
                self.listen(self._channel.fileno(), self._hear)
            elif self._is_lost:
                self._stop_reason = self._stop_reason or GONE
                return False
            timeout_s = _PAUSE_S if timeout_s is None else min(timeout_s, _PAUSE_S)
        if self._channel.is_connected:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * self._channel.wants_write
            key = self._selector.get_key(self._channel.fileno())
            if key.events != events:
                self._selector.modify(key.fd, events, key.data)
        return super().wait(timeout_s)

    def _listen_for_room(self, *, to_the_end: bool = False) -> None:
        """Read the output of the rank only while it can be forwarded; else the rank waits."""
        has_room = to_the_end or self._channel.has_room
        if has_room == self._hears_outputs:
            return
        self._hears_outputs = has_room
        for number, fd in enumerate(self._rank.outputs):
            if has_room:
                self.listen(fd, self._read_output, self._rank, number, fd)
            else:
                with suppress(KeyError):  # at its end
                    self._selector.unregister(fd)

    def _obey(self, order: dict[str, Any]) -> None:
        if "stop" in order:
            self._stop_reason = str(order["stop"])
        elif "finish" in order:
            self._is_finished = True
        elif "stack" in order:
            dumps = self.raw_stacks([self._rank], STACKS_S)
            self._send({"stack": dumps.get(self._rank.rank, "")})
        elif "start" in order:
            self.let_go(self._rank)
            self._hears_outputs = True
            self._rank = self._start()
        elif "retire" in order:
            self._rank.order(stop=True)
            self._rank.signal_group(signal.SIGTERM)
        elif "signal" in order:
            self._rank.signal(signal.Signals[order["signal"]])
        else:
            self._rank.order(**order)

    def _hear(self) -> bool:
        """Receive orders; from the end of the connection on, `wait` reconnects."""
        self._channel.flush()
        try:
            self._orders += self._channel.receive()
        except Broken:
            self._selector.unregister(self._channel.fileno())
            self._channel.detach()
            self._reach_until = time.monotonic() + self._plan.lost_after_s
        return True

    def _take_signals(self) -> None:
        read, write = os.pipe()
        for fd in (read, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in self._forwarded:
            signal.signal(number, lambda n, _frame: self._signals.append(n))
        self.listen(read, lambda: read_available(read) != b"")

    def _end(self) -> None:
        """Stop the rank if it runs, forward its last messages, and clean up."""
        try:
            self._listen_for_room(to_the_end=True)
            self.end_all(self._plan.grace_s)
            if self._own_dir is not None:
                with suppress(OSError):
                    self._send({"crash": self._rank.stack_path.read_bytes()})
            self._tell()
            self._send({"over": True})
            self.step_until(
                lambda: self._channel.is_drained or self._is_lost, self._plan.lost_after_s
            )
        finally:
            self._channel.detach()
            self.close()
            for fd in (self._payload_fd, *self._shared_fds):
                os.close(fd)
            if self._own_dir is not None:
                shutil.rmtree(self._own_dir, ignore_errors=True)
            elif self._is_lost:  # a launcher that was killed has left its directory
                remove_left_directories(self._dir.parent)


def chunks_of(word: str, fd: int) -> Iterator[dict[str, bytes]]:
    """Yield the content of a file as messages; the last one is empty."""
    place = 0
    while data := os.pread(fd, _CHUNK, place):
        place += len(data)
        yield {word: data}
    yield {word: b""}


def mpi_descriptors(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the descriptors by which an MPI library in a rank talks to its starter."""
    with suppress(KeyError, ValueError, OSError):  # of a step around this one, it is closed
        fd = int(environment["PMI_FD"])
        os.fstat(fd)
        return (fd,)
    return ()


def attend(invitation: Invitation, environment: Mapping[str, str]) -> str:
    """Run the agent of the rank that `environment` describes.

    Returns:
        Why it was stopped; "" if its rank was released.
    """
    place = detect({n: value for n, value in environment.items() if n not in _OF_OTHERS})
    return Agent(invitation, place, environment.get("SLURMD_NODENAME", ""), environment).run()


def visit(invitation: Invitation, order: str, timeout_s: float) -> dict[str, Any] | None:
    """Send a supervisor an order from outside of its run; return its answer.

    Args:
        invitation: where it is.
        order: what to do.
        timeout_s: longest wait for the answer.

    Returns:
        {} without an answer in time, None if the supervisor cannot be reached.
    """
    channel = ControlChannel()
    try:
        channel.attach(invitation.dial(channel, timeout_s))
        channel.send({"order": order})
        end = time.monotonic() + timeout_s
        while (remaining_s := end - time.monotonic()) > 0:
            if select.select([channel], [], [], remaining_s)[0]:
                for answer in channel.receive():
                    return answer
        return {}
    except (OSError, Broken):
        return None
    finally:
        channel.detach()


def main() -> int:
    """Run the agent that the environment describes."""
    if Path.cwd() == Path("/"):  # where mpiexec starts agents of other hosts
        with suppress(OSError, RuntimeError):
            os.chdir(Path.home())
    environment = dict(os.environ)
    attend(Invitation.read(environment.pop(INVITATION)), environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
