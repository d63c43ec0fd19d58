"""Gradient buckets: which parameters share one, and how gradients come into it. All local.

A bucket is a flat tensor of one dtype and device; the `.grad` of its parameters are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from unisono import torch_private as private

SMALL_BYTES = 128 << 10
"""Gradients up to here are filed together when their bucket is full: one call for all of them costs
less than one call each. Larger ones are filed as they come, while they are still in the cache."""

_ALIGN_BYTES = 64

Memory = Callable[[int, torch.dtype, torch.device], Tensor]
"""Number of elements, dtype and device -> flat zeros."""


@dataclass(frozen=True)
class Bucket:
    """What one bucket holds, for display and tests."""

    index: int
    """Number of the bucket: the order in which buckets travel."""
    dtype: torch.dtype
    """Dtype of its gradients."""
    device: torch.device
    """Where it lies."""
    numel: int
    """Gradient elements in it."""
    names: tuple[str, ...]
    """Its parameters, last registered first."""


class GradientBucket:
    """A flat tensor with the gradients of some parameters, and one flag for each of them.

    A flag says whether its parameter got a gradient; it travels with the gradients.

    Args:
        index: number of the bucket.
        names: names of its parameters.
        params: the parameters, of one dtype and device.
        memory: gives the flat tensor.
    """

    def __init__(
        self, index: int, names: Sequence[str], params: Sequence[nn.Parameter], memory: Memory
    ) -> None:
        first = params[0]
        self.index = index
        self.is_last = False
        """Whether it is the last one of a backward."""
        self.names = tuple(names)
        self.params = list(params)
        numel = sum(p.numel() for p in params)
        self.info = Bucket(index, first.dtype, first.device, numel, self.names)
        itemsize = first.element_size()
        line = max(1, _ALIGN_BYTES // itemsize)
        *places, end = accumulate((-(-p.numel() // line) * line for p in params), initial=0)
        self.flat = memory(end + len(params), first.dtype, first.device)
        self.data = self.flat[:end]
        """The gradients without the flags."""
        self.flags = self.flat[end:]
        # The same memory with a version counter of its own, which counts the writes through `.grad`
        # and not those of the collective.
        self._shown = self.flat.data
        pairs = zip(places, self.params, strict=True)
        self.slots = [_view(self._shown, at, p) for at, p in pairs]
        """Where each gradient belongs."""
        self._pointers = [slot.data_ptr() for slot in self.slots]
        self._is_large = [p.numel() * itemsize > SMALL_BYTES for p in params]
        self.used = [False] * len(self.params)
        """Whether each parameter got a gradient since the last reduction."""
        self.came: set[int] = set()
        """Members whose gradient came in this backward."""
        self.before: dict[int, Tensor | None] = {}
        """What `.grad` was, for members that got no gradient on this rank."""
        self.sent_version = 0
        """`version` when it left."""
        self.idle: set[int] = set()
        """Members that had no gradient on any rank in the last reduction, nor one of before."""

    @property
    def version(self) -> int:
        """A number that changes when a gradient is written to."""
        return self._shown._version

    def describe(self) -> str:
        """Return the bucket in words, for messages."""
        shown = ", ".join(self.names[:4]) + (", ..." if len(self.names) > 4 else "")
        dtype = str(self.info.dtype).removeprefix("torch.")
        return f"gradient bucket {self.index} ({self.info.numel} {dtype}: {shown})"

    # -- before it travels ----------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether all gradients of this backward are here."""
        return len(self.came) == len(self.params)

    def receive(self, i: int) -> None:
        """Take in the gradient that member `i` has just got."""
        self.used[i] = True
        self.came.add(i)
        param, slot = self.params[i], self.slots[i]
        if self._is_large[i] and param.grad is not None and param.grad is not slot:
            slot.copy_(_plain(param.grad))
            param.grad = slot

    @torch.no_grad()
    def gather(self, remember: bool) -> None:
        """Bring in every gradient that lies elsewhere; `.grad` becomes the view.

        Args:
            remember: whether to keep what unused members hold. Those without a gradient then bring
                zeros, and show what travels; else they stay without.
        """
        self.before.clear()
        self.idle.clear()
        slots: list[Tensor] = []
        grads: list[Tensor] = []
        for i, (param, slot) in enumerate(zip(self.params, self.slots, strict=True)):
            grad = param.grad
            if grad is None:
                self.used[i] = False  # it was cleared since
            if remember and not self.used[i]:
                self.before[i] = slot.clone() if grad is slot else grad
                if grad is None:
                    param.grad = slot.zero_()
            if grad is not None and grad is not slot:
                slots.append(slot)
                grads.append(_plain(grad))
                param.grad = slot
        if slots:
            private.copy_each_(slots, grads)

    @torch.no_grad()
    def fill(self, factor: float | None) -> None:
        """Make the bucket ready to travel: all gradients, multiplied by `factor`, and the flags."""
        self.gather(remember=True)
        if factor is not None:
            weigh_(self.data, factor)
        if self.before:
            self.flags.copy_(torch.tensor(self.used), non_blocking=True)
        else:
            self.flags.fill_(1)
        self.used = [False] * len(self.used)

    # -- afterwards -----------------------------------------------------------------------------

    @torch.no_grad()
    def resolve_unused(self) -> None:
        """After the reduction: members that no rank used go back to what they were.

        Flags are read only where this rank left something unused. A `.grad` that the user has put
        in the place of ours meanwhile is left alone.
        """
        if not self.before:
            return
        flags = self.flags.tolist()
        for i, before in self.before.items():
            if flags[i] != 0:
                continue
            if before is not None:
                self.slots[i].copy_(before)
                continue
            self.idle.add(i)
            if self.params[i].grad is self.slots[i]:
                self.params[i].grad = None
        self.before.clear()

    @torch.no_grad()
    def clear(self, set_to_none: bool) -> None:
        """Clear all gradients: one fill, and what lies elsewhere."""
        if not set_to_none:
            self._shown[: self.data.numel()].zero_()  # and `version` shows it
        for param, slot in zip(self.params, self.slots, strict=True):
            grad = param.grad
            if grad is None or (grad is slot and not set_to_none):
                continue
            param.grad = None if set_to_none else grad.detach().zero_()

    def has_moved(self) -> bool:
        """Whether gradients lie elsewhere: `module.double().float()` gives them other memory."""
        pairs = zip(self.slots, self._pointers, strict=True)
        return any(slot.data_ptr() != pointer for slot, pointer in pairs)

    @torch.no_grad()
    def forget_sum(self, was_written: bool) -> None:
        """Clear what came back of a backward that raised: the sum of incomplete gradients.

        Args:
            was_written: whether gradients that were under way were written to, as a
                `zero_grad(set_to_none=False)` does: those of before must not come back either.
        """
        for slot, users in zip(self.slots, self.flags.tolist(), strict=True):
            if users != 0 or was_written:
                slot.zero_()


def weigh_(grad: Tensor, factor: float) -> Tensor:
    """Multiply a gradient in place; what counts nothing may be infinite or NaN."""
    return grad.mul_(factor) if factor else grad.zero_()


def _view(flat: Tensor, place: int, param: nn.Parameter) -> Tensor:
    """Return the view for one gradient, with the parameter's strides where it is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset() + place)
    return flat[place : place + param.numel()].view(param.shape)


def _plain(grad: Tensor) -> Tensor:
    """Return a gradient as a dense tensor without history."""
    if grad.requires_grad:
        grad = grad.detach()
    return grad.to_dense() if grad.is_sparse else grad
