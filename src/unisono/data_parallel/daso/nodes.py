"""Which ranks share a node, and the groups of ranks that follow from it, for DASO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from unisono.comm import Communicator, detect, world
from unisono.comm.mpi_style import MPI_WORLD, get_comm
from unisono.data_parallel.ranks import communicator_of
from unisono.errors import MeshError
from unisono.expect import expect, is_integer
from unisono.topology import decompose


@dataclass(frozen=True)
class NodeLayout:
    """Ranks of each node, in rank order; nodes ordered by their lowest rank.

    >>> layout = NodeLayout.of_hosts(["a", "b", "a", "b", "b"])
    >>> layout.nodes, layout.groups
    (((0, 2), (1, 3, 4)), ((0, 1), (2, 3)))
    >>> layout.weights
    (0.8, 1.2)
    """

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of_hosts(cls, hosts: Sequence[str]) -> NodeLayout:
        """Return the layout of ranks that run on these hosts."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in nodes.values()))

    @classmethod
    def of_blocks(cls, size: int, ranks_per_node: int | Sequence[int]) -> NodeLayout:
        """Return the layout of consecutive ranks.

        Args:
            size: number of ranks.
            ranks_per_node: ranks of every node, or of each node.

        Raises:
            MeshError: the blocks do not make up `size` ranks.
        """
        if is_integer(ranks_per_node):
            if ranks_per_node < 1 or size % ranks_per_node:
                share = (
                    f"{size} / {ranks_per_node} = {size / ranks_per_node:g}"
                    if ranks_per_node > 0
                    else f"{ranks_per_node} < 1"
                )
                raise MeshError.because(
                    f"ranks_per_node={ranks_per_node}",
                    f"{size} ranks",
                    share,
                    f"a divisor of {size}, or a list of block sizes that add up to it",
                )
            blocks = [ranks_per_node] * (size // ranks_per_node)
        else:
            blocks = list(ranks_per_node)
        if min(blocks, default=0) < 1 or sum(blocks) != size:
            written = " + ".join(map(str, blocks)) or "nothing"
            raise MeshError.because(
                f"ranks_per_node={blocks}",
                f"{size} ranks",
                f"{written} = {sum(blocks)} != {size}"
                if sum(blocks) != size
                else f"{min(blocks)} < 1",
                "positive block sizes that add up to the number of ranks",
            )
        return cls(tuple(tuple(range(a, b)) for a, b in pairwise(decompose.bounds(blocks))))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Global groups: group `i` holds the `i`-th rank of every node.

        There are as many as the smallest node has ranks.
        """
        smallest = min(len(node) for node in self.nodes)
        return tuple(tuple(node[i] for node in self.nodes) for i in range(smallest))

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Share of each node in a mean times the number of nodes: 1 for equal nodes."""
        size = sum(len(node) for node in self.nodes)
        return tuple(len(self.nodes) * len(node) / size for node in self.nodes)

    def node_of(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return next(i for i, node in enumerate(self.nodes) if rank in node)


def layout_of(comm: Communicator, ranks_per_node: Any) -> NodeLayout:
    """Return which ranks share a node. Collective over `comm` when hostnames decide."""
    if ranks_per_node is None:
        return NodeLayout.of_hosts(comm.hosts)
    expect("ranks_per_node", ranks_per_node, (int, list, tuple, type(None)), "2, or [2, 3]")
    for size in [ranks_per_node] if is_integer(ranks_per_node) else ranks_per_node:
        expect("ranks_per_node", size, int)
    return NodeLayout.of_blocks(comm.size, ranks_per_node)


def all_ranks(comm: object) -> Communicator:
    """Return the ranks that train together; by default all that the launcher has started.

    Where each node has a default process group of its own, that is not the world. Local, except
    that the first use of MPI's world is collective over it.
    """
    ranks, started = communicator_of(comm), detect()
    is_default = comm is MPI_WORLD or (comm is None and get_comm() is MPI_WORLD)
    if not is_default or not started.is_world or started.size <= ranks.size:
        return ranks
    if started.kind not in ("mpich", "openmpi"):
        raise MeshError.because(
            "DASO(comm=None)",
            f"torch's default process group has {ranks.size} ranks, {started.size} were started",
            f"{ranks.size} < {started.size}",
            "comm= a group of all ranks, such as mpi4py's MPI.COMM_WORLD",
        )
    from mpi4py import MPI

    return Communicator.of(MPI.COMM_WORLD)


def group_of_node(comm: Communicator, members: Sequence[int]) -> Communicator | None:
    """Return torch's default group where it has the ranks of a node, on every node; else None.

    Scripts for HeAT begin so: a group of torch's on each node, whose backend fits the devices, and
    MPI between nodes. Collective over `comm`.

    Args:
        comm: all ranks, which are no part of torch's default group.
        members: those of the own node.
    """
    if comm._entry.maker is None:
        return None
    is_there = dist.is_initialized() and dist.get_world_size() == len(members)
    is_there = is_there and members[dist.get_rank()] == comm.rank
    if not all(flag for (flag,) in comm.all_gather_ints([int(is_there)])):
        return None
    node = world()
    is_node = [rank for (rank,) in node.all_gather_ints([comm.rank])] == list(members)
    return node if all(flag for (flag,) in comm.all_gather_ints([int(is_node)])) else None
