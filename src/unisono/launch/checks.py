"""What a field of a platform or an argument of `run` may be, and what is wrong with a platform.

A `Kind` checks one value, wherever it was written: in Python, in `unisono.toml` or in a shell.
`check_platform` and `check_machine` check a whole platform; nothing is started.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import resource
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from unisono import accelerator
from unisono.errors import PYTHON, MissingExtra, PlatformError, Spelling
from unisono.expect import is_integer

if TYPE_CHECKING:
    from unisono.launch.platform import Platform

BACKENDS = ("gloo", *accelerator.BACKENDS, "shm", "mpi")
"""What `backend` may say, as `unisono.comm.backends` has it; that would load torch here."""


def nearest(word: str, names: Collection[str]) -> str | None:
    """Return the name that `word` begins, or is most like; None if it is like none."""
    begun = [name for name in sorted(names) if name.startswith(word)]
    return next(iter(begun or difflib.get_close_matches(word, names, n=1)), None)


@dataclass(frozen=True)
class Kind:
    """A kind of value, and how it is checked."""

    what: str
    """In words."""
    example: Any
    """A value that fits."""
    fits: Callable[[Any], bool]
    """Whether a value is of this kind."""
    words: tuple[str, ...] = ()
    """The choices, if there are few."""

    def check(self, name: str, value: Any, call: str, spelling: Spelling = PYTHON) -> None:
        """Raise `PlatformError` unless `value`, given as `name`, is of this kind.

        Args:
            name: name of the field.
            value: its value.
            call: `"run"` or `"platform"`, where it was given; `""` shows it alone.
            spelling: how the caller writes it.
        """
        if self.fits(value):
            return
        example = self.example
        if isinstance(example, list) and isinstance(value, str):
            example = shlex.split(value) or [value]
        if self.words:
            example = nearest(str(value), self.words) or example
        is_alike = type(value) is type(self.example)
        spell = {"run": spelling.run, "platform": spelling.platform}.get(call, spelling.options)
        raise PlatformError.because(
            spell(**{name: value}),
            f"not {self.what}" if is_alike else f"{type(value).__name__}, not {self.what}",
            hint=spelling.options(**{name: example}),
        )


def _is_integer(value: Any, at_least: float = -float("inf")) -> bool:
    return is_integer(value) and value >= at_least


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_signal(value: Any) -> bool:
    return value in signal.Signals.__members__


def _is_seconds(value: Any) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and value > 0


def _is_torch_backend(value: Any) -> bool:
    """Whether torch is to check it: a map of kinds of devices to backends, or one of a plugin."""
    if not _is_text(value):
        return False
    return ":" in value or value == "mpi4py" or accelerator.is_backend(value)  # mpi4py is DDPW's


def one_of(*words: str, also: Callable[[Any], bool] = lambda _: False) -> Kind:
    """Return the kind of a value that is one of few words."""
    listed = ", ".join(map(repr, words))
    return Kind(f"one of {listed}", words[0], lambda v: v in words or also(v), words)


COUNT = Kind("an integer >= 1", 2, lambda v: _is_integer(v, 1))
COUNT_OR_ZERO = Kind("an integer >= 0", 2, lambda v: _is_integer(v, 0))
INTEGER = Kind("an integer", 2, _is_integer)
SECONDS = Kind("a number of seconds > 0", 60.0, _is_seconds)
FINITE_SECONDS = Kind(
    "a finite number of seconds > 0", 60.0, lambda v: _is_seconds(v) and v < float("inf")
)
MINUTES = Kind("a number of minutes, an integer >= 1", 60, COUNT.fits)
PORT = Kind("a port, 1 to 65535", 29400, lambda v: _is_integer(v, 1) and v < 65536)
FLAG = Kind("True or False", True, lambda v: isinstance(v, bool))
TEXT = Kind("a string", "word", _is_text)
PATH = Kind("a path", "word", lambda v: isinstance(v, (str, os.PathLike)))
SIGNAL = Kind("the name of a signal", "SIGUSR1", _is_signal)
SIGNALS = Kind("names of signals", ["SIGTERM"], lambda v: _is_list(v, _is_signal))
STRINGS = Kind("a list of strings", ["-v", "-x"], lambda v: _is_list(v, _is_text))
SPAWN = one_of("auto", "forkserver", "fork", "spawn")
BACKEND = one_of(*BACKENDS, also=_is_torch_backend)
GROUPS = Kind(
    "a list of lists of ranks",
    [[0, 1], [2, 3]],
    lambda v: v is None or _is_list(v, lambda group: isinstance(group, (list, tuple))),
)
TABLE = Kind(
    "a table with strings as names",
    {"account": "physics"},
    lambda v: isinstance(v, dict) and all(map(_is_text, v)),
)
VARIABLES = Kind(
    "a table of strings",
    {"NAME": "value"},
    lambda v: isinstance(v, dict) and all(map(_is_text, (*v, *v.values()))),
)


def check_platform(platform: Platform, spelling: Spelling = PYTHON) -> None:
    """Raise `PlatformError` if a platform makes no sense on any machine.

    Errors spell fields as the caller does.
    """
    for field in fields(platform):
        value = getattr(platform, field.name)
        if field.metadata and value != field.default:
            field.metadata["kind"].check(field.name, value, "platform", spelling)
    if platform.backend is None and (backend := os.environ.get("UNISONO_BACKEND")):
        BACKEND.check("UNISONO_BACKEND", backend, "")
    if platform.hosts:
        _check_hosts(platform, spelling)
    _check_sizes(platform, spelling)
    if platform.ipc_groups:
        _check_groups(platform, platform.ipc_groups, spelling)


def check_machine(platform: Platform, spelling: Spelling = PYTHON) -> None:
    """Raise `PlatformError` if a platform cannot be had on this machine."""
    kind, size = platform.kind, platform.world_size
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if kind.is_here and 0 < most < size:
        raise PlatformError.because(
            platform.describe(spelling),
            f"this process may have {most} open files, and each rank takes some",
            f"{size} ranks > {most}",
            "fewer ranks, or ulimit -n 65536 in the shell",
        )
    backend = platform.backend or os.environ.get("UNISONO_BACKEND")
    if backend in ("mpi", "mpi4py") and importlib.util.find_spec("mpi4py") is None:
        raise MissingExtra.of("mpi", spelling.options(backend=backend), "no mpi4py")
    if kind.value == "gpu":
        platform.gpu_of_rank(platform.ranks_per_node - 1, spelling)
    if kind.value == "mpi":
        from unisono.launch.places.mpi import find_mpiexec

        find_mpiexec(platform, spelling)
    if kind.value == "ray" and importlib.util.find_spec("ray") is None:
        raise MissingExtra.of("ray", platform.describe(spelling), "no ray")
    if kind.value == "mps" and not accelerator.count("mps"):
        raise PlatformError.because(
            platform.describe(spelling),
            "no Apple GPU that torch can use on this machine",
            hint=f"{spelling.options(on='cpu')} (or UNISONO_FORCE_ON=cpu) rehearses it here",
        )


def _check_hosts(platform: Platform, spelling: Spelling) -> None:
    hosts, nodes, hint = list(platform.hosts), platform.n_nodes, "each host once, as ssh takes it"
    strange = [host for host in hosts if host.startswith("-") or host.split() != [host]]
    repeated = [host for host, count in Counter(hosts).items() if count > 1]
    if platform.kind.value != "mpi":
        finding = f"{platform.kind.value} takes no hosts: mpi does"
        hint = spelling.options(on="mpi", hosts=hosts)
    elif strange:
        finding = f"{strange[0]!r} is not the name of a host"
    elif repeated:
        finding = f"{repeated[0]!r} more than once"
        hint += f"; {spelling.options(ranks=len(hosts))} for more ranks on each"
    elif nodes != len(hosts):
        finding, hint = f"{nodes} nodes != {len(hosts)} hosts", "leave nodes out"
    else:
        return
    call = spelling.platform(device=platform.kind.value, hosts=hosts)
    raise PlatformError.because(call, finding, hint=hint)


def _check_sizes(platform: Platform, spelling: Spelling) -> None:
    kind, ranks = platform.kind, platform.ranks
    nodes, gpus = platform.n_nodes, platform.n_gpus_per_node
    if nodes > 1 and kind.is_here:
        several = spelling.options(on="mpi", hosts=["a", "b"])
        raise PlatformError.because(
            spelling.platform(device=kind.value, n_nodes=nodes),
            "ranks on one host only, this one",
            hint=f"{several}, or SLURM, Ray; under torchrun --nnodes unisono.run joins the ranks",
        )
    if ranks is not None and ranks % nodes:
        below = ranks // nodes * nodes
        raise PlatformError.because(
            spelling.options(ranks=ranks, nodes=nodes),
            "nodes with unlike numbers of ranks",
            f"{ranks} ranks / {nodes} nodes = {ranks / nodes:g}",
            " or ".join(spelling.options(ranks=n) for n in (below, below + nodes) if n),
        )
    per_node, cpus = platform.ranks_per_node, platform.shared_cpus
    is_shared = platform.oversubscribe and per_node > gpus
    if kind.has_own_nodes and gpus % per_node and not is_shared:
        hints = [spelling.options(n_gpus_per_node=per_node), spelling.options(ranks=gpus * nodes)]
        hints += [spelling.options(oversubscribe=True)] if per_node > gpus else []
        raise _uneven("GPUs", gpus, per_node, spelling.platform(n_gpus_per_node=gpus), hints)
    if cpus is not None and cpus % per_node:
        hint = spelling.options(n_cpus_per_node=max(1, cpus // per_node) * per_node)
        raise _uneven("CPUs", cpus, per_node, spelling.platform(n_cpus_per_node=cpus), [hint])


def _uneven(what: str, count: int, ranks: int, call: str, hints: Sequence[str]) -> Exception:
    return PlatformError.because(
        f"{call} with {ranks} ranks on a node",
        f"{what} that cannot be shared evenly",
        f"{count} {what} / {ranks} ranks = {count / ranks:g}",
        ", or ".join(hints),
    )


def _check_groups(platform: Platform, groups: Sequence[Sequence[int]], spelling: Spelling) -> None:
    size, findings = platform.world_size, list[str]()
    groups_of: dict[int, list[str]] = {rank: [] for rank in range(size)}
    for number, group in enumerate(groups):
        findings += [] if group else [f"group {number} is empty"]
        for rank in group:
            if INTEGER.fits(rank) and rank in groups_of:
                groups_of[rank].append(f"group {number}")
            else:
                findings.append(f"rank {rank!r} in group {number}, where ranks are 0 to {size - 1}")
    for rank, names in groups_of.items():
        if len(names) != 1:
            findings.append(f"rank {rank} is in {' and '.join(names) or 'no group'}")
    if findings:
        raise PlatformError.because(
            f"{spelling.platform(ipc_groups=groups)} with {size} ranks",
            findings[0],
            hint="disjoint lists of ranks that cover all of them, or [] for one group of all",
        )
