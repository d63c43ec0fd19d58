"""The dp x gp matrix of ranks: as a value, as the current groups of the process, and its queries.

`setup_gp` and `use_groups` install a matrix; regions use its row unless told otherwise. Names and
defaults are gp_utils' where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from unisono.comm import Communicator, transports, world
from unisono.comm import groups as cache
from unisono.comm.backends import choose_backend
from unisono.errors import MeshError, PartitionError
from unisono.expect import expect, is_integer
from unisono.launch import run
from unisono.topology import Mesh

T = TypeVar("T")


class AssertedMeshError(MeshError, AssertionError):
    """A `MeshError` where gp_utils asserted: `except AssertionError` still catches it."""


class AssertedPartitionError(PartitionError, AssertionError):
    """A `PartitionError` where gp_utils asserted."""


@dataclass(frozen=True)
class GraphGroups:
    """This rank's row and column of the matrix of ranks."""

    gp: Communicator
    """Its row: consecutive ranks that work on one graph."""
    dp: Communicator
    """Its column: ranks that hold the same part of different graphs."""
    matrix: tuple[tuple[int, ...], ...]
    """World ranks, `dp.size` rows of `gp.size`."""


def graph_groups(
    size: int, *, backend: str | None = None, comm: Communicator | None = None
) -> GraphGroups:
    """Return rows of `size` consecutive ranks and the columns across them. Collective over `comm`.

    Changes no state; groups come from the cache, so asking twice makes nothing new.

    Args:
        size: ranks in a row; must divide the ranks of `comm`.
        backend: of the new groups, e.g. `"gloo"`; default that of `comm`.
        comm: the ranks to lay out; default the world.

    >>> graph_groups(1).matrix
    ((0,),)
    """
    return _laid_out(size, backend, world() if comm is None else comm, f"graph_groups({size!r})")


def _laid_out(size: int, backend: str | None, whole: Communicator, request: str) -> GraphGroups:
    _check_size(size, whole.size, request)
    rows = tuple(tuple(range(first, first + size)) for first in range(0, whole.size, size))
    columns = tuple(zip(*rows, strict=True))
    row, place = divmod(whole.rank, size)
    return GraphGroups(
        dp=_group(whole, columns[place], backend),
        gp=_group(whole, rows[row], backend),
        matrix=tuple(tuple(whole.ranks[rank] for rank in row) for row in rows),
    )


def _group(whole: Communicator, ranks: tuple[int, ...], backend: str | None) -> Communicator:
    """Return the communicator of some ranks of `whole`, the own one among them."""
    if backend is None or backend == whole.backend:
        is_whole = len(ranks) == whole.size
        return whole if is_whole else cast("Communicator", whole.sub(ranks))  # None outside only
    chosen = None
    if len(ranks) > 1:
        here = dict(transports.available())
        if backend not in here and not dist.is_backend_available(backend):
            here[backend] = f"this torch was built without {backend}"
        device = whole.device.type
        chosen = choose_backend(backend, device=device, nodes=1, available=here)
    entry = cache.entry_for(tuple(whole.ranks[rank] for rank in ranks), backend=chosen)
    return Communicator(entry, device=whole.device, timeout_s=whole.timeout_s)


def _check_size(size: object, total: int, request: str) -> None:
    """Raise unless rows of `size` fill `total` ranks."""
    if not is_integer(size) or size < 1:
        raise AssertedMeshError.because(
            request, f"{size!r} is not a number of ranks", None, "1 or more ranks in a row"
        )
    if size > total:
        raise AssertedMeshError.because(
            request,
            f"a world of {total} rank{'s' if total > 1 else ''}",
            f"{size} > {total}",
            f"unisono.run(fn, ranks={size}) starts enough of them",
        )
    if total % size:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        raise AssertedMeshError.because(
            request,
            f"a world of {total} ranks",
            f"{total} % {size} = {total % size}: rows of {size} do not fill it",
            f"one of {divisors}",
        )


@dataclass(frozen=True)
class _Installed:
    """The groups of the process, and the world in which they are valid."""

    groups: GraphGroups
    world: dist.ProcessGroup | None
    made_here: bool = False
    before: _Installed | None = None


_installed: _Installed | None = None


def ensure_div(a: int, b: int) -> None:
    """Raise unless `b` divides `a`."""
    if b == 0 or a % b:
        remainder = f" (remainder {a % b})" if b else ""
        raise AssertedPartitionError.because(f"{a} is not divisible by {b}{remainder}")


def divide_and_check_no_remainder(a: int, b: int) -> int:
    """Return `a / b`, which must be whole.

    >>> divide_and_check_no_remainder(6, 2)
    3
    """
    ensure_div(a, b)
    return a // b


def setup_gp(config: Mapping[str, Any]) -> None:
    """Set up the groups of the process. Collective over the world.

    Args:
        config: `gp_gpus`, ranks that share a graph (at most the world is taken), and optionally
            `distributed_backend`, default that of the world.
    """
    if not isinstance(config, Mapping) or "gp_gpus" not in config:
        keys = sorted(map(str, config)) if isinstance(config, Mapping) else type(config).__name__
        raise AssertedMeshError.because(
            "setup_gp(config)",
            f"no key 'gp_gpus' in {keys}",
            None,
            'setup_gp({"gp_gpus": 2, "distributed_backend": None})',
        )
    size, most = config["gp_gpus"], world().size
    request = f"setup_gp with gp_gpus={size!r}"
    size = most if is_integer(size) and size > most else size
    _install_new(size, config.get("distributed_backend"), request)


def setup_graph_parallel_groups(
    graph_parallel_group_size: int, distributed_backend: str | None = None
) -> None:
    """Set up groups of exactly this size. Collective over the world."""
    size = graph_parallel_group_size
    _install_new(size, distributed_backend, f"setup_graph_parallel_groups({size!r})")


def cleanup_gp() -> None:
    """Forget the groups, and destroy those that set-up made. On all ranks; twice is fine."""
    global _installed
    ended, _installed = _installed, None
    while ended is not None:
        if ended.made_here and ended.world is dist.group.WORLD:
            ended.groups.dp.close()
            ended.groups.gp.close()
        ended = ended.before


class use_groups:
    """Make these groups the current ones, until the end of a `with` block if there is one.

    Local for `GraphGroups`; collective over a `Mesh` whose communicators are used the first time.

    Args:
        groups: from `graph_groups`, or a `Mesh` with the two axes (no group is made twice).
        gp: name of the mesh axis along which a graph is split.
        dp: name of the mesh axis along which batches differ.
    """

    def __init__(self, groups: GraphGroups | Mesh, *, gp: str = "gp", dp: str = "dp") -> None:
        global _installed
        hint = "use_groups(graph_groups(2)), or use_groups(Mesh(dp=2, gp=2))"
        expect("groups", groups, (GraphGroups, Mesh), hint)
        if isinstance(groups, Mesh):
            world_rank, first = groups.comm().ranks, groups.ranks_along(gp)[0]
            rows = (groups.ranks_along(gp, rank=r) for r in groups.ranks_along(dp, rank=first))
            matrix = tuple(tuple(world_rank[rank] for rank in row) for row in rows)
            groups = GraphGroups(groups.comm(gp), groups.comm(dp), matrix)
        self.groups = groups
        self._mine = _Installed(self.groups, dist.group.WORLD, before=_installed)
        _installed = self._mine

    def __enter__(self) -> GraphGroups:
        return self.groups

    def __exit__(self, *_: object) -> None:
        global _installed
        if _installed is self._mine:  # a clean-up inside has ended the former ones too
            _installed = self._mine.before


def current_groups() -> GraphGroups | None:
    """Return the current groups; None before set-up, and when their world has ended."""
    if _installed is None or _installed.world is not dist.group.WORLD:
        return None
    return _installed.groups


def current_gp() -> Communicator:
    """Return the communicator regions use: the current row, or this process if it is alone.

    Raises:
        MeshError: in a world of several ranks without set-up. A forgotten set-up must not pass for
            a parallel run.
    """
    if _installed is not None and _installed.world is dist.group.WORLD:
        return _installed.groups.gp
    return alone("a graph-parallel region", "comm=unisono.world()")


def alone(request: str, option: str) -> Communicator:
    """Return the communicator of a process without other ranks; a world of several is refused."""
    whole = world()
    if whole.size > 1:
        raise MeshError.because(
            f"{request} before set-up",
            f"a world of {whole.size} ranks and no graph-parallel groups",
            None,
            f'{option}, or setup_gp({{"gp_gpus": {whole.size}, "distributed_backend": None}})',
        )
    return whole


def initialized() -> bool:
    """Whether groups are set up."""
    return current_groups() is not None


def get_dp_group() -> dist.ProcessGroup | None:
    """Return the process group of this rank's column; None before set-up."""
    groups = current_groups() if dist.is_initialized() else None
    return None if groups is None else groups.dp.process_group()


def get_gp_group() -> dist.ProcessGroup | None:
    """Return the process group of this rank's row; None before set-up."""
    groups = current_groups() if dist.is_initialized() else None
    return None if groups is None else groups.gp.process_group()


def get_dp_rank() -> int:
    """Return the place in the column; before set-up the rank in the world."""
    groups = current_groups()
    return world().rank if groups is None else groups.dp.rank


def get_gp_rank() -> int:
    """Return the place in the row; 0 before set-up."""
    groups = current_groups()
    return 0 if groups is None else groups.gp.rank


def get_dp_world_size() -> int:
    """Return the size of the column; before set-up that of the world."""
    groups = current_groups()
    return world().size if groups is None else groups.dp.size


def get_gp_world_size() -> int:
    """Return the size of the row; 1 before set-up."""
    groups = current_groups()
    return 1 if groups is None else groups.gp.size


def _install_new(size: int, backend: str | None, request: str) -> None:
    global _installed
    present = current_groups()
    if present is not None:
        raise AssertedMeshError.because(
            request,
            f"groups are set up already: dp({present.dp.size}) x gp({present.gp.size})",
            None,
            "call cleanup_gp() first",
        )
    groups = _laid_out(size, backend, world(), request)
    # A rank may clean up at once; its peers must have finished connecting by then.
    groups.dp.barrier()
    groups.gp.barrier()
    _installed = _Installed(groups, dist.group.WORLD, made_here=True)


def parallel_predict(model: Callable[[Any], T], batch: Any, workers: int = 4) -> T:
    """Return `model(batch)`, computed by `workers` ranks that share the graph.

    The model is a callable written with regions or a `GraphPlan`; it is copied to the ranks, its
    replicated result comes back from the first one, detached. In a process that is a rank already,
    the ranks of that world do it.

    Args:
        model: module or function of one argument.
        batch: its argument: tensors, or anything that can be pickled.
        workers: number of ranks, on this host.
    """
    return run(_predict, model, batch, ranks=workers)[0]


def _predict(model: Callable[[Any], Any], batch: Any) -> Any:
    with use_groups(graph_groups(world().size)):
        return _detached(model(batch))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _detached(getattr(value, f.name)) for f in fields(value) if f.init}
        return replace(value, **changed)
    if isinstance(value, tuple | list):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
