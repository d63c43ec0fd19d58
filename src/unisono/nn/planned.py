"""`PlannedModule`: a layer whose every message follows from a plan, and plans from shapes alone.

Before each call ranks agree on what they hold; `_make_plan` turns that into what this rank does.
Plans are frozen and kept: going back to known shapes costs nothing, and a backward uses the plan of
its own forward whatever was called since.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from inspect import signature
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import PartitionError, UnisonoError, an
from unisono.nn.agreement import (
    INPUTS,
    NO_GRAD,
    PARAMETERS,
    Agreements,
    BlockStructure,
    Cuts,
    Table,
    report_equal_blocks,
)
from unisono.nn.module import Module
from unisono.nn.parameters import (
    Holding,
    Shard,
    Weights,
    current_state_mode,
    draw_uniform,
    join_blocks,
    nothing,
    own_block,
    shared_generator,
)
from unisono.nn.split_tensors.tensor import Split
from unisono.operators import attach, broadcast
from unisono.operators.gradients import summed_gradients
from unisono.operators.halo import HaloExchangeMap, HaloOnGroup
from unisono.operators.linear import identity
from unisono.topology import Partition
from unisono.topology.decompose import split_cuts
from unisono.topology.halo import Axis, HaloPlan, plan_windows
from unisono.topology.window import copied

KEPT_PLANS = 8


class PlannedModule(Module):
    """Base of unisono's own layers.

    A subclass has `_make_plan` (pure: the same tables give every rank its part of one plan) and
    `forward`, which carries out `self._plan` on inputs that went through `self._tied`.
    """

    P_x: Partition
    """Partition of the input."""
    weights: Weights = "replicated"
    """Whether each rank that uses a block of a parameter stores it, or the first of them."""
    _takes_blocks: ClassVar[bool] = True
    """Whether ranks hold blocks of one input; else each holds an input of its own, as a summand."""
    _plan: Any

    def __init__(self) -> None:
        super().__init__()
        self._agreements = Agreements()
        self._tables: tuple[Table, ...] = ()
        """What all ranks held when the current plan was made."""
        self._plans: OrderedDict[tuple[Table, ...], Any] = OrderedDict()
        self._gradients = NO_GRAD
        """Whose gradients some rank needs in this call."""
        self._exchange: HaloOnGroup | None = None
        """With which the current plan begins: its `halo`, if it has one that moves anything."""
        self._ranks: tuple[int, ...] = ()
        """All ranks of the layer, in the root of its partitions; found in the first call."""
        self._takes_part = False
        """Whether this rank is in any of the layer's partitions."""
        self._setups = 0
        """How often set-up has run."""
        self._holdings: dict[str, Holding] = {}
        """What this rank stores of each parameter and buffer."""
        self._blocks_used: dict[str, tuple[int, ...]] = {}
        """Shape of the block of each parameter that this rank computes with."""
        self._replicated: dict[str, bool] = {}
        """Whether all ranks store the whole of it."""
        self._user_comms: dict[str, Communicator] = {}
        self._sums_gradients = True
        _living.add(self)

    def _describe(self) -> tuple[object, ...]:
        """Return what must be equal on all ranks of the layer: the arguments it was made with.

        A layer keeps them under their own names; of tensors, whether there is one counts.
        """
        arguments = [(name, getattr(self, name, None)) for name in _arguments_of(type(self))]
        return tuple((name, isinstance(x, Tensor) or x) for name, x in arguments)

    @abstractmethod
    def _make_plan(self, tables: Sequence[Table]) -> Any:
        """Return what this rank does for inputs of these structures."""

    def _read(
        self, input: tuple[Any, ...]
    ) -> tuple[tuple[BlockStructure, ...], int, UnisonoError | None]:
        """Return what this rank's inputs are like, whose gradients it needs, and what is wrong."""
        structures: list[BlockStructure] = []
        gradients = NO_GRAD
        fault: str | None = None if input else "nothing"
        for x in input:
            if not isinstance(x, Tensor):
                fault = fault or ("None" if x is None else an(type(x).__name__))
                continue
            structures.append(BlockStructure(tuple(x.shape), x.dtype, x.device.type))
            if x.requires_grad:
                gradients = INPUTS
            if isinstance(x, Split):
                fault = "a split tensor, which knows its blocks; this rank's block is x.local"
            elif x.is_meta and self._agreeing is not None:
                fault = "a tensor on meta, without data to send"
        if not torch.is_grad_enabled():
            gradients = NO_GRAD
        elif gradients == NO_GRAD:
            for p in self.parameters():
                if p.requires_grad:
                    gradients = PARAMETERS
                    break
        expected = len(self._tables) if self._tables else len(input)
        if fault is None and len(input) != expected:
            fault = f"{len(input)} tensors, {expected} expected"
        problem = None
        if fault is not None:
            problem = PartitionError.because(
                f"forward of {type(self).__name__}", fault, None, "call it with tensors"
            )
        return tuple(structures), gradients, problem

    def _distdl_module_requires_reset(self, input: tuple[Any, ...]) -> bool:
        if not self._distdl_is_setup:
            root = self._root()
            self._ranks = self._members()
            self._takes_part = root is not None and root.rank in self._ranks
            self._agreeing = self._control()
        structures, gradients, problem = self._read(input)
        if self._takes_part:
            block = None if self._distdl_is_setup else self._block_to_compare(input)
            self._agreements.agree(
                self._agreeing, self._ranks, structures, gradients, problem, self._named_arguments,
                block,
            )  # fmt: skip
            if self._gradients != self._agreements.gradients:  # setting costs a module's checks
                self._gradients = self._agreements.gradients
            if block is not None:
                report_equal_blocks(self._agreements.blocks, block.shape, self.P_x)
        elif problem is not None:
            raise problem
        return not self._distdl_is_setup or self._agreements.tables != self._tables

    def _block_to_compare(self, input: tuple[Any, ...]) -> Tensor | None:
        """Return the own block, if ranks that all hold the same one are mistaken."""
        x, partition = next(iter(input), None), getattr(self, "P_x", None)
        if not (self._takes_blocks and isinstance(partition, Partition) and isinstance(x, Tensor)):
            return None
        fits = partition.size == len(self._ranks) and x.dim() == partition.dim
        return x if fits else None

    def _named_arguments(self) -> tuple[object, ...]:
        return (type(self).__name__, *self._describe())

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:  # noqa: ARG002
        if not self._takes_part:
            return
        self._setups += 1
        key = self._agreements.tables
        if key not in self._plans:
            self._plans[key] = self._make_plan(key)
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        self._tables, self._plan = key, self._plans[key]
        plan: Any = self._plan
        halo = plan if isinstance(plan, HaloPlan) else getattr(plan, "halo", None)
        self._exchange = None
        if halo is not None and not halo.is_identity:
            self._exchange = HaloOnGroup(self.P_x.root, halo, self.P_x.ranks, halo.fill)

    def _window(self, x: Tensor, *, least: int = NO_GRAD + 1) -> Tensor:
        """Return the own window by the plan's `halo`, tied to the graph as `_tied` does."""
        tied = x if x.requires_grad else self._tied(x, least=least)
        if self._exchange is None:
            return identity(tied)
        return HaloExchangeMap.apply(tied, self._exchange)

    def _tied(self, x: Tensor, *, least: int = NO_GRAD + 1) -> Tensor:
        """Return `x` as part of the graph wherever some rank needs gradients.

        Then the backward of every rank enters the layer's messages, in the same order. `least` is
        `INPUTS` where those of parameters do not depend on it.
        """
        if self._gradients < least or x.requires_grad or not torch.is_grad_enabled():
            return x
        if not (x.is_floating_point() or x.is_complex()):
            return x
        return attach(x, torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True))

    def _outside(self, x: Tensor, *, preserve_batch: bool = True) -> Tensor:
        """Return what a rank that takes no part gets: no elements, tied to the graph in grad mode.

        Such a rank cannot know whether the others need gradients; a tie without use costs nothing.
        """
        self._gradients = INPUTS if torch.is_grad_enabled() else NO_GRAD
        if x.numel() == 0:
            return self._tied(x.view_as(x))
        rows = zero_volume(x, preserve_batch=preserve_batch)[:-1]
        return self._tied(x.reshape(*rows, -1)[..., :0])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plans: the copy makes its own when it is called."""
        state = super().__getstate__()
        state.pop("_plan", None)
        return state | {
            "_agreements": Agreements(),
            "_plans": OrderedDict(),
            "_tables": (),
            "_exchange": None,
            "_user_comms": {},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take part among the living layers, as a copy too."""
        super().__setstate__(state)
        _living.add(self)

    # -- parameters -------------------------------------------------------------------------------

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
            if current_state_mode() == "sharded":
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


_living: WeakSet[PlannedModule] = WeakSet()


def living_layers() -> list[PlannedModule]:
    """Return all layers of this process: who has only a parameter asks them."""
    return list(_living)


@cache
def _arguments_of(layer: type) -> tuple[str, ...]:
    """Return the names of the arguments of our layers among the bases of a class."""
    ours = [kind for kind in layer.__mro__ if kind.__module__.startswith("unisono.nn.layers")]
    return tuple(sorted({name for kind in ours for name in signature(kind).parameters}))


def zero_volume(x: Tensor, *, preserve_batch: bool = True) -> tuple[int, ...]:
    """Return the shape of what a rank outside of the destination gets."""
    return (x.shape[0], 0) if preserve_batch and x.dim() > 0 else (0,)


class ScaledGradient(torch.autograd.Function):
    """The identity, with its gradient multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor | float) -> Tensor:
        """Return `x`."""
        ctx.factor = factor
        return identity(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient times the factor."""
        return grad * ctx.factor, None


def check_dims(layer: str, P: Partition, least: int, most: int | None = None) -> None:
    """Raise unless a partition `(N, C, ...)` has a number of dims that a layer can take."""
    if P.dim >= least and (most is None or P.dim <= most):
        return
    needed = f"{least} or more" if most is None else str(most)
    needed = needed if most in (None, least) else f"{least} to {most}"
    raise PartitionError.because(
        f"{layer} on {P!r}",
        f"{P.dim} dims",
        f"needs {needed}",
        f"Partition({[2, *[1] * (least - 1)]}): batch, channels, then space",
    )


def check_sizes(
    layer: str, expected: Sequence[int], dims: Sequence[int], shape: Sequence[int]
) -> None:
    """Raise unless the whole input, of this shape, has the sizes that a layer was made for."""
    sizes = [shape[dim] for dim in dims]
    if sizes != list(expected):
        raise PartitionError.because(
            f"{layer} for {list(expected)} points along dims {list(dims)}",
            f"an input of global shape {list(shape)}",
            f"{sizes} != {list(expected)}",
            f"{an(layer)} for {sizes}",
        )


def index_in(partition: Partition) -> tuple[int, ...]:
    """Return the own place in a partition, for ranks that make plans: they are part of it."""
    index = partition.index
    if index is None:
        raise PartitionError(f"{partition!r} has no place for this rank")
    return index


def balanced_in(cuts: Cuts, *dims: int) -> Cuts:
    """Return the cuts with balanced blocks in some dims."""
    chosen = {dim % len(cuts) for dim in dims}
    return tuple(
        split_cuts(cut[-1], len(cut) - 1) if dim in chosen else cut for dim, cut in enumerate(cuts)
    )


def recut(before: Cuts, after: Cuts, index: Sequence[int]) -> HaloPlan:
    """Return the plan that moves points from blocks of some cuts to those of others."""
    return plan_windows(before, index, [Axis(bounds, copied) for bounds in after])
