"""`split_potential`: energy, forces and stress of one system, computed by a row of ranks.

Each rank holds its own atoms, the halo around them, and the edges that end in own atoms. The energy
is summed over ranks once; forces and stress are its derivatives, so that they, too, may stand in a
loss. Results are whole and alike on all ranks: a training loop reads as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.comm.health import check as checking
from unisono.errors import PartitionError
from unisono.expect import expect, expect_float
from unisono.graph_parallel import regions
from unisono.graph_parallel.adapters import Adapter, Piece, adapter_of
from unisono.graph_parallel.neighbours import images_near, radius_graph
from unisono.graph_parallel.partition import GraphPartition
from unisono.graph_parallel.plan import GraphPlan


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a potential says of a system; alike on all ranks, atoms in the order given."""

    energy: Tensor
    """A scalar."""
    forces: Tensor | None
    """`[N, 3]`: minus the derivative of the energy by positions."""
    stress: Tensor | None
    """`[3, 3]`: the derivative of the energy by strain, over the volume."""


class _Surroundings(NamedTuple):
    """Which atoms are near which, as found for some positions."""

    plan: GraphPlan
    partition: GraphPartition
    pos: Tensor
    cell: Tensor | None
    pbc: tuple[bool, ...]
    edge_index: Tensor
    """Among own atoms and the halo; among `rows`, if the model is called on images."""
    shifts: Tensor
    """Of each edge's source, or of each of `rows`."""
    rows: Tensor | None
    """Place of each image among own atoms and the halo."""


class SplitPotential(nn.Module):
    """A model as a potential whose atoms a row of ranks shares.

    After `loss.backward()` each rank holds a term of the gradients of parameters: wrap the
    potential in `GraphParallel`, or call `sync_gradients(potential)`. `partition` may be replaced
    between calls, when atoms have moved. In `eval()` mode forces and stress carry no graph of their
    own, unless `pos.requires_grad`.

    Args:
        model: a MACE, a SchNet of torch_geometric, or any with an `adapter`; alike on all ranks.
        partition: owner of every atom, such as `GraphPartition.morton(pos, ranks)`.
        adapter: how the model is called on a piece; default the one known for its class.
        skin: neighbours are searched this much beyond the cutoff, and again when an atom has moved
            half of it. Results do not change; 0 searches in each call.
        comm: the ranks; default the current row.

    >>> springs = Adapter(lambda k, piece: k(piece.vectors.square()), lambda k: 2.0)
    >>> chain = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]])
    >>> part = GraphPartition.contiguous(3, 1)
    >>> stretch = split_potential(nn.Linear(3, 1), part, adapter=springs)
    >>> stretch(chain, torch.ones(3, dtype=torch.int64)).forces.shape
    torch.Size([3, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        partition: GraphPartition,
        *,
        adapter: Adapter | None = None,
        skin: float = 0.0,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        expect("model", model, nn.Module)
        expect("partition", partition, GraphPartition, "GraphPartition.morton(pos, ranks)")
        self.model = model
        self.partition = partition
        """Owner of every atom."""
        self.comm = regions.row(comm)
        """The ranks."""
        self.adapter = adapter_of(model) if adapter is None else adapter
        """How the model is called on a piece."""
        self.skin = expect_float("skin", skin, 0, error=PartitionError)
        """How far beyond the cutoff neighbours are searched."""
        self._surroundings: _Surroundings | None = None
        self.plan: GraphPlan | None = None
        """The plan of the last call: who held what, and what the split cost (`plan.stats`)."""

    def forward(
        self,
        pos: Tensor,
        numbers: Tensor,
        *,
        cell: Tensor | None = None,
        pbc: bool | Sequence[bool] = True,
        forces: bool = True,
        stress: bool = False,
    ) -> Prediction:
        """Return energy, forces and stress of one system. Collective; all arguments alike.

        Args:
            pos: positions of all atoms `[N, 3]`, inside the cell or not.
            numbers: their atomic numbers `[N]`, int64.
            cell: rows are the vectors of the cell; None: nothing repeats.
            pbc: along which vectors it repeats.
            forces: whether to compute them.
            stress: whether to compute it; needs a cell.
        """
        self._check(pos, numbers, cell, stress)
        weight = next(self.model.parameters(), pos)
        near = self._surroundings_of(pos.detach(), cell, pbc)
        plan = near.plan
        with torch.set_grad_enabled(forces or stress or torch.is_grad_enabled()):
            own = plan.scatter(pos.to(weight.dtype))
            if forces and not own.requires_grad:
                own.requires_grad_()
            strain = own.new_zeros(3, 3, requires_grad=stress)
            term = self.adapter.energies(self.model, self._piece(near, numbers, own, strain)).sum()
            energy = plan.reduce(term, grad="identity")
            # From this rank's term: the backward of the exchange adds those of all other ranks.
            inputs = [own] * forces + [strain] * stress
            graph = self.training or pos.requires_grad
            slopes = list(torch.autograd.grad(term, inputs, create_graph=graph) if inputs else ())
            tension = slopes.pop() / _volume(cell).to(own) if stress else None
            pull = plan.gather(-slopes.pop(), grad="slice") if forces else None
        return Prediction(energy, pull, tension)

    def _surroundings_of(
        self, pos: Tensor, cell: Tensor | None, pbc: bool | Sequence[bool]
    ) -> _Surroundings:
        """Return who is near whom; of an earlier call, while atoms have moved little since.

        All ranks have the same positions, so they decide alike.
        """
        repeats = (pbc,) if isinstance(pbc, bool) else tuple(bool(p) for p in pbc)
        last = self._surroundings
        if (
            last is not None
            and self.skin > 0
            and last.partition is self.partition
            and last.pos.shape == pos.shape
            and last.pbc == repeats
            and _is_same_cell(last.cell, cell)
            and float((pos - last.pos).square().sum(1).max()) <= (self.skin / 2) ** 2
        ):
            return last
        cutoff = self.adapter.cutoff(self.model)
        nodes = self.partition.nodes_of(self.comm.rank)
        if self.adapter.depth is None:
            edges, shifts = radius_graph(pos, cutoff + self.skin, cell=cell, pbc=pbc, targets=nodes)
            plan = self._plan_for(edges)
            edges, rows = plan.edge_index, None
        else:
            reach = self.adapter.depth(self.model) * cutoff + self.skin
            atoms, shifts = images_near(pos, reach, nodes, cell=cell, pbc=pbc)
            edges = radius_graph(pos[atoms] + shifts, cutoff + self.skin).edge_index
            foreign = atoms[(self.partition.owner[atoms] != self.comm.rank)].unique()
            plan = self._plan_for(torch.stack([foreign, nodes[:1].expand(len(foreign))]))
            place = torch.empty(len(pos), dtype=torch.int64, device=pos.device)
            here = torch.cat([plan.local_nodes, plan.halo_nodes])
            place[here] = torch.arange(len(here), device=pos.device)
            rows = place[atoms]
        self.plan = plan
        kept_cell = None if cell is None else cell.detach().clone()
        self._surroundings = _Surroundings(
            plan, self.partition, pos.clone(), kept_cell, repeats, edges, shifts, rows
        )
        return self._surroundings

    def _piece(self, near: _Surroundings, numbers: Tensor, own: Tensor, strain: Tensor) -> Piece:
        """Return what the model is called on, under a strain that acts on everything."""
        plan, shifts = near.plan, near.shifts.to(own.dtype)
        bent = torch.eye(3, dtype=own.dtype, device=own.device)
        if strain.requires_grad:
            copied = regions.copy(strain, comm=plan.comm)
            bent = bent + (copied + copied.T) / 2
        atoms = torch.cat([plan.local_nodes, plan.halo_nodes])
        rows, positions = plan.extend(own), None
        source, target = near.edge_index
        if near.rows is None:
            vectors = (rows[target] - rows[source] - shifts) @ bent
        else:
            atoms = atoms[near.rows]
            positions = (rows[near.rows] + shifts) @ bent
            vectors = positions[target] - positions[source]
        edges = near.edge_index
        if self.skin > 0:
            keep = vectors.detach().norm(dim=1) <= self.adapter.cutoff(self.model)
            edges, vectors = edges[:, keep], vectors[keep]
        return Piece(numbers[atoms], edges, vectors, plan.num_local, plan.extend, positions)

    def _plan_for(self, edges: Tensor) -> GraphPlan:
        if self.plan is not None and self.plan.partition is self.partition:
            return self.plan.refresh(edges)
        return GraphPlan(self.partition, edges, edges="local", comm=self.comm)

    def _check(self, pos: Tensor, numbers: Tensor, cell: Tensor | None, stress: bool) -> None:
        atoms, hint = self.partition.num_nodes, "GraphPartition.morton(pos, ranks)"
        if pos.shape != (atoms, 3) or numbers.shape != (atoms,):
            raise PartitionError.because(
                f"a potential on a partition of {atoms} atoms",
                f"positions of shape {list(pos.shape)}, numbers of shape {list(numbers.shape)}",
                f"expected [{atoms}, 3] and [{atoms}]",
                f"potential.partition = {hint} after the number of atoms has changed",
            )
        check_elements(numbers.tolist(), self.adapter, self.model)
        if stress and (cell is None or not float(_volume(cell)) > 0):
            raise PartitionError.because(
                "the stress of a system without a volume", f"cell={cell}", None, "cell=[3, 3]"
            )
        if checking.active and self.comm.size > 1:
            for name, given in (("pos", pos), ("numbers", numbers), ("cell", cell)):
                apart = None if given is None else regions.difference_over_ranks(given, self.comm)
                if apart is not None:
                    raise PartitionError.because(
                        f"a potential whose {name} must be equal on all ranks", apart
                    )


split_potential = SplitPotential
"""The same, as what is done to a model."""


def check_elements(numbers: Iterable[int], adapter: Adapter, model: nn.Module) -> None:
    """Raise unless the model knows these elements."""
    known = None if adapter.elements is None else set(adapter.elements(model))
    unknown = set() if known is None else set(numbers) - known
    if unknown:
        raise PartitionError.because(
            f"the elements {sorted(set(numbers))} in a potential",
            f"it knows {sorted(known or ())}",
            f"unknown: {sorted(unknown)}",
            "a model that was trained for them",
        )


def _is_same_cell(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _volume(cell: Tensor | None) -> Tensor:
    return torch.zeros(()) if cell is None else torch.linalg.det(cell.detach()).abs()
