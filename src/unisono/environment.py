"""Which world is this process in? Read from environment variables, and from nothing else.

`detect` is a pure function of a mapping: no torch, no file, no subprocess. Each launcher that we
know is one `_Names` record, so a new one is one more record and one more condition.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from unisono.errors import PlatformError

__all__ = ["RANK_PID", "Environment", "Kind", "detect", "expand_tasks_per_node", "rank_mark"]

RANK_PID = "UNISONO_RANK_PID"
"""Variable with the mark of the rank from whose environment this process has its variables."""
_PLACE = (
    *("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID", "SLURM_PROCID"),
)
"""A launcher that starts a process as a rank of its own changes at least one of these."""

Kind = Literal["off", "bare", "unisono", "torchrun", "openmpi", "mpich", "slurm"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Which rank this process is, in the world that a launcher started."""

    kind: Kind
    """Which launcher started the world; `bare` and `off` are a process on its own."""
    rank: int = 0
    """Rank in the world."""
    size: int = 1
    """Number of ranks in the world."""
    local_rank: int = 0
    """Rank among those of this node."""
    local_size: int = 1
    """Number of ranks on this node."""
    node: int = 0
    """Number of this node."""
    nodes: int = 1
    """Number of nodes."""
    master: tuple[str, int] | None = None
    """Address and port of the store of rank 0, if known beforehand."""
    job_dir: Path | None = None
    """Directory of this run, if it has one."""

    @property
    def is_world(self) -> bool:
        """Whether a launcher started this process as one of its ranks."""
        return self.kind not in ("off", "bare")


class _Names(NamedTuple):
    """Variables of one launcher; None for what it does not say."""

    rank: str
    size: str
    local_rank: str
    local_size: str | None
    node: str | None = None
    nodes: str | None = None


_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_NAMES: dict[Kind, _Names] = {
    "unisono": _Names(*_OURS, "NODE_RANK", "GROUP_WORLD_SIZE"),
    "torchrun": _Names(*_OURS, "GROUP_RANK", "GROUP_WORLD_SIZE"),
    "openmpi": _Names(
        *(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    "mpich": _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": _Names(
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        *(None, "SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ),
}


def detect(env: Mapping[str, str] | None = None) -> Environment:
    """Return the world that the variables in `env` (default: this process's) describe.

    It is an `Environment` of kind `bare` (a world of one rank) if no launcher is found, and of kind
    `off` with `UNISONO_DETECT=0`. A process that a rank has started is `bare`, too, although it has
    inherited the variables of that rank.

    Example:
        >>> detect(
        ...     {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "4000"}
        ... ).rank
        1
    """
    env = os.environ if env is None else env
    kind = _kind(env)
    if kind in ("off", "bare"):
        return Environment(kind=kind, job_dir=_job_dir(env))
    return _read(kind, _NAMES[kind], env)


def rank_mark(env: Mapping[str, str], pid: int) -> str:
    """Return the mark of a rank with these variables: its process and its place.

    A process that the rank starts inherits all of them, but is not a rank: its pid differs.
    """
    return ":".join((str(pid), *(env.get(name, "") for name in _PLACE)))


def _kind(env: Mapping[str, str]) -> Kind:
    """Return the first kind whose condition holds."""
    if env.get("UNISONO_DETECT") == "0":
        return "off"
    owner = env.get(RANK_PID, "").partition(":")[0]
    is_child = owner.isdigit() and int(owner) != os.getpid()
    if is_child and env[RANK_PID] == rank_mark(env, int(owner)):
        return "bare"
    # A child whose variables differ from the rank's: another launcher, started by a rank, set them.
    if not is_child and "UNISONO_RUN_ID" in env and "RANK" in env:
        return "unisono"
    if "TORCHELASTIC_RUN_ID" in env or all(
        name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ):
        return "torchrun"
    if "OMPI_COMM_WORLD_SIZE" in env:
        return "openmpi"
    in_slurm_step = "SLURM_STEP_ID" in env
    # srun sets PMI's variables, too; and in an allocation mpiexec starts its ranks by srun, whose
    # step has one task per node. Only mpiexec counts the ranks of a node.
    by_mpiexec = "MPI_LOCALNRANKS" in env or not in_slurm_step
    if "PMI_SIZE" in env and "PMI_RANK" in env and by_mpiexec:
        return "mpich"
    # A batch script has SLURM_PROCID but no step, and `srun --pty bash` is a step of one task:
    # neither is a rank of a world.
    if in_slurm_step and _integer(env, "SLURM_STEP_NUM_TASKS", default=1) > 1:
        return "slurm"
    return "bare"


def _read(kind: Kind, names: _Names, env: Mapping[str, str]) -> Environment:
    """Read what `names` says, and check that the numbers fit each other."""
    rank = _integer(env, names.rank)
    size = _integer(env, names.size)
    if not 0 <= rank < size:
        raise PlatformError.because(
            f"{names.rank}={rank} and {names.size}={size} ({kind})",
            "a rank outside of its world",
            f"ranks of a world of {size} are 0 to {size - 1}",
            "set both, or set UNISONO_DETECT=0 to run as a world of one",
        )
    node = _integer(env, names.node, default=-1)
    if kind == "slurm":
        tasks = expand_tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
        local_size = tasks[node] if 0 <= node < len(tasks) else 1
        nodes = _integer(env, names.nodes, default=len(tasks))
    else:
        local_size = max(1, _integer(env, names.local_size, default=1))
        nodes = _integer(env, names.nodes, default=-(-size // local_size))
    return Environment(
        kind=kind,
        rank=rank,
        size=size,
        local_rank=_integer(env, names.local_rank, default=0),
        local_size=local_size,
        node=node if node >= 0 else rank // local_size,
        nodes=nodes,
        master=_master(env),
        job_dir=_job_dir(env),
    )


def _integer(env: Mapping[str, str], name: str | None, *, default: int | None = None) -> int:
    """Return the number in variable `name`, or `default` without it."""
    text = env.get(name) if name is not None else None
    if text is None or name is None:
        if default is None:
            raise PlatformError.because(
                "the world of the launcher that started this process",
                f"no variable {name}",
                hint="UNISONO_DETECT=0 to run as a world of one",
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise PlatformError.because(
            f"{name}={text!r}", "not an integer", hint=f"unset {name}, or UNISONO_DETECT=0"
        ) from None


def _master(env: Mapping[str, str]) -> tuple[str, int] | None:
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        return None
    port = _integer(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise PlatformError.because(
            f"MASTER_PORT={port}", "not a port", "ports are 1 to 65535", "unset MASTER_PORT"
        )
    return env["MASTER_ADDR"], port


def _job_dir(env: Mapping[str, str]) -> Path | None:
    text = env.get("UNISONO_JOB_DIR")
    return Path(text) if text else None


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's short form of tasks per node.

    Example:
        >>> expand_tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise PlatformError.because(
                f"SLURM_STEP_TASKS_PER_NODE={text!r}",
                f"{part!r} where a number such as 2 or 2(x3) is expected",
                hint="UNISONO_DETECT=0 to run as a world of one",
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
