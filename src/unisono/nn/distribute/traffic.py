"""What one rank sends in a forward of a split layer, from the very plan that the layer makes.

The layer is asked on paper, at any place of its partition, for any input: partitions on `on_paper`
know places, layers can be built and planned there, and nothing travels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.comm import Communicator
from unisono.comm.groups import GroupEntry
from unisono.errors import PartitionError, an
from unisono.nn.agreement import Structure, Table
from unisono.nn.distribute.chain import Join
from unisono.nn.layers.batch_norm import DistributedBatchNorm
from unisono.nn.layers.conv import _FeatureConv
from unisono.nn.layers.conv_transpose import _FeatureConvTranspose
from unisono.nn.layers.halo import DistributedPad
from unisono.nn.layers.norm import (
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
)
from unisono.nn.layers.pooling import GlobalAvgPool, _Pool
from unisono.nn.layers.upsampling import DistributedUpsample
from unisono.nn.planned import PlannedModule
from unisono.topology import Partition
from unisono.topology.halo import HaloPlan

__all__ = ["Traffic", "on_paper", "partition_of", "traffic", "whole_output"]

_KNOWN = (
    _FeatureConv,
    _FeatureConvTranspose,
    _Pool,
    DistributedUpsample,
    DistributedPad,
    DistributedBatchNorm,
    DistributedLayerNorm,
    DistributedGroupNorm,
    GlobalAvgPool,
    Join,
)
_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one forward."""

    messages: int
    """To single ranks; a collective counts as one."""
    sent: int
    """Bytes, as the trace counts them."""
    verb: str = "-"
    """The collective, where it is one."""
    halo: HaloPlan | None = None
    """Of a layer that reads a window."""


def partition_of(layer: PlannedModule[Any]) -> Partition:
    """Return the partition of a layer's input; refuse layers that `distribute` does not make."""
    is_as_made = getattr(layer, "weights", "replicated") == "replicated"
    if isinstance(layer, _KNOWN) and is_as_made and getattr(layer, "balance", True):
        return layer.P_x
    raise PartitionError.because(
        f"plan_report of a network with {an(type(layer).__name__)}",
        "it counts what layers send that distribute makes",
        None,
        "with unisono.comm.trace() as t: net(x)",
    )


def whole_output(layer: PlannedModule[Any], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a layer's whole output; raise what the layer raises for such an input."""
    alone = Partition((1,) * len(shape), comm=on_paper((0,), 0))
    plan = _planned(layer, alone, tuple(shape), torch.float32)
    if isinstance(layer, GlobalAvgPool):
        return (*shape[:2], *(1,) * (len(shape) - 2))
    halo = _halo_of(plan)
    if halo is None:
        return tuple(shape)
    if isinstance(layer, DistributedPad):
        return tuple(halo.output_shape)
    channels = getattr(getattr(layer, "settings", layer), "out_channels", shape[1])
    return (shape[0], channels, *halo.output_shape[2:])


def traffic(layer: PlannedModule[Any], shape: Sequence[int], place: int, itemsize: int) -> Traffic:
    """Return what a rank sends for an input of this whole shape, in balanced blocks.

    Args:
        layer: from a network that `distribute` has made.
        shape: of the whole input.
        place: the rank of the layer's partition.
        itemsize: bytes of an element.
    """
    P = partition_of(layer)
    root = on_paper(range(max(P.ranks) + 1), P.ranks[place])
    seen = Partition(P.shape, ranks=P.ranks, comm=root)
    block = P.local_shape(shape, rank=place)
    plan = _planned(layer, seen, tuple(shape), _DTYPES.get(itemsize, torch.float32))
    halo = _halo_of(plan)
    if halo is not None:
        count = sum(message.numel for message in halo.sends)
        return Traffic(len(halo.sends), count * itemsize, halo=halo)
    if isinstance(layer, DistributedBatchNorm):
        if plan.comm.size == 1 or not (layer.training or layer.running_mean is None):
            return Traffic(0, 0)
        return Traffic(1, 2 * plan.channels * plan.dtype.itemsize, "all_gather")
    if isinstance(layer, DistributedLayerNorm):
        places = math.prod(block[: -len(layer.normalized_shape)])
        at_least_single = max(itemsize, 4)
        return _collective(plan.comm.size, 2 * places * at_least_single, "all_gather")
    if isinstance(layer, DistributedGroupNorm):
        return _of_group_norm(layer, plan, P, block[0], max(itemsize, 4))
    if isinstance(layer, GlobalAvgPool):
        size = math.prod(P.shape[2:])
        return _collective(size, math.prod(block[:2]) * itemsize, "all_reduce")
    return _of_join(P, block, plan, itemsize)


def _collective(size: int, sent: int, verb: str) -> Traffic:
    return Traffic(1, sent, verb) if size > 1 else Traffic(0, 0)


def _of_group_norm(
    layer: DistributedGroupNorm, plan: Any, P: Partition, samples: int, itemsize: int
) -> Traffic:
    tracks = isinstance(layer, DistributedInstanceNorm) and layer.track_running_stats
    if tracks and not layer.training:
        return Traffic(0, 0)
    moments = _collective(plan.comm.size, 2 * samples * plan.groups * itemsize, "all_gather")
    if not tracks or P.shape[0] == 1:
        return moments
    sent = moments.sent + 2 * plan.groups * itemsize
    verb = "all_gather, all_reduce" if moments.messages else "all_reduce"
    return Traffic(moments.messages + 1, sent, verb)


def _of_join(P: Partition, block: Sequence[int], plan: Any, itemsize: int) -> Traffic:
    cuts, overlap = plan
    if overlap is not None:
        count = sum(math.prod(move.shape) for move in overlap.sends)
        return Traffic(len(overlap.sends), count * itemsize)
    messages = sent = 0
    held = list(block)
    for axis in reversed(range(P.dim)):  # one axis after the other, with more each time
        if P.shape[axis] > 1:
            messages += 1
            sent += math.prod(held) * itemsize
            held[axis] = cuts[axis][-1]
    return Traffic(messages, sent, "all_gather") if messages else Traffic(0, 0)


def _halo_of(plan: Any) -> HaloPlan | None:
    found = getattr(getattr(plan, "exchange", plan), "halo", plan)
    return found if isinstance(found, HaloPlan) else None


def _planned(
    layer: PlannedModule[Any], seen: Partition, shape: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """Return the plan that a layer on partition `seen` makes for an input in balanced blocks."""
    asked = copy.copy(layer)
    asked.__dict__["P_x"] = seen
    asked._comm = seen.root
    blocks = {
        rank: Structure(seen.local_shape(shape, rank=place), dtype, "cpu")
        for place, rank in enumerate(seen.ranks)
    }
    ranks = tuple(sorted(blocks))
    return asked._make_plan([Table(ranks, tuple(blocks[rank] for rank in ranks))])


class OnPaper(Communicator):
    """Ranks of which one is played; the others are taken to say what it says."""

    def broadcast(self, x: Any, src: int = 0, **options: Any) -> Any:  # noqa: ARG002
        """Return the own tensor."""
        return x

    def all_gather_ints(
        self,
        values: Sequence[int],
        *,
        timeout_s: float | None = None,  # noqa: ARG002
    ) -> list[tuple[int, ...]]:
        """Return the own numbers for every rank."""
        return [tuple(values)] * self.size

    def _made(self, ranks: tuple[int, ...]) -> Communicator:
        return on_paper(ranks, ranks.index(self.ranks[self.rank]))


def on_paper(ranks: Sequence[int], rank: int) -> OnPaper:
    """Return these ranks of a world on paper, as place `rank` among them sees them."""
    entry = GroupEntry(None, tuple(ranks), made_by_us=False)
    entry.rank = rank
    entry.name = entry.key = "on paper"
    return OnPaper(entry, device=torch.device("cpu"))
