"""How each kind of object gives its state to a checkpoint, and takes it back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.data_parallel import DASO, DataParallel, DataParallelOptimizer
from unisono.errors import CheckpointError
from unisono.nn import Shard, state_dict_mode
from unisono.train.checkpoint.blocks import (
    Path,
    is_leaf,
    shape_of,
    taken_apart,
)
from unisono.train.checkpoint.folder import Saved

Tensors = Mapping[Path, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the tensors in a saved state, by path."""
_COMPILED = "_orig_mod."
"""What torch.compile puts into names."""
_EXTRA = "_extra_state"
"""How torch names what a module adds to its state."""


class Part:
    """One object of a checkpoint: a state had by one call and taken back by another. Local.

    Args:
        kind: what it is, for messages.
        capture: returns the state as a tree of plain values, tensors and `Shard`s; copies nothing.
        take: takes a state back.
        other_ranks: for states that do not fit another number of ranks, what does.
    """

    in_place = False
    """Whether saved tensors are read right into those of the state, or their blocks."""

    def __init__(
        self,
        kind: str,
        capture: Callable[[], Any],
        take: Callable[[Any], object],
        *,
        other_ranks: str | None = None,
    ) -> None:
        self.kind = kind
        self.capture = capture
        self.take = take
        self.other_ranks = other_ranks
        self.blocks: dict[Path, Any] = {}
        """Where tensors of the state may be cut: by path, or its beginning, one that says how."""

    def problems(self, rest: Any, tensors: Tensors) -> list[str]:  # noqa: ARG002
        """Return why a saved state does not fit, before anything is changed."""
        return []

    def block_at(self, path: Path, shape: tuple[int, ...]) -> Shard | Tensor | None:
        """Return how a saved tensor is cut here, and on which device; None: unknown."""
        like = next((self.blocks[path[:n]] for n in range(1, 4) if path[:n] in self.blocks), None)
        # A number may be a counter, which optimizers have on the CPU.
        if isinstance(like, Shard | Tensor) and shape_of(like) == tuple(shape) and shape:
            return like
        return None


class ModulePart(Part):
    """A module: data-parallel, distributed layers, FSDP2, DTensor, or plain."""

    in_place = True

    def __init__(self, module: nn.Module) -> None:
        self.module = _inside(module)
        super().__init__(type(self.module).__name__, lambda: self.state, self._load)
        with state_dict_mode("sharded"):
            state = self.module.state_dict()
        self._module_names = {name.replace(_COMPILED, ""): name for name in state}
        self.state: dict[str, Any] = {name.replace(_COMPILED, ""): state[name] for name in state}
        self.blocks = {(name,): value for name, value in self.state.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters under the names of the state."""
        return {name.replace(_COMPILED, ""): p for name, p in self.module.named_parameters()}

    def problems(self, rest: Any, tensors: Tensors) -> list[str]:  # noqa: ARG002
        """Compare names, shapes and dtypes; an extra state may be anything at any time."""
        empty = [name for name, x in self.state.items() if isinstance(x, Tensor) and x.is_meta]
        return [
            *_compared(tensors, self.state),
            *(f"{name}: on the meta device here, without memory" for name in empty),
        ]

    def _load(self, tree: dict[str, Any]) -> None:
        self.module.load_state_dict({self._module_names[name]: v for name, v in tree.items()})


class OptimizerPart(Part):
    """A torch optimizer, or a `DataParallelOptimizer` around one.

    Args:
        optimizer: the optimizer.
        modules: modules of the same checkpoint, which give names to its parameters.
    """

    in_place = True

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Mapping[str, ModulePart]) -> None:
        is_ours = isinstance(optimizer, DataParallelOptimizer)
        kind = type(optimizer.torch_optimizer if is_ours else optimizer).__name__
        super().__init__(kind, self._state, self._load)
        self._optimizer = optimizer
        shared: dict[int, tuple[str, Any]] = {}
        for name, part in modules.items():
            for path, parameter in part.named_parameters().items():
                shared.setdefault(id(parameter), (f"{name}.{path}", part.state.get(path)))
        self._groups: list[list[str]] = []
        for group in optimizer.param_groups:
            self._groups.append([])
            for parameter in group["params"]:
                unknown = (f"parameter {len(self.blocks)}", parameter)
                name, block = shared.get(id(parameter), unknown)
                self._groups[-1].append(name)
                self.blocks["state", name] = block  # its state is cut as the parameter is

    def _state(self) -> dict[str, Any]:
        """Return state and hyper-parameters by names of parameters."""
        saved = self._optimizer.state_dict()
        names = {
            index: name
            for group, current in zip(saved["param_groups"], self._groups, strict=True)
            for index, name in zip(group["params"], current, strict=True)
        }
        state = {
            names.get(index, index): {k: self._cut(v, names.get(index)) for k, v in values.items()}
            for index, values in saved["state"].items()
        }
        groups = [
            {**group, "params": current}
            for group, current in zip(saved["param_groups"], self._groups, strict=True)
        ]
        return {"kind": self.kind, "state": state, "groups": groups}

    def _cut(self, value: Any, name: str | None) -> Any:
        """Return a value of the state as the block that it is, if its parameter is one."""
        block = self.blocks.get(("state", name))
        if not isinstance(value, Tensor) or not isinstance(block, Shard):
            return value
        if value.shape == block.tensor.shape:
            return Shard(value, block.global_shape, block.offsets)
        return value

    def problems(self, rest: Any, tensors: Tensors) -> list[str]:  # noqa: ARG002
        """Compare the kind of optimizer and the parameters of its groups."""
        kind = rest.get("kind", "DASO")
        if kind != self.kind:
            return [f"{kind} in the checkpoint, {self.kind} here"]
        saved = [group["params"] for group in rest["groups"]]
        if len(saved) != len(self._groups):
            return [f"{len(saved)} parameter groups in the checkpoint, {len(self._groups)} here"]
        problems: list[str] = []
        for i, (there, here) in enumerate(zip(saved, self._groups, strict=True)):
            if set(there) != set(here):
                odd = sorted(set(there) ^ set(here))
                problems.append(
                    f"group {i}: {len(there)} parameters in the checkpoint, {len(here)} here, "
                    f"differing in {', '.join(odd[:4])}{', ...' if len(odd) > 4 else ''}"
                )
        return problems

    def _load(self, tree: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(self.in_torch_form(tree))

    def in_torch_form(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a captured state as `load_state_dict` of the optimizer wants it."""
        index = {name: i for i, name in enumerate(n for group in self._groups for n in group)}
        return {
            "state": {index.get(name, name): value for name, value in tree["state"].items()},
            "param_groups": [
                {**group, "params": [index[name] for name in current]}
                for group, current in zip(tree["groups"], self._groups, strict=True)
            ],
        }


class DasoPart(Part):
    """DASO: its local optimizer as any optimizer; schedule and what is in flight for each rank."""

    in_place = True

    def __init__(self, daso: DASO, modules: Mapping[str, ModulePart]) -> None:
        self._daso = daso
        self._local = OptimizerPart(daso.local_optimizer, modules)
        super().__init__(f"DASO of {self._local.kind}", self._state, self._load)
        self.blocks = {("local_optimizer", *path): x for path, x in self._local.blocks.items()}

    def _state(self) -> dict[str, Any]:
        return {**self._daso.state_dict(), "local_optimizer": self._local.capture()}

    def problems(self, rest: Any, tensors: Tensors) -> list[str]:
        """Compare the local optimizers."""
        if "local_optimizer" not in rest:
            return [f"no DASO in the checkpoint, {self.kind} here"]
        inner = {path[1:]: x for path, x in tensors.items() if path[0] == "local_optimizer"}
        return self._local.problems(rest["local_optimizer"], inner)

    def _load(self, tree: dict[str, Any]) -> None:
        local = self._local.in_torch_form(tree["local_optimizer"])
        self._daso.load_state_dict({**tree, "local_optimizer": local})


class NetPart(Part):
    """A Bayesian net: parameters, running values and recurrent states."""

    in_place = True

    def __init__(self, net: Any) -> None:
        super().__init__(f"bayes {type(net).__name__}", self._state, self._load)
        self._net = net

    def _state(self) -> dict[str, Any]:
        state = self._net.state_dict(tensors=True, running=True)
        return {"state": state, **self._net.recurrent_state()}

    def _load(self, tree: dict[str, Any]) -> None:
        self._net.load_state_dict(tree["state"])
        self._net.set_recurrent_state(tree)

    def problems(self, rest: Any, tensors: Tensors) -> list[str]:  # noqa: ARG002
        """Compare the parameters of layers; recurrent states have shapes of the last batch."""
        saved = {path: x for path, x in tensors.items() if path[0] == "state"}
        return _compared(saved, {"state": self._state()["state"]})


def parts_of(objects: Mapping[str, Any]) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return the objects that have a state, as parts, and the plain values among `objects`."""
    parts: dict[str, Part] = {}
    values: dict[str, Any] = {}
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            parts[name] = ModulePart(value)
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
        return Part("generator", value.get_state, value.set_state)
    is_loader = _is_loader(value)
    if is_loader and not hasattr(value, "state_dict"):
        raise CheckpointError.because(
            f"{name}=DataLoader",
            "torch's loader does not know how far it has come",
            hint=f"loader = Resumable(loader), iterate that, and {name}=loader",
        )
    bayes = sys.modules.get("unisono.bayes")
    if bayes is not None and isinstance(value, (bayes.Sequential, bayes.DDPSequential)):
        return NetPart(value.model if isinstance(value, bayes.DDPSequential) else value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return Part(
            type(value).__name__,
            value.state_dict,
            value.load_state_dict,
            other_ranks="loader = Resumable(DataLoader(...)), which begins at the same sample"
            if is_loader
            else None,
        )
    if callable(getattr(value, "set_epoch", None)) and hasattr(value, "epoch"):
        return Part(type(value).__name__, lambda: _epoch_of(value), lambda s: _set_epoch(value, s))
    return None


def _is_loader(value: object) -> bool:
    return isinstance(value, torch.utils.data.DataLoader)


def _epoch_of(sampler: Any) -> dict[str, Any]:
    return {"epoch": sampler.epoch, "seed": getattr(sampler, "seed", None)}


def _set_epoch(sampler: Any, state: dict[str, Any]) -> None:
    if state["seed"] is not None:
        sampler.seed = state["seed"]
    sampler.set_epoch(state["epoch"])


def described(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of the whole tensor."""
    return shape_of(value), (value.tensor if isinstance(value, Shard) else value).dtype


def _compared(saved: Tensors, state: dict[str, Any]) -> list[str]:
    """Say in what saved tensors differ from those of a state, under the keys that it has."""

    def texts(tensors: Tensors) -> dict[str, str]:
        return {
            ".".join(map(str, path)): f"{list(shape)} of {str(dtype).removeprefix('torch.')}"
            for path, (shape, dtype) in tensors.items()
            if not any(str(key).endswith(_EXTRA) for key in path)
        }

    leaves = taken_apart(state, is_leaf)[1].values()
    here = texts({path: described(leaf) for path, leaf in leaves})
    there = texts(saved)
    problems = [f"{name}: not in the checkpoint" for name in here if name not in there]
    problems += [f"{name}: only in the checkpoint" for name in there if name not in here]
    other = [name for name in here if name in there and there[name] != here[name]]
    return problems + [
        f"{name}: {there[name]} in the checkpoint, {here[name]} here" for name in other
    ]


def _inside(module: nn.Module) -> nn.Module:
    """Return the module inside of wrappers that only add ways to train it."""
    while True:
        if isinstance(module, DataParallel):
            module.finalize()
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif isinstance(compiled := getattr(module, "_orig_mod", None), nn.Module):
            module = compiled
        else:
            return module


def parts_to_restore(saved: Saved, objects: Mapping[str, Any], partial: bool) -> dict[str, Part]:
    """Return the objects as parts, or say which names do not fit the checkpoint. Local."""
    parts, values = parts_of(objects)
    there = saved.manifest.parts
    call = f"Checkpoint.restore({', '.join(f'{name}=' for name in objects)})"
    contents = ", ".join(f"{n} ({kind})" for n, kind in there.items()) or "no object"
    problem = f"step {saved.step} holds {contents}"
    if values:
        name = next(iter(values))
        raise CheckpointError.because(
            call,
            f"{name} is a plain value, {type(values[name]).__name__}",
            hint=f"restored = checkpoint.restore(...); then restored[{name!r}]",
        )
    unknown = [name for name in parts if name not in there]
    if unknown:
        raise CheckpointError.because(
            call, problem, f"nothing under {', '.join(unknown)}", "the names that save() was given"
        )
    left_out = [name for name in there if name not in parts]
    if left_out and not partial:
        raise CheckpointError.because(
            call,
            problem,
            f"not asked for: {', '.join(left_out)}",
            f"restore(..., {left_out[0]}=...), or partial=True to leave them as they are",
        )
    return parts
