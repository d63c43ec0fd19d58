"""Potentials that others wrote, each called on one rank's piece of a system: MACE, SchNet.

A model is never edited. What it needs is told by an `Adapter` of a few lines: how far it looks, and
how it turns a piece (own atoms, halo, edges that end in own atoms, their vectors) into energies of
own atoms. Between layers the features of the halo are fetched from their owners, by `piece.extend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import PartitionError, an


@dataclass(frozen=True, eq=False)
class Piece:
    """What one rank computes: its own atoms first, then those of the halo."""

    numbers: Tensor
    """`[own + halo]`, int64: atomic numbers."""
    edge_index: Tensor
    """`[2, E]`: sources among own and halo atoms, targets among own ones."""
    vectors: Tensor
    """`[E, 3]`: from source to target, through the cell's border where that is near."""
    own: int
    """Number of own atoms."""
    extend: Callable[[Tensor], Tensor]
    """Rows of own atoms -> rows of own and halo atoms. Collective, with its gradient."""


@dataclass(frozen=True)
class Adapter:
    """How a kind of model is called on a piece.

    >>> springs = Adapter(  # all neighbours pull
    ...     cutoff=lambda model: 2.0,
    ...     energies=lambda model, piece: model(piece.vectors.square().sum(1, keepdim=True)),
    ... )
    """

    energies: Callable[[Any, Piece], Tensor]
    """`energies(model, piece)`: any shape, together the energy of the own atoms."""
    cutoff: Callable[[Any], float]
    """Length of the longest edge."""
    elements: Callable[[Any], list[int]] | None = None
    """Atomic numbers that the model knows; None: any."""


def adapter_of(model: nn.Module) -> Adapter:
    """Return the adapter of a model that is known here."""
    for kind in type(model).__mro__:
        known = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
        if known is not None:
            return known
    raise PartitionError.because(
        f"split_potential of {an(type(model).__name__)}",
        f"known are {', '.join(name.rpartition('.')[2] for name in _KNOWN)}",
        None,
        "adapter=Adapter(energies=..., cutoff=...), or eager instead of scripted",
    )


@contextmanager
def replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Let `module.name` be `value` for a while; nothing of the model's source changes."""
    place: dict[str, Any] = vars(module)
    if name in module._modules:  # assigning it would ask for a module that stays
        place = module._modules
    missing = object()
    before = place.get(name, missing)
    place[name] = value
    try:
        yield
    finally:
        if before is missing:
            del place[name]
        else:
            place[name] = before


# -- MACE ------------------------------------------------------------------------------------------


def mace(head: str | None = None) -> Adapter:
    """Return the adapter of MACE, for one of its heads.

    MACE can be called with edge vectors and with atoms of others, as LAMMPS does when it divides
    space. We take that way, but for LAMMPS' exchange of features, which has no second derivative.
    """

    def energies(model: Any, piece: Piece) -> Tensor:
        known = model.atomic_numbers
        # MACE cannot be called without atoms: a rank that has none brings one that counts nothing.
        numbers = piece.numbers if piece.own else known[:1]
        own = piece.own or 1
        kinds = (numbers[:, None] == known).long().argmax(1)
        data = {
            "node_attrs": nn.functional.one_hot(kinds, len(known)).to(piece.vectors.dtype),
            "edge_index": piece.edge_index,
            "vectors": piece.vectors,
            "batch": torch.zeros_like(kinds[:own]),
            "head": torch.full((1,), _head(model, head), device=kinds.device),
            "natoms": (own, len(kinds) - own),
            "lammps_class": piece,
        }

        def fetch(node_feats: Tensor, *, first_layer: bool, **_: Any) -> Tensor:
            if first_layer:  # features of elements alone: every rank has made them itself
                return node_feats
            rows = piece.extend(node_feats[: piece.own])
            return rows if piece.own else torch.cat([node_feats, rows])

        with ExitStack() as stack:
            for interaction in model.interactions:
                stack.enter_context(replaced(interaction, "handle_lammps", fetch))
            out = model(data, compute_force=False, lammps_mliap=True)
        return out["node_energy"][: piece.own]

    return Adapter(
        energies,
        cutoff=lambda model: float(model.r_max),
        elements=lambda model: model.atomic_numbers.tolist(),
    )


def _head(model: Any, head: str | None) -> int:
    heads = list(model.heads)
    if head in heads or (head is None and len(heads) == 1):
        return 0 if head is None else heads.index(head)
    raise PartitionError.because(
        f"head {head!r} of a MACE model", f"heads {heads}", None, f"adapter=mace({heads[0]!r})"
    )


# -- SchNet ----------------------------------------------------------------------------------------


def schnet() -> Adapter:
    """Return the adapter of torch_geometric's SchNet: it sums rows of own atoms to one energy."""

    def energies(model: Any, piece: Piece) -> Tensor:
        if model.dipole or model.readout.__class__.__name__ != "SumAggregation":
            raise PartitionError.because(
                "split_potential of a SchNet",
                "its result is no sum over atoms",
                None,
                'SchNet(readout="add", dipole=False)',
            )
        given = _Given(piece.edge_index, piece.vectors.norm(dim=1))
        with ExitStack() as stack:
            stack.enter_context(replaced(model, "interaction_graph", given))
            for interaction in model.interactions:
                conv = interaction.conv
                hook = conv.lin1.register_forward_hook(lambda _, __, rows: piece.extend(rows))
                stack.callback(hook.remove)
                cut = conv.lin2.register_forward_pre_hook(lambda _, rows: (rows[0][: piece.own],))
                stack.callback(cut.remove)
            own = piece.numbers[: piece.own]
            return model(own, piece.vectors.new_zeros(piece.own, 3))

    return Adapter(energies, cutoff=lambda model: float(model.cutoff))


class _Given(nn.Module):
    """Edges and their lengths, in place of a search for them."""

    def __init__(self, *edges: Tensor) -> None:
        super().__init__()
        self.edges = edges

    def forward(self, *_: Tensor) -> tuple[Tensor, ...]:
        """Return them."""
        return self.edges


_KNOWN: dict[str, Adapter] = {
    "mace.modules.models.MACE": mace(),
    "torch_geometric.nn.models.schnet.SchNet": schnet(),
}
