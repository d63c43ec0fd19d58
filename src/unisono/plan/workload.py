"""A model as the planner sees it: times, bytes and layers of one training step. Pure.

`profile.py` measures one; tests and users may also write one down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a pass over a batch on one core: a fixed part and one for each sample."""

    fixed_s: float
    sample_s: float

    def seconds(self, samples: float) -> float:
        """Return the time of `samples`."""
        return self.fixed_s + samples * self.sample_s


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One leaf of the model; shapes are those of one sample."""

    name: str
    kind: str
    parameter_bytes: int
    share: float
    """Of the time of the whole."""
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    reach: tuple[int, ...] = ()
    """Points beyond a block that it reads along each spatial dim, on both sides together."""


@dataclass(frozen=True, kw_only=True)
class SentBucket:
    """Gradients that travel together."""

    nbytes: int
    ready: float
    """Share of backward after which the last of them is there."""
    needed: float
    """Share of the next forward after which the first of their parameters is used."""


@dataclass(frozen=True)
class Sent:
    """One call of a verb by one rank."""

    verb: str
    """`exchange` or `all_reduce`."""
    bytes: int
    ranks: int
    """Ranks that take part; of an exchange, those that it sends to."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What the busiest rank of a team does, which has a part of each sample of the team."""

    refusal: str = ""
    """Why it cannot be, if so."""
    passes: Pace = Pace(fixed_s=0.0, sample_s=0.0)
    """Forward and backward of its part, by samples of the team, without waiting."""
    activation_bytes: float = 0.0
    """Kept from forward to backward for each sample of the team."""
    sent: Sequence[Sent] = ()
    """Everything it sends in a forward and a backward."""
    is_hidden: bool = False
    """Whether it computes while messages travel, as far as the link allows."""
    note: str = ""
    """What to know."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of a model; times are those of one core, alone."""

    name: str
    forward: Pace
    backward: Pace
    optimizer_s: float
    """One update of all parameters."""
    parameter_bytes: int
    state_bytes: int
    """What the optimizer keeps."""
    activation_bytes: float
    """Kept from forward to backward for each sample."""
    buckets: Sequence[SentBucket]
    """In the order in which they travel."""
    layers: Sequence[Layer] = ()
    graph: Callable[[int, float], Share] | None = None
    """`graph(ranks, samples)`: what a rank does when the graphs of `samples` are cut over ranks,
    without the sum of gradients."""
    is_bayesian: bool = False
    item_bytes: int = 4
    """Of a number."""

    @property
    def sent_bytes(self) -> int:
        """What all ranks add up in one step."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def held_bytes(self) -> int:
        """What a rank with all parameters holds beside activations."""
        return self.parameter_bytes + self.sent_bytes + self.state_bytes

    @property
    def whole(self) -> Share:
        """The share of a rank that is its own team."""
        a, b = self.forward, self.backward
        passes = Pace(fixed_s=a.fixed_s + b.fixed_s, sample_s=a.sample_s + b.sample_s)
        return Share(passes=passes, activation_bytes=self.activation_bytes)

    def compute(self, samples: float) -> float:
        """Return the seconds of forward, backward and update on one core."""
        return self.whole.passes.seconds(samples) + self.optimizer_s


def fit_pace(samples: Sequence[float], seconds: Sequence[float]) -> Pace:
    """Return the line through measured times, with neither part negative; least relative squares.

    >>> line = fit_pace([1, 2, 4], [3.0, 5.0, 9.0])
    >>> round(line.fixed_s, 6), round(line.sample_s, 6)
    (1.0, 2.0)
    """
    # Weights 1 / t^2: a small batch counts as much as a large one.
    rows = [(1 / t, n / t) for n, t in zip(samples, seconds, strict=True)]
    aa, ab, bb = (math.fsum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (math.fsum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        fixed, each = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if fixed >= 0 and each >= 0:
            return Pace(fixed_s=fixed, sample_s=each)
        if each < 0:
            return Pace(fixed_s=a / aa, sample_s=0.0)
    return Pace(fixed_s=0.0, sample_s=b / bb)
