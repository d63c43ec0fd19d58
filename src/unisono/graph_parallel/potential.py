"""`split_potential`: energy, forces and stress of one system, computed by a row of ranks.

Each rank holds its own atoms, the halo around them, and the edges that end in own atoms. The energy
is summed over ranks once; forces and stress are its derivatives, so that they, too, may stand in a
loss. Results are whole and alike on all ranks: a training loop reads as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.comm.health import check as checking
from unisono.errors import PartitionError
from unisono.expect import expect
from unisono.graph_parallel import regions
from unisono.graph_parallel.adapters import Adapter, Piece, adapter_of
from unisono.graph_parallel.neighbours import radius_graph
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
        found = radius_graph(
            pos.detach(),
            self.adapter.cutoff(self.model),
            cell=cell,
            pbc=pbc,
            targets=self.partition.nodes_of(self.comm.rank),
        )
        plan = self.plan = self._plan_for(found.edge_index)
        with torch.set_grad_enabled(forces or stress or torch.is_grad_enabled()):
            own = plan.scatter(pos.to(weight.dtype))
            if forces and not own.requires_grad:
                own.requires_grad_()
            strain = own.new_zeros(3, 3, requires_grad=stress)
            vectors = _edge_vectors(plan, own, found.shifts.to(own.dtype), strain, stress)
            held = torch.cat([plan.local_nodes, plan.halo_nodes])
            piece = Piece(numbers[held], plan.edge_index, vectors, plan.num_local, plan.extend)
            mine = self.adapter.energies(self.model, piece).sum()
            energy = plan.reduce(mine, grad="identity")
            # From the own term: the backward of the exchange adds those of all other ranks.
            wanted = [own] * forces + [strain] * stress
            graph = self.training or pos.requires_grad
            slopes = list(torch.autograd.grad(mine, wanted, create_graph=graph) if wanted else ())
            tension = slopes.pop() / _volume(cell).to(own) if stress else None
            pull = plan.gather(-slopes.pop(), grad="slice") if forces else None
        return Prediction(energy, pull, tension)

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


def _edge_vectors(
    plan: GraphPlan, own: Tensor, shifts: Tensor, strain: Tensor, strained: bool
) -> Tensor:
    """Return the vectors from sources to targets, under a strain that acts on everything."""
    source, target = plan.edge_index
    vectors = own[target] - plan.extend(own)[source] - shifts
    if not strained:
        return vectors
    bent = regions.copy(strain, comm=plan.comm)
    return vectors + vectors @ ((bent + bent.T) / 2)


def _volume(cell: Tensor | None) -> Tensor:
    return torch.zeros(()) if cell is None else torch.linalg.det(cell.detach()).abs()
