"""The exception family of unisono and the one builder of its messages.

Every message a user meets has up to four parts: what was asked, what was found (numbers, shapes,
ranks), the arithmetic that fails, and `HINT:` with one thing to type. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "CheckWarning",
    "CheckpointError",
    "CollectiveMismatch",
    "JobCancelled",
    "LayoutError",
    "MeshError",
    "MissingExtra",
    "PartitionError",
    "PlatformError",
    "RankFailed",
    "RankTimeout",
    "RemoteError",
    "Requeue",
    "UnisonoError",
    "compress_ranks",
    "explain",
]


SAVED_ALONE = "save is collective: remove the `if rank == 0:` around it; each rank writes its share"
"""What to do where other ranks do not come to a save."""


def explain(
    request: str, problem: str | None = None, arithmetic: str | None = None, hint: str | None = None
) -> str:
    """Build a message of the four parts, one line each; parts that are None are left out.

    >>> print(
    ...     explain("Mesh(data=2, graph=3)", "8 ranks", "2 * 3 = 6 != 8", "Mesh(data=2, graph=4)")
    ... )
    Mesh(data=2, graph=3)
      found: 8 ranks
      2 * 3 = 6 != 8
      HINT: Mesh(data=2, graph=4)
    """
    lines = [request]
    if problem:
        lines.append(f"  found: {_indented(problem)}")
    if arithmetic:
        lines.append(f"  {_indented(arithmetic)}")
    if hint:
        lines.append(f"  HINT: {_indented(hint)}")
    return "\n".join(lines)


def _indented(text: str) -> str:
    return text.strip("\n").replace("\n", "\n    ")


def an(word: str) -> str:
    """Put the article before a word.

    >>> an("int"), an("Linear")
    ('an int', 'a Linear')
    """
    return f"{'an' if word[:1].lower() in 'aeio' else 'a'} {word}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence.

    >>> name_ranks([3]), name_ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {compress_ranks(ranks)}"


def ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return which ranks have each text, in the order in which the texts first come.

    >>> ranks_by_text({0: "here", 1: "there", 2: "here"})
    {'here': [0, 2], 'there': [1]}
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return ranks


def grouped_stacks(stacks: Mapping[int, str], first: Sequence[int] = ()) -> str:
    """Write the stacks of several ranks; equal ones once, those of ranks `first` at the top.

    >>> print(grouped_stacks({0: "  a", 1: "  b", 2: "  a"}, first=[1]))
    --- rank 1
      b
    --- ranks 0, 2
      a
    """
    order = sorted(stacks, key=lambda rank: (rank not in first, rank))
    # Thread numbers differ between processes that stand at the same place.
    texts = {rank: re.sub(r"0x[0-9a-f]{8,}", "0x...", stacks[rank]) for rank in order}
    groups = ranks_by_text(texts).items()
    return "\n".join(f"--- {name_ranks(ranks)}\n{text}" for text, ranks in groups)


def compress_ranks(ranks: Sequence[int]) -> str:
    """Write a set of ranks the short way.

    >>> compress_ranks([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    ordered = sorted(set(ranks))
    runs: list[tuple[int, int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Spelling:
    """How a caller writes arguments, for errors: as a Python program does.

    The command line has one of its own.
    """

    def options(self, **values: Any) -> str:
        """Return arguments side by side.

        Example:
            >>> Spelling().options(on="cpu", ranks=2)
            "on='cpu', ranks=2"
        """
        return ", ".join(f"{name}={value!r}" for name, value in values.items())

    def run(self, **values: Any) -> str:
        """Return a call of `run` with these arguments."""
        return f"unisono.run(..., {self.options(**values)})"

    def platform(self, **values: Any) -> str:
        """Return a platform with these fields."""
        return f"Platform({self.options(**values)})"


PYTHON = Spelling()


class UnisonoError(RuntimeError):
    """Base of all errors of unisono; a `RuntimeError`, as callers of torch.distributed expect.

    Use `SomeError.because(request, problem, arithmetic, hint)` to build one in the four-part form.
    """

    @classmethod
    def because(
        cls,
        request: str,
        problem: str | None = None,
        arithmetic: str | None = None,
        hint: str | None = None,
    ) -> UnisonoError:
        """Return this kind of error with a four-part message."""
        return cls(explain(request, problem, arithmetic, hint))


class PlatformError(UnisonoError, ValueError):
    """A platform (device, ranks, nodes, backend) that is wrong or not to be had here."""


class MeshError(UnisonoError, ValueError):
    """Ranks, groups or mesh axes that do not fit each other."""


class PartitionError(UnisonoError, ValueError):
    """Sizes, dims or layouts of a tensor over ranks that do not fit each other."""


class LayoutError(UnisonoError, ValueError):
    """A replicated, sharded or partial tensor used where another kind is needed."""


class CheckWarning(UserWarning):
    """A silent mistake that was noticed: the program goes on, with another result than one process.

    `warnings.filterwarnings("error", category=CheckWarning)` makes errors of them.
    """


class CheckpointError(UnisonoError):
    """A checkpoint that cannot be written, is damaged, or does not fit what is to be restored."""


class CollectiveMismatch(UnisonoError):
    """Ranks of one group called different collectives, or the same one with unlike arguments.

    Attributes:
        calls: for each rank of the group, the text of its call.
        returned: ranks that make no more calls, because their function has returned, and what
            each had made and counted in the group.
    """

    def __init__(
        self,
        message: str,
        calls: Mapping[int, str] | None = None,
        *,
        returned: Mapping[int, Mapping[str, int]] | None = None,
    ) -> None:
        super().__init__(message)
        self.calls: dict[int, str] = dict(calls or {})
        self.returned: dict[int, dict[str, int]] = {r: dict(n) for r, n in (returned or {}).items()}


class RankFailed(UnisonoError):
    """A rank raised or died; the other ranks were stopped.

    Attributes:
        rank: the rank that failed first (in the world), or None when it is not known.
        host: the host it ran on.
        exit_code: its exit code when it died without a traceback.
        signal: the name of the signal that killed it.
        traceback: its own traceback, as text.
        exception: the original exception when it could travel to this process.
        consequences: ranks that were stopped because of it, and what they said.
        waiting: for ranks still running at that time, where they stood.
        log_tail: the last lines it printed.
        job_dir: directory with the logs.
        attempt: number of the attempt in which it failed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        exit_code: int | None = None,
        signal: str | None = None,
        traceback: str | None = None,
        exception: BaseException | None = None,
        consequences: Mapping[int, str] | None = None,
        waiting: Mapping[int, str] | None = None,
        log_tail: str | None = None,
        job_dir: str | None = None,
        attempt: int = 0,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.signal = signal
        self.traceback = traceback
        self.exception = exception
        self.consequences: dict[int, str] = dict(consequences or {})
        self.waiting: dict[int, str] = dict(waiting or {})
        self.log_tail = log_tail
        self.job_dir = job_dir
        self.attempt = attempt


class RankTimeout(UnisonoError, TimeoutError):
    """A deadline passed while ranks waited for each other; a `TimeoutError` too.

    Attributes:
        stacks: for each rank that answered, its Python stacks as text.
        missing: ranks that had not arrived in the call that timed out.
        op: the call that timed out.
        site: source line of that call.
        rank: the rank that the others waited for, when one can be named.
        last_collective: for each rank that answered, its last collective.
    """

    def __init__(
        self,
        message: str,
        *,
        stacks: Mapping[int, str] | None = None,
        missing: Sequence[int] = (),
        op: str | None = None,
        site: str | None = None,
        rank: int | None = None,
        last_collective: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.stacks: dict[int, str] = dict(stacks or {})
        self.missing: tuple[int, ...] = tuple(missing)
        self.op = op
        self.site = site
        self.rank = rank if rank is not None else (self.missing[0] if self.missing else None)
        self.last_collective: dict[int, str] = dict(last_collective or {})


class RemoteError(UnisonoError):
    """An exception of another process that could not travel; its text is the traceback."""


class JobCancelled(UnisonoError):
    """The job was cancelled before it ended.

    Attributes:
        job_id: id of the job.
    """

    def __init__(self, message: str, *, job_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class MissingExtra(UnisonoError, ImportError):
    """An optional dependency is needed; the message says which `pip install` brings it."""

    @classmethod
    def of(cls, extra: str, wanted_for: str, problem: str | None = None) -> MissingExtra:
        """Return the error for extra `extra` of this package."""
        return cls(explain(wanted_for, problem, hint=f'pip install "unisono[{extra}]"'))


class Requeue(BaseException):
    """Raised on all ranks by `unisono.requeue()`: saved, start me again. Not an `Exception`, so
    that `except Exception` in user code lets it pass.
    """
