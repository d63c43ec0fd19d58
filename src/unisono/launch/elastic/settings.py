"""Options of `run` for ranks that may die and join, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.errors import PYTHON, PlatformError, Spelling
from unisono.launch.checks import COUNT
from unisono.launch.platform import Platform


@dataclass(frozen=True)
class Elastic:
    """How a job may grow and shrink."""

    least: int
    """With fewer members no step begins."""
    most: int
    """Never more ranks than that."""


def bounds(
    ranks: Any, elastic: bool | None, spelling: Spelling = PYTHON
) -> tuple[int | None, int | None]:
    """Return the fewest ranks, None for a world that stays as it is, and the most.

    >>> bounds((2, 8), None), bounds(4, True), bounds(4, None)
    ((2, 8), (1, 4), (None, 4))
    """
    if not isinstance(ranks, (tuple, list)):
        return (1 if elastic else None), ranks
    call = spelling.run(ranks=ranks)
    if len(ranks) != 2 or not all(map(COUNT.fits, ranks)) or ranks[0] > ranks[1]:
        finding = "not the fewest and the most ranks, each 1 or more"
        raise PlatformError.because(call, finding, None, spelling.options(ranks=(2, 8)))
    if elastic is False:
        finding = "elastic=False, so there is one number of ranks"
        raise PlatformError.because(call, finding, None, spelling.options(ranks=ranks[1]))
    return ranks[0], ranks[1]


def checked(
    place: str, platform: Platform, least: int | None, spelling: Spelling = PYTHON
) -> Elastic | None:
    """Return how the job may grow and shrink; None for a world that stays as it is."""
    if least is None or place == "inline":
        return None
    if place not in ("cpu", "gpu", "slurm", "ray"):
        raise PlatformError.because(
            spelling.run(on=place, elastic=True),
            "ranks of MPI end together: mpiexec ends all with the first that dies, and none can "
            "join its world later"
            if place == "mpi"
            else "members are processes of this host, on its CPU or its GPUs, or of a cluster",
            None,
            f"{spelling.options(on='cpu')} or gpu on one host; "
            f"{spelling.options(on='slurm')} or ray on several",
        )
    return Elastic(least, platform.world_size)
