"""`ResidentRanks`: ranks that stay and answer, for a caller that is not a rank.

They are a submitted job: supervised, ended with this process, one error if any of them fails. Each
holds a connection to the caller, over a socket that only this user can reach, with a shared key; it
waits there, in no collective, until there is a question. The end of the connection is its end.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from unisono.errors import RankFailed
from unisono.launch.api import submit
from unisono.launch.job import Job

LEAVE_S = 10.0
"""Longest wait for ranks that were told to end; then they are made to."""
LOOK_S = 0.2
"""Seconds between two looks at whether the job still runs."""


class ResidentRanks:
    """Ranks that each make an answering function once, and then call it for each question.

    Args:
        make: called as `make(*args)` on each rank; what it returns answers questions.
        args: its arguments.
        ranks: number of ranks, on this host.

    >>> with ResidentRanks(lambda: lambda n: n + 1, ranks=2) as team:
    ...     team.ask(1), team.ask(5)
    ([2, 2], [6, 6])
    """

    def __init__(
        self, make: Callable[..., Callable[[Any], Any]], /, *args: Any, ranks: int
    ) -> None:
        folder = tempfile.mkdtemp(prefix="unisono-")  # for this user alone
        key, path = os.urandom(32), str(Path(folder) / "ranks")
        self._lines: list[Connection] = []
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(path)
                door.listen(ranks)
                door.settimeout(LOOK_S)
                self._job: Job = submit(_stay, make, args, path, key, on="cpu", ranks=ranks)
                self._end = weakref.finalize(self, _let_go, self._job, self._lines)
                while len(self._lines) < ranks:
                    self._welcome(door, key)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def is_closed(self) -> bool:
        """Whether the ranks have been let go, or have failed."""
        return not self._end.alive

    def ask(self, question: Any) -> list[Any]:
        """Return the answers of all ranks, in rank order.

        Raises:
            RankFailed: a rank raised or died, now or since the last question; all have ended.
        """
        data = pickle.dumps(question)
        waiting, answers = list(self._lines), dict.fromkeys(self._lines)
        try:
            for line in self._lines:
                line.send_bytes(data)
            while waiting:
                wait(waiting)
                for line in [line for line in waiting if line.poll()]:
                    answers[line] = line.recv()
                    waiting.remove(line)
        except (EOFError, OSError):
            self._fail()
        except BaseException:  # an interrupt: answers that come late would fit no question
            self.close()
            raise
        return [answers[line] for line in self._lines]

    def close(self) -> None:
        """End the ranks, and wait until they have. Safe to repeat."""
        if hasattr(self, "_end"):
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _welcome(self, door: socket.socket, key: bytes) -> None:
        """Take in the next rank; the order of lines is that of ranks."""
        try:
            caller, _ = door.accept()
        except TimeoutError:
            if self._job.done():
                self._fail()
            return
        line = Connection(caller.detach())
        self._lines.append(line)
        try:
            deliver_challenge(line, key)
            answer_challenge(line, key)
            if len(self._lines) == self._job.ranks:
                places = {line: line.recv() for line in self._lines}
                self._lines.sort(key=places.__getitem__)
        except (EOFError, OSError):  # it has ended, and why is the job's to tell
            self._fail()

    def _fail(self) -> NoReturn:
        """Raise what ended the ranks."""
        try:
            self._job.result(LEAVE_S)
        except TimeoutError:
            pass
        finally:
            self.close()
        raise RankFailed("resident ranks have ended, and left no error")


def _let_go(job: Job, lines: list[Connection]) -> None:
    for line in lines:
        line.close()
    if not job.wait(LEAVE_S if lines else 0):
        job.cancel()


def _stay(
    make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...], path: str, key: bytes
) -> None:
    """Answer on a rank until the caller hangs up."""
    answer = make(*args)
    with Client(path, "AF_UNIX", authkey=key) as line:
        line.send(int(os.environ["RANK"]))
        while True:
            try:
                question = line.recv()
            except EOFError:
                return
            line.send(answer(question))
