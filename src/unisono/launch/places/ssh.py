"""Ranks on hosts that are reached by ssh: one connection for each host, and nothing else.

    python -m unisono.launch.places.ssh DIRECTORY ATTEMPT      here, started by the launcher
    python -m unisono.launch.places.ssh                        there, at the other end of ssh

The command that ssh runs has neither a secret nor a path of the job in it: all that a host is told
goes through the connection, as does all that comes back (`mirror.py`). A message is a line of
plain data and bytes after it; nothing is unpickled.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.logs import tail
from unisono.launch.places.mailbox import Plan
from unisono.launch.places.mirror import (
    SILENT_S,
    Change,
    Host,
    Link,
    Lost,
    follow_all,
    on_copies,
    places_of,
)
from unisono.launch.places.program import LaunchedRanks
from unisono.launch.platform import Platform
from unisono.launch.pool.protocol import Job

CONNECT_S = 10
"""Deadline of ssh for a connection."""
_BEGIN = b"\0unisono\0"
"""What a shell may print before this is not for us."""
_LENGTH = struct.Struct("<Q")
_MODULE = "unisono.launch.places.ssh"
_NOISE = re.compile(r"Warning: Permanently added .*|\s*")


def ssh_ranks(job: Job, plan: Plan, attempt: int, **shown: Any) -> LaunchedRanks:
    """Return the ranks of a job on the hosts of its platform; see `on_copies`."""
    platform = job.platform
    entry = {
        "hosts": list(platform.hosts),
        "args": list(platform.ssh_args),
        "python": platform.python or sys.executable,
    }
    return on_copies(job, plan, attempt, entry, **shown)


def check_hosts(platform: Platform) -> None:
    """Raise `PlatformError` unless the hosts of a platform make sense."""
    hosts, nodes = list(platform.hosts), platform.n_nodes
    strange = next((h for h in hosts if h.startswith("-") or h.split() != [h]), None)
    twice = next((host for host, count in Counter(hosts).items() if count > 1), None)
    names = 'names as ssh takes them: hosts=["a", "user@b"]'
    blocks = f"each host once, and ranks={len(hosts)} for more ranks on each"
    for is_wrong, found, hint in (
        (not hosts, "no hosts", 'hosts=["a", "b"], or --hosts a,b'),
        (strange is not None, f"{strange!r} is not the name of a host", names),
        (twice is not None, f"{twice!r} more than once", blocks),
        (nodes != len(hosts), f"{nodes} nodes != {len(hosts)} hosts", "leave nodes out"),
    ):
        if is_wrong:
            asked = f'unisono.run(..., on="ssh", hosts={hosts!r})'
            raise PlatformError.because(asked, found, None, hint)


def check_program() -> None:
    """Raise `PlatformError` where there is no ssh."""
    if shutil.which("ssh") is None:
        raise PlatformError.because(
            'unisono.run(..., on="ssh")', "no ssh on PATH", None, "apt install openssh-client"
        )


def ssh_command(host: str, python: str, args: Sequence[str]) -> list[str]:
    """Return the words that start our program on a host.

    It asks for no password (nobody could type one), and gives up on a connection that is dead.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": 3,
        "ServerAliveCountMax": 3,
    }
    words = [f"-o{name}={value}" for name, value in options.items()]
    there = f"exec {shlex.quote(python)} -P -m {_MODULE}"
    return ["ssh", "-T", *args, *words, "--", host, there]


class Channel:
    """Messages over two descriptors: plain data, and the bytes of files."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd

    def send(self, head: Mapping[str, Any], changes: Sequence[Change] = ()) -> None:
        """Send one message; raises `Lost` where nobody takes it."""
        sizes = [(change.name, change.offset, len(change.data)) for change in changes]
        packed = json.dumps({**head, "changes": sizes}).encode()
        try:
            for part in (_LENGTH.pack(len(packed)), packed, *(change.data for change in changes)):
                view = memoryview(part)
                while view:
                    view = view[os.write(self._write_fd, view) :]
        except OSError:
            raise Lost("the connection broke") from None

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], list[Change]]:
        """Wait for one message; raises `Lost` where none comes."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, timeout_s))
        head = json.loads(self._read(length, SILENT_S))
        sizes = head.pop("changes")
        return head, [Change(n, self._read(size, SILENT_S), offset) for n, offset, size in sizes]

    def skip_to_begin(self, timeout_s: float) -> None:
        """Drop what comes before the first message."""
        seen = b""
        while not seen.endswith(_BEGIN):
            seen = seen[-len(_BEGIN) :] + self._read(1, timeout_s)

    def _read(self, size: int, timeout_s: float) -> bytes:
        """Return `size` bytes, of which some come at least every `timeout_s`."""
        data = bytearray()
        while len(data) < size:
            if not select.select([self._read_fd], [], [], timeout_s)[0]:
                raise Lost(f"no word for {timeout_s:g} s")
            if not (piece := os.read(self._read_fd, min(1 << 20, size - len(data)))):
                raise Lost("the connection broke")
            data += piece
        return bytes(data)


class Connection(Link):
    """An ssh to one host, and what is said through it.

    Args:
        places: of the ranks of this host.
        entry: what `job.json` says.
        directory: of the job.
        attempt: number of the attempt.
    """

    def __init__(
        self,
        places: Sequence[Mapping[str, Any]],
        entry: Mapping[str, Any],
        directory: Path,
        attempt: int,
    ) -> None:
        super().__init__(places, entry["plan"]["start_timeout_s"])
        python, args = entry["ssh"]["python"], entry["ssh"]["args"]
        self.hint = f"ssh {shlex.quote(self.host)} {python} -m unisono doctor"
        self._log = directory / f"ssh-{self.ranks[0]}.log"
        output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._ssh = subprocess.Popen(
                ssh_command(self.host, python, args),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
            )
        finally:
            os.close(output)
        self._pipes = self._ssh.stdin, self._ssh.stdout
        self._channel = Channel(*(pipe.fileno() for pipe in self._pipes[::-1] if pipe is not None))
        self._first = {"attempt": attempt, "places": list(places), "cwd": entry["cwd"]}

    def exchange(self, changes: Sequence[Change]) -> tuple[list[Change], bool]:
        try:
            if not self.has_answered:
                self._channel.skip_to_begin(self.limit_s)
                self._channel.send(self._first)
                self.has_answered = True
            self._channel.send({}, changes)
            head, found = self._channel.receive(SILENT_S)
        except Lost as loss:
            raise Lost(self._words(loss)) from None
        return found, head["over"]

    def abort(self) -> None:
        self._ssh.kill()

    def close(self) -> None:
        for pipe in self._pipes:
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(SILENT_S)
        self._ssh.kill()
        self._ssh.wait()

    def _words(self, loss: Lost) -> str:
        """Say what happened, in the words of ssh if it has any."""
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(1.0)
        lines = [line for line in tail(self._log).splitlines() if not _NOISE.fullmatch(line)]
        found = lines[-1] if lines else str(loss)
        if self.has_answered:
            return f"was lost: {found}"
        return f"could not be started: {found}"


def _serve() -> int:
    """Be a host, until its ranks have ended or the launcher is silent."""
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(2, 1)  # a stray print is not a message
    with open(os.devnull) as null:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
    os.write(channel._write_fd, _BEGIN)
    try:
        first, _ = channel.receive(SILENT_S)
        host = Host(**first)
    except Lost:
        return 1
    try:
        while True:
            _, changes = channel.receive(SILENT_S)
            found, is_over = host.exchange(changes)
            channel.send({"over": is_over}, found)
    except Lost:
        return 0
    finally:
        host.close()


def _start(directory: Path, attempt: int) -> int:
    """Be the program that starts ranks on all hosts."""
    entry = job_files.read_state(directory)
    hosts, per_host = entry["ssh"]["hosts"], entry["plan"]["ranks_per_node"]
    places = places_of([host for host in hosts for _ in range(per_host)], {h: h for h in hosts})
    links = [
        Connection(list(of_host), entry, directory, attempt)
        for _, of_host in itertools.groupby(places, key=itemgetter("node"))
    ]
    follow_all(directory, attempt, links)
    return 0


if __name__ == "__main__":
    sys.exit(_start(Path(sys.argv[1]), int(sys.argv[2])) if sys.argv[1:] else _serve())
