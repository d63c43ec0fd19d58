"""`Platform`: where ranks run, how many there are, and what each of them gets.

Sizes follow from few fields, and it matters which of them were given: a platform remembers that.
What can be wrong with one is in `platform_checks.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from unisono.cores import threads_per_rank, usable_cores
from unisono.errors import PlatformError
from unisono.launch.console import IO
from unisono.launch.device import Device

if TYPE_CHECKING:
    import torch

__all__ = ["Platform"]

OLD_NAMES = {"n_gpus": "n_gpus_per_node", "n_cpus": "n_cpus_per_node", "ram": "mem_per_node"}
"""Spellings of earlier DDPW releases."""
_NATIVE_DEFAULTS: dict[str, Any] = {
    "name": "unisono",
    "partition": None,
    "n_cpus_per_node": None,
    "mem_per_node": None,
    "seed": None,
    "timeout_min": None,
    "console_logs": "./.unisono/jobs",
    "verbose": False,
}
"""Fields that differ where `on` is a word instead of a platform in DDPW's style."""


class _Remembering(type):
    """Lets a platform know which of its fields the caller named, and understand old names."""

    if not TYPE_CHECKING:  # the signature that people and tools see is that of the fields

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            names = [f.name for f in fields(cls) if f.init and not f.kw_only]
            given = {*names[: len(args)], *kwargs}
            spoken_old = {old for old in OLD_NAMES if old in kwargs}
            for old in spoken_old:
                value, new = kwargs.pop(old), OLD_NAMES[old]
                known = kwargs.get(new, value)
                if new in names[: len(args)]:
                    known = args[names.index(new)]
                if known != value:
                    raise PlatformError.because(
                        f"Platform({old}={value!r}, {new}={known!r})",
                        f"two values for one thing: {old} is an old name of {new}",
                        None,
                        f"Platform({new}={known!r})",
                    )
                if new not in names[: len(args)]:
                    kwargs[new] = value
            unknown = sorted(set(kwargs) - {f.name for f in fields(cls) if f.init})
            if unknown:
                raise unknown_field(unknown[0])
            platform = super().__call__(*args, **kwargs)
            platform._explicit = frozenset(OLD_NAMES.get(name, name) for name in given)
            platform._is_per_task = "n_cpus" in spoken_old
            return platform

        @property
        def __signature__(cls) -> inspect.Signature:
            _, *own = inspect.signature(cls.__init__).parameters.values()
            return inspect.Signature(own)


@dataclass(slots=False)
class Platform(metaclass=_Remembering):
    """Where to run, and on how many ranks.

    `run`, `submit` and `Wrapper` check a platform and work on a copy. `n_gpus`, `n_cpus` and `ram`
    are accepted as old names of `n_gpus_per_node`, `n_cpus_per_node` and `mem_per_node`.

    Example:
        >>> Platform(device="cpu", n_gpus_per_node=4).world_size
        4
    """

    name: str = "ddpw"
    """Name of the job."""
    device: Device | str = Device.GPU
    """Kind of place."""
    partition: str | None = "general"
    """Partition of the cluster."""
    n_nodes: int = 1
    """Number of hosts."""
    n_gpus_per_node: int = 1
    """Ranks on each node where nothing else says how many; 0 on a cluster is a job without GPUs."""
    n_cpus_per_node: int | None = 1
    """CPUs of a node for this job; on CPU platforms the ranks, if nothing else says how many."""
    mem_per_node: int | None = 32
    """Memory of a node in GB; None asks for none in particular."""
    spawn_method: str = "auto"
    """`"auto"`, `"forkserver"`, `"fork"`: from the warm server; `"spawn"`: fresh interpreters."""
    ipc_protocol: str = "tcp"
    """How ranks meet: `"tcp"`, or `"file"` for a file in the directory of the run."""
    master_addr: str | None = None
    """Where rank 0 listens; None decides at the start."""
    master_port: int | None = None
    """Its port; None takes a free one."""
    ipc_groups: list[list[int]] | None = field(default_factory=list)
    """None: no process group; `[]`: one of all ranks; else disjoint lists of ranks."""
    backend: str | None = None
    """torch.distributed backend; None chooses one that fits the device."""
    seed: int | None = 1889
    """Seed of all generators of each rank; None leaves them alone."""
    timeout_min: int | None = 2880
    """Time limit of a cluster job in minutes."""
    slurm_additional_parameters: dict[str, Any] | None = None
    """More options for the cluster."""
    console_logs: str = "./.output/logs"
    """Parent of the directories of cluster jobs."""
    verbose: bool = True
    """Whether `Wrapper` prints what it does."""
    upon_finish: Callable[[], object] | None = None
    """Called once after all ranks succeeded: in the launcher, on a cluster in rank 0."""

    ranks: int | None = field(default=None, kw_only=True)
    """Number of ranks over all nodes; None derives it."""
    start_timeout_s: float = field(default=300.0, kw_only=True)
    """Deadline of the start of all ranks."""
    comm_timeout_s: float = field(default=600.0, kw_only=True)
    """Deadline of each collective, in all groups."""
    grace_s: float = field(default=1.0, kw_only=True)
    """Time between asking a rank to stop and killing it."""
    interrupt_s: float = field(default=30.0, kw_only=True)
    """Time that ranks have to save and end after the first Ctrl-C."""
    seed_per_rank: bool | None = field(default=None, kw_only=True)
    """Whether rank r gets `seed + r`; None: yes under `run`, no under `Wrapper`."""
    upon_error: Callable[[BaseException], object] | None = field(default=None, kw_only=True)
    """Called in the launcher with the exception of a failed run."""
    env: dict[str, str] | None = field(default=None, kw_only=True)
    """More environment variables for the ranks."""
    detect: bool = field(default=True, kw_only=True)
    """Whether to join a world that this process is in already."""
    stop_signals: tuple[str, ...] = field(default=("SIGTERM", "SIGUSR2"), kw_only=True)
    """Signals that ask a rank to stop (`should_stop`)."""
    stack_signal: str = field(default="SIGUSR1", kw_only=True)
    """Signal at which a rank writes its stacks."""
    oversubscribe: bool = field(default=False, kw_only=True)
    """Whether several ranks may share a GPU."""
    max_requeues: int = field(default=100, kw_only=True)
    """How often `requeue` may start a run again."""
    submitter: str = field(default="auto", kw_only=True)
    """Who talks to the cluster: `"auto"`, `"submitit"` or `"sbatch"`."""
    srun_args: Sequence[str] = field(default=(), kw_only=True)
    """More words for `srun`."""
    mpiexec: str | None = field(default=None, kw_only=True)
    """Path of `mpiexec`; None looks for it."""
    mpiexec_args: Sequence[str] = field(default=(), kw_only=True)
    """More words for `mpiexec`."""

    def __post_init__(self) -> None:
        self.device = Device.from_str(self.device)
        self._explicit: frozenset[str] = frozenset()
        self._is_per_task = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "device" and isinstance(value, str):
            value = Device.from_str(value)
        object.__setattr__(self, name, value)
        if name in FIELDS and "_explicit" in self.__dict__:
            object.__setattr__(self, "_explicit", self._explicit | {name})

    @classmethod
    def of_place(cls, place: str | Device, given: Mapping[str, Any]) -> Platform:
        """Return the platform that `on="..."` means, with the fields in `given` explicit."""
        device = Device.from_str(place)
        own = {"n_gpus_per_node": 0} if device in (Device.SLURM, Device.CPU, Device.MPI) else {}
        renamed = {OLD_NAMES.get(name) for name in given}
        defaults = {k: v for k, v in {**_NATIVE_DEFAULTS, **own}.items() if k not in renamed}
        platform = cls(**{**defaults, "device": device, **given})
        platform._explicit = frozenset(OLD_NAMES.get(name, name) for name in given)
        return platform

    @property
    def kind(self) -> Device:
        """The device as a `Device`."""
        return Device.from_str(self.device)

    def is_explicit(self, name: str) -> bool:
        """Whether the caller gave this field."""
        return OLD_NAMES.get(name, name) in self._explicit

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set fields that the caller did not give."""
        for name, value in values.items():
            if not self.is_explicit(name):
                setattr(self, OLD_NAMES.get(name, name), value)

    def copy(self) -> Platform:
        """Return a copy that later changes of this platform do not reach."""
        twin = copy.copy(self)
        for name in ("ipc_groups", "env", "slurm_additional_parameters"):
            object.__setattr__(twin, name, copy.deepcopy(getattr(self, name)))
        return twin

    @property
    def n_gpus(self) -> int:
        """Old name of `n_gpus_per_node`."""
        return self.n_gpus_per_node

    @n_gpus.setter
    def n_gpus(self, value: int) -> None:
        self.n_gpus_per_node = value

    @property
    def n_cpus(self) -> int | None:
        """Old name of `n_cpus_per_node`; together with GPUs it counts the CPUs of each rank."""
        return self.n_cpus_per_node

    @n_cpus.setter
    def n_cpus(self, value: int | None) -> None:
        self.n_cpus_per_node = value
        self._is_per_task = True

    @property
    def ram(self) -> int | None:
        """Old name of `mem_per_node`."""
        return self.mem_per_node

    @ram.setter
    def ram(self, value: int | None) -> None:
        self.mem_per_node = value

    @property
    def _counts_gpus(self) -> bool:
        """Whether the ranks of a node are its `n_gpus_per_node`."""
        by_device = self.kind is Device.GPU or (self.kind is Device.SLURM and self.n_gpus_per_node)
        return bool(by_device or (self.is_explicit("n_gpus_per_node") and self.n_gpus_per_node))

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        if self.ranks is not None:
            return max(1, self.ranks // self.n_nodes)
        if self._counts_gpus:
            return self.n_gpus_per_node
        if self.is_explicit("n_cpus_per_node") and self.n_cpus_per_node is not None:
            return self.n_cpus_per_node
        return 1

    @property
    def world_size(self) -> int:
        """Number of ranks asked for, over all nodes."""
        return self.ranks if self.ranks is not None else self.ranks_per_node * self.n_nodes

    @property
    def requires_ipc(self) -> bool:
        """Whether the ranks form process groups."""
        return self.world_size > 1 and self.ipc_groups is not None

    @property
    def cpus_per_rank(self) -> int:
        """Number of CPUs, and threads, of each rank."""
        if self.is_explicit("n_cpus_per_node") and self.n_cpus_per_node is not None:
            if self._is_per_task and self._counts_gpus:
                return self.n_cpus_per_node
            return max(1, self.n_cpus_per_node // self.ranks_per_node)
        if self.kind is Device.SLURM:
            return 1
        return threads_per_rank(self.ranks_per_node, usable_cores())

    def torch_device(self, local_rank: int) -> torch.device:
        """Return the device of the rank at this place of its node, as that rank sees it."""
        import torch

        from unisono.launch.platform_checks import gpu_of_rank

        if self._has_gpus():
            return torch.device("cuda", gpu_of_rank(self, local_rank))
        return torch.device("mps" if self.kind is Device.MPS else "cpu")

    def _has_gpus(self) -> bool:
        """Whether ranks work on GPUs; under MPI if that was asked for and the node has some."""
        if self.kind is Device.MPI:
            from unisono.launch.accelerators import visible_gpus

            asked = self.is_explicit("n_gpus_per_node") and self.n_gpus_per_node > 0
            return asked and visible_gpus() > 0
        return self.kind is Device.GPU or (self.kind is Device.SLURM and self.n_gpus_per_node > 0)

    def validate(self) -> None:
        """Raise `PlatformError` if this platform makes no sense, or cannot be had here."""
        from unisono.launch.platform_checks import check_machine, check_platform

        check_platform(self)
        check_machine(self)
        if self.kind is Device.SLURM:
            from unisono.launch.slurm.cluster_checks import check_cluster

            check_cluster(self)

    def print(self) -> None:
        """Print the platform as a table, through `IO.print`."""
        from unisono.launch.platform_table import platform_table

        IO.print(platform_table(self))


FIELDS = frozenset(f.name for f in fields(Platform))
"""Names of the fields of a platform."""


def unknown_field(name: str) -> Exception:
    """Return the error for a field that platforms do not have."""
    import difflib

    near = difflib.get_close_matches(name, [*FIELDS, *OLD_NAMES], n=1)
    return PlatformError.because(
        f"Platform({name}=...)",
        f"fields are {', '.join(f.name for f in fields(Platform))}",
        None,
        f"did you mean {near[0]}?" if near else None,
    )
