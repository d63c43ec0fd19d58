"""`ResidentRanks`: ranks that stay and answer, for a caller that is not a rank.

They are a submitted job: supervised, ended with this process, with one error if any of them fails.
Each has an authenticated connection to the caller, over a socket that only this user can reach. It
waits there, in no collective, for the next question, and ends when the connection closes.
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
"""Longest wait for ranks to end by themselves before they are cancelled."""
LOOK_S = 0.2
"""Seconds between two checks whether the job still runs."""


class ResidentRanks:
    """Ranks that each make a function once, and then call it for each question.

    Args:
        make: called as `make(*args)` on each rank; returns the function that answers.
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
        """Whether the ranks were released, or have failed."""
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
        """End the ranks and wait until they have ended. Safe to repeat."""
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
        """Accept the connection of the next rank; the last one sorts them by rank."""
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
        except (EOFError, OSError):  # it has ended, and the job knows why
            self._fail()

    def _fail(self) -> NoReturn:
        """Raise the error that ended the ranks."""
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
    """Answer questions on a rank until the caller closes the connection."""
    answer = make(*args)
    with Client(path, "AF_UNIX", authkey=key) as line:
        line.send(int(os.environ["RANK"]))
        while True:
            try:
                question = line.recv()
            except EOFError:
                return
            line.send(answer(question))
