"""What can be wrong with a platform, each as a `PlatformError` with its numbers."""

from __future__ import annotations

import difflib
import importlib.util
import os
import signal
import socket
from collections import Counter

from unisono.errors import MissingExtra, PlatformError
from unisono.launch import accelerators
from unisono.launch.device import Device
from unisono.launch.field_kinds import check_kinds
from unisono.launch.mpiexec import find_mpiexec
from unisono.launch.platform import Platform
from unisono.launch.rendezvous import owner_of_port

_ONE_HOST = (Device.CPU, Device.GPU, Device.MPS)
_CHOICES = {
    "spawn_method": ("auto", "forkserver", "fork", "spawn"),
    "ipc_protocol": ("tcp", "file"),
    "submitter": ("auto", "submitit", "sbatch"),
}
BACKENDS = ("gloo", "nccl", "shm", "mpi")
"""What `backend` may say, as `unisono.comm.backends` has it; that would load torch here."""


def check_platform(platform: Platform) -> None:
    """Raise `PlatformError` if `platform` makes no sense on any machine."""
    check_kinds(platform)
    for name, words in _CHOICES.items():
        if (value := getattr(platform, name)) not in words:
            raise PlatformError.because(
                f"Platform({name}={value!r})",
                f"choices are {', '.join(map(repr, words))}",
                hint=f"{name}={words[0]!r}",
            )
    _check_backend(platform)
    _check_sizes(platform)
    _check_groups(platform)
    _check_seconds(platform)
    _check_signals(platform)
    _check_port(platform)


def check_machine(platform: Platform) -> None:
    """Raise `PlatformError` if `platform` cannot be had on this machine."""
    _check_free_port(platform)
    wanted, source = _backend(platform)
    if wanted in ("mpi", "mpi4py") and importlib.util.find_spec("mpi4py") is None:
        raise MissingExtra.of("mpi", source, "no mpi4py")
    if platform.kind is Device.GPU:
        gpu_of_rank(platform, platform.ranks_per_node - 1)
    if platform.kind is Device.MPI:
        find_mpiexec(platform)
    if platform.kind is Device.MPS and not accelerators.has_mps():
        raise PlatformError.because(
            _asked(platform),
            "no Apple GPU that torch can use on this machine",
            None,
            'device="cpu" (or UNISONO_FORCE_ON=cpu) rehearses it on processes of this host',
        )


def gpu_of_rank(platform: Platform, local_rank: int) -> int:
    """Return the number of the GPU of a rank, or explain that there are too few."""
    visible = accelerators.visible_gpus()
    size = platform.ranks_per_node
    index = accelerators.gpu_index(local_rank, size, visible, oversubscribe=platform.oversubscribe)
    # A rank may see one device because a scheduler bound it; a launcher that sees one has one.
    if index is None or (visible < size and not platform.oversubscribe and not _is_bound()):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise PlatformError.because(
            _asked(platform),
            f"{visible} GPU{'' if visible == 1 else 's'} visible "
            f"(CUDA_VISIBLE_DEVICES {'is not set' if seen is None else f'={seen!r}'})",
            f"{size} ranks > {visible} GPUs",
            f'on="cpu", ranks={size} (or UNISONO_FORCE_ON=cpu) rehearses it on processes',
        )
    return index


def _is_bound() -> bool:
    """Whether this process is a rank, whose devices somebody has chosen."""
    return "LOCAL_RANK" in os.environ or "SLURM_STEP_ID" in os.environ


def _asked(platform: Platform) -> str:
    ranks = f"{platform.world_size} rank{'s' if platform.world_size > 1 else ''}"
    return f"Platform(device={platform.kind.value!r}) with {ranks}"


def _backend(platform: Platform) -> tuple[str, str]:
    """Return the backend that is asked for, if any, and by whom."""
    if platform.backend is not None:
        return platform.backend, f"Platform(backend={platform.backend!r})"
    wanted = os.environ.get("UNISONO_BACKEND", "")
    return wanted, f"UNISONO_BACKEND={wanted}"


def _check_backend(platform: Platform) -> None:
    wanted, source = _backend(platform)
    if not wanted or ":" in wanted or wanted in ("mpi4py", *BACKENDS):
        return  # a map such as cpu:gloo,cuda:nccl is torch's to check
    near, *_ = difflib.get_close_matches(wanted, BACKENDS, n=1) or BACKENDS
    raise PlatformError.because(
        source,
        f"backends are {', '.join(map(repr, BACKENDS))}",
        hint=f"UNISONO_BACKEND={near}" if platform.backend is None else f"backend={near!r}",
    )


def _check_sizes(platform: Platform) -> None:
    for name, least in (
        ("ranks", 1),
        ("n_nodes", 1),
        ("n_gpus_per_node", 0),
        ("n_cpus_per_node", 1),
    ):
        value = getattr(platform, name)
        if value is not None and value < least:
            raise PlatformError.because(
                f"Platform({name}={value!r})",
                f"a whole number, {least} or more, is needed",
                hint=f"{name}={max(least, 1)}",
            )
    if platform.n_nodes > 1 and platform.kind in _ONE_HOST:
        raise PlatformError.because(
            f"Platform(device={platform.kind.value!r}, n_nodes={platform.n_nodes})",
            "ranks on one host only, this one",
            None,
            "torchrun --nnodes, SLURM or MPI start ranks on several hosts; unisono.run joins them",
        )
    if platform.kind is Device.GPU and platform.n_gpus_per_node == 0 and platform.ranks is None:
        raise PlatformError.because(
            "Platform(device='gpu', n_gpus_per_node=0)", "no rank at all", None, 'device="cpu"'
        )
    check_divides(platform.ranks, platform.n_nodes)
    per_node = platform.ranks_per_node
    gpus = platform.n_gpus_per_node
    is_shared = platform.oversubscribe and per_node > gpus
    if platform.kind is Device.SLURM and gpus and gpus % per_node and not is_shared:
        raise PlatformError.because(
            f"Platform(n_gpus_per_node={gpus}) with {per_node} ranks on a node",
            "GPUs that cannot be shared evenly",
            f"{gpus} GPUs / {per_node} ranks = {gpus / per_node:g}",
            f"n_gpus_per_node={per_node}, or ranks={gpus * platform.n_nodes}"
            + (", or oversubscribe=True" if per_node > gpus else ""),
        )
    cpus = platform.n_cpus_per_node
    if (
        platform.is_explicit("n_cpus_per_node")
        and not platform._is_per_task
        and cpus is not None
        and cpus % per_node
    ):
        raise PlatformError.because(
            f"Platform(n_cpus_per_node={cpus}) with {per_node} ranks on a node",
            "CPUs that cannot be shared evenly",
            f"{cpus} CPUs / {per_node} ranks = {cpus / per_node:g}",
            f"n_cpus_per_node={max(1, cpus // per_node) * per_node}",
        )


def check_divides(ranks: int | None, nodes: int) -> None:
    """Raise `PlatformError` unless every node gets the same number of ranks."""
    if ranks is not None and ranks % nodes:
        below = ranks // nodes * nodes
        fits = [size for size in (below, below + nodes) if size]
        raise PlatformError.because(
            f"ranks={ranks}, nodes={nodes}",
            "nodes with unlike numbers of ranks",
            f"{ranks} ranks / {nodes} nodes = {ranks / nodes:g}",
            f"ranks={' or ranks='.join(map(str, fits))}",
        )


def _check_groups(platform: Platform) -> None:
    groups = platform.ipc_groups
    if not groups:
        return
    size = platform.world_size
    asked = f"Platform(ipc_groups={groups!r}) with {size} ranks"
    hint = "disjoint lists of ranks that cover all of them, or [] for one group of all"
    for number, group in enumerate(groups):
        if not group:
            raise PlatformError.because(asked, f"group {number} is empty", None, hint)
        for rank in group:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
                raise PlatformError.because(
                    asked,
                    f"rank {rank!r} in group {number}",
                    f"ranks of a world of {size} are 0 to {size - 1}",
                    hint,
                )
    counts = Counter(rank for group in groups for rank in group)
    for rank, count in counts.items():
        if count > 1:
            where = [number for number, group in enumerate(groups) if rank in group]
            found = f"rank {rank} is in group {' and '.join(map(str, where))}"
            raise PlatformError.because(asked, f"{found} ({count} times in all)", None, hint)
    if missing := sorted(set(range(size)) - set(counts)):
        raise PlatformError.because(asked, f"rank {missing[0]} is in no group", None, hint)


def _check_seconds(platform: Platform) -> None:
    for name in ("start_timeout_s", "comm_timeout_s", "grace_s", "interrupt_s"):
        value = getattr(platform, name)
        if value <= 0:
            raise PlatformError.because(
                f"Platform({name}={value!r})", "not a time in seconds", hint=f"{name}=60"
            )
    if platform.timeout_min is not None and platform.timeout_min < 1:
        raise PlatformError.because(
            f"Platform(timeout_min={platform.timeout_min})",
            "no time at all",
            None,
            "timeout_min=60, in minutes; None is the limit of the partition",
        )
    if platform.max_requeues < 0:
        raise PlatformError.because(
            f"Platform(max_requeues={platform.max_requeues!r})",
            "negative",
            hint="max_requeues=0 never starts the job again",
        )


def _check_signals(platform: Platform) -> None:
    for name in (*platform.stop_signals, platform.stack_signal):
        if name not in signal.Signals.__members__:
            raise PlatformError.because(
                f"a signal {name!r}", "no signal of this system", None, '"SIGTERM", "SIGUSR2"'
            )


_PORT_HINT = "leave master_port out, and a free port is taken at the start"


def _check_port(platform: Platform) -> None:
    port = platform.master_port
    if port is not None and not 0 < port < 65536:
        raise PlatformError.because(
            f"Platform(master_port={port!r})", "not a port", "ports are 1 to 65535", _PORT_HINT
        )


def _check_free_port(platform: Platform) -> None:
    port = platform.master_port
    if port is None or platform.kind not in _ONE_HOST or not platform.requires_ipc:
        return
    addr = platform.master_addr or "127.0.0.1"
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((addr, port))
        except OSError as error:
            why = "privileged" if isinstance(error, PermissionError) else "in use or not to be had"
            owner = owner_of_port(port)
            raise PlatformError.because(
                f"Platform(master_addr={addr!r}, master_port={port})",
                f"port {port} is {why}: {error.strerror}" + (f"; {owner} has it" if owner else ""),
                None,
                _PORT_HINT,
            ) from error
