"""`Calculator`: a potential on ranks that stay, for everything that ASE can do with one.

A large system is shared by all ranks, atom by atom; many small ones are dealt out whole. Atoms that
move are partitioned anew where they stand, when the old partition has become a bad one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from unisono.comm import Communicator, world
from unisono.errors import MissingExtra, PartitionError
from unisono.expect import expect, expect_float, expect_int
from unisono.graph_parallel.adapters import Adapter, adapter_of
from unisono.graph_parallel.groups import graph_groups
from unisono.graph_parallel.neighbours import wrapped
from unisono.graph_parallel.partition import GraphPartition
from unisono.graph_parallel.plan import GraphPlan
from unisono.graph_parallel.potential import SplitPotential, check_elements
from unisono.launch.resident import ResidentRanks

try:
    from ase.calculators.calculator import Calculator as AseCalculator
    from ase.calculators.calculator import PropertyNotImplementedError, all_changes
except ImportError as error:
    raise MissingExtra.of("potentials", "Calculator, which is one of ASE's", str(error)) from error

ATOMS = 16
"""A system with fewer atoms than this for each rank is not split: its halo would be all of it."""
WORSE = 1.1
"""A partition is replaced when its halo, or its imbalance, has grown by this factor."""
PROPERTIES = ("energy", "free_energy", "forces", "stress", "hessian")
"""What can be asked for."""
_VOIGT = [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]


class System(NamedTuple):
    """What ranks are told of a system."""

    pos: np.ndarray
    numbers: np.ndarray
    cell: np.ndarray | None
    pbc: tuple[bool, ...]


class Calculator(AseCalculator):
    """Energy, forces, stress and Hessian of ASE's `Atoms`, by ranks that stay between calls.

    Ranks are started by the first call, and end with the calculator: `close()`, the end of a `with`
    block, when it is no longer used, or with this process. If one fails, the call raises
    `RankFailed`; the next call starts new ones.

    Args:
        model: a MACE, a SchNet of torch_geometric, or any with an `adapter`. It is copied to ranks.
        ranks: number of ranks, on this host.
        adapter: how the model is called on a piece; default the one known for its class.
        skin: neighbours are searched this much beyond the cutoff, and again when an atom has moved
            half of it; no result depends on it.
        options: those of ASE's calculators.

    Example:
        >>> with Calculator(model, ranks=4) as atoms.calc:  # doctest: +SKIP
        ...     atoms.get_potential_energy()
    """

    implemented_properties = [*PROPERTIES]  # noqa: RUF012  as ASE has it

    def __init__(
        self,
        model: nn.Module,
        ranks: int = 2,
        *,
        adapter: Adapter | None = None,
        skin: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        expect("model", model, nn.Module)
        self.ranks = expect_int("ranks", ranks, 1, error=PartitionError)
        """Number of ranks."""
        self._model = model
        self._adapter = adapter_of(model) if adapter is None else adapter
        self._skin = expect_float("skin", skin, 0, error=PartitionError)
        self._team: ResidentRanks | None = None

    def calculate(
        self,
        atoms: Any = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute properties of `atoms`; ASE calls it when they have changed."""
        super().calculate(atoms, properties, system_changes)
        self.results = self.evaluate([self.atoms], properties)[0]

    def evaluate(
        self, systems: Sequence[Any], properties: Sequence[str] = ("energy", "forces")
    ) -> list[dict[str, Any]]:
        """Return the properties of several `Atoms`, one dictionary for each.

        Systems above the fair share of a rank are split, one after the other; the rest is dealt
        out whole.
        """
        unknown = set(properties) - set(self.implemented_properties)
        if unknown:
            raise PropertyNotImplementedError(f"{sorted(unknown)}: {self.implemented_properties}")
        told = [self._checked(atoms, properties) for atoms in systems]
        if not told:
            return []
        if self._team is None or self._team.is_closed:
            self._team = ResidentRanks(
                _Worker, self._model, self._adapter, self._skin, ranks=self.ranks
            )
        answers = self._team.ask((told, tuple(properties)))
        found = {number: values for answer in answers for number, values in answer.items()}
        return [found[number] for number in range(len(told))]

    def get_hessian(self, atoms: Any = None) -> np.ndarray:
        """Return the second derivatives of the energy by positions, `[3 N, 3 N]`."""
        return np.asarray(self.get_property("hessian", atoms))

    def close(self) -> None:
        """End the ranks. Safe to repeat; a later call would start new ones."""
        if self._team is not None:
            self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, atoms: Any, properties: Sequence[str]) -> System:
        """Return what ranks are told; what they could not compute is refused here."""
        pos, numbers = atoms.get_positions(), atoms.get_atomic_numbers()
        if len(pos) == 0:
            raise PartitionError.because("Calculator", "a system without atoms")
        if not np.isfinite(pos).all():
            atom = int(np.argwhere(~np.isfinite(pos))[0, 0])
            raise PartitionError.because("Calculator", f"atom {atom} is at {pos[atom].tolist()}")
        check_elements(numbers.tolist(), self._adapter, self._model)
        pbc = tuple(bool(p) for p in atoms.pbc)
        cell = np.asarray(atoms.cell.array)
        if "stress" in properties and not (atoms.cell.rank == 3 and all(pbc)):
            raise PropertyNotImplementedError(
                "stress: the system is not periodic in all directions"
            )
        for vector in np.flatnonzero(pbc):
            if not cell[vector].any():
                raise PartitionError.because(
                    "Calculator",
                    f"pbc={pbc} with a cell of {cell.tolist()}",
                    None,
                    "atoms.set_cell(...), or atoms.pbc = False",
                )
        return System(pos, numbers, cell if any(pbc) else None, pbc)


def deal(sizes: Sequence[int], ranks: int) -> list[int | None]:
    """Return for each system the rank that computes it; None: all of them share it.

    >>> deal([10, 500, 10, 20], 2)
    [1, None, 1, 0]
    """
    owners: list[int | None] = [None] * len(sizes)
    rest = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    left = sum(sizes)
    while rest and sizes[rest[0]] > left / ranks and sizes[rest[0]] >= ATOMS * ranks:
        left -= sizes[rest.pop(0)]
    loads = [(0, rank) for rank in range(ranks)]
    for number in rest:
        load, owner = heapq.heappop(loads)
        owners[number] = owner
        heapq.heappush(loads, (load + sizes[number], owner))
    return owners


class _Worker:
    """One of the ranks: answers questions about systems."""

    def __init__(self, model: nn.Module, adapter: Adapter, skin: float) -> None:
        self._model = model.eval().requires_grad_(False)
        self._adapter, self._skin = adapter, skin
        self._rank, self._ranks = world().rank, world().size
        self._row, self._alone = graph_groups(self._ranks).gp, graph_groups(1).gp
        self._shared: SplitPotential | None = None
        self._whole: SplitPotential | None = None
        """For systems that are not split."""
        self._cost_when_new: tuple[float, float] | None = None

    def __call__(
        self, question: tuple[Sequence[System], Sequence[str]]
    ) -> dict[int, dict[str, Any]]:
        """Return the properties of the systems that are this rank's to tell."""
        systems, properties = question
        answers: dict[int, dict[str, Any]] = {}
        owners = deal([len(system.numbers) for system in systems], self._ranks)
        for number, (system, owner) in enumerate(zip(systems, owners, strict=True)):
            if owner not in (None, self._rank):
                continue
            found = self._properties(system, properties, owner is None)
            if owner is not None or self._rank == 0:
                answers[number] = found
        return answers

    def _properties(
        self, system: System, properties: Sequence[str], is_shared: bool
    ) -> dict[str, Any]:
        pos = torch.from_numpy(system.pos)
        cell = None if system.cell is None else torch.from_numpy(system.cell)
        if is_shared:
            potential = self._potential(pos, cell, system.pbc)
        else:
            potential = self._whole
            if potential is None or potential.partition.num_nodes != len(pos):
                part = GraphPartition.contiguous(len(pos), 1)
                potential = self._whole = self._split(part, self._alone)
        pos.requires_grad_("hessian" in properties)
        numbers = torch.from_numpy(system.numbers).long()
        out = potential(pos, numbers, cell=cell, pbc=system.pbc, stress="stress" in properties)
        if is_shared and self._cost_when_new is None:
            self._cost_when_new = _cost(potential.plan)
        energy = float(out.energy.detach())
        found: dict[str, Any] = {"energy": energy, "free_energy": energy}
        if out.forces is not None:
            found["forces"] = out.forces.detach().numpy()
            if "hessian" in properties:
                found["hessian"] = _hessian(out.forces, pos).numpy()
        if out.stress is not None:
            found["stress"] = out.stress.detach().numpy()[_VOIGT]
        return found

    def _split(self, part: GraphPartition, comm: Communicator) -> SplitPotential:
        model, adapter, skin = self._model, self._adapter, self._skin
        return SplitPotential(model, part, adapter=adapter, skin=skin, comm=comm).eval()

    def _potential(self, pos: Tensor, cell: Tensor | None, pbc: Sequence[bool]) -> SplitPotential:
        """Return the potential on all ranks, with a partition that suits these positions."""
        known, work = self._shared, None
        if known is not None and known.partition.num_nodes == len(pos):
            before, plan = self._cost_when_new, known.plan
            if before is None or plan is None:
                return known
            pairs = zip(_cost(plan), before, strict=True)
            if not any(now > WORSE * then for now, then in pairs):
                return known
            # Work goes with edges: each atom costs what it did in the last call.
            edges = torch.bincount(plan.edge_index[1], minlength=plan.num_local)
            work = plan.gather(edges.double() + 1, grad="slice")
        part = GraphPartition.morton(wrapped(pos, cell, pbc), self._ranks, cost=work)
        if known is None:
            known = self._shared = self._split(part, self._row)
        known.partition, self._cost_when_new = part, None
        return known


def _cost(plan: GraphPlan | None) -> tuple[float, float]:
    """Return halo and imbalance of a partition; alike on all ranks."""
    return (0, 1) if plan is None else (sum(plan.stats.halo_per_rank), plan.stats.edge_imbalance)


def _hessian(forces: Tensor, pos: Tensor) -> Tensor:
    """Return the second derivatives, row by row: ranks meet in each, so they cannot be vmapped."""
    rows = []
    for number in range(forces.numel()):
        one = torch.zeros_like(forces)
        one.view(-1)[number] = -1.0
        rows.append(torch.autograd.grad(forces, pos, one, retain_graph=True)[0].reshape(-1))
    return torch.stack(rows)
