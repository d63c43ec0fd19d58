"""What the pool asks of its ranks and what they answer, one dataclass a message.

A world lives from `Open` to `Close`; between them any number of `Call`. Each command gets one
reply. The user's function and values travel inside as bytes, so that a fault in them is theirs.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from unisono.launch.pool.protocol import Returned

STACK_SIGNAL: int = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1
"""Makes a rank write its stacks. If possible, SIGUSR1 is left to the code under test."""

REMADE_FIXTURES: tuple[str, ...] = ("monkeypatch",)
"""Fixtures that act on the process they live in, so each rank makes its own."""


@dataclass(frozen=True, kw_only=True)
class Open:
    """Join a fresh default process group."""

    world: int
    """Number of ranks."""
    store: str
    """Path of the file through which the ranks find each other."""
    secret: bytes
    """With it they sign what they leave each other."""
    backend: str
    """Backend of the group, as `torch.distributed.init_process_group` spells it."""
    group_timeout_s: float
    """After this long a collective raises."""
    environ: dict[str, str]
    """Environment of the test process."""
    cwd: str
    """Working directory of the test process."""
    path: list[str]
    """`sys.path` of the test process."""
    filters: bytes
    """Warning filters of the test process, pickled by cloudpickle."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Run a function."""

    payload: bytes
    """`(function, args, kwargs)`, pickled by cloudpickle."""
    seed: int
    """Seed of torch, numpy and random at the start of the call."""
    drawn: bytes = b""
    """More of `kwargs`, a dict pickled by cloudpickle; empty for none."""
    remake: tuple[str, ...] = ()
    """Names of keyword arguments that are pytest fixtures to be made in the rank."""
    keep: bool = True
    """Whether the returned value is sent back."""
    verbosity: int = 0
    """Verbosity of pytest's comparison of unequal values."""


@dataclass(frozen=True, kw_only=True)
class Close:
    """Leave the group and put the process back as it was before `Open`."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The group is there."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """A command raised."""

    text: str
    """The traceback."""
    summary: str
    """The last line of it."""
    outcome: str = "error"
    """`"skip"`, `"xfail"`, `"assume"`, or `"error"` for everything else."""
    reason: str = ""
    """The text given to `pytest.skip` or `pytest.xfail`."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The group is gone."""

    leaks: dict[str, list[str]] = field(default_factory=dict)
    """What the calls left behind: kind of thing -> descriptions."""
    reusable: bool = True
    """Whether everything left behind could be undone."""


Command = Open | Call | Close
Reply = Opened | Returned | Raised | Closed
"""`Returned` is that of the launcher: a large value stays in the file of results."""
