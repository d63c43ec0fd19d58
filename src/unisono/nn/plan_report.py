"""`plan_report`: what a split network will send, computed from shapes before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from unisono.errors import PartitionError
from unisono.nn.conv_feature import _FeatureConv
from unisono.nn.conv_transpose import _FeatureConvTranspose
from unisono.nn.pooling import _Pool
from unisono.nn.upsampling import DistributedUpsample
from unisono.topology import Partition, halo
from unisono.topology.decompose import split_cuts
from unisono.topology.halo_plan import HaloPlan
from unisono.topology.resample import resample_length
from unisono.topology.transposed import transposed_length
from unisono.topology.window import per_dim

_COLUMNS = ("layer", "kind", "own output", "halo", "messages", "bytes sent", "boundary")
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, _FeatureConv)
_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, _Pool,
)  # fmt: skip
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, _FeatureConvTranspose)
_GATHERING = (nn.Flatten, nn.Linear)


@dataclass(frozen=True)
class _Windows:
    """The arguments of a layer that reads a window."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    mode: str = "zeros"
    ceil_mode: bool = False


def plan_report(
    net: nn.Module,
    input_shape: Sequence[int],
    partition: Partition | None = None,
    *,
    itemsize: int = 4,
) -> str:
    """Return a table of the layers: own shapes, halo widths, messages and bytes of the worst rank.

    Local; no world is needed.

    Args:
        net: an ordinary network, or one made by `distribute`; layers are taken in order.
        input_shape: of the whole input.
        partition: how it is cut; default that of the first distributed layer.
        itemsize: bytes of an element.
    """
    cut = partition or _partition_of(net)
    if cut is None or cut.dim != len(input_shape):
        raise PartitionError.because(
            f"plan_report(net, {list(input_shape)})",
            "no partition" if cut is None else f"{cut!r}",
            None,
            "plan_report(net, shape, Partition([1, 1, 2, 2])), one size for each tensor dim",
        )
    shape = tuple(input_shape)
    rows: list[tuple[str, ...]] = []
    for path, layer in _leaves(net):
        if isinstance(layer, _GATHERING):
            share = math.prod(shape) - math.prod(_balanced(shape, cut))
            rows.append(_row(path, layer, "whole", "-", cut.size - 1, share * itemsize, "-"))
            break
        window = _window_of(layer)
        if window is not None:
            plans = _plans(shape, cut, window)
            channels = getattr(getattr(layer, "settings", layer), "out_channels", shape[1])
            first = plans[0]
            own = (first.output_shape[0], channels, *first.output_shape[2:])
            worst = max(plans, key=lambda plan: sum(m.numel for m in plan.sends))
            sent = sum(message.numel for message in worst.sends)
            widths = ", ".join(f"{a}/{b}" for a, b in _widths(worst))
            rows.append(
                _row(path, layer, _sizes(own), widths, len(worst.sends), sent * itemsize,
                     f"{100 * _boundary(worst):.0f}%")
            )  # fmt: skip
            shape = (shape[0], channels, *_output_space(shape, window))
        else:
            shape = _resized(layer, shape)
            rows.append(_row(path, layer, _sizes(_balanced(shape, cut)), "-", 0, 0, "-"))
    return _table(rows)


def _partition_of(net: nn.Module) -> Partition | None:
    """Return the partition of the first distributed layer."""
    for layer in net.modules():
        held = getattr(layer, "P_x", None)
        if isinstance(held, Partition):
            return held
    return None


def _leaves(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in net.named_modules():
        if not any(True for _ in layer.children()):
            yield path or "-", layer


def _window_of(layer: nn.Module) -> _Windows | None:
    """Return the window arguments of a layer, ours or torch's; None if it reads no neighbours."""
    m = cast("Any", layer)
    if isinstance(layer, _FeatureConv):
        s = layer.settings
        return _Windows(s.kernel_size, s.stride, s.padding, s.dilation, s.padding_mode)
    if isinstance(layer, _CONVS):
        return _Windows(m.kernel_size, m.stride, m.padding, m.dilation, m.padding_mode)
    if isinstance(layer, _POOLS):
        dims = int(type(layer).__name__[-2])
        kernel = per_dim(m.kernel_size, dims, "kernel_size")
        return _Windows(
            kernel,
            per_dim(m.stride, dims, "stride"),
            per_dim(m.padding, dims, "padding"),
            per_dim(getattr(m, "dilation", 1), dims, "dilation"),
            ceil_mode=m.ceil_mode,
        )
    return None


def _plans(shape: Sequence[int], cut: Partition, window: _Windows) -> list[HaloPlan]:
    cuts = [split_cuts(n, parts) for n, parts in zip(shape, cut.shape, strict=True)]
    return [
        halo.plan(
            cuts, cut.index_of(place), window.kernel, window.stride, window.padding,
            window.dilation, window.mode, ceil_mode=window.ceil_mode,
        )
        for place in range(cut.size)
    ]  # fmt: skip


def _output_space(shape: Sequence[int], window: _Windows) -> tuple[int, ...]:
    whole = [(0, n) for n in shape]
    plan = halo.plan(
        whole, (0,) * len(whole), window.kernel, window.stride, window.padding, window.dilation,
        window.mode, ceil_mode=window.ceil_mode,
    )  # fmt: skip
    return plan.output_shape[2:]


def _resized(layer: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape behind a layer that changes sizes without a window of its own."""
    m = cast("Any", layer)
    space = shape[2:]
    if isinstance(layer, _TRANSPOSED):
        arguments = (m.kernel_size, m.stride, m.padding, m.dilation, m.output_padding)
        sizes = [transposed_length(x, *own) for x, *own in zip(space, *arguments, strict=True)]
        return (shape[0], m.out_channels, *sizes)
    if isinstance(layer, nn.Upsample | DistributedUpsample):
        sizes = _each(m.size, len(space))
        scales = _each(m.scale_factor, len(space))
        found = (
            resample_length(x, size=None if s is None else int(s), scale=f)
            for x, s, f in zip(space, sizes, scales, strict=True)
        )
        return (*shape[:2], *found)
    return shape


def _each(value: Any, count: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * count


def _balanced(shape: Sequence[int], cut: Partition) -> tuple[int, ...]:
    return cut.local_shape(shape, rank=0)


def _widths(plan: HaloPlan) -> list[tuple[int, int]]:
    """Return how far the window reaches beyond the own block, for each spatial dim."""
    return [
        (max(0, own[0] - needed[0]), max(0, needed[1] - own[1]))
        for own, needed in zip(plan.own[2:], plan.needed[2:], strict=True)
    ]


def _boundary(plan: HaloPlan) -> float:
    """Return the share of outputs that wait for other ranks."""
    every = math.prod(plan.output_shape[2:])
    inside = math.prod(stop - start for start, stop in plan.interior[2:])
    return 1 - inside / every if every else 0.0


def _row(
    path: str, layer: nn.Module, own: str, widths: str, messages: int, sent: int, boundary: str
) -> tuple[str, ...]:
    return (path, type(layer).__name__, own, widths, str(messages), f"{sent:,}", boundary)


def _sizes(values: Sequence[int]) -> str:
    return "x".join(map(str, values))


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    every = [_COLUMNS, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    )
