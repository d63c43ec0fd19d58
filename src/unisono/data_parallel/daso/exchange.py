"""DASO's nodes, and what it sends between them: means of parameters, at once or in the background.

One rank of each node takes part in an exchange and passes the result on inside its node. Parameters
are never rounded on the wire: where it is narrower than they are, differences to the last common
value travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.comm import Communicator, Pending, detect, world
from unisono.comm.mpi_style import MPI_WORLD, get_comm
from unisono.data_parallel.ranks import (
    average_tensors,
    broadcast_tensors,
    communicator_of,
    flatten,
    on_device,
    real_view,
    structure_of,
    write_back,
)
from unisono.errors import MeshError
from unisono.expect import expect, is_integer, refusal
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
            even = ranks_per_node > 0 and size % ranks_per_node == 0
            blocks = [ranks_per_node] * (size // ranks_per_node) if even else []
            share = f"{size} / {ranks_per_node} is not a whole number of nodes"
        else:
            blocks = list(ranks_per_node)
            share = f"{' + '.join(map(str, blocks)) or 'nothing'} = {sum(blocks)}"
        if min(blocks, default=0) < 1 or sum(blocks) != size:
            raise MeshError.because(
                f"ranks_per_node={ranks_per_node}",
                f"{size} ranks",
                share,
                f"a divisor of {size}, or a list of positive block sizes that add up to it",
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
        members: those of this node.
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


@dataclass
class InFlight:
    """An exchange that has been started and not yet used."""

    group: int
    """Number of the global group."""
    sums: list[Tensor]
    """What arrives, on the rank of each node that takes part; memory for it on the others."""
    pending: list[Pending[Tensor]] = field(default_factory=list)


class FlatParameters:
    """Packs trainable parameters, in the order of `named_parameters`, and writes them back.

    Args:
        module: frozen parameters are left out, shared ones count once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.structure = module, structure_of(module)
        self.named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for _, param in self.named:
            kinds[param.device, param.dtype].append(param)
        self._kinds = list(kinds.values())

    def pack(self) -> list[Tensor]:
        """Return the values as new flat tensors, one for each kind."""
        return [flatten(kind) for kind in self._kinds]

    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the parameters with these values."""
        for kind, flat in zip(self._kinds, flats, strict=True):
            write_back(flat, kind)

    def first_non_finite(self) -> int:
        """Return the place in `named` of the first parameter with a nan or inf, or -1."""
        places = range(len(self.named))
        return next((i for i in places if not _is_finite(real_view(self.named[i][1]))), -1)


class NodeExchange:
    """Averages of parameters between nodes. Making one is collective over `comm`.

    Args:
        comm: all ranks.
        layout: which of them share a node.
        chunk: elements of a message.
        wire: dtype in which float32 values travel in a mean that is waited for.
    """

    flat: FlatParameters
    """The parameters of the module."""

    def __init__(
        self, comm: Communicator, layout: NodeLayout, *, chunk: int, wire: torch.dtype
    ) -> None:
        self.in_flight: InFlight | None = None
        self.common: list[Tensor] | None = None
        """Last value that all ranks had in common; kept where differences to it travel."""
        self.comm = comm
        self.layout = layout
        self._chunk = chunk
        self._wire = wire
        this_node = layout.node_of(comm.rank)
        node = group_of_node(comm, layout.nodes[this_node]) or comm.sub(layout.nodes[this_node])
        self.node = cast(Communicator, node)
        """Ranks of this node."""
        self._groups = [comm.sub(ranks) for ranks in layout.groups]
        self._n_nodes = len(layout.nodes)
        self._weight = layout.weights[this_node]

    def bind(self, module: nn.Module) -> None:
        """Take the parameters of a module; rank 0's become the common value. Collective."""
        self.flat, self.in_flight = FlatParameters(module), None
        values = self.flat.pack()
        is_narrow = self._n_nodes > 1 and any(self._dtype(x) != x.dtype for x in values)
        self.common = values if is_narrow else None
        broadcast_tensors(self.common or [], self.comm)

    def has_changed(self) -> bool:
        """Whether parameters are others than those taken, or not at the common value. Local.

        Asked between epochs. From weights loaded meanwhile the common value may be far away, and a
        narrow difference to it would round them.
        """
        if self.flat.structure != structure_of(self.flat.module):
            return True
        return self.common is not None and not all(map(torch.equal, self.flat.pack(), self.common))

    def align(self) -> None:
        """Bring the ranks of this node together at their mean. Collective over the node."""
        average_tensors([param for _, param in self.flat.named], self.node)

    def mean(self, group: int) -> None:
        """Give all ranks the mean of the nodes and wait for it. Collective over all ranks."""
        self.drop()
        values = self.flat.pack()
        bases = values if self.common is None else self.common
        shares: list[Tensor] = []
        for x, base in zip(values, bases, strict=True):
            dtype = x.dtype if self.common is None else self._dtype(x)
            difference = x if dtype == x.dtype else x.sub_(base)
            shares.append(difference.mul_(self._weight).to(dtype))
        self._start(group, shares)
        result: list[Tensor] = []
        for x, base, total in zip(values, bases, self._arrived(), strict=True):
            mean = total.to(x.dtype).div_(self._n_nodes)
            result.append(mean if total.dtype == x.dtype else mean.add_(base))
        if self.common is not None:
            self.common = result
        self.flat.unpack(result)

    def send(self, group: int) -> None:
        """Start to average the parameters as they are now. Collective over the group's ranks."""
        self._start(group, [x.mul_(self._weight) for x in self.flat.pack()])

    def merge(self, batches: int) -> None:
        """Mix the mean under way into the parameters, `batches` after it was sent. Collective.

        The newer parameters of the node count for `2 * batches` nodes.
        """
        sums = self._arrived()
        if self._n_nodes == 1:
            return  # an average with its past would only hold it back
        share = self._n_nodes / (2 * batches + self._n_nodes)
        values = self.flat.pack()
        for x, total in zip(values, sums, strict=True):
            x.lerp_(total / self._n_nodes, share)
        self.flat.unpack(values)

    def complete(self) -> None:
        """Wait until what is in flight has arrived. Local."""
        if self.in_flight is not None:
            for pending in self.in_flight.pending:
                pending.wait()
            self.in_flight.pending.clear()

    def drop(self) -> None:
        """Wait for what is in flight and forget it. Local."""
        self.complete()
        self.in_flight = None

    def _start(self, group: int, shares: list[Tensor]) -> None:
        """Start to sum up what the nodes bring. Collective over the ranks of the global group."""
        self.in_flight = InFlight(group, shares)
        members = self._groups[group]
        if members is not None:
            self.in_flight.pending = [
                on_device(members, part.device).start.all_reduce_(part)
                for x in shares
                for part in x.split(self._chunk)
            ]

    def _arrived(self) -> list[Tensor]:
        """Return the sums under way, on every rank, and check that they are finite. Collective."""
        arrived = cast(InFlight, self.in_flight)
        waiting = iter(arrived.pending)
        for x in arrived.sums:
            for part in x.split(self._chunk):
                if (pending := next(waiting, None)) is not None:
                    pending.wait()
                on_device(self.node, part.device).broadcast_(part, arrived.group)
        self.in_flight = None
        if not all(map(_is_finite, arrived.sums)):
            self._raise_non_finite(arrived.sums)
        return arrived.sums

    def _raise_non_finite(self, sums: Sequence[Tensor]) -> None:
        """Name the first parameter that is not finite. All ranks have the same sums: collective."""
        places = [place for (place,) in self.comm.all_gather_ints([self.flat.first_non_finite()])]
        rank = next((r for r, place in enumerate(places) if place >= 0), None)
        if rank is not None:
            problem = f"{self.flat.named[places[rank]][0]} is not finite on rank {rank}"
            hint = "lower the learning rate, clip gradients, or look for the batch that did it"
        else:
            dtype = next(x.dtype for x in sums if not _is_finite(x))
            problem = f"the sum over nodes overflows {dtype}"
            hint = "downcast_type=torch.bfloat16 has the range of float32"
        raise refusal(ValueError, "mean of parameters over nodes", problem, hint=hint)

    def _dtype(self, x: Tensor) -> torch.dtype:
        return self._wire if x.dtype == torch.float32 else x.dtype


def average_buffers(module: nn.Module, comm: Communicator) -> None:
    """Give all ranks the mean of float buffers and rank 0's other ones. Collective."""
    buffers = list(module.buffers())
    average_tensors([x for x in buffers if _has_mean(x)], comm)
    broadcast_tensors([x for x in buffers if not _has_mean(x)], comm)


def _is_finite(x: Tensor) -> bool:
    """Whether all values are finite; one pass, no copy."""
    if x.numel() == 0:
        return True
    low, high = x.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _has_mean(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
