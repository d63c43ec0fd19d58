"""The state of an optimizer: by the names of parameters, and in blocks as the parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unisono.data_parallel import DASO, DataParallelOptimizer
from unisono.nn import Shard
from unisono.train.checkpoint.module_part import ModulePart, block_for
from unisono.train.checkpoint.tree import Path


class OptimizerPart:
    """A torch optimizer, or a `DataParallelOptimizer` around one.

    Args:
        optimizer: the optimizer.
        modules: modules of the same checkpoint, which give names to its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Mapping[str, ModulePart]) -> None:
        is_ours = isinstance(optimizer, DataParallelOptimizer)
        self.kind = type(optimizer.torch_optimizer if is_ours else optimizer).__name__
        self._optimizer = optimizer
        known: dict[int, tuple[str, Any]] = {}
        for name, part in modules.items():
            for path, parameter in part.named_parameters().items():
                known.setdefault(id(parameter), (f"{name}.{path}", part.state.get(path)))
        self._groups: list[list[str]] = []
        self._blocks: dict[str, Any] = {}
        """Parameter as the state of its module has it: says how it is cut."""
        for group in optimizer.param_groups:
            self._groups.append([])
            for parameter in group["params"]:
                name, block = known.get(
                    id(parameter), (f"parameter {len(self._blocks)}", parameter)
                )
                self._groups[-1].append(name)
                self._blocks[name] = block

    def capture(self) -> dict[str, Any]:
        """Return state and hyper-parameters by names of parameters."""
        saved = self._optimizer.state_dict()
        names = {
            index: name
            for group, mine in zip(saved["param_groups"], self._groups, strict=True)
            for index, name in zip(group["params"], mine, strict=True)
        }
        state = {
            names.get(index, index): {k: self._cut(v, names.get(index)) for k, v in values.items()}
            for index, values in saved["state"].items()
        }
        groups = [
            {**group, "params": mine}
            for group, mine in zip(saved["param_groups"], self._groups, strict=True)
        ]
        return {"kind": self.kind, "state": state, "groups": groups}

    def _cut(self, value: Any, name: str | None) -> Any:
        """Return a value of the state as the block that it is, if its parameter is one."""
        block = self._blocks.get(name or "")
        if not isinstance(value, Tensor) or not isinstance(block, Shard):
            return value
        if value.shape == block.tensor.shape:
            return Shard(value, block.global_shape, block.offsets)
        return value

    def problems(self, rest: Any, shapes: Mapping[Path, Any]) -> list[str]:  # noqa: ARG002
        """Compare the kind of optimizer and the parameters of its groups."""
        kind = rest.get("kind", "DASO")
        if kind != self.kind:
            return [f"{kind} in the checkpoint, {self.kind} here"]
        saved = [group["params"] for group in rest["groups"]]
        if len(saved) != len(self._groups):
            return [f"{len(saved)} parameter groups in the checkpoint, {len(self._groups)} here"]
        told: list[str] = []
        for i, (there, here) in enumerate(zip(saved, self._groups, strict=True)):
            if set(there) != set(here):
                odd = sorted(set(there) ^ set(here))
                told.append(
                    f"group {i}: {len(there)} parameters in the checkpoint, {len(here)} here, "
                    f"differing in {', '.join(odd[:4])}{', ...' if len(odd) > 4 else ''}"
                )
        return told

    def place(self, path: Path, shape: tuple[int, ...]) -> tuple[Shard, Any] | None:
        """Return memory for the own block of a value that is cut as its parameter is."""
        if len(path) < 2 or path[0] != "state":
            return None
        return block_for(self._blocks.get(path[1]), shape)

    def apply(self, tree: Any, *, same_ranks: bool) -> None:  # noqa: ARG002
        """Load the state."""
        self._optimizer.load_state_dict(self.in_torch_form(tree))

    def in_torch_form(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a captured state as `load_state_dict` of the optimizer wants it."""
        index = {name: i for i, name in enumerate(n for group in self._groups for n in group)}
        return {
            "state": {index.get(name, name): value for name, value in tree["state"].items()},
            "param_groups": [
                {**group, "params": [index[name] for name in mine]}
                for group, mine in zip(tree["groups"], self._groups, strict=True)
            ],
        }


class DasoPart:
    """DASO: its local optimizer as any optimizer; schedule and what is in flight for each rank."""

    def __init__(self, daso: DASO, modules: Mapping[str, ModulePart]) -> None:
        self._daso = daso
        self._local = OptimizerPart(daso.local_optimizer, modules)
        self.kind = f"DASO of {self._local.kind}"

    def capture(self) -> dict[str, Any]:
        """Return the state of this rank."""
        return {**self._daso.state_dict(), "local_optimizer": self._local.capture()}

    def problems(self, rest: Any, shapes: Mapping[Path, Any]) -> list[str]:
        """Compare the local optimizers."""
        if "local_optimizer" not in rest:
            return [f"no DASO in the checkpoint, {self.kind} here"]
        inner = {path[1:]: shape for path, shape in shapes.items() if path[0] == "local_optimizer"}
        return self._local.problems(rest["local_optimizer"], inner)

    def place(self, path: Path, shape: tuple[int, ...]) -> tuple[Shard, Any] | None:
        """Return memory as the local optimizer does."""
        return self._local.place(path[1:], shape) if path[0] == "local_optimizer" else None

    def apply(self, tree: Any, *, same_ranks: bool) -> None:  # noqa: ARG002
        """Load the state; DASO itself leaves out what another rank had in flight."""
        device = self._daso.params_ref[0].device
        local = self._local.in_torch_form(tree["local_optimizer"])
        rest = {name: value for name, value in tree.items() if name != "local_optimizer"}
        moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), rest)
        self._daso.load_state_dict({**moved, "local_optimizer": local})
