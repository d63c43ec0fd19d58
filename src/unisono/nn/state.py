"""State that does not know the layout: whole tensors in and out, or blocks with their place.

`state_dict()` of a distributed layer gives what the torch layer of the global size gives, on every
rank; `load_state_dict` takes that and keeps the own block. So a model saved on four ranks loads on
one, on three, and into plain torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import CollectiveMismatch, PartitionError, RankTimeout, an
from unisono.expect import expect_choice
from unisono.nn.module import Module
from unisono.nn.parameters import (
    Holding,
    Weights,
    draw_uniform,
    nothing,
    shared_generator,
    whole,
)
from unisono.nn.planned import PlannedModule
from unisono.nn.split_tensors.module import SplitModule
from unisono.operators import broadcast
from unisono.operators.gradients import (
    EarlierGradients,
    GradientPolicy,
    reduce_gradients,
    summed_gradients,
)
from unisono.topology import Partition

P = TypeVar("P")
StateMode = Literal["full", "sharded"]


@dataclass(frozen=True)
class Shard:
    """A block of a parameter and its place in the whole one: what mode "sharded" saves."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


torch.serialization.add_safe_globals([Shard])  # torch.load takes files with nothing else by default


class HoldingModule(PlannedModule[P]):
    """A layer with parameters or buffers of which a rank may hold only a block."""

    weights: Weights = "replicated"

    def __init__(self) -> None:
        super().__init__()
        self._holdings: dict[str, Holding] = {}
        """What this rank stores of each parameter and buffer."""
        self._blocks_used: dict[str, tuple[int, ...]] = {}
        """Shape of the block of each parameter that this rank computes with."""
        self._replicated: dict[str, bool] = {}
        """Whether all ranks store the whole of it."""
        self._user_comms: dict[str, Communicator] = {}
        self._sums_gradients = True
        _living.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take part among the living layers, as a copy too."""
        super().__setstate__(state)
        _living.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_user_comms": {}}

    def _hold(
        self, name: str, used: Holding, *, everywhere: bool = False, is_buffer: bool = False
    ) -> Holding:
        """Note which block of a parameter this rank uses; return what it stores of it.

        `everywhere`: all ranks use all of it. A buffer is stored wherever it is used.
        """
        stored = used
        if self.weights == "root" and not is_buffer:
            users = self._users(name)
            if users is not None and users.rank != 0:
                stored = nothing(used.global_shape)
            everywhere = False
        self._blocks_used[name], self._holdings[name] = used.shape, stored
        self._replicated[name] = everywhere
        return stored

    def blocks(self) -> dict[str, Tensor]:
        """Return own blocks by name, empty ones too: the same names on all ranks of the layer."""
        named = {name: getattr(self, name, None) for name in self._holdings}
        return {name: x for name, x in named.items() if x is not None}

    def _draw(
        self,
        weight: Holding,
        bias: Holding | None,
        *,
        everywhere: bool = False,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Draw the own blocks of weight and bias, as torch's linear and conv layers do. Collective.

        The fan is that of dim 1, for transposed convolutions too, as in torch.
        """
        fan = math.prod(weight.global_shape[1:])
        gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        # In the order in which torch rounds: the weights are its own, bit by bit.
        edges = (
            (math.sqrt(3.0) * (gain / math.sqrt(fan)), 1 / math.sqrt(fan)) if fan else (0.0, 0.0)
        )
        parts = ("weight", weight, edges[0]), ("bias", bias, edges[1])
        with shared_generator(self._control()) as generator:
            for name, used, edge in parts:
                self.register_parameter(name, None)
                if used is not None:
                    stored = self._hold(name, used, everywhere=everywhere)
                    block = draw_uniform(stored, edge, generator, dtype=dtype, device=device)
                    self.register_parameter(name, nn.Parameter(block))

    def _users(self, name: str) -> Partition | None:
        """Return the ranks that use this rank's block of a parameter; None on a rank outside."""
        raise TypeError(f"{type(self).__name__} has no ranks for {name}")

    def _gradient_comm(self, name: str) -> Communicator | None:
        """Return the ranks over which the gradient of a parameter is summed; None for none."""
        if self.weights != "replicated":
            return None
        if name not in self._user_comms:
            users = self._users(name)
            if users is None:
                return None
            self._user_comms[name] = users.comm
        return self._user_comms[name]

    def _used(self, *names: str) -> list[Tensor]:
        """Return the blocks of parameters that the same ranks use, wherever they are stored.

        Those that the layer does not have are left out. Gradients are summed over these ranks: on
        all of them, or on the first.
        """
        found = {name: getattr(self, name) for name in names}
        tensors: dict[str, Tensor] = {name: p for name, p in found.items() if p is not None}
        if self.weights == "replicated":
            comm = self._gradient_comm(names[0]) if self._sums_gradients and tensors else None
            each = tensors.values()
            return list(each if comm is None else summed_gradients(comm, *each))
        users = self._users(names[0])
        if users is None or users.size == 1 or not tensors:
            return list(tensors.values())
        shapes = [self._blocks_used[name] for name in tensors]
        sizes = list(map(math.prod, shapes))
        flat = torch.cat([x.reshape(-1) for x in tensors.values()])
        flat = broadcast(flat, like=((sum(sizes),), flat.dtype), comm=users.comm)
        parts = flat.split_with_sizes(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, holding in self._holdings.items():
            key = prefix + name
            if key not in destination:
                continue
            block = destination[key]
            if _mode == "sharded":
                destination[key] = Shard(block, holding.global_shape, holding.start)
            elif not self._replicated[name]:
                destination[key] = join_blocks(block, holding, self._root())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **kwargs: Any
    ) -> None:
        for name, holding in self._holdings.items():
            key = prefix + name
            if key in state_dict:
                state_dict[key] = own_block(state_dict[key], holding, key)
        super()._load_from_state_dict(state_dict, prefix, *rest, **kwargs)


def living_layers() -> list[HoldingModule[Any]]:
    """Return all layers of this process that hold blocks: who has only a parameter asks them."""
    return list(_living)


def join_blocks(block: Tensor, holding: Holding, comm: Communicator | None) -> Tensor:
    """Return the whole tensor on every rank of `comm`. Collective."""
    if comm is None or comm.size == 1:
        return block
    joined = block.new_empty(holding.global_shape)
    for holding_there, values in _blocks_of_all(block, holding, comm):
        if values.numel():
            joined[holding_there.slices] = values.view(holding_there.shape)
    return joined


def _blocks_of_all(
    block: Tensor, holding: Holding, comm: Communicator
) -> list[tuple[Holding, Tensor]]:
    """Return what each rank holds of a tensor, its values in one row. Collective."""
    dims = len(holding.global_shape)
    where = [
        Holding(holding.global_shape, record[:dims], record[dims:])
        for record in comm.all_gather_ints([*holding.start, *holding.shape])
    ]
    flat = comm.all_gather(block.detach().reshape(-1))
    return list(
        zip(
            where,
            flat.split([math.prod(block_at.shape) for block_at in where]),
            strict=True,
        )
    )


def own_block(value: Any, holding: Holding, key: str) -> Tensor:
    """Return the own block of what a state holds: a whole tensor, or the block and its place."""
    if isinstance(value, Shard):
        place = Holding(value.global_shape, value.offsets, tuple(value.tensor.shape))
        if place != holding:
            raise PartitionError.because(
                f"load_state_dict of {key}",
                f"a block of {list(place.shape)} at {list(place.start)}",
                f"this rank holds {list(holding.shape)} at {list(holding.start)}",
                "whole tensors (full_state_dict) for another number of ranks",
            )
        return value.tensor
    if not isinstance(value, Tensor):
        raise PartitionError.because(
            f"load_state_dict of {key}", an(type(value).__name__), None, "a tensor, or a Shard"
        )
    if tuple(value.shape) == holding.global_shape:
        return value[holding.slices]
    return value  # a bare block; torch compares its shape


@contextmanager
def state_dict_mode(mode: StateMode) -> Iterator[None]:
    """Choose what `state_dict()` of distributed layers gives inside the block.

    `"full"` (default): whole tensors on every rank; collective where blocks are split.
    `"sharded"`: own blocks with their place (`Shard`), which load at the same number of ranks.
    """
    expect_choice("state_dict_mode", mode, get_args(StateMode), error=PartitionError)
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def current_state_mode() -> StateMode:
    """Return what `state_dict()` of distributed layers gives at the moment."""
    return _mode


def full_state_dict(module: nn.Module, *, rank: int | None = None) -> dict[str, Any]:
    """Return whole tensors under the names of the torch module. Collective over its ranks.

    Args:
        module: any module tree with distributed layers.
        rank: only this rank of the world gets them, the others an empty dict; default all do.
    """
    with state_dict_mode("full"):
        try:
            state = module.state_dict()
        except RankTimeout as error:
            hint = "call full_state_dict on all ranks; rank= says which of them gets the tensors"
            error.args = (f"{error}\n  HINT: {hint}",)
            raise
    me = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank is not None and rank != me:
        return {}
    return dict(state)


def check_replicas(module: nn.Module) -> None:
    """Raise on all ranks if a block that several ranks hold differs between them. Collective.

    Parameters of ordinary layers in the tree count as held by all ranks.
    """
    everyone = next((root for layer in module.modules() if (root := _root_of(layer))), None)
    for path, layer in module.named_modules():
        if isinstance(layer, HoldingModule):
            comm, holdings, values = layer._root(), layer._holdings, layer.blocks()
        else:
            comm, values = everyone, dict(layer.named_parameters(recurse=False))
            holdings = {name: whole(p.shape) for name, p in values.items()}
        if comm is None or comm.size == 1:
            continue
        for name, value in values.items():
            _compare(f"{path}.{name}".lstrip("."), value, holdings[name], comm)


def _root_of(layer: nn.Module) -> Communicator | None:
    """Return the ranks that a layer, or a split network, is spread over."""
    if isinstance(layer, SplitModule):
        return layer.partition.comm
    return layer._root() if isinstance(layer, Module) else None


def _compare(name: str, value: Tensor, holding: Holding, comm: Communicator) -> None:
    first: dict[Holding, tuple[int, Tensor]] = {}
    for rank, (holding_there, values) in enumerate(_blocks_of_all(value, holding, comm)):
        other, expected = first.setdefault(holding_there, (rank, values))
        # NaN is the same as NaN.
        if not torch.allclose(expected, values, rtol=0.0, atol=0.0, equal_nan=True):
            difference = (expected - values).abs().max().item()
            raise CollectiveMismatch.because(
                f"check_replicas: {name}",
                f"ranks {comm.ranks[other]} and {comm.ranks[rank]} hold the same block",
                f"largest difference {difference:g}",
                "update parameters from their gradients only, with equal optimizers on all ranks",
            )


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Leave gradients of replicated parameters local inside the block; sum them once at its end.

    For accumulation over several backwards. Collective at its end. Layers that share a parameter
    sum in every backward: each has its own ranks.
    """
    holders = Counter(id(p) for each in module.modules() for p in each.parameters(recurse=False))
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, HoldingModule)
        and all(holders[id(p)] == 1 for p in layer.parameters(recurse=False))
    ]
    before = [(layer, layer._sums_gradients) for layer in layers]
    held = [
        (layer, name, p)
        for layer in layers
        for name, p in layer.named_parameters(recurse=False)
        if name in layer._holdings
    ]
    earlier = EarlierGradients(p for _, _, p in held)
    for layer in layers:
        layer._sums_gradients = False
    try:
        with ExitStack() as inside:
            for part in module.modules():
                if isinstance(part, SplitModule):
                    inside.enter_context(part.no_sync())
            yield
    except BaseException:
        earlier.put_back()  # what the block has added is not summed, and would not be alike
        raise
    finally:
        for layer, flag in before:
            layer._sums_gradients = flag
    users = [(p, layer._gradient_comm(name)) for layer, name, p in held]
    reduce_gradients((p, GradientPolicy(sum_over=(comm,))) for p, comm in users if comm is not None)
    earlier.add()


_mode: StateMode = "full"
_living: WeakSet[HoldingModule[Any]] = WeakSet()
