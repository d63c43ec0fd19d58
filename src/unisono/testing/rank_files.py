"""What pool and ranks have agreed upon: files, the signal that asks for stacks, own fixtures."""

from __future__ import annotations

import signal
from pathlib import Path

STACK_SIGNAL: int = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1
"""Makes a rank write its stacks. If possible, SIGUSR1 is left to the code under test."""

REMADE_FIXTURES: tuple[str, ...] = ("monkeypatch",)
"""Fixtures that act on the process they live in, so each rank makes its own."""


def output_file(directory: Path, rank: int) -> Path:
    """File that takes what `rank` prints."""
    return directory / f"rank{rank}.out"


def stack_file(directory: Path, rank: int) -> Path:
    """File into which `rank` writes its stacks when asked, and the interpreter its last words."""
    return directory / f"rank{rank}.stack"
