"""`Platform`: where ranks run, how many there are, and what each of them gets.

Each field says what it may be and, where only some places take it, which (`checks.py`). `Device` is
the kind of place. Accelerators are counted without making a context on any of them.
"""

# ruff: noqa: RUF009  what `_of` returns is no default but a field

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, Any, Self

from unisono import accelerator, removed
from unisono.cores import threads_per_rank, usable_cores
from unisono.errors import PYTHON, PlatformError, Spelling
from unisono.launch import checks as kinds
from unisono.launch.checks import Kind, check_machine, check_platform, nearest
from unisono.launch.logs import IO

if TYPE_CHECKING:
    import torch

__all__ = ["Device", "Platform"]


class _Devices(EnumMeta):
    """Lets a device that is gone say what to write instead."""

    def __getattr__(cls, name: str) -> Any:
        if name in cls._member_map_:  # where Python 3.11 looks members up
            return cls._member_map_[name]
        raise removed.removed_name(f"unisono.Device.{name}")


class Device(Enum, metaclass=_Devices):
    """A kind of place, as `Platform(device=...)` and `run(on=...)` name it."""

    CPU = "cpu"
    GPU = "gpu"
    SLURM = "slurm"
    MPS = "mps"
    MPI = "mpi"
    RAY = "ray"

    @property
    def is_here(self) -> bool:
        """Whether its ranks are processes of this host, which the launcher starts itself."""
        return self in (Device.CPU, Device.GPU, Device.MPS)

    @property
    def has_own_nodes(self) -> bool:
        """Whether ranks get the CPUs and GPUs that the platform names, not those of this host."""
        return self in (Device.SLURM, Device.RAY)

    @classmethod
    def from_str(cls, device: str | Device) -> Device:
        """Return the device of that name; case does not matter, and a kind of accelerator is a GPU.

        Example:
            >>> Device.from_str("CUDA")
            <Device.GPU: 'gpu'>
        """
        if isinstance(device, Device):
            return device
        word = device.strip().lower() if isinstance(device, str) else str(device)
        with suppress(ValueError):
            return cls(word)
        if accelerator.is_kind(word):
            return cls.GPU
        accelerator.refuse_number(word)
        values = [member.value for member in cls]
        near = nearest(word, [*values, *accelerator.KINDS])
        raise PlatformError.because(
            f"device={device!r}",
            f"devices are {', '.join(map(repr, values))}",
            hint=removed.REMOVED.get(f"unisono.Device.{word.upper()}")
            or (f"did you mean device={near!r}?" if near else 'device="cpu"'),
        )


def gpu_index(local_rank: int, local_size: int, visible: int, *, oversubscribe: bool) -> int | None:
    """Return which visible GPU a rank gets; None if there are too few.

    A rank that sees exactly one device was bound to it by a scheduler and takes it.
    """
    if visible >= local_size:
        return local_rank
    if visible == 1:
        return 0
    return local_rank % visible if oversubscribe and visible else None


_WITH_GPUS = ("gpu", "mps", "mpi", "ray", "slurm")
_HOSTS = ("mpi", "ray", "slurm")


def _of(kind: Kind, default: Any = None, *, only: Sequence[str] = ()) -> Any:
    """Return a field of this kind; `only` these places take it, or all of them."""
    values: Any = {"default_factory": list} if default == [] else {"default": default}
    return field(**values, metadata={"kind": kind, "only": tuple(only)})


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Where to run, and on how many ranks. It does not change: `but` returns another one.

    Example:
        >>> Platform(device="cpu", ranks=4).world_size
        4
    """

    device: Device | str = Device.GPU
    """Kind of place; a kind of accelerator (`"cuda"`, `"xpu"`) is `"gpu"` with that accelerator."""
    accelerator: str | None = _of(kinds.TEXT, only=_WITH_GPUS)
    """Kind of accelerator of `"gpu"`; None is the one that a rank finds."""
    name: str = _of(kinds.TEXT, "unisono")
    """Name of the job."""

    ranks: int | None = _of(kinds.COUNT)
    """Number of ranks over all nodes; None derives it from the fields below, else takes one."""
    n_nodes: int = _of(kinds.COUNT, 1, only=_HOSTS)
    """Number of hosts; where `hosts` are named, their number."""
    n_gpus_per_node: int = _of(kinds.COUNT_OR_ZERO, 0)
    """GPUs of a node, and its ranks where `ranks` is not given."""
    n_cpus_per_node: int | None = _of(kinds.COUNT)
    """CPUs of a node for this job; its ranks, where neither `ranks` nor GPUs are given."""
    oversubscribe: bool = _of(kinds.FLAG, False, only=_WITH_GPUS)
    """Whether several ranks may share a GPU."""

    backend: str | None = _of(kinds.BACKEND)
    """torch.distributed backend; None chooses one that fits the device."""
    ipc_groups: list[list[int]] | None = _of(kinds.GROUPS, [])
    """None: no process group; `[]`: one of all ranks; else disjoint lists of ranks."""
    ipc_protocol: str = _of(kinds.one_of("tcp", "file"), "tcp")
    """How ranks meet: `"tcp"`, or `"file"` for a file in the directory of the run."""
    master_addr: str | None = _of(kinds.TEXT)
    """Where rank 0 listens; None decides at the start."""
    master_port: int | None = _of(kinds.PORT)
    """Its port; None takes a free one."""
    spawn_method: str = _of(kinds.SPAWN, "auto", only=("cpu", "gpu", "mps"))
    """`"auto"`, `"forkserver"`, `"fork"`: from the warm server; `"spawn"`: fresh interpreters."""
    env: dict[str, str] | None = _of(kinds.VARIABLES)
    """More environment variables for the ranks."""
    detect: bool = _of(kinds.FLAG, True)
    """Whether to join a world that this process is in already."""
    seed: int | None = _of(kinds.INTEGER)
    """Seed of all generators of each rank; None leaves them alone."""
    seed_per_rank: bool | None = _of(kinds.FLAG)
    """Whether rank r gets `seed + r`; None: yes under `run`, no under `Wrapper`."""

    start_timeout_s: float = _of(kinds.FINITE_SECONDS, 300.0)
    """Deadline of the start of all ranks."""
    comm_timeout_s: float = _of(kinds.FINITE_SECONDS, 600.0)
    """Deadline of each collective, in all groups."""
    grace_s: float = _of(kinds.FINITE_SECONDS, 1.0)
    """Time between asking a rank to stop and killing it."""
    interrupt_s: float = _of(kinds.FINITE_SECONDS, 30.0)
    """Time that ranks have to save and end after the first Ctrl-C."""
    lost_after_s: float = _of(kinds.FINITE_SECONDS, 60.0, only=_HOSTS)
    """MPI, Ray, SLURM: how long a host may be unreachable before its ranks are given up."""
    stop_signals: tuple[str, ...] = _of(kinds.SIGNALS, ("SIGTERM", "SIGUSR2"))
    """Signals that ask a rank to stop (`should_stop`)."""
    stack_signal: str = _of(kinds.SIGNAL, "SIGUSR1")
    """Signal at which a rank writes its stacks."""
    max_requeues: int = _of(kinds.COUNT_OR_ZERO, 100)
    """How often `requeue` may start a run again."""
    verbose: bool = _of(kinds.FLAG, False)
    """Whether `Wrapper` prints what it does."""
    upon_finish: Callable[[], object] | None = None
    """Called once after all ranks succeeded: in the launcher, on a cluster in rank 0."""
    upon_error: Callable[[BaseException], object] | None = None
    """Called in the launcher with the exception of a failed run."""

    hosts: Sequence[str] = _of(kinds.STRINGS, (), only=["mpi"])
    """MPI: names of the hosts, which are the nodes; `mpiexec` reaches them by ssh."""
    mpiexec: str | None = _of(kinds.PATH, only=["mpi"])
    """MPI: path of `mpiexec`; None looks for it."""
    mpiexec_args: Sequence[str] = _of(kinds.STRINGS, (), only=["mpi"])
    """MPI: more words for `mpiexec`."""
    partition: str | None = _of(kinds.TEXT, only=["slurm"])
    """SLURM: partition; None is the cluster's default."""
    mem_per_node: int | None = _of(kinds.COUNT_OR_ZERO, only=["slurm"])
    """SLURM: memory of a node in GB; None asks for none in particular."""
    timeout_min: int | None = _of(kinds.MINUTES, only=["slurm"])
    """SLURM: time limit in minutes; None is that of the partition."""
    slurm_additional_parameters: dict[str, Any] | None = _of(kinds.TABLE, only=["slurm"])
    """SLURM: more options for `sbatch`."""
    srun_args: Sequence[str] = _of(kinds.STRINGS, (), only=["slurm"])
    """SLURM: more words for `srun`."""
    console_logs: str = _of(kinds.PATH, "./.unisono/jobs", only=("mpi", "slurm"))
    """SLURM, MPI: parent of the directories of jobs on several hosts."""
    ray_init: dict[str, Any] | None = _of(kinds.TABLE, only=["ray"])
    """Ray: arguments of `ray.init`, as `{"address": "10.0.0.1:6379"}`."""

    def __new__(cls, *_args: Any, **named: Any) -> Self:
        """Check the names of fields: the error of a dataclass does not say which one is meant."""
        check_names(named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind = Device.from_str(self.device)
        word = self.device.value if isinstance(self.device, Device) else self.device.strip().lower()
        if kind.is_here and word not in ("cpu", "gpu"):
            vars(self)["accelerator"] = word
        vars(self)["device"] = kind
        if isinstance(self.hosts, (list, tuple)) and self.hosts and self.n_nodes == 1:
            vars(self)["n_nodes"] = len(self.hosts)

    def but(self, **changes: Any) -> Self:
        """Return a copy with these fields changed.

        Later changes of what this platform holds do not reach it.
        """
        check_names(changes)
        values = {f.name: getattr(self, f.name) for f in fields(Platform)}
        values |= {n: copy.deepcopy(v) for n, v in values.items() if isinstance(v, (list, dict))}
        if "device" in changes:  # what follows from a field goes with it
            values["accelerator"] = None
        if "hosts" in changes:
            values["n_nodes"] = 1
        return type(self)(**{**values, **changes})

    @property
    def kind(self) -> Device:
        """The kind of place."""
        return Device(self.device)

    def is_explicit(self, name: str) -> bool:
        """Whether a field says something else than its default."""
        return getattr(self, name) != _DEFAULTS[name]

    @property
    def counts_gpus(self) -> bool:
        """Whether the ranks of a node are its GPUs."""
        return self.n_gpus_per_node > 0

    @property
    def shared_cpus(self) -> int | None:
        """The CPUs that the ranks of a node share; None if their number was not given."""
        return self.n_cpus_per_node

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        if self.ranks is not None:
            return max(1, self.ranks // self.n_nodes)
        if self.counts_gpus:
            return self.n_gpus_per_node
        is_on_cores = self.kind not in (Device.GPU, Device.MPS)
        return (self.shared_cpus if is_on_cores else None) or 1

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return self.ranks if self.ranks is not None else self.ranks_per_node * self.n_nodes

    @property
    def requires_ipc(self) -> bool:
        """Whether the ranks form process groups."""
        return self.world_size > 1 and self.ipc_groups is not None

    @property
    def cpus_per_rank(self) -> int:
        """Number of CPUs, and threads, of each rank."""
        if (cpus := self.shared_cpus) is not None:
            return max(1, cpus // self.ranks_per_node)
        if self.kind.has_own_nodes:
            return 1
        return threads_per_rank(self.ranks_per_node, usable_cores())

    def torch_device(self, local_rank: int) -> torch.device:
        """Return the device of the rank at this place of its node, as that rank sees it."""
        import torch

        if self.kind is Device.MPS:
            return torch.device("mps")
        if not self._has_gpus():
            return torch.device("cpu")
        index = self.gpu_of_rank(local_rank)
        return torch.device(self.accelerator or accelerator.kind() or "cpu", index)

    def _has_gpus(self) -> bool:
        """Whether ranks work on GPUs; under MPI if the platform names GPUs and the node has any."""
        if self.kind is Device.MPI:
            return self.counts_gpus and accelerator.count() > 0
        return self.kind is Device.GPU or (self.kind.has_own_nodes and self.n_gpus_per_node > 0)

    def gpu_of_rank(self, local_rank: int, spelling: Spelling = PYTHON) -> int:
        """Return the number of the GPU of a rank, or explain that there are too few."""
        visible, size = accelerator.count(self.accelerator), self.ranks_per_node
        index = gpu_index(local_rank, size, visible, oversubscribe=self.oversubscribe)
        # A rank may see one device because a scheduler bound it; a launcher that sees one has one.
        is_bound = "LOCAL_RANK" in os.environ or "SLURM_STEP_ID" in os.environ
        if index is None or (visible < size and not self.oversubscribe and not is_bound):
            gpus = f"{visible} GPU{'' if visible == 1 else 's'}"
            gpus += f" of the kind {self.accelerator!r}" if self.accelerator else ""
            instead = spelling.options(on="cpu", ranks=size)
            raise PlatformError.because(
                self.describe(spelling),
                f"{gpus} visible ({accelerator.visibility()})",
                f"{size} rank{'s' if size > 1 else ''} > {gpus}",
                f"{instead} (or UNISONO_FORCE_ON=cpu) rehearses it on processes"
                + f"; ranks={visible}, or oversubscribe=True to share devices" * (visible > 0),
            )
        return index

    def describe(self, spelling: Spelling = PYTHON) -> str:
        """Return the place and the number of ranks, to begin an error with."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"{spelling.platform(device=self.accelerator or self.kind.value)} with {ranks}"

    def validate(self) -> None:
        """Raise `PlatformError` if this platform makes no sense, or cannot be had here."""
        check_platform(self)
        check_machine(self)
        if self.kind is Device.SLURM:
            from unisono.launch.places.slurm.cluster import check_programs

            check_programs()

    def print(self) -> None:
        """Print the platform as a table, through `IO.print`."""
        size, groups = self.world_size, self.ipc_groups
        spread = f" ({self.ranks_per_node} on each of {self.n_nodes} nodes)"
        if groups:
            grouping = "; ".join(", ".join(map(str, group)) for group in groups)
        else:
            grouping = "none" if groups is None else "all ranks together"
        rows: dict[str, object] = {
            "name": self.name,
            "device": self.accelerator or self.kind.value,
            "ranks": f"{size}{spread if self.n_nodes > 1 else ''}",
            "threads": f"{self.cpus_per_rank} each",
            "backend": self.backend or "chosen by the device",
            "seed": "none" if self.seed is None else self.seed,
            "groups": grouping,
        }
        if self.requires_ipc:
            port = "" if self.master_port is None else f":{self.master_port}"
            where = self.master_addr or "decided at the start"
            rows["master"] = f"{self.ipc_protocol}, {where}{port}"
        IO.print("\n".join(f"  {name:<7}  {value}" for name, value in rows.items()))

    def rank_table(self) -> str:
        """Return one line for each rank: its node and its device."""
        lines = [f"{'rank':>4}  {'node':<16}  device"]
        for rank in range(self.world_size):
            node, local_rank = divmod(rank, self.ranks_per_node)
            if self.kind.has_own_nodes:  # not a device of this host
                device = f"gpu:{local_rank}" if self.n_gpus_per_node else "cpu"
            else:
                device = str(self.torch_device(local_rank))
            is_here = self.n_nodes == 1 and (self.kind.is_here or self.kind is Device.MPI)
            name = socket.gethostname() if is_here else f"node {node}"
            name = self.hosts[node] if self.hosts else name
            lines.append(f"{rank:>4}  {name:<16}  {device}")
        return "\n".join(lines)


FIELDS = {f.name: f for f in fields(Platform)}
"""The fields of a platform, by name."""
KINDS: dict[str, Kind] = {n: f.metadata["kind"] for n, f in FIELDS.items() if f.metadata}
"""What they may be; those without an entry are checked where they are used."""
_DEFAULTS = {name: [] if f.default is MISSING else f.default for name, f in FIELDS.items()}


def places_of(name: str) -> tuple[str, ...]:
    """Return the places that take a field; none if all of them do."""
    return FIELDS[name].metadata.get("only", ())


def check_names(named: Collection[str]) -> None:
    """Raise `PlatformError` for a field that no platform has."""
    unknown = min(set(named) - FIELDS.keys(), default=None)
    if unknown is not None:
        near = nearest(unknown, FIELDS)
        hint = removed.REMOVED.get(f"unisono.Platform.{unknown}")
        raise PlatformError.because(
            f"Platform({unknown}=...)",
            f"fields are {', '.join(FIELDS)}",
            hint=hint or (f"did you mean {near}?" if near else None),
        )
