"""`Platform`: where ranks run, how many there are, and what each of them gets.

`Device` is the kind of place. Accelerators are counted without making a context on any of them.
Each field carries the kind of value it takes, which settings from a file, from variables and from
the command line use as well. Sizes follow from few fields, and it matters which of them were given:
a platform remembers that.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import os
import resource
import shlex
import signal
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from unisono import accelerator
from unisono.cores import threads_per_rank, usable_cores
from unisono.errors import MissingExtra, PlatformError, UnisonoError
from unisono.expect import is_integer
from unisono.launch.logs import IO
from unisono.launch.places.rendezvous import owner_of_port

if TYPE_CHECKING:
    import torch

__all__ = ["Device", "Platform"]

T = TypeVar("T", bound=type)


class Device(Enum):
    """A kind of place, as `Platform(device=...)` and `run(on=...)` name it."""

    CPU = "cpu"
    GPU = "gpu"
    SLURM = "slurm"
    MPS = "mps"
    MPI = "mpi"
    SSH = "ssh"
    RAY = "ray"

    @property
    def is_here(self) -> bool:
        """Whether its ranks are processes of this host, which the launcher starts itself."""
        return self in (Device.CPU, Device.GPU, Device.MPS)

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
            hint=f"did you mean device={near!r}?" if near else 'device="cpu"',
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


BACKENDS = ("gloo", *accelerator.BACKENDS, "shm", "mpi")
"""What `backend` may say, as `unisono.comm.backends` has it; that would load torch here."""
_AS_TOLD = (Device.SLURM, Device.RAY)
"""Places where ranks get CPUs and GPUs by what is asked for, not by what is there."""
_PORT_HINT = "leave master_port out, and a free port is taken at the start"


@dataclass(frozen=True)
class Kind:
    """A kind of value, and how it is checked."""

    what: str
    """In words."""
    example: Any
    """A value that fits."""
    fits: Callable[[Any], bool]
    """Whether a value is of this kind."""
    is_text: bool = False
    """Whether a variable of the environment has it as it stands, not as a TOML value."""
    words: tuple[str, ...] = ()
    """The choices, if there are few."""

    @property
    def toml(self) -> str:
        """The example as it is typed in a variable or on the command line."""
        match self.example:
            case bool():
                return str(self.example).lower()
            case dict():
                pairs = (f'{name} = "{value}"' for name, value in self.example.items())
                return f"'{{{', '.join(pairs)}}}'"
            case list():
                return "'" + str(self.example).replace("'", '"') + "'"
            case _:
                return str(self.example)

    def check(self, name: str, value: Any, call: str = "Platform({})") -> None:
        """Raise `PlatformError` unless `value`, given as `name` in `call`, is of this kind."""
        if self.fits(value):
            return
        example = self.example
        if isinstance(example, list) and isinstance(value, str):
            example = shlex.split(value) or [value]
        if self.words:
            example = nearest(str(value), self.words) or example
        raise PlatformError.because(
            call.format(f"{name}={value!r}"),
            f"{type(value).__name__}, not {self.what}"
            if type(value) is not type(self.example)
            else f"not {self.what}",
            None,
            f"{name}={example!r}",
        )


def _is_integer(value: Any, at_least: float = -float("inf")) -> bool:
    return is_integer(value) and value >= at_least


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_signal(value: Any) -> bool:
    return value in signal.Signals.__members__


def _is_torch_backend(value: Any) -> bool:
    """Whether torch is to check it: a map of kinds of devices to backends, or one of a plugin."""
    if not _is_text(value):
        return False
    return ":" in value or value == "mpi4py" or accelerator.is_backend(value)  # mpi4py is DDPW's


def _kind(
    what: str, example: Any, fits: Callable[[Any], bool], *, is_text: bool = False
) -> dict[str, Kind]:
    """Return what a field carries in its metadata."""
    return {"kind": Kind(what, example, fits, is_text)}


def _one_of(*words: str, also: Callable[[Any], bool] = lambda _: False) -> dict[str, Kind]:
    listed = ", ".join(map(repr, words))

    def fits(value: Any) -> bool:
        return value in words or also(value)

    return {"kind": Kind(f"one of {listed}", words[0], fits, is_text=True, words=words)}


COUNT = Kind("an integer >= 1", 2, functools.partial(_is_integer, at_least=1))
COUNT_OR_ZERO = Kind("an integer >= 0", 2, functools.partial(_is_integer, at_least=0))
SECONDS = Kind(
    "a number of seconds > 0",
    60.0,
    lambda v: (_is_integer(v) or isinstance(v, float)) and v > 0,
)

_COUNT, _COUNT_OR_ZERO = {"kind": COUNT}, {"kind": COUNT_OR_ZERO}
_SECONDS = _kind(
    "a finite number of seconds > 0", 60.0, lambda v: SECONDS.fits(v) and v < float("inf")
)
_MINUTES = _kind("a number of minutes, an integer >= 1", 60, COUNT.fits)
_INTEGER = _kind("an integer", 2, _is_integer)
_PORT = _kind("a port, 1 to 65535", 29400, lambda v: _is_integer(v, 1) and v < 65536)
_FLAG = _kind("True or False", True, lambda v: isinstance(v, bool))
_TEXT = _kind("a string", "word", _is_text, is_text=True)
_PATH = _kind("a path", "word", lambda v: isinstance(v, (str, os.PathLike)), is_text=True)
_SIGNAL = _kind("the name of a signal", "SIGUSR1", _is_signal, is_text=True)
_SIGNALS = _kind("names of signals", ["SIGTERM"], lambda v: _is_list(v, _is_signal))
_STRINGS = _kind("a list of strings", ["-v", "-x"], lambda v: _is_list(v, _is_text))
_BACKEND = _one_of(*BACKENDS, also=_is_torch_backend)
_GROUPS = _kind(
    "a list of lists of ranks",
    [[0, 1], [2, 3]],
    lambda v: _is_list(v, lambda group: isinstance(group, (list, tuple))),
)
_TABLE = _kind(
    "a table with strings as names",
    {"account": "physics"},
    lambda v: isinstance(v, dict) and all(map(_is_text, v)),
)
_VARIABLES = _kind(
    "a table of strings",
    {"NAME": "value"},
    lambda v: isinstance(v, dict) and all(map(_is_text, (*v, *v.values()))),
)


def nearest(word: str, names: Collection[str]) -> str | None:
    """Return the name that `word` begins, or is most like; None if it is like none."""
    begun = [name for name in sorted(names) if name.startswith(word)]
    return next(iter(begun or difflib.get_close_matches(word, names, n=1)), None)


def _unknown(named: Mapping[str, Any]) -> UnisonoError:
    """Return the error of a field that no platform has."""
    unknown = min(named.keys() - FIELDS)
    near = nearest(unknown, FIELDS)
    return PlatformError.because(
        f"Platform({unknown}=...)",
        f"fields are {', '.join(f.name for f in fields(Platform))}",
        None,
        f"did you mean {near}?" if near else None,
    )


def _noting_given(cls: T) -> T:
    """Have a platform note which of its fields the caller gave, and refuse unknown ones."""
    init = cls.__init__
    names = [f.name for f in fields(cls)]

    @functools.wraps(init)
    def noting(self: Any, *args: Any, **named: Any) -> None:
        if not named.keys() <= FIELDS:
            raise _unknown(named)
        vars(self)["_given"] = frozenset((*names[: len(args)], *named))
        init(self, *args, **named)

    cls.__init__ = noting
    return cls


@_noting_given
@dataclass(frozen=True)
class Platform:
    """Where to run, and on how many ranks. It does not change: `but` returns another one.

    Example:
        >>> Platform(device="cpu", n_gpus_per_node=4).world_size
        4
    """

    name: str = field(default="ddpw", metadata=_TEXT)
    """Name of the job."""
    device: Device | str = Device.GPU
    """Kind of place."""
    partition: str | None = field(default="general", metadata=_TEXT)
    """Partition of the cluster."""
    n_nodes: int = field(default=1, metadata=_COUNT)
    """Number of hosts."""
    n_gpus_per_node: int = field(default=1, metadata=_COUNT_OR_ZERO)
    """Ranks on each node where nothing else says how many; 0 on a cluster is a job without GPUs."""
    n_cpus_per_node: int | None = field(default=1, metadata=_COUNT)
    """CPUs of a node for this job; on CPU platforms the ranks, if nothing else says how many."""
    mem_per_node: int | None = field(default=32, metadata=_COUNT_OR_ZERO)
    """Memory of a node in GB; None asks for none in particular."""
    spawn_method: str = field(
        default="auto", metadata=_one_of("auto", "forkserver", "fork", "spawn")
    )
    """`"auto"`, `"forkserver"`, `"fork"`: from the warm server; `"spawn"`: fresh interpreters."""
    ipc_protocol: str = field(default="tcp", metadata=_one_of("tcp", "file"))
    """How ranks meet: `"tcp"`, or `"file"` for a file in the directory of the run."""
    master_addr: str | None = field(default=None, metadata=_TEXT)
    """Where rank 0 listens; None decides at the start."""
    master_port: int | None = field(default=None, metadata=_PORT)
    """Its port; None takes a free one."""
    ipc_groups: list[list[int]] | None = field(default_factory=list, metadata=_GROUPS)
    """None: no process group; `[]`: one of all ranks; else disjoint lists of ranks."""
    backend: str | None = field(default=None, metadata=_BACKEND)
    """torch.distributed backend; None chooses one that fits the device."""
    seed: int | None = field(default=1889, metadata=_INTEGER)
    """Seed of all generators of each rank; None leaves them alone."""
    timeout_min: int | None = field(default=2880, metadata=_MINUTES)
    """Time limit of a cluster job in minutes; None is that of the partition."""
    slurm_additional_parameters: dict[str, Any] | None = field(default=None, metadata=_TABLE)
    """More options for the cluster."""
    console_logs: str = field(default="./.output/logs", metadata=_PATH)
    """Parent of the directories of cluster jobs."""
    verbose: bool = field(default=True, metadata=_FLAG)
    """Whether `Wrapper` prints what it does."""
    upon_finish: Callable[[], object] | None = None
    """Called once after all ranks succeeded: in the launcher, on a cluster in rank 0."""

    _: KW_ONLY
    ranks: int | None = field(default=None, metadata=_COUNT)
    """Number of ranks over all nodes; None derives it."""
    start_timeout_s: float = field(default=300.0, metadata=_SECONDS)
    """Deadline of the start of all ranks."""
    comm_timeout_s: float = field(default=600.0, metadata=_SECONDS)
    """Deadline of each collective, in all groups."""
    grace_s: float = field(default=1.0, metadata=_SECONDS)
    """Time between asking a rank to stop and killing it."""
    interrupt_s: float = field(default=30.0, metadata=_SECONDS)
    """Time that ranks have to save and end after the first Ctrl-C."""
    seed_per_rank: bool | None = field(default=None, metadata=_FLAG)
    """Whether rank r gets `seed + r`; None: yes under `run`, no under `Wrapper`."""
    upon_error: Callable[[BaseException], object] | None = None
    """Called in the launcher with the exception of a failed run."""
    env: dict[str, str] | None = field(default=None, metadata=_VARIABLES)
    """More environment variables for the ranks."""
    detect: bool = field(default=True, metadata=_FLAG)
    """Whether to join a world that this process is in already."""
    stop_signals: tuple[str, ...] = field(default=("SIGTERM", "SIGUSR2"), metadata=_SIGNALS)
    """Signals that ask a rank to stop (`should_stop`)."""
    stack_signal: str = field(default="SIGUSR1", metadata=_SIGNAL)
    """Signal at which a rank writes its stacks."""
    oversubscribe: bool = field(default=False, metadata=_FLAG)
    """Whether several ranks may share a GPU."""
    max_requeues: int = field(default=100, metadata=_COUNT_OR_ZERO)
    """How often `requeue` may start a run again."""
    submitter: str = field(default="auto", metadata=_one_of("auto", "submitit", "sbatch"))
    """Who talks to the cluster: `"auto"`, `"submitit"` or `"sbatch"`."""
    srun_args: Sequence[str] = field(default=(), metadata=_STRINGS)
    """More words for `srun`."""
    mpiexec: str | None = field(default=None, metadata=_PATH)
    """Path of `mpiexec`; None looks for it."""
    mpiexec_args: Sequence[str] = field(default=(), metadata=_STRINGS)
    """More words for `mpiexec`."""
    hosts: Sequence[str] = field(default=(), metadata=_STRINGS)
    """Names of the hosts that ssh reaches; they are the nodes."""
    ssh_args: Sequence[str] = field(default=(), metadata=_STRINGS)
    """More words for `ssh`."""
    python: str | None = field(default=None, metadata=_PATH)
    """Path of Python on those hosts; None: the same as here."""
    ray_init: dict[str, Any] | None = field(default=None, metadata=_TABLE)
    """Arguments of `ray.init`, as `{"address": "10.0.0.1:6379"}`."""

    # Each platform has its own of these: what `device` means, and which fields were given.
    kind: ClassVar[Device] = Device.GPU
    accelerator: ClassVar[str | None] = None
    """The kind of accelerator that `device` names; None is whatever a rank finds."""
    _given: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        kind = Device.from_str(self.device)
        if kind.is_here and kind is not Device.CPU and self.device not in (Device.GPU, "gpu"):
            word = self.device.value if isinstance(self.device, Device) else self.device
            vars(self)["accelerator"] = word.strip().lower()
        vars(self)["device"] = vars(self)["kind"] = kind
        if isinstance(self.hosts, (list, tuple)) and self.hosts and "n_nodes" not in self._given:
            vars(self)["n_nodes"] = len(self.hosts)
        if self.kind is Device.RAY and "n_gpus_per_node" not in self._given:
            vars(self)["n_gpus_per_node"] = 0

    @classmethod
    def at(cls, place: Device | str, given: Mapping[str, Any]) -> Self:
        """Return the platform that `on="..."` means, with the fields in `given` explicit."""
        has_gpus = Device.from_str(place) in (Device.GPU, Device.MPS)
        own = {} if has_gpus else {"n_gpus_per_node": 0}
        platform = cls(**{**_NATIVE_DEFAULTS, **own, **given, "device": place})
        vars(platform)["_given"] = frozenset(("device", *given))
        return platform

    def but(self, **changes: Any) -> Self:
        """Return a copy with these fields changed; they count as given.

        Later changes of what this platform holds do not reach it.
        """
        if not changes.keys() <= FIELDS:
            raise _unknown(changes)
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (list, dict)):
                vars(twin)[name] = copy.deepcopy(value)
        vars(twin).update(changes, _given=self._given.union(changes))
        if "device" in changes:
            vars(twin).pop("accelerator", None)
        if "device" in changes or "hosts" in changes:
            twin.__post_init__()
        return twin

    def is_explicit(self, name: str) -> bool:
        """Whether the caller gave this field."""
        return name in self._given

    @property
    def _counts_gpus(self) -> bool:
        """Whether the ranks of a node are its `n_gpus_per_node`."""
        if self.kind is Device.GPU:
            return True
        is_asked = self.kind is Device.SLURM or self.is_explicit("n_gpus_per_node")
        return is_asked and self.n_gpus_per_node > 0

    @property
    def _shared_cpus(self) -> int | None:
        """The CPUs that the ranks of a node share; None if nobody said how many."""
        return self.n_cpus_per_node if "n_cpus_per_node" in self._given else None

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        if self.ranks is not None:
            return max(1, self.ranks // self.n_nodes)
        if self._counts_gpus:
            return self.n_gpus_per_node
        return self._shared_cpus or 1

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
        if (cpus := self._shared_cpus) is not None:
            return max(1, cpus // self.ranks_per_node)
        if self.kind in _AS_TOLD:
            return 1
        return threads_per_rank(self.ranks_per_node, usable_cores())

    def torch_device(self, local_rank: int) -> torch.device:
        """Return the device of the rank at this place of its node, as that rank sees it."""
        import torch

        if self.kind is Device.MPS:
            return torch.device("mps")
        if not self._has_gpus():
            return torch.device("cpu")
        index = self._gpu_of_rank(local_rank)
        return torch.device(self.accelerator or accelerator.kind() or "cpu", index)

    def _has_gpus(self) -> bool:
        """Whether ranks work on GPUs; by MPI and ssh if that was asked for and the node has any."""
        if self.kind in (Device.MPI, Device.SSH):
            asked = self.is_explicit("n_gpus_per_node") and self.n_gpus_per_node > 0
            return asked and accelerator.count() > 0
        return self.kind is Device.GPU or (self.kind in _AS_TOLD and self.n_gpus_per_node > 0)

    def _gpu_of_rank(self, local_rank: int) -> int:
        """Return the number of the GPU of a rank, or explain that there are too few."""
        visible, size = accelerator.count(self.accelerator), self.ranks_per_node
        index = gpu_index(local_rank, size, visible, oversubscribe=self.oversubscribe)
        # A rank may see one device because a scheduler bound it; a launcher that sees one has one.
        is_bound = "LOCAL_RANK" in os.environ or "SLURM_STEP_ID" in os.environ
        if index is None or (visible < size and not self.oversubscribe and not is_bound):
            gpus = f"{visible} GPU{'' if visible == 1 else 's'}"
            gpus += f" of the kind {self.accelerator!r}" if self.accelerator else ""
            raise PlatformError.because(
                self._asked(),
                f"{gpus} visible ({accelerator.visibility()})",
                f"{size} rank{'s' if size > 1 else ''} > {gpus}",
                f'on="cpu", ranks={size} (or UNISONO_FORCE_ON=cpu) rehearses it on processes'
                + f"; ranks={visible}, or oversubscribe=True to share devices" * (visible > 0),
            )
        return index

    def _asked(self) -> str:
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"Platform(device={(self.accelerator or self.kind.value)!r}) with {ranks}"

    def validate(self) -> None:
        """Raise `PlatformError` if this platform makes no sense, or cannot be had here."""
        self.check()
        self.check_machine()
        if self.kind is Device.SLURM:
            from unisono.launch.places.slurm.cluster import check_cluster

            check_cluster(self)

    def check(self) -> None:
        """Raise `PlatformError` if this platform makes no sense on any machine.

        The defaults do, so only fields that were given are looked at.
        """
        for name in sorted(self._given.intersection(KINDS)):
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                KINDS[name].check(name, value)
        if self.backend is None and (wanted := os.environ.get("UNISONO_BACKEND")):
            KINDS["backend"].check("UNISONO_BACKEND", wanted, "{}")
        if self.kind is Device.SSH:
            from unisono.launch.places.ssh import check_hosts

            check_hosts(self)
        elif self.hosts:
            raise PlatformError.because(
                f"Platform(device={self.kind.value!r}, hosts={list(self.hosts)!r})",
                "hosts are used on ssh only",
                None,
                'on="ssh"',
            )
        self._check_sizes()
        if self.ipc_groups:
            self._check_groups(self.ipc_groups)

    def check_machine(self) -> None:
        """Raise `PlatformError` if this platform cannot be had on this machine."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self.kind.is_here and 0 < most < self.world_size:
            raise PlatformError.because(
                self._asked(),
                f"this process may have {most} open files, and each rank takes some",
                f"{self.world_size} ranks > {most}",
                "fewer ranks, or ulimit -n 65536 in the shell",
            )
        if self.master_port is not None and self.kind.is_here and self.requires_ipc:
            self._check_free_port(self.master_port)
        wanted = self.backend or os.environ.get("UNISONO_BACKEND")
        if wanted in ("mpi", "mpi4py") and importlib.util.find_spec("mpi4py") is None:
            raise MissingExtra.of("mpi", f"backend={wanted!r}", "no mpi4py")
        if self.kind is Device.GPU:
            self._gpu_of_rank(self.ranks_per_node - 1)
        if self.kind is Device.MPI:
            from unisono.launch.places.mpi import find_mpiexec

            find_mpiexec(self)
        if self.kind is Device.SSH:
            from unisono.launch.places.ssh import check_program

            check_program()
        if self.kind is Device.RAY and importlib.util.find_spec("ray") is None:
            raise MissingExtra.of("ray", self._asked(), "no ray")
        if self.kind is Device.MPS and not accelerator.count("mps"):
            raise PlatformError.because(
                self._asked(),
                "no Apple GPU that torch can use on this machine",
                None,
                'device="cpu" (or UNISONO_FORCE_ON=cpu) rehearses it on processes of this host',
            )

    def _check_sizes(self) -> None:
        nodes, gpus = self.n_nodes, self.n_gpus_per_node
        if nodes > 1 and self.kind.is_here:
            raise PlatformError.because(
                f"Platform(device={self.kind.value!r}, n_nodes={nodes})",
                "ranks on one host only, this one",
                None,
                'on="ssh", hosts=["a", "b"], or MPI, SLURM, Ray; under torchrun --nnodes '
                "unisono.run joins the ranks",
            )
        if self.kind is Device.GPU and gpus == 0 and self.ranks is None:
            raise PlatformError.because(
                "Platform(device='gpu', n_gpus_per_node=0)", "no rank at all", None, 'device="cpu"'
            )
        if self.ranks is not None and self.ranks % nodes:
            below = self.ranks // nodes * nodes
            fits = [size for size in (below, below + nodes) if size]
            raise PlatformError.because(
                f"ranks={self.ranks}, nodes={nodes}",
                "nodes with unlike numbers of ranks",
                f"{self.ranks} ranks / {nodes} nodes = {self.ranks / nodes:g}",
                f"ranks={' or ranks='.join(map(str, fits))}",
            )
        per_node, cpus = self.ranks_per_node, self._shared_cpus
        is_shared = self.oversubscribe and per_node > gpus
        if self.kind in _AS_TOLD and gpus % per_node and not is_shared:
            raise PlatformError.because(
                f"Platform(n_gpus_per_node={gpus}) with {per_node} ranks on a node",
                "GPUs that cannot be shared evenly",
                f"{gpus} GPUs / {per_node} ranks = {gpus / per_node:g}",
                f"n_gpus_per_node={per_node}, or ranks={gpus * nodes}"
                + (", or oversubscribe=True" if per_node > gpus else ""),
            )
        if cpus is not None and cpus % per_node:
            raise PlatformError.because(
                f"Platform(n_cpus_per_node={cpus}) with {per_node} ranks on a node",
                "CPUs that cannot be shared evenly",
                f"{cpus} CPUs / {per_node} ranks = {cpus / per_node:g}",
                f"n_cpus_per_node={max(1, cpus // per_node) * per_node}",
            )

    def _check_groups(self, groups: Sequence[Sequence[int]]) -> None:
        size, found, arithmetic = self.world_size, "", None
        places: dict[int, list[int]] = {rank: [] for rank in range(size)}
        for number, group in enumerate(groups):
            if not group:
                found = found or f"group {number} is empty"
            for rank in group:
                if _is_integer(rank) and rank in places:
                    places[rank].append(number)
                elif not found:
                    found = f"rank {rank!r} in group {number}"
                    arithmetic = f"ranks of a world of {size} are 0 to {size - 1}"
        for rank, where in places.items():
            if len(where) != 1 and not found:
                found = f"rank {rank} is in {'no group' if not where else ''}"
                found += " and ".join(f"group {number}" for number in where)
        if found:
            raise PlatformError.because(
                f"Platform(ipc_groups={groups!r}) with {size} ranks",
                found,
                arithmetic,
                "disjoint lists of ranks that cover all of them, or [] for one group of all",
            )

    def _check_free_port(self, port: int) -> None:
        addr = self.master_addr or "127.0.0.1"
        family = socket.AF_INET6 if ":" in addr else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((addr, port))
            except OSError as error:
                is_denied = isinstance(error, PermissionError)
                why = "privileged" if is_denied else "in use or not to be had"
                owner = f"; {owner} has it" if (owner := owner_of_port(port)) else ""
                raise PlatformError.because(
                    f"Platform(master_addr={addr!r}, master_port={port})",
                    f"port {port} is {why}: {error.strerror}{owner}",
                    None,
                    _PORT_HINT,
                ) from error

    def print(self) -> None:
        """Print the platform as a table, through `IO.print`."""
        size, groups = self.world_size, self.ipc_groups
        spread = f" ({self.ranks_per_node} on each of {self.n_nodes} nodes)"
        if groups:
            told = "; ".join(", ".join(map(str, group)) for group in groups)
        else:
            told = "none" if groups is None else "all ranks together"
        rows: dict[str, object] = {
            "name": self.name,
            "device": self.accelerator or self.kind.value,
            "ranks": f"{size}{spread if self.n_nodes > 1 else ''}",
            "threads": f"{self.cpus_per_rank} each",
            "backend": self.backend or "chosen by the device",
            "seed": "none" if self.seed is None else self.seed,
            "groups": told,
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
            if self.kind in _AS_TOLD:  # not a device of this host
                device = f"gpu:{local_rank}" if self.n_gpus_per_node else "cpu"
            else:
                device = str(self.torch_device(local_rank))
            is_here = self.n_nodes == 1 and (self.kind.is_here or self.kind is Device.MPI)
            name = socket.gethostname() if is_here else f"node {node}"
            name = self.hosts[node] if self.hosts else name
            lines.append(f"{rank:>4}  {name:<16}  {device}")
        return "\n".join(lines)


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
FIELDS = frozenset(f.name for f in fields(Platform))
"""Names of the fields of a platform."""
_MAY_BE_NONE = frozenset(f.name for f in fields(Platform) if str(f.type).endswith("| None"))
KINDS: dict[str, Kind] = {
    **{f.name: f.metadata["kind"] for f in fields(Platform) if "kind" in f.metadata},
    "nodes": COUNT,
    "timeout_s": SECONDS,
    "max_restarts": COUNT_OR_ZERO,
}
"""What the fields of a platform and the arguments of `run` take."""
