"""MACE models with random weights, systems for them, and what plain MACE says, in float64."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

needs_mace = pytest.mark.skipif(
    find_spec("mace") is None or find_spec("ase") is None,
    reason='no MACE here: pip install "unisono[potentials]"',
)
CUTOFF = 4.0
ELEMENTS = [13, 29]


@cache
def mace() -> SimpleNamespace:
    """The parts of MACE and e3nn, whose import warns of much that is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = {name: import_module(f"mace.{name}") for name in ("data", "modules", "tools")}
        o3 = import_module("e3nn.o3")  # after mace, which sets what it needs to be loaded
    loader = parts["tools"].torch_geometric.dataloader.DataLoader
    return SimpleNamespace(**parts, o3=o3, loader=loader)


def mace_model(kind: str = "ScaleShiftMACE", channels: int = 8, **changed: Any) -> torch.nn.Module:
    """A small model of copper and aluminium; the same weights every time."""
    parts, before = mace(), torch.get_default_dtype()
    residual = parts.modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    first = parts.modules.interaction_classes["RealAgnosticInteractionBlock"]
    given: dict[str, Any] = {
        "r_max": CUTOFF,
        "num_bessel": 4,
        "num_polynomial_cutoff": 5,
        "max_ell": 2,
        "interaction_cls": residual,
        "interaction_cls_first": first,
        "num_interactions": 2,
        "num_elements": 2,
        "hidden_irreps": parts.o3.Irreps(f"{channels}x0e+{channels}x1o"),
        "MLP_irreps": parts.o3.Irreps("4x0e"),
        "atomic_energies": np.array([-1.0, -2.0]),
        "avg_num_neighbors": 10.0,
        "atomic_numbers": ELEMENTS,
        "correlation": 2,
        "gate": torch.nn.functional.silu,
    }
    if kind == "ScaleShiftMACE":
        given |= {"atomic_inter_scale": 1.3, "atomic_inter_shift": 0.1}
    for name in ("interaction_cls", "interaction_cls_first"):
        if name in changed:
            changed[name] = parts.modules.interaction_classes[changed[name]]
    generator = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(parts.modules, kind)(**given | changed)
    finally:
        torch.set_default_dtype(before)
        torch.set_rng_state(generator)


def crystal(repeat: int | tuple[int, int, int] = 3, **changed: Any) -> Any:
    """Copper with every third atom replaced, rattled: 4 atoms for each cube."""
    from ase.build import bulk

    atoms = bulk("Cu", "fcc", a=3.6, cubic=True).repeat(repeat)
    atoms.rattle(0.1, seed=1)
    atoms.numbers[::3] = 13
    if "cell" in changed:
        atoms.set_cell(changed["cell"], scale_atoms=True)
    atoms.pbc = changed.get("pbc", True)
    return atoms


def tensors_of(atoms: Any) -> dict[str, Any]:
    """The arguments of a split potential."""
    cell = torch.tensor(atoms.cell.array) if atoms.pbc.any() else None
    return {
        "pos": torch.tensor(atoms.positions),
        "numbers": torch.tensor(atoms.numbers),
        "cell": cell,
        "pbc": [bool(p) for p in atoms.pbc],
    }


def by_mace(model: Any, atoms: Any, stress: bool) -> tuple[Any, Any, Any, Any]:
    """Energy, forces, stress of plain MACE with its own neighbour list, and its positions."""
    parts, before = mace(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = parts.data.config_from_atoms(atoms)
            table = parts.tools.AtomicNumberTable(ELEMENTS)
            graph = parts.data.AtomicData.from_config(
                config, z_table=table, cutoff=float(model.r_max)
            )
            batch = next(iter(parts.loader([graph], batch_size=1, shuffle=False))).to_dict()
            pos = batch["positions"]
            out = model(batch, training=True, compute_stress=stress)
    finally:
        torch.set_default_dtype(before)
    return out["energy"][0], out["forces"], out["stress"][0] if stress else None, pos
