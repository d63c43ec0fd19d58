"""Options of `run` for ranks that may die and join, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import PYTHON, PlatformError, Spelling
from unisono.launch.fields import COUNT
from unisono.launch.job_files import check_ours
from unisono.launch.platform import Platform

if TYPE_CHECKING:
    from unisono.launch.places.agent import Invitation


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How a job may grow and shrink."""

    least: int
    """With fewer members no step begins."""
    most: int
    """Never more ranks than that."""
    invite: Path | None = None
    """Where to leave an invitation for other hosts."""
    join: Invitation | None = None
    """Where the launcher is whose training these ranks join."""


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
    place: str,
    platform: Platform,
    least: int | None,
    invite: str | Path | None = None,
    join: str | Path | None = None,
    spelling: Spelling = PYTHON,
) -> Elastic | None:
    """Return how the job may grow and shrink; None for a world that stays as it is.

    `invite` is where to leave an invitation for other hosts, `join` where one was left; `spelling`
    is how the caller writes options, in errors.
    """
    if least is None:
        return None
    if place == "inline":
        return None
    call = spelling.run(on=place, elastic=True)
    by_hosts = "unisono run --elastic --invite FILE here and unisono run --join FILE on other hosts"
    if place in ("slurm", "ray"):
        if invite is not None or join is not None:
            raise PlatformError.because(
                f"{call} with --invite or --join",
                "the nodes of the job are all that its ranks come from",
                None,
                "these options without on",
            )
    elif place not in ("cpu", "gpu") or platform.n_nodes > 1:
        raise PlatformError.because(
            call,
            "ranks of MPI end together: mpiexec ends all with the first that dies, and none can "
            "join its world later"
            if place == "mpi"
            else "members are processes of this host, on its CPU or its GPUs, and those that other "
            "hosts send to it",
            None,
            f"{spelling.options(on='cpu')} or gpu on one host; {by_hosts}; "
            f"{spelling.options(on='slurm')} or ray for a cluster",
        )
    return Elastic(
        least=least,
        most=platform.world_size,
        invite=None if invite is None else Path(invite).absolute(),
        join=None if join is None else _invitation(Path(join)),
    )


def _invitation(path: Path) -> Invitation:
    """Read what `--invite` has written."""
    from unisono.launch.places.agent import Invitation

    check_ours(path)
    try:
        return Invitation.read(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise PlatformError.because(
            f"--join {path}",
            f"no invitation: {error}",
            None,
            "the file that --invite FILE has written",
        ) from None
