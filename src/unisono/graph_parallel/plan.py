"""`GraphPlan`: one rank's part of a graph, and the fetch of exactly the rows it lacks.

Made once for a graph and used for every layer and step until the graph changes. Nothing is ever
replicated: a rank holds its own rows, and those of other ranks that its edges point to.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from unisono import operators
from unisono.comm import Communicator
from unisono.comm.arguments import check_tensor
from unisono.comm.health import check as checking
from unisono.errors import PartitionError
from unisono.expect import expect, expect_choice
from unisono.graph_parallel import regions
from unisono.graph_parallel.layout import tagged, watched
from unisono.graph_parallel.partition import GraphPartition, check_edges
from unisono.graph_parallel.regions import MISSING
from unisono.graph_parallel.stats import GraphStats
from unisono.graph_parallel.transfer import RowsUnderWay, start_rows
from unisono.topology import RowPlan
from unisono.topology.decompose import split_sizes

Message = Callable[[Tensor, Tensor, Any], Tensor]
"""`message(x_src, x_dst, edge_attr) -> [E', ...]`."""
DENSE = 0.6
"""Where every rank needs more than this share of all foreign rows, all are gathered instead."""


class GraphPlan:
    """A rank's nodes, edges and halo, and the movements between ranks.

    An edge s -> d is a column of `edge_index`; the owner of d computes it. Own nodes are numbered
    `0..num_local-1`, halo nodes follow, grouped by owner; `edge_index` points into
    `plan.extend(x)`.

    Args:
        partition: owner of every node, with as many parts as `comm` has ranks.
        edge_index: `[2, E]`, int64, original node numbers.
        edges: `"all"`: every rank passes the whole list, nothing is exchanged. `"local"`: each
            passes the edges that end in its own nodes; two small exchanges (collective).
        cut: `"nodes"`, or `"edges"` for very dense graphs: edges are dealt out evenly, targets may
            be foreign, and partial sums go home at the end of `message_pass`.
        comm: the ranks; default the current row.
    """

    def __init__(
        self,
        partition: GraphPartition,
        edge_index: Tensor,
        *,
        edges: Literal["all", "local"] = "all",
        cut: Literal["nodes", "edges"] = "nodes",
        comm: Communicator | None = None,
    ) -> None:
        self.partition = partition
        """Owner of every node."""
        self.comm = regions.row(comm)
        """The ranks."""
        self.cut: Literal["nodes", "edges"] = cut
        """What is dealt out: nodes with their incoming edges, or edges."""
        self._edges: Literal["all", "local"] = edges
        self._check(edge_index)
        if checking.active and self.comm.size > 1:
            self._compare(edge_index)
        self._given = edge_index.clone()
        lists = self._lists(edge_index.cpu())
        rank, device = self.comm.rank, edge_index.device
        first = partition.offsets[rank]
        self.num_local = partition.sizes[rank]
        """Own nodes."""
        self.num_halo = lists.halo.numel()
        """Foreign nodes that own edges touch."""
        self.local_nodes = partition.nodes_of(rank).to(device)
        """Their original numbers."""
        self.halo_nodes = partition.perm[lists.halo].to(device)
        """Original numbers of the halo, in its order."""
        self.edge_ids = lists.edge_ids.to(device)
        """Columns of the given `edge_index` that this rank computes, ascending."""
        place = torch.empty(partition.num_nodes, dtype=torch.int64)
        place[first : first + self.num_local] = torch.arange(self.num_local)
        place[lists.halo] = self.num_local + torch.arange(self.num_halo)
        self.edge_index = place[lists.ends].to(device)
        """`[2, E_r]`, local numbers; sources point into `extend(x)`."""
        foreign = (self.edge_index >= self.num_local).any(0)
        self.inner_edges = (~foreign).nonzero()[:, 0]
        """Positions of edges with own ends only."""
        self.outer_edges = foreign.nonzero()[:, 0]
        """Positions of edges that need the halo."""
        self._inner = self.edge_index[:, self.inner_edges]
        self._outer = self.edge_index[:, self.outer_edges]
        if cut == "nodes":
            self._outer[0] -= self.num_local  # sources point into the halo alone
        self.rows = RowPlan(
            self.num_local, (lists.sends - first).to(device), lists.send_sizes, lists.halo_sizes
        )
        """Which own rows go where, and how many come from each rank."""
        self.stats = GraphStats(
            edges_total=sum(lists.edges_per_rank),
            edges_cut=lists.edges_cut,
            nodes_per_rank=partition.sizes,
            edges_per_rank=lists.edges_per_rank,
            halo_per_rank=lists.halo_per_rank,
        )
        """What the split costs, over all ranks."""
        self.is_dense = self.comm.size > 1 and all(
            halo > DENSE * (partition.num_nodes - own)
            for halo, own in zip(lists.halo_per_rank, partition.sizes, strict=True)
        )
        """Whether all ranks need most rows, so that `exchange` gathers all; alike everywhere."""
        self._halo_places = lists.halo.to(device)

    @property
    def send_index(self) -> Tensor:
        """Own rows that peers need, grouped by peer, in the peer's halo order."""
        return self.rows.send_index

    @property
    def send_sizes(self) -> tuple[int, ...]:
        """How many rows each peer needs."""
        return self.rows.send_sizes

    @property
    def recv_sizes(self) -> tuple[int, ...]:
        """How many halo rows come from each peer."""
        return self.rows.recv_sizes

    def scatter(self, x: Tensor) -> Tensor:
        """Return the own rows of `x`, which all ranks hold equal, in the original order. R -> S."""
        nodes = self.partition.num_nodes
        self._check_rows(x, nodes, "scatter", f"a row for each of the {nodes} nodes of the graph")
        perm = self.partition.perm.to(x.device)
        return regions.scatter(x.index_select(0, perm), sizes=self.partition.sizes, comm=self.comm)

    def gather(self, x: Tensor, *, grad: Literal["slice", "sum"] = MISSING) -> Tensor:
        """Return the rows of all ranks in the original order; `grad` as in `regions.gather`."""
        whole = regions.gather(x, grad=grad, sizes=self.partition.sizes, comm=self.comm)
        in_order = whole.index_select(0, self.partition.inverse.to(x.device))
        return tagged(in_order, "replicated")

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
            return watched("exchange", x, self._fetch, comm=self.comm)
        tensors = (x, *more)
        for t in tensors:
            check_tensor(t, self.comm.device, "exchange")
            self._check_rows(t, self.num_local, "exchange")
        packed: dict[torch.dtype, Tensor] = {}
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            flat = [t.reshape(t.shape[0], _width(t)) for t in tensors if t.dtype == dtype]
            packed[dtype] = self._fetch(torch.cat(flat, 1), self.comm)
        out: list[Tensor] = []
        taken = dict.fromkeys(packed, 0)
        for t in tensors:
            start, width = taken[t.dtype], _width(t)
            rows = packed[t.dtype].narrow(1, start, width)
            out.append(rows.reshape(self.num_halo, *t.shape[1:]))
            taken[t.dtype] = start + width
        return tuple(out)

    def extend(self, x: Tensor) -> Tensor:
        """Return own and halo rows joined, `[num_local + num_halo, ...]`. Collective."""
        return torch.cat([x, self.exchange(x)])

    def start(self, x: Tensor) -> RowsUnderWay:
        """Begin to fetch the halo rows; `wait()` of the result returns them. Collective.

        Work between the two calls overlaps with the transfer, in the backward too.
        """
        if torch.compiler.is_compiling():
            return RowsUnderWay(self.exchange(x), None)
        self._check_rows(x, self.num_local, "start")
        return start_rows(x, self.rows, self.comm)

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
        total = self._add_messages(None, (x, x), self._inner, message, inner)
        halo = under_way.wait()
        if self.cut == "nodes":
            return tagged(
                self._add_messages(total, (halo, x), self._outer, message, outer), "sharded", 0
            )
        both = torch.cat([x, halo])
        total = self._add_messages(total, (both, both), self._outer, message, outer)
        return tagged(self.close(total), "sharded", 0)

    def close(self, partial: Tensor) -> Tensor:
        """Return the own rows of the sum over ranks of `partial`, a row for each row of `extend`.

        Collective; the adjoint of `extend`. Foreign rows go home and are added there.
        """
        self._check_rows(partial, self.num_local + self.num_halo, "close")
        own, foreign = partial.split([self.num_local, self.num_halo])
        if not self.is_dense:
            return own + operators.add_rows(foreign, self.rows, comm=self.comm)
        part = self.partition
        whole = partial.new_zeros((part.num_nodes, *partial.shape[1:]))
        whole = whole.index_add(0, self._halo_places, foreign)
        return own + regions.reduce_scatter(whole, sizes=part.sizes, comm=self.comm)

    def refresh(self, edge_index: Tensor) -> GraphPlan:
        """Return the plan for other edges between the same nodes; itself if they are the same.

        Collective when `edges="local"`.
        """
        check_edges(edge_index, self.partition.num_nodes, "GraphPlan.refresh")
        same = torch.equal(edge_index.to(self._given.device), self._given)
        if self._edges == "local":
            same = all(flag for (flag,) in self.comm.all_gather_ints([int(same)]))
        if same:
            return self
        return GraphPlan(
            self.partition, edge_index, edges=self._edges, cut=self.cut, comm=self.comm
        )

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
        expect_choice("cut", self.cut, ("nodes", "edges"), error=PartitionError)
        check_edges(edge_index, part.num_nodes, "GraphPlan")
        if self._edges == "local" and self.cut == "nodes":
            _check_own_targets(part, edge_index.cpu(), self.comm.rank)

    def _compare(self, edge_index: Tensor) -> None:
        """In check mode: raise on all ranks unless they were given the same graph."""
        shared = edge_index if self._edges == "all" else edge_index[:, :0]
        told = [shared.shape[1], _checksum(shared), _checksum(self.partition.owner)]
        answers = self.comm.all_gather_ints(told)
        for words, place in (("edges", 0), ("edges", 1), ("owners of nodes", 2)):
            odd = [rank for rank, answer in enumerate(answers) if answer[place] != told[place]]
            if len({answer[place] for answer in answers}) > 1:
                raise PartitionError.because(
                    f"GraphPlan(edges={self._edges!r}) on rank {self.comm.rank}",
                    f"other {words} than on rank{'s' if len(odd) > 1 else ''} {odd}",
                    f"{words}: {[answer[place] for answer in answers]}" if place == 0 else None,
                    'the same list everywhere, or own edges only with edges="local"',
                )

    def _lists(self, edge_index: Tensor) -> _HaloLists:
        part, comm = self.partition, self.comm
        if self._edges == "local":
            return _from_own_edges(part, edge_index, comm)
        if self.cut == "nodes":
            computes = part.owner[edge_index[1]]
        else:
            shares = torch.tensor(split_sizes(edge_index.shape[1], part.parts))
            computes = torch.arange(part.parts).repeat_interleave(shares)
        return _from_all_edges(part, edge_index, computes, comm.rank)

    def _fetch(self, x: Tensor, comm: Communicator) -> Tensor:
        if not self.is_dense:
            return operators.all_gather_rows(x, self.rows, comm=comm)
        self._check_rows(x, self.num_local, "exchange")
        whole = operators.all_gather(x, 0, self.partition.sizes, comm=comm)
        return whole.index_select(0, self._halo_places)

    def _add_messages(
        self,
        total: Tensor | None,
        rows: tuple[Tensor, Tensor],
        ends: Tensor,
        message: Message,
        edge_attr: Tensor | None,
    ) -> Tensor:
        source, target = ends
        x_src, x_dst = rows[0].index_select(0, source), rows[1].index_select(0, target)
        sent = _messages(message, x_src, x_dst, edge_attr)
        if total is None:
            held = self.num_local + (self.num_halo if self.cut == "edges" else 0)
            total = sent.new_zeros((held, *sent.shape[1:]))
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


def _checksum(numbers: Tensor) -> int:
    return zlib.crc32(numbers.cpu().contiguous().numpy().tobytes())


def _width(x: Tensor) -> int:
    return x[0].numel() if x.shape[0] else torch.Size(x.shape[1:]).numel()


@dataclass(frozen=True, eq=False)
class _HaloLists:
    """Which rows a rank fetches and sends; nodes by their place in the new order, by owner."""

    edge_ids: Tensor
    """Columns of the given edge list that this rank computes, ascending."""
    ends: Tensor
    """`[2, E_r]`: their sources and targets, new order."""
    halo: Tensor
    """Foreign nodes among the ends, ascending: grouped by owner."""
    halo_sizes: tuple[int, ...]
    """How many of them each rank owns."""
    sends: Tensor
    """Own nodes that others fetch, grouped by the rank that does, ascending in each group."""
    send_sizes: tuple[int, ...]
    """How many each rank fetches."""
    halo_per_rank: tuple[int, ...]
    """Halo rows of every rank."""
    edges_per_rank: tuple[int, ...]
    """Edges of every rank."""
    edges_cut: int
    """Edges of all ranks with a foreign end."""


def _from_all_edges(
    part: GraphPartition, edge_index: Tensor, edge_owner: Tensor, rank: int
) -> _HaloLists:
    """Return the lists when every rank knows all edges: nothing has to be asked.

    `edge_owner` is the rank that computes each edge. No loop over edges.
    """
    nodes, parts = part.num_nodes, part.parts
    foreign = [(edge_owner != part.owner[end]).nonzero()[:, 0] for end in edge_index]
    wanted = [
        edge_owner[cut] * nodes + part.inverse[end[cut]]
        for cut, end in zip(foreign, edge_index, strict=True)
    ]
    pairs = torch.unique(torch.cat(wanted))  # sorted: by the rank that fetches, then by node
    fetcher, node = pairs // max(nodes, 1), pairs % max(nodes, 1)
    halo = node[fetcher == rank]
    own = (node >= part.offsets[rank]) & (node < part.offsets[rank + 1])
    edge_ids = (edge_owner == rank).nonzero()[:, 0]
    return _HaloLists(
        edge_ids=edge_ids,
        ends=part.inverse[edge_index[:, edge_ids]],
        halo=halo,
        halo_sizes=_counts(_owners(part, halo), parts),
        sends=node[own],
        send_sizes=_counts(fetcher[own], parts),
        halo_per_rank=_counts(fetcher, parts),
        edges_per_rank=_counts(edge_owner, parts),
        edges_cut=int(_any_of(foreign, edge_index.shape[1])),
    )


def _from_own_edges(part: GraphPartition, edge_index: Tensor, comm: Communicator) -> _HaloLists:
    """Return the lists when each rank knows its own edges only: two exchanges ask the others."""
    rank = comm.rank
    foreign = [(part.owner[end] != rank).nonzero()[:, 0] for end in edge_index]
    wanted = [part.inverse[end[cut]] for cut, end in zip(foreign, edge_index, strict=True)]
    halo = torch.unique(torch.cat(wanted))
    halo_sizes = _counts(_owners(part, halo), part.parts)
    edges = edge_index.shape[1]
    told = comm.all_gather_ints([*halo_sizes, edges, int(_any_of(foreign, edges))])
    send_sizes = tuple(row[rank] for row in told)
    return _HaloLists(
        edge_ids=torch.arange(edges),
        ends=part.inverse[edge_index],
        halo=halo,
        halo_sizes=halo_sizes,
        sends=comm.all_to_all(halo.to(comm.device), halo_sizes, send_sizes).cpu(),
        send_sizes=send_sizes,
        halo_per_rank=tuple(sum(row[:-2]) for row in told),
        edges_per_rank=tuple(row[-2] for row in told),
        edges_cut=sum(row[-1] for row in told),
    )


def _check_own_targets(part: GraphPartition, edge_index: Tensor, rank: int) -> None:
    """Raise unless this rank owns the target of each of its edges."""
    strange = (part.owner[edge_index[1]] != rank).nonzero()
    if strange.numel():
        column = int(strange[0])
        source, target = edge_index[:, column].tolist()
        raise PartitionError.because(
            'GraphPlan(edges="local")',
            f"edge {column} is {source} -> {target}, on rank {rank}",
            f"node {target} is owned by rank {int(part.owner[target])}, not {rank}",
            "each rank passes the edges that end in its own nodes",
        )


def _owners(part: GraphPartition, nodes: Tensor) -> Tensor:
    return part.owner[part.perm[nodes]]


def _counts(values: Tensor, parts: int) -> tuple[int, ...]:
    return tuple(torch.bincount(values, minlength=parts).tolist())


def _any_of(foreign: list[Tensor], edges: int) -> int:
    sources, targets = foreign
    if targets.numel() == 0:
        return sources.numel()
    flags = torch.zeros(edges, dtype=torch.bool)
    flags[sources] = flags[targets] = True
    return int(flags.sum())


_MESSAGE_HINT = (
    "def message(x_src, x_dst, edge_attr): return x_src  # [E', ...], a row for each edge"
)


def _messages(message: Message, x_src: Tensor, x_dst: Tensor, edge_attr: Tensor | None) -> Tensor:
    """Return the messages of some edges, a row for each; local."""
    try:
        sent = message(x_src, x_dst, edge_attr)
    except TypeError as error:
        if _takes_three(message):
            raise
        raise PartitionError.because(
            "message_pass: message(x_src, x_dst, edge_attr)", str(error), None, _MESSAGE_HINT
        ) from None
    if not isinstance(sent, Tensor) or sent.shape[:1] != x_src.shape[:1]:
        found = f"shape {list(sent.shape)}" if isinstance(sent, Tensor) else repr(sent)
        raise PartitionError.because(
            "message_pass: what message(x_src, x_dst, edge_attr) returned",
            found,
            f"{x_src.shape[0]} edges need a tensor of {x_src.shape[0]} rows",
            _MESSAGE_HINT,
        )
    return sent


def _takes_three(message: Message) -> bool:
    try:
        inspect.signature(message).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # built-in functions need not tell
        pass
    return True
