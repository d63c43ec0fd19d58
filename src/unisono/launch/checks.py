"""What is wrong with a platform: on any machine, and on this one. Nothing is started here."""

from __future__ import annotations

import importlib.util
import os
import resource
from collections import Counter
from collections.abc import Sequence

from unisono import accelerator
from unisono.errors import PYTHON, MissingExtra, PlatformError, Spelling
from unisono.launch.platform import AS_REQUESTED, KINDS, MAY_BE_NONE, Device, Platform


def check_platform(platform: Platform, spelling: Spelling = PYTHON) -> None:
    """Raise `PlatformError` if a platform makes no sense on any machine.

    Errors spell fields as the caller does.
    """
    for name in sorted(KINDS.keys() & vars(platform)):
        value = getattr(platform, name)
        if value is not None or name not in MAY_BE_NONE:
            KINDS[name].check(name, value, "platform", spelling)
    if platform.backend is None and (backend := os.environ.get("UNISONO_BACKEND")):
        KINDS["backend"].check("UNISONO_BACKEND", backend, "")
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
    if kind is Device.GPU:
        platform.gpu_of_rank(platform.ranks_per_node - 1, spelling)
    if kind is Device.MPI:
        from unisono.launch.places.mpi import find_mpiexec

        find_mpiexec(platform, spelling)
    if kind is Device.RAY and importlib.util.find_spec("ray") is None:
        raise MissingExtra.of("ray", platform.describe(spelling), "no ray")
    if kind is Device.MPS and not accelerator.count("mps"):
        cpu = spelling.options(on="cpu")
        raise PlatformError.because(
            platform.describe(spelling),
            "no Apple GPU that torch can use on this machine",
            hint=f"{cpu} (or UNISONO_FORCE_ON=cpu) rehearses it on processes of this host",
        )


def _check_hosts(platform: Platform, spelling: Spelling) -> None:
    hosts, nodes = list(platform.hosts), platform.n_nodes
    strange = next((h for h in hosts if h.startswith("-") or h.split() != [h]), None)
    twice = next((host for host, count in Counter(hosts).items() if count > 1), None)
    fields: dict[str, object] = {"device": platform.kind.value, "hosts": hosts}
    for is_wrong, finding, hint in (
        (
            platform.kind is not Device.MPI,
            f"{platform.kind.value} takes no hosts: mpi does",
            spelling.options(on="mpi", hosts=hosts),
        ),
        (
            strange is not None,
            f"{strange!r} is not the name of a host",
            f"names as ssh takes them: {spelling.options(hosts=['a', 'user@b'])}",
        ),
        (
            twice is not None,
            f"{twice!r} more than once",
            f"each host once; {spelling.options(ranks=len(hosts))} for more ranks on each",
        ),
        (nodes != len(hosts), f"{nodes} nodes != {len(hosts)} hosts", "leave nodes out"),
    ):
        if is_wrong:
            raise PlatformError.because(spelling.platform(**fields), finding, hint=hint)


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
        fits = [spelling.options(ranks=size) for size in (below, below + nodes) if size]
        raise PlatformError.because(
            spelling.options(ranks=ranks, nodes=nodes),
            "nodes with unlike numbers of ranks",
            f"{ranks} ranks / {nodes} nodes = {ranks / nodes:g}",
            " or ".join(fits),
        )
    per_node, cpus = platform.ranks_per_node, platform.shared_cpus
    is_shared = platform.oversubscribe and per_node > gpus
    if kind in AS_REQUESTED and gpus % per_node and not is_shared:
        hints = [spelling.options(n_gpus_per_node=per_node), spelling.options(ranks=gpus * nodes)]
        if per_node > gpus:
            hints.append(spelling.options(oversubscribe=True))
        raise PlatformError.because(
            f"{spelling.platform(n_gpus_per_node=gpus)} with {per_node} ranks on a node",
            "GPUs that cannot be shared evenly",
            f"{gpus} GPUs / {per_node} ranks = {gpus / per_node:g}",
            ", or ".join(hints),
        )
    if cpus is not None and cpus % per_node:
        raise PlatformError.because(
            f"{spelling.platform(n_cpus_per_node=cpus)} with {per_node} ranks on a node",
            "CPUs that cannot be shared evenly",
            f"{cpus} CPUs / {per_node} ranks = {cpus / per_node:g}",
            spelling.options(n_cpus_per_node=max(1, cpus // per_node) * per_node),
        )


def _check_groups(platform: Platform, groups: Sequence[Sequence[int]], spelling: Spelling) -> None:
    size, finding, arithmetic = platform.world_size, "", None
    groups_of: dict[int, list[int]] = {rank: [] for rank in range(size)}
    for number, group in enumerate(groups):
        if not group:
            finding = finding or f"group {number} is empty"
        for rank in group:
            if KINDS["seed"].fits(rank) and rank in groups_of:
                groups_of[rank].append(number)
            elif not finding:
                finding = f"rank {rank!r} in group {number}"
                arithmetic = f"ranks of a world of {size} are 0 to {size - 1}"
    for rank, numbers in groups_of.items():
        if len(numbers) != 1 and not finding:
            finding = f"rank {rank} is in {'' if numbers else 'no group'}"
            finding += " and ".join(f"group {number}" for number in numbers)
    if finding:
        raise PlatformError.because(
            f"{spelling.platform(ipc_groups=groups)} with {size} ranks",
            finding,
            arithmetic,
            "disjoint lists of ranks that cover all of them, or [] for one group of all",
        )
