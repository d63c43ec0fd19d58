"""What can be wrong with a request to this very cluster, found before anything is written."""

from __future__ import annotations

import difflib
import shutil
import sys
from collections.abc import Sequence

from unisono.errors import PlatformError
from unisono.launch.platform import Platform
from unisono.launch.slurm import commands
from unisono.launch.slurm.commands import Partition


def check_cluster(platform: Platform) -> str | None:
    """Return the partition to name in the batch script; raise `PlatformError` for a bad request."""
    check_programs()
    return choose_partition(platform, commands.partitions())


def choose_partition(platform: Platform, known: Sequence[Partition]) -> str | None:
    """Return the partition of this platform among those that are known, if it is to be named.

    One that the caller named must exist; the one of DDPW's default is left out on a cluster that
    does not have it, with a line that says so.
    """
    names = [partition.name for partition in known]
    wanted = platform.partition
    if wanted is not None and not set(wanted.split(",")) <= set(names):
        if platform.is_explicit("partition"):
            near = difflib.get_close_matches(wanted, names, n=1)
            raise PlatformError.because(
                f"Platform(partition={wanted!r})",
                f"partitions of this cluster are {', '.join(names) or 'none'}",
                None,
                f"partition={near[0]!r}" if near else "leave it out for the cluster's default",
            )
        default = next((partition.name for partition in known if partition.is_default), "none")
        print(
            f"unisono: this cluster has no partition {wanted!r}; the default one is {default}",
            file=sys.stderr,
        )
        wanted = None
    chosen = [p for p in known if (p.name in wanted.split(",") if wanted else p.is_default)]
    most = max((partition.nodes for partition in chosen), default=None)
    if most is not None and platform.n_nodes > most:
        raise PlatformError.because(
            f"{platform.n_nodes} nodes of partition {wanted or chosen[0].name!r}",
            f"it has {most}",
            f"{platform.n_nodes} nodes > {most}",
            f"nodes={most}",
        )
    return wanted


def check_programs() -> None:
    """Raise `PlatformError` unless jobs can be submitted from here."""
    for program in ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo"):
        if shutil.which(program) is None:
            raise commands.not_found(program)
