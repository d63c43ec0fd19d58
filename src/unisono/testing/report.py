"""The one report about ranks that raised, died or did not come back; checks that all fail alike.

Its first line counts them; then, in the order in which they failed, every traceback (equal ones
once), how the dead ones died, where the others stand, and the last lines each printed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unisono.errors import name_ranks, ranks_by_text
from unisono.launch.pool.verdict import signal_name

if TYPE_CHECKING:
    from unisono.comm import Communicator

STACK_SIGNAL: int = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1
"""Makes a rank write its stacks. If possible, SIGUSR1 is left to the code under test."""
_TAIL_LINES = 40
_ADDRESSES = re.compile(r"\[[0-9.]+\]:[0-9]+|0x[0-9a-f]+")


@dataclass(frozen=True, kw_only=True)
class Raised:
    """What a rank reports of an exception."""

    text: str
    """The traceback."""
    summary: str = ""
    """The last line of it."""
    outcome: str = "error"
    """`"skip"`, `"xfail"`, `"assume"`, or `"error"` for everything else."""
    reason: str = ""
    """The exception as text."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What became of each rank of a world that failed."""

    world: int
    """Number of ranks."""
    doing: str = ""
    """What the ranks had been told to do, when it was not the test itself."""
    raised: Mapping[int, Raised] = field(default_factory=dict)
    """What ranks raised, first to fail first."""
    died: Mapping[int, int] = field(default_factory=dict)
    """Exit codes, or minus the number of a signal, first to die first."""
    waiting: Mapping[int, str] = field(default_factory=dict)
    """Stacks of ranks that had not come back."""
    waited: str = ""
    """How long was waited for them."""
    output: Mapping[int, str] = field(default_factory=dict)
    """What each rank had printed."""
    crashes: Mapping[int, str] = field(default_factory=dict)
    """What the interpreter wrote about a fatal error of a dead rank."""


class RankFailure(AssertionError):
    """Ranks raised, died or did not come back; the text tells it all.

    Attributes:
        world: number of ranks.
        raised: traceback of each rank that raised.
        died: how each dead rank ended, such as `"exit code 7"` or `"killed by SIGKILL"`.
        waiting: stacks of each rank that had not come back.
        output: what each rank had printed.
        summary: the first line, and the message of the rank that failed first.
    """

    def __init__(self, findings: Findings) -> None:
        super().__init__(write_report(findings))
        first = next((r.summary.partition("\n")[0] for r in findings.raised.values()), "")
        self.summary = headline(findings) + (f": {first}" if first else "")
        self.world = findings.world
        self.raised = {rank: raised.text for rank, raised in findings.raised.items()}
        self.died = {rank: how_it_died(code) for rank, code in findings.died.items()}
        self.waiting = dict(findings.waiting)
        self.output = dict(findings.output)
        self._findings = findings

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._findings,)


class LeakFound(AssertionError):
    """A test left things behind; the text names them, and the rank."""


def how_it_died(code: int) -> str:
    """Name an exit code, or minus the number of a signal.

    >>> how_it_died(7), how_it_died(-9)
    ('exit code 7', 'killed by SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def headline(findings: Findings) -> str:
    """Return the first line of the report.

    >>> headline(Findings(world=3, died={1: 7}, waiting={2: ""}))
    '1 of 3 ranks died (exit code 7), 1 still waiting, 1 returned'
    """
    parts: list[tuple[int, str]] = []
    if findings.raised:
        parts.append((len(findings.raised), "raised"))
    if findings.died:
        ways = " / ".join(dict.fromkeys(how_it_died(code) for code in findings.died.values()))
        parts.append((len(findings.died), f"died ({ways})"))
    if findings.waiting:
        parts.append((len(findings.waiting), "still waiting"))
    returned = findings.world - sum(count for count, _ in parts)
    if returned:
        parts.append((returned, "returned"))
    (count, what), *rest = parts
    text = f"{count} of {findings.world} ranks {what}"
    text += "".join(f", {count} {what}" for count, what in rest)
    return f"{text}, while {findings.doing}" if findings.doing else text


def write_report(findings: Findings) -> str:
    """Return the whole report as text."""
    sections = [headline(findings)]
    for rank, code in findings.died.items():
        crash = findings.crashes.get(rank, "")
        sections.append(_section(f"rank {rank} died: {how_it_died(code)}", crash))
    for ranks, text in _alike({rank: raised.text for rank, raised in findings.raised.items()}):
        sections.append(_section(f"{name_ranks(ranks)} raised", text))
    for ranks, text in _alike(findings.waiting):
        title = f"{name_ranks(ranks)} still waiting {findings.waited}".rstrip()
        sections.append(_section(title, text))
    for rank, text in sorted(findings.output.items()):
        if text.strip():
            sections.append(_section(f"rank {rank} printed", _tail(text)))
    return "\n".join(sections)


def _alike(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Group ranks whose texts differ in addresses at most, in the order of their first."""
    plain = {rank: _ADDRESSES.sub("*", text) for rank, text in texts.items()}
    return [(ranks, texts[ranks[0]]) for ranks in ranks_by_text(plain).values()]


def _section(title: str, text: str) -> str:
    rule = "-" * max(4, 96 - len(title))
    return f"---- {title} {rule}\n{text.rstrip()}".rstrip()


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) <= _TAIL_LINES:
        return "\n".join(lines)
    left_out = len(lines) - _TAIL_LINES
    return "\n".join([f"... {left_out} lines before ...", *lines[-_TAIL_LINES:]])


def name_of(function: object) -> str:
    """Return how a report calls a function or a module."""
    return getattr(function, "__name__", type(function).__name__)


def raise_together(title: str, problems: Sequence[str], *, comm: Communicator) -> None:
    """Raise one `AssertionError` on every rank if any rank found something. Collective.

    Args:
        title: what was checked.
        problems: what this rank found wrong; empty when all is well.
        comm: the ranks that take part.
    """
    __tracebackhide__ = True
    raise_what_was_found(title, comm.all_gather_object(list(problems)))


def raise_what_was_found(title: str, problems_by_rank: Sequence[Sequence[str]]) -> None:
    """Raise an `AssertionError` if there is anything in the lists that all ranks know."""
    __tracebackhide__ = True
    by_text: dict[str, list[int]] = {}
    for rank, texts in enumerate(problems_by_rank):
        for text in texts:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        lines = [_line(text, ranks, len(problems_by_rank)) for text, ranks in by_text.items()]
        raise AssertionError("\n".join([title, *lines]))


def _line(text: str, ranks: Sequence[int], size: int) -> str:
    where = "all ranks" if len(ranks) == size else name_ranks(ranks)
    indented = text.strip().replace("\n", "\n    ")
    return f"  {where}: {indented}" if size > 1 else f"  {indented}"
