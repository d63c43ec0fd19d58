"""`GraphGroups`: the dp x gp matrix of ranks as a value, and how it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from unisono.comm import Communicator, transports, world
from unisono.comm import groups as cache
from unisono.comm.backends import choose_backend
from unisono.graph_parallel.asserted import AssertedMeshError
from unisono.topology import Mesh


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
    whole = world() if comm is None else comm
    check_size(size, whole.size, f"graph_groups({size!r})")
    rows = tuple(tuple(range(first, first + size)) for first in range(0, whole.size, size))
    columns = tuple(zip(*rows, strict=True))
    mine, place = divmod(whole.rank, size)
    return GraphGroups(
        dp=_group(whole, columns[place], backend),
        gp=_group(whole, rows[mine], backend),
        matrix=tuple(tuple(whole.ranks[rank] for rank in row) for row in rows),
    )


def groups_of_mesh(mesh: Mesh, gp: str, dp: str) -> GraphGroups:
    """Return the matrix of two axes of a mesh, on its own communicators."""
    world_rank = mesh.comm().ranks
    rows = tuple(
        tuple(world_rank[rank] for rank in mesh.ranks_along(gp, rank=first))
        for first in mesh.ranks_along(dp, rank=mesh.ranks_along(gp)[0])
    )
    return GraphGroups(gp=mesh.comm(gp), dp=mesh.comm(dp), matrix=rows)


def _group(whole: Communicator, ranks: tuple[int, ...], backend: str | None) -> Communicator:
    """Return the communicator of some ranks of `whole`, the own one among them."""
    if len(ranks) == whole.size and backend in (None, whole.backend):
        return Communicator.of(whole)
    if backend in (None, whole.backend) and (part := whole.sub(ranks)) is not None:
        return part
    chosen = None
    if backend is not None and len(ranks) > 1:
        nccl = "ok" if dist.is_nccl_available() else "this torch was built without NCCL"
        here = {**transports.available(), "nccl": nccl}
        device = whole.device.type
        chosen = choose_backend(backend, device=device, nodes=1, available=here).name
    entry = cache.entry_for(tuple(whole.ranks[rank] for rank in ranks), backend=chosen)
    return Communicator(entry, device=whole.device, timeout_s=whole.timeout_s)


def check_whole_number(size: object, asked: str) -> None:
    """Raise unless `size` is a number of ranks."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise AssertedMeshError.because(
            asked, f"{size!r} is not a number of ranks", None, "1 or more ranks in a row"
        )


def check_size(size: int, total: int, asked: str) -> None:
    """Raise unless rows of `size` fill `total` ranks."""
    check_whole_number(size, asked)
    if size > total:
        raise AssertedMeshError.because(
            asked,
            f"a world of {total} rank{'s' if total > 1 else ''}",
            f"{size} > {total}",
            f"unisono.run(fn, ranks={size}) starts enough of them",
        )
    if total % size:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        raise AssertedMeshError.because(
            asked,
            f"a world of {total} ranks",
            f"{total} % {size} = {total % size}: rows of {size} do not fill it",
            f"one of {divisors}",
        )
