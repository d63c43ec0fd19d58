"""How each kind of object gives its state to a checkpoint and takes it back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from unisono.data_parallel import DASO, DataParallel
from unisono.errors import CheckpointError
from unisono.nn import Shard
from unisono.train.checkpoint.blocks import is_leaf, shape_of
from unisono.train.checkpoint.module_part import ModulePart, compared
from unisono.train.checkpoint.optimizer_part import DasoPart, OptimizerPart
from unisono.train.checkpoint.tree import Path, taken_apart

Shapes = Mapping[Path, tuple[int, ...]]
"""Shapes of the tensors in a saved state, by path."""


class Part(Protocol):
    """One object of a checkpoint. All methods are local."""

    kind: str
    """What it is, for messages."""

    def capture(self) -> Any:
        """Return the state as a tree of plain values, tensors and `Shard`s; nothing is copied."""
        ...

    def problems(self, rest: Any, shapes: Shapes) -> list[str]:
        """Return why a saved state does not fit, before anything is changed."""
        ...

    def place(self, path: Path, shape: tuple[int, ...]) -> tuple[Shard, Any] | None:
        """Return where a saved tensor goes, block and tensor; None: the whole of it, anywhere."""
        ...

    def apply(self, tree: Any, *, same_ranks: bool) -> None:
        """Take a state back; `same_ranks`: it is from this rank of equally many."""
        ...


class ValuePart:
    """A state that is had by one call and taken back by another."""

    def __init__(
        self, kind: str, capture: Callable[[], Any], take: Callable[[Any], object]
    ) -> None:
        self.kind = kind
        self.capture = capture
        self._take = take

    def problems(self, rest: Any, shapes: Shapes) -> list[str]:  # noqa: ARG002
        """Whoever takes the state knows best."""
        return []

    def place(self, path: Path, shape: tuple[int, ...]) -> None:
        """Every rank takes whole tensors."""

    def apply(self, tree: Any, *, same_ranks: bool) -> None:  # noqa: ARG002
        """Give the state back."""
        self._take(tree)


class RankPart(ValuePart):
    """A state that means something only to the same rank among equally many."""

    def apply(self, tree: Any, *, same_ranks: bool) -> None:
        """Give the state back, or leave things as they are."""
        if same_ranks:
            self._take(tree)


class NetPart(ValuePart):
    """A Bayesian net: parameters, running values and recurrent states."""

    def __init__(self, net: Any) -> None:
        super().__init__(f"bayes {type(net).__name__}", self._state, self._load)
        self._net = net

    def _state(self) -> dict[str, Any]:
        net = self._net
        return {
            "state": net.state_dict(tensors=True, running=True),
            "lstm": net.carried_lstm_states(),
            "history": net.lstm_histories(),
        }

    def _load(self, tree: dict[str, Any]) -> None:
        self._net.load_state_dict(tree["state"])
        self._net.reset_lstm_states()
        self._net.set_lstm_states(tree["lstm"])
        self._net.set_lstm_histories(tree.get("history", {}))

    def problems(self, rest: Any, shapes: Shapes) -> list[str]:  # noqa: ARG002
        """Compare layers and sizes."""
        _, leaves = taken_apart(self._state(), is_leaf)
        here = {path: list(shape_of(leaf)) for path, leaf in leaves.values()}
        there = {path: list(shape) for path, shape in shapes.items()}
        return compared(_by_layer(there), _by_layer(here))


def _by_layer(shapes: Mapping[Path, list[int]]) -> dict[str, str]:
    """Return shapes of each layer's parameters; recurrent states have those of the last batch."""
    layers: dict[str, str] = {}
    for path, shape in shapes.items():
        if path[0] == "state":
            layers[path[1]] = f"{layers.get(path[1], '')} {shape}".strip()
    return layers


def parts_of(objects: Mapping[str, Any]) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return the objects that have a state, as parts, and the plain values among `objects`."""
    parts: dict[str, Part] = {}
    values: dict[str, Any] = {}
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            parts[name] = ModulePart(value)
            if isinstance(value, DataParallel) and value.compression_state_dict():
                parts[f"{name}~compression"] = RankPart(
                    "compression", value.compression_state_dict, value.load_compression_state_dict
                )
    modules = {name: part for name, part in parts.items() if isinstance(part, ModulePart)}
    for name, value in objects.items():
        if name in parts:
            continue
        part = _part_of(name, value, modules)
        if part is None:
            values[name] = value
        else:
            parts[name] = part
    return parts, values


def _part_of(name: str, value: Any, modules: Mapping[str, ModulePart]) -> Part | None:
    if isinstance(value, DASO):
        return DasoPart(value, modules)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerPart(value, modules)
    if isinstance(value, torch.Generator):
        return ValuePart("generator", value.get_state, value.set_state)
    if isinstance(value, torch.utils.data.DataLoader):
        raise CheckpointError.because(
            f"{name}=DataLoader",
            "torch's loader does not know how far it has come",
            None,
            f"loader = Resumable(loader), iterate that, and {name}=loader",
        )
    bayes = sys.modules.get("unisono.bayes")
    if bayes is not None and isinstance(value, (bayes.Sequential, bayes.DDPSequential)):
        return NetPart(value.model if isinstance(value, bayes.DDPSequential) else value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return ValuePart(type(value).__name__, value.state_dict, value.load_state_dict)
    if callable(getattr(value, "set_epoch", None)) and hasattr(value, "epoch"):
        return ValuePart(
            type(value).__name__, lambda: _epoch_of(value), lambda s: _set_epoch(value, s)
        )
    return None


def _epoch_of(sampler: Any) -> dict[str, Any]:
    return {"epoch": sampler.epoch, "seed": getattr(sampler, "seed", None)}


def _set_epoch(sampler: Any, state: dict[str, Any]) -> None:
    if state["seed"] is not None:
        sampler.seed = state["seed"]
    sampler.set_epoch(state["epoch"])
