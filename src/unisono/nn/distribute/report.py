"""`plan_report`: what a split network will send, from shapes, before anything runs.

The network is split on paper, run once on tensors without data to learn which layer is called with
what, and every split layer is asked for the plan that it would make.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.errors import PartitionError
from unisono.nn.distribute.chain import DistributedSequential, Join, children_of
from unisono.nn.distribute.distribute import distribute
from unisono.nn.distribute.following import layers_around, trust, trusted
from unisono.nn.distribute.traffic import Traffic, on_paper, partition_of, traffic, whole_output
from unisono.nn.layers.dropout import OwnDropout
from unisono.nn.layers.pooling import GlobalAvgPool
from unisono.nn.planned import PlannedModule
from unisono.topology import Partition
from unisono.topology.decompose import block
from unisono.topology.halo import HaloPlan

_COLUMNS = ("layer", "kind", "own output", "halo", "messages", "bytes sent", "boundary")


def plan_report(
    net: nn.Module,
    input_shape: Sequence[int],
    partition: Partition | None = None,
    *,
    itemsize: int = 4,
    head: Literal["replicate", "batch"] = "replicate",
    custom: Literal["refuse", "recurse"] = "recurse",
) -> str:
    """Return a table of the layers: own shapes, halo widths, messages and bytes of the worst rank.

    Layers stand in the order in which one forward calls them, with what that forward sends; a
    collective is named in the column of halos, and its bytes are this rank's contribution. Besides,
    each chain of layers, or layer outside of one, sends some 300 bytes by which ranks agree on what
    they hold. Local; no world is needed.

    Args:
        net: an ordinary network, or one made by `distribute`.
        input_shape: of the whole input.
        partition: how the input of an ordinary network is to be cut; the other has its own.
        itemsize: bytes of an element.
        head: as in `distribute`.
        custom: as in `distribute`, which is asked to "recurse" here.

    Raises:
        PartitionError: what `distribute`, or a layer called with such an input, refuses.
    """
    dtype = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
    whole = torch.empty(tuple(input_shape), dtype=dtype, device="meta")
    calls = rehearsed(net, [whole], partition, itemsize=itemsize, head=head, custom=custom)
    return _table([call.cells() for call in calls])


@dataclass(frozen=True)
class Call:
    """One call of a layer in a forward of a split network."""

    path: str
    kind: str
    own: tuple[int, ...]
    """Shape of the output that the first rank holds."""
    sent: Traffic
    """Of the rank that sends most."""
    is_split: bool
    """Whether ranks hold different parts of the same samples behind it."""

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table."""
        widths, boundary = self.sent.verb, "-"
        if self.sent.halo is not None:
            widths = ", ".join(f"{a}/{b}" for a, b in _widths(self.sent.halo))
            boundary = f"{100 * _boundary(self.sent.halo):.0f}%"
        return (
            self.path or "-", self.kind, "x".join(map(str, self.own)), widths,
            str(self.sent.messages), f"{self.sent.sent:,}", boundary,
        )  # fmt: skip


def rehearsed(
    net: nn.Module,
    inputs: Sequence[Tensor],
    partition: Partition | None = None,
    *,
    itemsize: int = 4,
    head: Literal["replicate", "batch"] = "replicate",
    custom: Literal["refuse", "recurse"] = "recurse",
) -> list[Call]:
    """Split a network on paper, run it once without data, and return the calls of its layers.

    This is the one answer to what can be split: it asks `distribute` and the layers themselves.

    Args:
        net: an ordinary network, or one made by `distribute`.
        inputs: whole arguments of its forward, on the device "meta".
        partition: how the first of them is to be cut.
        itemsize: bytes of an element.
        head: as in `distribute`.
        custom: as in `distribute`.

    Raises:
        PartitionError: what `distribute`, or a layer called with such an input, refuses.
    """
    input_shape = inputs[0].shape
    split_layers = (layer for layer in net.modules() if isinstance(layer, PlannedModule))
    known = next(map(partition_of, split_layers), None)
    cut = known or partition
    if cut is None or cut.dim != len(input_shape):
        raise PartitionError.because(
            f"plan_report(net, {list(input_shape)})",
            "no partition" if cut is None else f"{cut!r}",
            None,
            "plan_report(net, shape, Partition([1, 1, 2, 2])), one size for each tensor dim",
        )
    split = copy.deepcopy(net).to("meta")
    if known is None:
        everyone = Partition(cut.shape, comm=on_paper(range(cut.size), 0))
        split = distribute(split, everyone, head=head, custom=custom)
        cut = everyone
    kinds = {
        path: type(layer).__name__ for path, layer in net.named_modules(remove_duplicate=False)
    }
    rehearsal = _Rehearsal(cut, kinds, itemsize)
    stage = rehearsal.staged(split, "")
    with torch.no_grad(), torch.device("meta"):
        stage(*inputs)
    return rehearsal.calls


class _Rehearsal:
    """One forward of a split network on tensors without data, and the rows it gives."""

    def __init__(self, cut: Partition, kinds: dict[str, str], itemsize: int) -> None:
        self.calls: list[Call] = []
        self._is_split = True
        self._kinds = kinds
        self._itemsize = itemsize
        self._own: Callable[[tuple[int, ...]], tuple[int, ...]] = _blocks_of(cut)
        """From the shape of a whole tensor to that of the own part, at this point of the walk."""

    def staged(self, module: nn.Module, path: str) -> nn.Module:
        """Return a module for whole tensors in place of a split one, as closely looked at."""
        made = self._stage(module, path)
        about = trusted(module)
        if about is not None:
            trust(made, about)
        layer = next(layers_around(module), None)
        if layer is not None:
            layer.attach(made)
        return made

    def _stage(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, PlannedModule):
            return _OnWhole(self, module, path)
        if isinstance(module, OwnDropout):
            return self._watched(nn.Identity(), path)
        if not any(True for _ in module.children()):
            return self._watched(module, path)
        if isinstance(module, DistributedSequential):
            chain = nn.Sequential()
            for name, child in children_of(module):
                if name == module._join_before:
                    chain.append(_OnWhole(self, module._join[0], f"{path}.{name}".lstrip(".")))
                chain.append(self.staged(child, f"{path}.{name}".lstrip(".")))
            return chain
        made = copy.copy(module)  # it may stand in two places
        made._modules = {
            name: self.staged(child, f"{path}.{name}".lstrip("."))
            for name, child in children_of(module)
        }
        return made

    def _watched(self, layer: nn.Module, path: str) -> nn.Module:
        def note(_: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            if isinstance(output, Tensor):
                self._add(path, self._own(tuple(output.shape)), Traffic(0, 0))

        made = copy.copy(layer)
        made._forward_hooks = layer._forward_hooks.copy()
        made.register_forward_hook(note)
        return made

    def called(
        self, layer: PlannedModule[Any], path: str, shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Take down a call of a split layer; return the shape of its whole output."""
        after = whole_output(layer, shape)
        P = partition_of(layer)
        every = [traffic(layer, shape, place, self._itemsize) for place in range(P.size)]
        worst = max(every, key=lambda sent: (sent.sent, sent.messages))
        if isinstance(layer, Join):
            self._own = _samples_of(layer.everyone.size) if layer.cuts_batch else _everything
            self._is_split = False
            self._add(path, self._own(after), worst, "Join")
            return after
        if isinstance(layer, GlobalAvgPool):
            self._own = _blocks_of(P.sub(0, rank=0))
            self._is_split = False
        own = self._own(after) if len(after) == P.dim else after
        self._add(path, own, worst)
        return after

    def _add(self, path: str, own: Sequence[int], sent: Traffic, kind: str | None = None) -> None:
        kind = kind or self._kinds.get(path, "-")
        self.calls.append(Call(path, kind, tuple(own), sent, self._is_split))


class _OnWhole(nn.Module):
    """Stands for a split layer where whole tensors without data pass."""

    def __init__(self, rehearsal: _Rehearsal, layer: PlannedModule[Any], path: str) -> None:
        super().__init__()
        self._called: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: rehearsal.called(
            layer, path, shape
        )
        self._gives_indices = getattr(layer, "return_indices", False)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return a tensor of the whole output's shape."""
        y = input.new_empty(self._called(tuple(input.shape)))
        return (y, y.long()) if self._gives_indices else y


def _blocks_of(P: Partition) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda shape: P.local_shape(shape, rank=0) if len(shape) == P.dim else shape


def _samples_of(ranks: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda shape: (block(shape[0], ranks, 0)[1], *shape[1:])


def _everything(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


def _widths(plan: HaloPlan) -> list[tuple[int, int]]:
    """Return how far the window reaches beyond the own block, for each spatial dim."""
    return [(max(0, left), max(0, right)) for left, right in plan.widths[2:]]


def _boundary(plan: HaloPlan) -> float:
    """Return the share of outputs that wait for other ranks."""
    every = math.prod(plan.output_shape[2:])
    inside = math.prod(stop - start for start, stop in plan.interior[2:])
    return 1 - inside / every if every else 0.0


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    every = [_COLUMNS, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    )
