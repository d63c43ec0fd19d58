"""What a way to split would cost, why another cannot be, and which waits are hidden. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a way makes a rank do in one training step."""

    compute_s: float
    """Forward, backward and update of a rank."""
    waiting_s: float
    """What of the communication is not hidden."""
    communication_s: float
    """All messages of a rank, whether it waits for them or not."""
    memory_bytes: float
    """Parameters, gradients, optimizer state and activations of a rank."""
    algorithm: str = "-"
    """How gradients are added."""
    note: str = ""
    """What to know."""


@dataclass(frozen=True, kw_only=True)
class Prediction(Cost):
    """One training step of all ranks."""

    way: str
    """How the work is split."""
    ranks: int
    """Ranks in all."""
    samples: float
    """Samples of all ranks."""
    alone_s: float
    """One rank that does the work of one rank, alone."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.waiting_s

    @property
    def communication_share(self) -> float:
        """Of the step."""
        return self.waiting_s / self.step_s if self.step_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.samples / self.step_s if self.step_s else 0.0

    @property
    def efficiency(self) -> float:
        """Throughput over that of as many ranks that do not have to talk.

        Above 1 where ranks share the update of the parameters, which those do whole.
        """
        return self.alone_s / self.step_s if self.step_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        return asdict(self) | {
            "step_s": self.step_s,
            "communication_share": self.communication_share,
            "samples_per_s": self.samples_per_s,
            "efficiency": self.efficiency,
        }


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A way that this model or these ranks do not allow."""

    way: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return both, for JSON."""
        return asdict(self)


# -- waiting for messages that travel while a rank computes --------------------------------------


def arrivals(ready: Sequence[float], durations: Sequence[float]) -> list[float]:
    """Return when each message has arrived; they go one after the other, each when it is ready.

    >>> arrivals([1.0, 2.0], [3.0, 1.0])
    [4.0, 5.0]
    """
    clock = 0.0
    times: list[float] = []
    for start, duration in zip(ready, durations, strict=True):
        clock = max(clock, start) + duration
        times.append(clock)
    return times


def waiting(
    ready: Sequence[float],
    durations: Sequence[float],
    needed: Sequence[float],
    backward_s: float,
    overlap: float,
) -> float:
    """Return how long a rank waits for messages that are sent during backward.

    Args:
        ready: when each can start, counted from the beginning of backward.
        durations: of each, on its own.
        needed: when each is used, counted from the end of backward; 0: by the update.
        backward_s: end of backward.
        overlap: share of a message's time that costs the computing rank nothing.
    """
    late = (
        arrived - backward_s - use
        for arrived, use in zip(arrivals(ready, durations), needed, strict=True)
    )
    return remaining(math.fsum(durations), max(0.0, *late, 0.0), overlap)


def remaining(total_s: float, ideal_s: float, overlap: float) -> float:
    """Return the wait of messages that take `total_s`, `ideal_s` of it with perfect overlap.

    >>> remaining(10.0, 2.0, 1.0), remaining(10.0, 2.0, 0.0)
    (2.0, 10.0)
    """
    return total_s - overlap * (total_s - min(ideal_s, total_s))
