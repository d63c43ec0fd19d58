"""Third-party potentials, each called on one rank's piece of a system: MACE, PyG's, matgl's.

A model is never edited. An `Adapter` of a few lines says how far it looks, and how it turns a piece
(own atoms, halo, edges that end in own atoms, their vectors) into energies of own atoms. Between
layers the features of the halo are fetched from their owners, by `piece.extend`; or the halo is as
wide as all layers together, and the model is called unchanged (`by_forward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

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
    positions: Tensor | None = None
    """`[own + halo, 3]`, for an adapter with a `depth`: then every image of a foreign atom in reach
    is a row of the halo, targets of edges may be in it, and `extend` is not to be called."""


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
    depth: Callable[[Any], int] | None = None
    """Layers of messages, for a model that is called on all atoms so many cutoffs away, and then
    needs no `extend`. None: the halo is one cutoff wide, and `energies` extends rows."""


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
        count = piece.own or 1
        kinds = (numbers[:, None] == known).long().argmax(1)
        data = {
            "node_attrs": nn.functional.one_hot(kinds, len(known)).to(piece.vectors.dtype),
            "edge_index": piece.edge_index,
            "vectors": piece.vectors,
            "batch": torch.zeros_like(kinds[:count]),
            "head": torch.full((1,), _head(model, head), device=kinds.device),
            "natoms": (count, len(kinds) - count),
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


# -- any model, on its own atoms and a halo as wide as all of its layers ---------------------------


def by_graph(
    energies: Callable[[Any, Piece, Tensor], Tensor],
    cutoff: Callable[[Any], float],
    depth: Callable[[Any], int],
    elements: Callable[[Any], list[int]] | None = None,
) -> Adapter:
    """Return the adapter of a model that takes a batch of graphs.

    Own atoms are graph 0 and the halo, `depth` cutoffs wide, is graph 1; edges join both. Only the
    energy of graph 0 is taken, which must be a sum over atoms. The layers of the halo are computed
    on several ranks: exact, at the price of that work.

    Args:
        energies: `energies(model, piece, graph)`, with the number of its graph for each row of
            `piece.positions`, returns the energies of both graphs.
        cutoff: length of the longest edge, of the model.
        depth: how many edges away an atom can change the energy of another.
        elements: atomic numbers that the model knows; None: any.
    """

    def of_own(model: Any, piece: Piece) -> Tensor:
        positions = cast("Tensor", piece.positions)
        if not piece.own:
            return positions.sin().sum() * 0  # stays part of derivatives of every order
        graph = (torch.arange(len(positions), device=positions.device) >= piece.own).long()
        return energies(model, piece, graph).reshape(-1)[:1]  # some drop the dim of one graph

    return Adapter(of_own, cutoff, elements, depth)


def by_forward(cutoff: Callable[[Any], float], depth: Callable[[Any], int]) -> Adapter:
    """Return the adapter of a model that is called as `model(z, pos, batch)`, as PyG's are.

    As `by_graph`. The model must find its edges by PyG's `radius_graph`, which is replaced during
    the call by the edges of both graphs.

    Args:
        cutoff: length of the longest edge, of the model.
        depth: how many edges away an atom can change the energy of another.

    >>> adapter = by_forward(lambda model: 5.0, lambda model: len(model.layers))
    """

    def energies(model: Any, piece: Piece, graph: Tensor) -> Tensor:
        with known_edges(model, piece.edge_index) as calls:
            out = model(piece.numbers, piece.positions, graph)
        if not calls:
            raise PartitionError.because(
                f"split_potential of {an(type(model).__name__)} by its forward",
                "it did not call torch_geometric's radius_graph: atoms would not see the halo",
                None,
                "adapters.by_graph, with a function that passes piece.edge_index to the model",
            )
        return out[0] if isinstance(out, tuple) else out

    return by_graph(energies, cutoff, depth)


@contextmanager
def known_edges(model: nn.Module, edge_index: Tensor) -> Iterator[list[float]]:
    """Let PyG's models use these edges: replace `radius_graph`, and note each call's radius.

    `triplets`, by which DimeNet finds edges that follow each other, is replaced too: PyG's own
    needs torch_sparse.
    """
    calls: list[float] = []

    def radius_graph(pos: Tensor, r: float, *_: Any, loop: bool = False, **__: Any) -> Tensor:
        calls.append(r)
        if not loop:
            return edge_index
        atoms = torch.arange(len(pos), device=edge_index.device)
        return torch.cat([edge_index, atoms.expand(2, -1)], 1)

    functions = {"radius_graph": radius_graph, "triplets": _triplets}
    sources = {id(f): f for m in model.modules() if (f := _globals_of(m))}.values()
    before = [
        (names, name, names[name]) for names in sources for name in functions if name in names
    ]
    for names, name, _ in before:
        names[name] = functions[name]
    try:
        yield calls
    finally:
        for names, name, function in before:
            names[name] = function


def _globals_of(module: nn.Module) -> dict[str, Any]:
    names = getattr(type(module).forward, "__globals__", {})
    return names if "radius_graph" in names else {}


def _triplets(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """Return `i, j`, then `i, j, k, kj, ji` of each pair of edges k -> j, j -> i with k != i."""
    source, target = edge_index
    order = target.argsort(stable=True)
    degree = torch.bincount(target, minlength=num_nodes)
    count = degree[source]
    ji = torch.arange(len(source), device=source.device).repeat_interleave(count)
    first = (degree.cumsum(0) - degree)[source].repeat_interleave(count)
    within = torch.arange(len(ji), device=ji.device)
    within = within - (count.cumsum(0) - count).repeat_interleave(count)
    kj = order[first + within]
    keep = source[kj] != target[ji]
    kj, ji = kj[keep], ji[keep]
    return target, source, target[ji], source[ji], source[kj], kj, ji


def dimenet() -> Adapter:
    """Return the adapter of torch_geometric's DimeNet and DimeNet++."""
    return by_forward(
        lambda model: float(model.cutoff), lambda model: len(model.interaction_blocks) + 1
    )


def visnet() -> Adapter:
    """Return the adapter of torch_geometric's ViSNet."""
    layers = by_forward(
        lambda model: float(model.representation_model.distance.cutoff),
        lambda model: len(model.representation_model.vis_mp_layers) + 1,
    )

    def energies(model: Any, piece: Piece) -> Tensor:
        if model.reduce_op not in ("add", "sum") or bool(model.mean.any()):
            raise PartitionError.because(
                "split_potential of a ViSNet",
                f"reduce_op={model.reduce_op!r}, mean={model.mean.tolist()}",
                "its result is no sum over atoms",
                'ViSNet(reduce_op="sum", mean=0.0)',
            )
        with replaced(model, "derivative", False):
            return layers.energies(model, piece)

    return replace(layers, energies=energies)


def matgl(messages: int) -> Adapter:
    """Return the adapter of a model of matgl; of a `Potential` take its `.model`.

    Args:
        messages: how many edges away one block looks: 2 if it has angles, else 1.
    """

    def numbers_of(model: Any) -> list[int]:
        from ase.data import atomic_numbers  # matgl needs it, too

        return [atomic_numbers[symbol] for symbol in model.element_types]

    def energies(model: Any, piece: Piece, graph: Tensor) -> Tensor:
        if model.is_intensive or getattr(model, "readout_operation", "sum") != "sum":
            raise PartitionError.because(
                f"split_potential of {an(type(model).__name__)}",
                "its result is no sum over atoms",
                hint=f"{type(model).__name__}(is_intensive=False)",
            )
        known = torch.tensor(numbers_of(model), device=graph.device)
        both = SimpleNamespace(
            node_type=(piece.numbers[:, None] == known).long().argmax(1),
            pos=piece.positions,
            edge_index=piece.edge_index[:, piece.edge_index[0].argsort()],  # angles rely on it
            pbc_offset=piece.vectors.new_zeros(piece.edge_index.shape[1], 3),
            pbc_offshift=None,
            batch=graph,
            num_graphs=2,
            num_nodes=len(graph),
        )
        return model(both)

    return by_graph(
        energies,
        lambda model: float(model.cutoff),
        lambda model: messages * int(getattr(model, "n_blocks", 0) or model.num_layers) + 1,
        numbers_of,
    )


def sevennet() -> Adapter:
    """Return the adapter of SevenNet, without modalities."""

    def energies(model: Any, piece: Piece, graph: Tensor) -> Tensor:
        data = {
            "x": piece.numbers,
            "atomic_numbers": piece.numbers,
            "pos": piece.positions,
            "edge_index": piece.edge_index,
            "edge_vec": piece.vectors,
            "batch": graph,
            "num_atoms": torch.bincount(graph, minlength=2),
        }
        with replaced(model, "force_output", nn.Identity()):
            return model(data)["inferred_total_energy"]

    return by_graph(
        energies,
        lambda model: float(model.cutoff),
        lambda model: sum(name.endswith("_convolution") for name, _ in model.named_children()),
        lambda model: list(model.type_map),
    )


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
    "torch_geometric.nn.models.visnet.ViSNet": visnet(),
    "torch_geometric.nn.models.dimenet.DimeNet": dimenet(),
    "matgl.models._tensornet.TensorNet": matgl(messages=1),
    "matgl.models._m3gnet.M3GNet": matgl(messages=2),
    "matgl.models._chgnet.CHGNet": matgl(messages=2),
    "sevenn.nn.sequential.AtomGraphSequential": sevennet(),
}
