"""`GraphPlan`: one rank's part of a graph, and the fetch of exactly the rows it lacks.

Made once for a graph and used for every layer and step until the graph changes. Nothing is ever
replicated: a rank holds its own rows, and those of other ranks that its edges point to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, overload

import torch
from torch import Tensor

from unisono import operators
from unisono.accelerator import copied_once
from unisono.comm import Communicator
from unisono.comm.arguments import check_tensor
from unisono.errors import PartitionError
from unisono.expect import expect, expect_choice
from unisono.graph_parallel import regions
from unisono.graph_parallel.integers import CHUNK, counts, digest, marked, smallest_dtype
from unisono.graph_parallel.partition import GraphPartition, check_edges
from unisono.graph_parallel.regions import MISSING
from unisono.graph_parallel.stats import GraphStats
from unisono.graph_parallel.transfer import Depart, RowsUnderWay, Transfer
from unisono.topology import RowPlan

Message = Callable[[Tensor, Tensor, Any], Tensor]
"""`message(x_src, x_dst, edge_attr) -> [E', ...]`."""


class GraphPlan:
    """A rank's nodes, edges and halo, and the movements between ranks.

    An edge s -> d is a column of `edge_index`; the owner of d computes it. Own nodes are numbered
    `0..num_local-1`, halo nodes follow, grouped by owner; `edge_index` points into
    `plan.extend(x)`. The first call that moves rows compares digests of owners and edges over the
    ranks: if they differ, it raises on all ranks.

    Args:
        partition: owner of every node, with as many parts as `comm` has ranks.
        edge_index: `[2, E]`, int64, original node numbers.
        edges: `"all"`: every rank passes the whole list, nothing is exchanged. `"local"`: each
            passes the edges that end in its own nodes; three small exchanges (collective).
        comm: the ranks; default the current row.
    """

    def __init__(
        self,
        partition: GraphPartition,
        edge_index: Tensor,
        *,
        edges: Literal["all", "local"] = "all",
        comm: Communicator | None = None,
    ) -> None:
        self.partition = partition
        """Owner of every node."""
        self.comm = regions.row(comm)
        """The ranks."""
        self.rows: RowPlan
        """Which own rows go where, and how many come from each rank."""
        self.stats: GraphStats
        """What the split costs, over all ranks."""
        self._edges: Literal["all", "local"] = edges
        self._check(edge_index)
        self._digest = _digest(edge_index)
        self._to_compare = self._shared_digest() if self.comm.size > 1 else None
        rank, device = self.comm.rank, edge_index.device
        self._device = device
        edges_here, halo, self.rows, self.stats = self._lists(edge_index.cpu())
        self.num_local = partition.sizes[rank]
        """Own nodes."""
        self.num_halo = halo.numel()
        """Foreign nodes that own edges touch."""
        self.local_nodes = partition.nodes_of(rank).to(device)
        """Their original numbers."""
        self.halo_nodes = partition.perm[halo].to(device)
        """Original numbers of the halo, in its order."""
        self.edge_ids = edges_here.to(device)
        """Columns of the given `edge_index` that this rank computes, ascending."""
        self.edge_index = self._renumbered(edge_index)
        """`[2, E_r]`, local numbers; sources point into `extend(x)`."""
        foreign = self.edge_index[0] >= self.num_local
        self.inner_edges = marked(~foreign)
        """Positions of edges with own ends only."""
        self.outer_edges = marked(foreign)
        """Positions of edges that need the halo."""
        self.send_index = self.rows.send_index
        """Own rows that peers need, grouped by peer, in the peer's halo order."""
        self.send_sizes = self.rows.send_sizes
        """How many rows each peer needs."""
        self.recv_sizes = self.rows.recv_sizes
        """How many halo rows come from each peer."""

    def scatter(self, x: Tensor) -> Tensor:
        """Return the own rows of `x`, which all ranks hold equal, in the original order. R -> S."""
        nodes = self.partition.num_nodes
        self._check_rows(x, nodes, "scatter", f"a row for each of the {nodes} nodes of the graph")
        perm = copied_once(self.partition.perm, x.device)
        return regions.scatter(x.index_select(0, perm), sizes=self.partition.sizes, comm=self.comm)

    def gather(self, x: Tensor, *, grad: Literal["slice", "sum"] = MISSING) -> Tensor:
        """Return the rows of all ranks in the original order; `grad` as in `regions.gather`."""
        self._compare()
        whole = regions.gather(x, grad=grad, sizes=self.partition.sizes, comm=self.comm)
        return whole.index_select(0, copied_once(self.partition.inverse, x.device))

    def reduce(self, x: Tensor, *, grad: Literal["identity", "sum"] = MISSING) -> Tensor:
        """Return the sum of `x` over ranks, such as an energy; `grad` as in `regions.reduce`."""
        return regions.reduce(x, grad=grad, comm=self.comm)

    @overload
    def exchange(self, x: Tensor, /) -> Tensor: ...
    @overload
    def exchange(self, x: Tensor, y: Tensor, /, *more: Tensor) -> tuple[Tensor, ...]: ...
    def exchange(self, x: Tensor, /, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the halo rows `[num_halo, ...]` of own rows `[num_local, ...]`. Collective.

        S -> I: gradients of the fetched rows go home and are added there. Several tensors of one
        dtype travel in one exchange, and a tuple is returned.
        """
        if not more:
            return self._fetch(x)
        tensors = (x, *more)
        for t in tensors:
            check_tensor(t, self.comm.device, "exchange")
            self._check_rows(t, self.num_local, "exchange")
        packed: dict[torch.dtype, Tensor] = {}
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            flat = [t.reshape(len(t), t.shape[1:].numel()) for t in tensors if t.dtype == dtype]
            packed[dtype] = self._fetch(torch.cat(flat, 1))
        out: list[Tensor] = []
        taken = dict.fromkeys(packed, 0)
        for t in tensors:
            start, width = taken[t.dtype], t.shape[1:].numel()
            rows = packed[t.dtype].narrow(1, start, width)
            out.append(rows.reshape(self.num_halo, *t.shape[1:]))
            taken[t.dtype] = start + width
        return tuple(out)

    def extend(self, x: Tensor) -> Tensor:
        """Return own and halo rows joined, `[num_local + num_halo, ...]`. Collective."""
        return _joined(x, self.exchange(x))

    def start(self, x: Tensor) -> RowsUnderWay:
        """Begin to fetch the halo rows; `wait()` of the result returns them. Collective.

        Work between the two calls overlaps with the transfer, in the backward too.
        """
        if torch.compiler.is_compiling():
            return RowsUnderWay(self.exchange(x))
        self._check_rows(x, self.num_local, "start")
        self._compare()
        transfer = Transfer(self.comm, self.rows)
        return RowsUnderWay(Depart.apply(x, transfer), transfer)

    def message_pass(
        self, x: Tensor, message: Message, *, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Return for each own node the sum of the messages of its incoming edges. Collective.

        Edges within the rank are computed while the halo travels, forward and backward.

        Args:
            x: own rows `[num_local, ...]`.
            message: `message(x_src, x_dst, edge_attr) -> [E', ...]`; called for inner edges, then
                for outer ones, also when there are none.
            edge_attr: a row for each edge of this rank, in the order of `edge_ids`: the rows
                `a[plan.edge_ids]` of an `a` that goes with the given `edge_index`.
        """
        if edge_attr is not None:
            edges = self.edge_ids.numel()
            self._check_rows(edge_attr, edges, "edge_attr", "edge_attr=a[plan.edge_ids]")
        under_way = self.start(x)
        inner = None if edge_attr is None else edge_attr.index_select(0, self.inner_edges)
        outer = None if edge_attr is None else edge_attr.index_select(0, self.outer_edges)
        total = self._add_messages(None, x, x, self._inner, message, inner)
        return self._add_messages(total, under_way.wait(), x, self._outer, message, outer)

    def refresh(self, edge_index: Tensor) -> GraphPlan:
        """Return the plan for other edges between the same nodes; itself if no rank's have changed.

        Collective.
        """
        check_edges(edge_index, self.partition.num_nodes, "GraphPlan.refresh")
        is_same = _digest(edge_index) == self._digest
        if all(flag for (flag,) in self.comm.all_gather_ints([int(is_same)])):
            return self
        return GraphPlan(self.partition, edge_index, edges=self._edges, comm=self.comm)

    def __repr__(self) -> str:
        return (
            f"GraphPlan(rank {self.comm.rank} of {self.comm.size}: {self.num_local} nodes, "
            f"{self.num_halo} halo, {self.edge_ids.numel()} edges)"
        )

    def _check(self, edge_index: Tensor) -> None:
        part, ranks = self.partition, self.comm.size
        hint = f"GraphPartition.balanced(edge_index, num_nodes, {ranks})"
        expect("partition", part, GraphPartition, hint)
        if part.parts != ranks:
            found = f"a partition of {part.parts} parts, {ranks} ranks"
            raise PartitionError.because("GraphPlan", found, f"{part.parts} != {ranks}", hint)
        expect_choice("edges", self._edges, ("all", "local"), error=PartitionError)
        check_edges(edge_index, part.num_nodes, "GraphPlan")
        if self._edges == "local":
            _check_own_targets(part, edge_index.cpu(), self.comm.rank)

    @cached_property
    def _inner(self) -> Tensor:
        return self.edge_index[:, self.inner_edges]

    @cached_property
    def _outer(self) -> Tensor:
        """Ends of the edges from the halo; sources are places in the halo alone."""
        source, target = self.edge_index[:, self.outer_edges]
        return torch.stack([source - self.num_local, target])

    def _shared_digest(self) -> list[int]:
        """Return numbers that are alike where ranks have the same graph."""
        shared = self._digest if self._edges == "all" else (0, 0)
        return [*shared, digest(self.partition.owner)]

    def _compare(self) -> None:
        """Raise on all ranks unless they have the same graph; compared once, in the first call.

        Not when the plan is made, which needs no other rank; a compiled graph cannot wait for it.
        """
        here = self._to_compare
        if here is None or torch.compiler.is_compiling():
            return
        answers = self.comm.all_gather_ints(here)
        for place, words in enumerate(("edges", "edges", "owners of nodes")):
            odd = [rank for rank, answer in enumerate(answers) if answer[place] != here[place]]
            if len({answer[place] for answer in answers}) > 1:
                raise PartitionError.because(
                    f"GraphPlan(edges={self._edges!r}) on rank {self.comm.rank}",
                    f"other {words} than on rank{'s' if len(odd) > 1 else ''} {odd}",
                    f"{words}: {[answer[place] for answer in answers]}" if place == 0 else None,
                    'the same list everywhere, or own edges only with edges="local"',
                )
        self._to_compare = None

    def _lists(self, edge_index: Tensor) -> tuple[Tensor, Tensor, RowPlan, GraphStats]:
        """Return this rank's edges, its halo (places in the new order), what it sends, the costs.

        Where every rank has all edges, no other rank is needed; else three exchanges are: how many
        rows go where, which ones, and what the others compute.
        """
        part, comm, rank = self.partition, self.comm, self.comm.rank
        first = part.offsets[rank]
        source, target = edge_index
        computes = part.owners_of(target)
        fetcher, node, cut = part.fetched(source, computes)
        if self._edges == "local":
            edge_ids, halo = torch.arange(len(target), device=target.device), node
            halo_sizes = self._by_owner(halo)
            one_each = [1] * comm.size
            asked = torch.tensor(halo_sizes, device=comm.device)
            send_sizes = tuple(comm.all_to_all(asked, one_each, one_each).tolist())
            sends = comm.all_to_all(halo.to(comm.device), halo_sizes, send_sizes).cpu()
            told = comm.all_gather_ints([len(halo), len(target), cut])
            halo_per_rank, computed, cuts = zip(*told, strict=True)
            cut = sum(cuts)
        else:
            edge_ids, computed = marked(computes == rank), counts(computes, part.parts)
            halo_per_rank = counts(fetcher, part.parts)
            halo = node[sum(halo_per_rank[:rank]) : sum(halo_per_rank[: rank + 1])].clone()
            halo_sizes = self._by_owner(halo)
            is_own = marked((node >= first) & (node < first + part.sizes[rank]))
            sends, send_sizes = node[is_own], counts(fetcher[is_own], part.parts)
        stats = GraphStats(
            edges_total=sum(computed),
            edges_cut=cut,
            nodes_per_rank=part.sizes,
            edges_per_rank=computed,
            halo_per_rank=halo_per_rank,
        )
        index = (sends - first).to(self._device)
        return edge_ids, halo, RowPlan(part.sizes[rank], index, send_sizes, halo_sizes), stats

    def _by_owner(self, places: Tensor) -> tuple[int, ...]:
        """Return how many of some ascending places of the new order each rank owns."""
        ends = torch.searchsorted(
            places, torch.tensor(self.partition.offsets, device=places.device)
        )
        return tuple(ends.diff().tolist())

    def _renumbered(self, edge_index: Tensor) -> Tensor:
        """Return the ends of this rank's edges, in local numbers."""
        nodes = torch.cat([self.local_nodes, self.halo_nodes])
        number = smallest_dtype(self.partition.num_nodes)
        place = torch.empty(self.partition.num_nodes, dtype=number, device=self._device)
        place[nodes] = torch.arange(nodes.numel(), dtype=number, device=self._device)
        local = edge_index.new_empty(2, self.edge_ids.numel())
        for ends, ours in zip(edge_index, local, strict=True):
            for ids, some in zip(self.edge_ids.split(CHUNK), ours.split(CHUNK), strict=True):
                some.copy_(place.index_select(0, ends.index_select(0, ids)))
        return local

    def _fetch(self, x: Tensor) -> Tensor:
        self._compare()
        return operators.all_gather_rows(x, self.rows, comm=self.comm)

    def _add_messages(
        self,
        total: Tensor | None,
        sources: Tensor,
        targets: Tensor,
        ends: Tensor,
        message: Message,
        edge_attr: Tensor | None,
    ) -> Tensor:
        source, target = ends
        x_src, x_dst = sources.index_select(0, source), targets.index_select(0, target)
        sent = _messages(message, x_src, x_dst, edge_attr)
        if total is None:
            total = sent.new_zeros((self.num_local, *sent.shape[1:]))
        return total.index_add(0, target, sent)

    def _check_rows(
        self, x: Tensor, rows: int, verb: str, hint: str = "x = plan.scatter(full) gives own rows"
    ) -> None:
        if x.dim() == 0 or x.shape[0] != rows:
            raise PartitionError.because(
                f"{verb} of shape {list(x.shape)} on rank {self.comm.rank}",
                f"{self!r}",
                f"{x.shape[0] if x.dim() else 0} != {rows} rows",
                hint,
            )


def _joined(own: Tensor, halo: Tensor) -> Tensor:
    """Return rows one after the other; a rank without any stays part of every derivative.

    The derivative of `torch.cat` leaves out flat tensors without elements, and the rank with them
    would not join the backward of its own backward.
    """
    if own.dim() > 1:
        return torch.cat([own, halo])
    return torch.cat([own[:, None], halo[:, None]])[:, 0]


def _digest(edge_index: Tensor) -> tuple[int, int]:
    """Return the number of edges, and a number that other edges do not have."""
    return edge_index.shape[1], digest(edge_index)


def _check_own_targets(part: GraphPartition, edge_index: Tensor, rank: int) -> None:
    """Raise unless this rank owns the target of each of its edges."""
    strange = marked(part.owners_of(edge_index[1]) != rank)
    if strange.numel():
        column = int(strange[0])
        source, target = edge_index[:, column].tolist()
        raise PartitionError.because(
            'GraphPlan(edges="local")',
            f"edge {column} is {source} -> {target}, on rank {rank}",
            f"node {target} is owned by rank {int(part.owner[target])}, not {rank}",
            "each rank passes the edges that end in its own nodes",
        )


_MESSAGE_HINT = (
    "def message(x_src, x_dst, edge_attr): return x_src  # [E', ...], a row for each edge"
)


def _messages(message: Message, x_src: Tensor, x_dst: Tensor, edge_attr: Tensor | None) -> Tensor:
    """Return the messages of some edges, a row for each; local."""
    asked = "message_pass: message(x_src, x_dst, edge_attr)"
    try:
        sent = message(x_src, x_dst, edge_attr)
    except TypeError:
        try:
            inspect.signature(message).bind(x_src, x_dst, edge_attr)
        except TypeError as error:
            raise PartitionError.because(asked, str(error), None, _MESSAGE_HINT) from None
        except ValueError:  # built-in functions need not tell
            pass
        raise
    if not isinstance(sent, Tensor) or sent.shape[:1] != x_src.shape[:1]:
        found = f"shape {list(sent.shape)}" if isinstance(sent, Tensor) else repr(sent)
        needed = f"{x_src.shape[0]} edges need a tensor of {x_src.shape[0]} rows"
        raise PartitionError.because(f"{asked} returned", found, needed, _MESSAGE_HINT)
    return sent
