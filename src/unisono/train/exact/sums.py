"""The sums over the shards of a step: computed, added up on the board, given to the model.

What a shard gives is one vector of bytes (gradients, changes of buffers) and a note (its loss,
what it logged, which parameters it used). `shards.py` says where these lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unisono.accelerator import is_accelerator
from unisono.comm import call as calls
from unisono.errors import LayoutError, UnisonoError
from unisono.train.exact.checks import check_calls, check_loss
from unisono.train.exact.data import Loader, Shards
from unisono.train.exact.link import ElasticLink, InVain
from unisono.train.exact.peers import Ranges
from unisono.train.exact.shards import VectorLayout, nodes_in, tree_sum
from unisono.train.generators import seed_generators, seed_of

Closure = Callable[[Any], Tensor]


class LoggedStep(Protocol):
    """A step whose closure may note numbers."""

    number: int
    logged: dict[str, float] | None
    """What the shard that is computed has noted; None outside of a closure."""


class ShardSums:
    """The part of one member in the sums of each step.

    Args:
        model: its trained parameters get gradients, its buffers the mean of their changes.
        shards: which samples each shard holds.
        loader: fetches them.
        scaler: a `torch.amp.GradScaler`, or None.
        device: where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Shards,
        loader: Loader,
        scaler: Any,
        device: torch.device,
    ) -> None:
        self.shards, self._loader, self._scaler = shards, loader, scaler
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = list(model.buffers())
        self.layout = VectorLayout(self.parameters, self._buffers, len(shards.cuts))
        self.result = torch.empty(self.layout.bytes, dtype=torch.uint8, device=device)
        """The sum of all shards, where the model is."""
        self._staged = torch.empty_like(self.result) if is_accelerator(device) else None
        """What a shard gives before it is copied to the board."""
        self._scratch: list[Tensor] = []
        self._views: dict[int, list[Tensor]] = {}
        """Parts of vectors by their addresses, which stay."""

    def compute(self, link: ElasticLink, step: LoggedStep, closure: Closure) -> None:
        """Leave the sums of this member's shards on the board."""
        order, layout = link.follower.order, self.layout
        run = order["runs"][order["place"]]
        self._loader.expect(step.number, [run])
        for node in nodes_in(run, 0, layout.shards):
            at = layout.row(node[0])
            free = [*self._scratch, link.view(at, at + layout.bytes)]

            def leaf(shard: int, count: int, free: list[Tensor] = free) -> Tensor | None:
                if count > 1:
                    return None
                if link.is_disturbed():
                    raise InVain
                if not free:
                    self._scratch.append(torch.empty(layout.bytes, dtype=torch.uint8))
                    free.append(self._scratch[-1])
                return self._shard(link, step, closure, shard, free.pop())

            def add(lower: Tensor, upper: Tensor, free: list[Tensor] = free) -> Tensor:
                free.append(upper)
                return layout.add(lower, upper)  # so that all comes to where the first one is

            tree_sum(*node, leaf, add)
            link.publish(self._parts_of_row(link, at))

    def _parts_of_row(self, link: ElasticLink, at: int) -> Ranges:
        """Return what each member needs of the sum at a byte of the board: its pieces."""
        cut = len(link.follower.order["ranks"])
        return lambda place: [
            (at + begin, at + end)
            for begin, end in (section.bounds(place, cut) for section in self.layout.sections)
        ]

    def _shard(
        self, link: ElasticLink, step: LoggedStep, closure: Closure, shard: int, out: Tensor
    ) -> Tensor:
        """Compute gradient, buffers and loss of one shard, from the state before the step."""
        batch = self._loader.fetch(step.number, shard)
        seed_generators(seed_of(self.shards.seed, "model", step.number, shard))
        weight, before = self.shards.weight(shard), [b.clone() for b in self._buffers]
        step.logged, latest = {}, calls.latest_call
        try:
            loss = closure(batch)
            check_loss(loss)
            check_calls(latest)
            share = loss * weight
            if self._scaler is not None:
                share = self._scaler.scale(share)
            gradients = torch.autograd.grad(share, self.parameters, allow_unused=True)
        finally:
            logged, step.logged = step.logged, None
        views, used = self._views_of(out if self._staged is None else self._staged), 0
        with torch.no_grad():
            for place, (view, gradient) in enumerate(zip(views, gradients, strict=False)):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(_dense(gradient))
                    used |= 1 << place
            for view, buffer, old in zip(
                views[len(gradients) :], self._buffers, before, strict=True
            ):
                if buffer.is_floating_point() or buffer.is_complex():
                    # The change, so that what does not change stays as it is; infinities do not.
                    change = (buffer - old).mul_(weight)
                    torch.where(buffer == old, torch.zeros_like(change), change, out=view)
                else:
                    view.copy_(buffer)
                buffer.copy_(old)
        if self._staged is not None:
            out.copy_(self._staged)  # the host waits: others will read it
        note = {"step": step.number, "loss": loss.item(), "log": logged, "used": f"{used:x}"}
        self._write_note(link, shard, note)
        return out

    def _views_of(self, vector: Tensor) -> list[Tensor]:
        address = vector.data_ptr()
        if address not in self._views:
            self._views[address] = self.layout.views(vector)
        return self._views[address]

    def _write_note(self, link: ElasticLink, shard: int, note: dict[str, Any]) -> None:
        data, room = json.dumps(note).encode(), self.layout.note_bytes
        if len(data) > room:
            raise UnisonoError.because(
                "step.log(...) of an elastic training",
                f"{len(note['log'])} numbers, of which one shard has room for fewer",
                f"{len(data)} bytes > {room}",
                "log fewer numbers",
            )
        begin = self.layout.notes(note["step"]) + shard * room
        link.view(begin, begin + room).copy_(
            torch.frombuffer(bytearray(data.ljust(room)), dtype=torch.uint8)
        )
        link.publish(lambda _: [(begin, begin + room)])

    def reduce(self, link: ElasticLink) -> None:
        """Add up this member's piece of all shards, and leave it as a part of the result."""
        layout, order = self.layout, link.follower.order
        piece, cut = order["place"], len(order["ranks"])
        layout.reduce(order["runs"], piece, cut, link.view)
        bounds = [section.bounds(piece, cut) for section in layout.sections]
        link.publish(lambda _: [(layout.result + b, layout.result + e) for b, e in bounds])

    def deliver(self, link: ElasticLink, number: int) -> tuple[float, dict[str, float]]:
        """Give the sums of a step to the model; return the means of its loss and metrics."""
        layout = self.layout
        self.result.copy_(link.view(layout.result, layout.result + layout.bytes))
        notes = self._read_notes(link, number)
        used = 0
        for note in notes:
            used |= int(note["used"], 16)
        views = self._views_of(self.result)
        for place, (parameter, view) in enumerate(zip(self.parameters, views, strict=False)):
            parameter.grad = view if used >> place & 1 else None
        with torch.no_grad():
            for buffer, view in zip(self._buffers, views[len(self.parameters) :], strict=True):
                if buffer.is_floating_point() or buffer.is_complex():
                    buffer.add_(view)
                else:
                    buffer.copy_(view)
        names = dict.fromkeys(name for note in notes for name in note["log"])
        metrics = {
            name: self._mean([note["log"].get(name, float("nan")) for note in notes])
            for name in names
        }
        return self._mean([note["loss"] for note in notes]), metrics

    def _read_notes(self, link: ElasticLink, number: int) -> list[dict[str, Any]]:
        """Return what every shard of a step says besides its gradient."""
        room, count = self.layout.note_bytes, self.layout.shards
        begin = self.layout.notes(number)
        raw = bytes(link.view(begin, begin + count * room).numpy())
        notes = [json.loads(raw[shard * room : (shard + 1) * room]) for shard in range(count)]
        if any(note["step"] != number for note in notes):  # a mistake of ours, not a result
            raise UnisonoError(f"step {number}: the board holds shards of another step")
        return notes

    def _mean(self, values: list[float]) -> float:
        """Return the mean over the batch of what each shard has, added up in the tree."""
        weighted = [value * self.shards.weight(shard) for shard, value in enumerate(values)]

        def sum_of(first: int, count: int) -> float | None:
            return weighted[first] if count == 1 else None

        return tree_sum(0, len(values), sum_of, lambda lower, upper: lower + upper)


def _dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise LayoutError.because(
            "a gradient of an elastic training",
            "a sparse one, which other shards cannot be added to",
            hint="nn.Embedding(..., sparse=False)",
        )
    return gradient
