"""DistDL's layers: those of `unisono.nn` with DistDL's arguments and defaults.

`as_distdl` says where the two differ, layer by layer. What all share: partitions of DistDL are
taken as well as ours, and each block of a weight is stored once, on its first rank
(`weights="root"`). Other ranks have no parameters; `weight` and `bias` are tensors without elements
there, which get gradients without elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from unisono import nn as ours
from unisono.compat.distdl.blocks import compute_nd_slice_shape
from unisono.compat.distdl.partitions import MPIPartition, layout_of
from unisono.compat.distdl.structures import manager_or_new
from unisono.errors import PartitionError, explain
from unisono.nn.layers.conv import choose
from unisono.nn.layers.linear import SubLinear
from unisono.nn.parameters import Holding
from unisono.nn.split_tensors.windows import MODES, Taps, resampled, taps_of
from unisono.operators import attach
from unisono.topology import Partition
from unisono.topology.halo import Box
from unisono.topology.overlap import LocalMove, Move, OverlapPlan
from unisono.topology.resample import Resampling
from unisono.topology.window import per_dim

AnyPartition = MPIPartition | Partition
Ints = Sequence[int] | Tensor
Kind = TypeVar("Kind", bound=type[nn.Module])


class Module(ours.Module):
    """A torch module that is set up lazily, together with the other ranks.

    A layer of your own overrides some of `_distdl_module_requires_reset(input)`,
    `_distdl_input_changed(input)`, `_distdl_module_teardown(input)` and
    `_distdl_module_setup(input)`, which are called in this order. All ranks of all partitions among
    its attributes decide together, so a change that one rank alone sees is met by all.
    """

    _distdl_backend: Any = None
    """The module `backends.mpi`."""

    def partitions(self) -> tuple[Partition, ...]:
        """Return the partitions over which set-up is collective: those among the attributes."""
        layouts = (
            value._layout if isinstance(value, MPIPartition) else value
            for value in self.__dict__.values()
        )
        return tuple(layout for layout in layouts if isinstance(layout, Partition))


# How a layer of ours takes DistDL's arguments.


def as_distdl(
    order: str = "", *, without: str = "", ignored: str = "", **defaults: Any
) -> Callable[[Kind], Kind]:
    """Let a subclass of one of our layers take the arguments of DistDL's.

    Those of our layer, by name, but for what is said here. `P_...` may be partitions of DistDL;
    `buffer_manager` is checked and kept, since layers bring their own memory.

    Args:
        order: all that may be given without a name, separated by blanks; default as in our layer,
            then `buffer_manager` if it is among `defaults`.
        without: arguments of our layer that DistDL's has not.
        ignored: arguments of DistDL's forks that have no effect here.
        defaults: other defaults than ours, and arguments that only DistDL has.
    """

    def adapt(kind: Kind) -> Kind:
        arguments = _signature(kind, order.split(), without.split(), ignored.split(), defaults)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                bound = arguments.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{kind.__name__}{arguments}: {error}") from None
            bound.apply_defaults()
            values = {
                name: layout_of(value) if name.startswith("P_") and value is not None else value
                for name, value in bound.arguments.items()
                if name not in ignored.split()
            }
            values.pop("buffer_manager", None)
            super(kind, self).__init__(**values)
            if isinstance(self, StoredParameters):
                self._set_aside()
            if "buffer_manager" in bound.arguments:
                manager: Any = manager_or_new(bound.arguments["buffer_manager"])
                self.buffer_manager = manager

        __init__.__signature__ = arguments.replace(
            parameters=[
                Parameter("self", Parameter.POSITIONAL_OR_KEYWORD),
                *arguments.parameters.values(),
            ]
        )
        setattr(kind, "__init__", __init__)  # noqa: B010 - each kind has its own
        return kind

    return adapt


def _signature(
    kind: type, order: list[str], without: list[str], ignored: list[str], defaults: dict[str, Any]
) -> Signature:
    """Return the arguments of DistDL's layer: positional ones, then those that need a name."""
    layer = next(k for k in kind.__mro__ if not k.__module__.startswith("unisono.compat"))
    parameters = inspect.signature(layer).parameters
    arguments = {name: p for name, p in parameters.items() if name not in without}
    if not order:
        order = [name for name, p in arguments.items() if p.kind is not Parameter.KEYWORD_ONLY]
        order += [name for name in ("buffer_manager",) if name in defaults]
    for name in (*order, *arguments, *defaults, *ignored):
        arguments.setdefault(name, Parameter(name, Parameter.KEYWORD_ONLY, default=None))
    for name, value in (dict.fromkeys(ignored, False) | defaults).items():
        arguments[name] = arguments[name].replace(default=value)
    named = [name for name in arguments if name not in order]
    return Signature(
        [arguments[name].replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for name in order]
        + [arguments[name].replace(kind=Parameter.KEYWORD_ONLY) for name in named]
    )


class StoredParameters(nn.Module):
    """Only ranks that store a parameter have it. Stands before a layer of `unisono.nn`.

    What other ranks need in its place, to take part in messages, is no parameter: `parameters()`,
    and optimizers with it, do not see it.
    """

    _stand_ins: dict[str, nn.Parameter]
    _holdings: dict[str, Holding]

    @property
    def serial(self) -> bool:
        """Whether the layer's weights are on one rank."""
        return getattr(self, "P_w", self.P_x).size == 1

    @property
    def stores_bias(self) -> bool:
        """Whether the bias is stored on this rank."""
        return self.bias is not None and self.bias.numel() > 0

    def _set_aside(self) -> None:
        """Take away the parameters of which this rank stores nothing."""
        named = (
            (name, self._parameters[name]) for name in self._holdings if name in self._parameters
        )
        self._stand_ins = {name: p for name, p in named if p is not None and not p.numel()}
        for name in self._stand_ins:
            del self._parameters[name]

    def __getattr__(self, name: str) -> Any:
        stand_ins = self.__dict__.get("_stand_ins", {})
        return stand_ins[name] if name in stand_ins else super().__getattr__(name)

    @contextmanager
    def _with_stand_ins(self) -> Iterator[None]:
        """Have a parameter of every name inside, as on the ranks that store them."""
        self._parameters.update(self._stand_ins)
        try:
            yield
        finally:
            for name in self._stand_ins:
                self._stand_ins[name] = cast("nn.Parameter", self._parameters.pop(name))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with self._with_stand_ins():
            return super()._apply(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._with_stand_ins():
            super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._with_stand_ins():
            super()._load_from_state_dict(*args, **kwargs)

    def _read(self, input: tuple[Any, ...]) -> Any:
        with self._with_stand_ins():
            return cast("Any", super())._read(input)

    def _used(self, *names: str) -> list[Tensor]:
        # Ranks without a parameter do not see that it is frozen, and send a gradient all the same.
        stored = {name: self._parameters.get(name) for name in names}
        frozen = {n: p.detach() for n, p in stored.items() if p is not None and not p.requires_grad}
        vars(self).update({name: p.requires_grad_() for name, p in frozen.items()})
        try:
            return cast("Any", super())._used(*names)
        finally:
            for name in frozen:
                del vars(self)[name]

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result, tied to what stands in for parameters."""
        y: Tensor = super().forward(input)
        if self._stand_ins and torch.is_grad_enabled():
            return attach(y, *self._stand_ins.values())
        return y


@as_distdl(buffer_manager=None)
class Repartition(ours.Repartition, Module):
    """Move a tensor from the blocks of one partition to the balanced blocks of another."""

    @property
    def P_x_to_y_overlaps(self) -> list[tuple[Any, Any, Any]]:
        """For each rank of `P_y`: slices in the own input, their shape, the partner.

        Partners are ranks of the union of both partitions, or "self"; three times None for a rank
        that gets nothing from here. Empty before the first call, and outside of `P_x`.
        """
        return self._listed(self.P_x, self.P_y, lambda plan: plan.sends, lambda local: local.source)

    @property
    def P_y_to_x_overlaps(self) -> list[tuple[Any, Any, Any]]:
        """For each rank of `P_x`: slices in the own output, their shape, the partner. As above."""
        return self._listed(self.P_y, self.P_x, lambda plan: plan.recvs, lambda local: local.dest)

    def _listed(
        self,
        here: Partition,
        there: Partition,
        moves: Callable[[OverlapPlan], Sequence[Move]],
        kept: Callable[[LocalMove], Box],
    ) -> list[tuple[Any, Any, Any]]:
        if not (self._distdl_is_setup and self._takes_part and here.active):
            return []
        plan, me, union = self._plan.overlap, here.root.rank, self.P_x.union(self.P_y).ranks
        boxes = {move.peer: move.box for move in moves(plan)}
        if plan.local is not None:
            boxes[me] = kept(plan.local)
        overlaps: list[tuple[Any, Any, Any]] = [(None, None, None)] * there.size
        for place, rank in enumerate(there.ranks):
            if rank in boxes:
                slices = tuple(slice(start, stop) for start, stop in boxes[rank])
                partner = "self" if rank == me else union.index(rank)
                overlaps[place] = (slices, compute_nd_slice_shape(slices), partner)
        return overlaps


@as_distdl(weights="root")
class DistributedLinear(StoredParameters, ours.DistributedLinear, Module):
    """`torch.nn.Linear` with input, weight and output split over three partitions.

    The local layer is `.sublinear`; the bias is in the first column of `P_w`.
    """


@as_distdl(weights="root", without="bias")
class DistributedBatchNorm(StoredParameters, ours.DistributedBatchNorm, Module):
    """`torch.nn.BatchNorm1d/2d/3d` of a tensor split in any dims.

    The parameters have DistDL's shape `[1, C, 1, ...]`, under torch's names and DistDL's (`gamma`
    and `beta`). States hold them in the shape that torch gives them.
    """

    def _set_aside(self) -> None:
        super()._set_aside()
        self._shape_parameters(*self._over_channels)

    @property
    def gamma(self) -> Tensor | None:
        """The scale."""
        return self.weight

    @property
    def beta(self) -> Tensor | None:
        """The shift."""
        return self.bias

    @contextmanager
    def _shaped_as_by_torch(self) -> Iterator[None]:
        self._shape_parameters(-1)
        try:
            yield
        finally:
            self._shape_parameters(*self._over_channels)

    @property
    def _over_channels(self) -> tuple[int, ...]:
        return 1, -1, *(1,) * (self.P_x.dim - 2)

    def _shape_parameters(self, *shape: int) -> None:
        for p in self._parameters.values():
            if p is not None:
                p.data = p.data.view(shape)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._shaped_as_by_torch():
            super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._shaped_as_by_torch():
            super()._load_from_state_dict(*args, **kwargs)

    def _used(self, *names: str) -> list[Tensor]:
        return [x.flatten() for x in super()._used(*names)]


class _Conv(StoredParameters):
    weight: Tensor
    bias: Tensor | None

    @property
    def conv_layer(self) -> SubLinear:
        """The parameters that this rank stores."""
        return SubLinear(self.weight, self.bias)


class _AvgPool(nn.Module):
    dims: int

    def __init__(self, dilation: Any, **arguments: Any) -> None:
        if any(size != 1 for size in per_dim(dilation, self.dims, "dilation")):
            raise PartitionError.because(
                f"{type(self).__name__}(dilation={dilation})",
                "torch averages neighbouring points only",
                hint="dilation=1",
            )
        super().__init__(**arguments)


class Interpolate(nn.Module):
    """The local part of an upsampling: the share of own inputs in outputs, without communication.

    Points of other ranks are left out: the sum over ranks is the whole upsampling.

    Args:
        x_local_start: where the own input begins in the whole one, for each dim; `x_local_stop`
            where it ends, `x_global_shape` the whole sizes; likewise for the output `y`.
        scale_factor: the factor, if it was given; None for the ratio of the sizes.
        mode: "nearest", "linear" or "cubic".
        align_corners: as in torch.
    """

    def __init__(
        self,
        x_local_start: Ints,
        x_local_stop: Ints,
        x_global_shape: Ints,
        y_local_start: Ints,
        y_local_stop: Ints,
        y_global_shape: Ints,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:
        super().__init__()
        starts, stops, xs, firsts, lasts, ys = (
            [int(n) for n in box][2:]
            for box in (x_local_start, x_local_stop, x_global_shape,
                        y_local_start, y_local_stop, y_global_shape)
        )  # fmt: skip
        factors = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * len(xs)
        dims = list(zip(starts, stops, xs, firsts, lasts, ys, factors, strict=True))
        self._taps = {
            double: [
                _own_points(
                    taps_of(
                        Resampling(x, y, MODES.get(mode, mode), scale, align_corners, double),
                        first, last, start,
                    ),
                    stop - start,
                )
                for start, stop, x, first, last, y, scale in dims
            ]
            for double in (False, True)
        }  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """Return the share of `input` in the outputs."""
        taps = self._taps[input.dtype == torch.float64]
        return resampled(nn.functional.pad(input, (0, 1) * len(taps)), taps)


def _own_points(taps: Taps, count: int) -> Taps:
    """Return taps in which all points of other ranks are one, behind the own ones: a zero."""
    points = (tuple(p if 0 <= p < count else count for p in each) for each in taps.points)
    return Taps(tuple(points), taps.weights)


_TORCHS = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("cubic", "bicubic", "cubic")}
"""DistDL's modes -> torch's in 1, 2 and 3 dims."""


class _WholeSize(ours.DistributedUpsample):
    """Takes the size of the whole output, with batch and channels, and DistDL's modes."""

    def __init__(
        self,
        P_x: Partition,
        size: Sequence[int] | None,
        scale_factor: float | Sequence[float] | None,
        mode: str,
        align_corners: bool,
    ) -> None:
        space = P_x.dim - 2
        if mode == "cubic" and space != 2:
            hint = 'mode="linear"'
            words = 'DistributedUpsample(mode="cubic")', f"{space} spatial dims", f"{space} != 2"
            raise NotImplementedError(explain(*words, hint))
        if size is not None and len(size) != P_x.dim:
            raise PartitionError.because(
                f"DistributedUpsample(size={list(size)})",
                f"a partition of {P_x.dim} dims",
                f"{len(size)} != {P_x.dim}",
                "the whole shape, with batch and channels",
            )
        torchs = _TORCHS.get(mode, (mode,) * space)[space - 1]
        aligned = None if torchs.startswith("nearest") and not align_corners else align_corners
        self._kept = None if size is None else tuple(int(n) for n in size[:2])
        in_space = None if size is None else [int(n) for n in size[2:]]
        super().__init__(P_x, in_space, scale_factor, torchs, aligned)

    def _check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super()._check(shape, dtype)
        if self._kept is not None and shape[:2] != self._kept:
            raise PartitionError.because(
                f"DistributedUpsample(size={[*self._kept, *(self.size or ())]})",
                f"batch and channels of the input: {list(shape[:2])}",
                f"{list(shape[:2])} != {list(self._kept)}",
                "only spatial sizes change",
            )


@as_distdl(
    "P_x buffer_manager size scale_factor mode align_corners",
    mode="linear",
    align_corners=False,
    buffer_manager=None,
)
class DistributedUpsample(_WholeSize, Module):
    """`torch.nn.Upsample` of a tensor `(N, C, ...)` split in any dims.

    Args:
        P_x: partition of the input.
        buffer_manager: kept; layers bring their own memory.
        size: sizes of the whole output, with batch and channels; or
        scale_factor: by how much each spatial dim grows. Exactly one of the two.
        mode: "linear" in as many dims as there are, "nearest", "cubic" (2 spatial dims only).
        align_corners: as in torch; not for "nearest".
    """


# All others need no code of their own.

_BLANK = "\n\n"


def _classes() -> Iterator[tuple[str, type[nn.Module]]]:
    """Yield the layers that differ from ours in arguments alone, or by what stands before ours."""
    conv = as_distdl(weights="root", buffer_manager=None)
    # The stride of a pooling is 1 unless it is given, unlike torch's.
    pool = {
        "order": "P_x kernel_size stride padding dilation buffer_manager",
        "without": "return_indices ceil_mode count_include_pad divisor_override",
        "stride": 1,
        "dilation": 1,
        "buffer_manager": None,
    }
    # Of DistDL's forks. `collect_state` has no effect: `state_dict()` always gives whole tensors.
    forks = as_distdl(without="weights", ignored="collect_state")
    # ZeRO stores each block once, cut over the ranks that use it; here the first of them has it.
    once = as_distdl(weights="root", ignored="collect_state checkpoint")
    # The value of a loss is that of the whole tensors, on every rank of `P_x`; DistDL has it on the
    # first and 0.0 on the others. Either way each rank calls `backward()` once.
    loss = as_distdl("P_x reduction")
    table: tuple[tuple[str, tuple[type, ...], Callable[[Any], Any]], ...] = (
        ("AllGather AllSumReduce Broadcast ReduceScatter SumReduce", (), as_distdl()),
        ("DistributedFeatureConv{}d DistributedFeatureConvTranspose{}d", (_Conv,), conv),
        ("DistributedChannelConv{}d DistributedGeneralConv{}d", (_Conv,), conv),
        ("DistributedMaxPool{}d", (), as_distdl(**pool)),
        ("DistributedAvgPool{}d", (_AvgPool,), as_distdl(**pool)),
        ("DistributedEmbedding DistributedLinearAllGather", (), forks),
        ("DistributedLinearReduceScatter", (), forks),
        ("DistributedLayerNorm DistributedLayerNormZero", (StoredParameters,), once),
        ("DistributedRMSNormZero DistributedEmbeddingZero", (StoredParameters,), once),
        ("DistributedLinearAllGatherZero", (StoredParameters,), once),
        ("DistributedLinearReduceScatterZero", (StoredParameters,), once),
        ("DistributedL1Loss DistributedMSELoss DistributedPoissonNLLLoss", (), loss),
        ("DistributedBCELoss DistributedBCEWithLogitsLoss DistributedKLDivLoss", (), loss),
        ("DistributedNLLLoss DistributedCrossEntropyLoss", (), loss),
    )
    for names, before, adapt in table:
        for name in dict.fromkeys(word.format(dims) for word in names.split() for dims in "123"):
            kind = getattr(ours, name.removesuffix("Zero"))
            doc = f"{kind.__doc__.partition(_BLANK)[0]}{_BLANK}Arguments and defaults are DistDL's."
            attributes = {"__module__": __name__, "__doc__": doc}
            yield name, adapt(type(name, (*before, kind, Module), attributes))


globals().update(_classes())


def _chosen(dims: int) -> Callable[..., Any]:
    """Return the function that makes the convolution that fits its partitions."""
    kinds = [
        globals()[f"Distributed{kind}Conv{dims}d"] for kind in ("Feature", "Channel", "General")
    ]

    def conv(
        P_x: AnyPartition,
        P_y: AnyPartition | None = None,
        P_w: AnyPartition | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        outputs, weights = (None if P is None else layout_of(P) for P in (P_y, P_w))
        return choose(dims, kinds, layout_of(P_x), outputs, weights, args, kwargs)

    conv.__name__ = conv.__qualname__ = f"DistributedConv{dims}d"
    conv.__doc__ = (
        f"Return the {dims}-d convolution for these partitions: feature, channel, general."
    )
    return conv


DistributedConv1d, DistributedConv2d, DistributedConv3d = (_chosen(dims) for dims in (1, 2, 3))
