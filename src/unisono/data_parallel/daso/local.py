"""DASO on one rank: its optimizer step with scheduler and scaler, and whether its node syncs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.comm import Communicator


class LocalStep:
    """What a rank does with its own optimizer, and whether its node stays together.

    Pickled without the ranks of its node.

    Args:
        optimizer: the torch optimizer.
        scheduler: stepped after each batch or each epoch.
        by_epoch: which of the two.
    """

    node: Communicator
    """Ranks of this node; set before the first step."""

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None, by_epoch: bool) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler: torch.amp.GradScaler | None = None
        self.syncs = True
        """Whether gradients of the next backward are averaged in the node."""
        self.went_apart = False
        """Whether ranks of the node may differ since they were brought together."""
        self._by_epoch = by_epoch
        self._switch: Callable[[bool], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "node"}

    def attach(self, switch: Callable[[bool], None] | None) -> None:
        """Use this switch of the node's gradient averaging; None: nothing averages."""
        self._switch = switch
        self.syncs = True
        self.went_apart = False

    @property
    def is_apart(self) -> bool:
        """Whether the ranks of this node have to be brought together before an exchange."""
        return self.node.size > 1 and (self.went_apart or self._switch is None)

    def aligned(self) -> None:
        """Parameters of the node are equal again; they stay so unless optimizer state differs."""
        self.went_apart = self.went_apart and any(self.optimizer.state.values())

    def together(self) -> None:
        """Parameters and optimizer state of the node are equal again."""
        self.went_apart = False

    def step(
        self,
        closure: Callable[[], Any] | None,
        synced: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Any:
        """Make the optimizer step of a batch, then that of a per-batch scheduler.

        Args:
            closure: passed on.
            synced: whether this batch's gradients were averaged in the node.
            grad_scale: set when the user's scaler calls DASO: gradients are this much too large.
            found_inf: the same: not 0 when they are not finite, and the step is left out.
        """
        self.went_apart = self.went_apart or not synced
        arguments = () if closure is None else (closure,)
        if self.scaler is not None:
            before = self.scaler.get_scale()
            result = self.scaler.step(self.optimizer, *arguments)
            self.scaler.update()
            skipped = self.scaler.get_scale() < before
        elif found_inf is not None and found_inf.item():
            result, skipped = None, True
        else:
            if grad_scale is not None:
                self._unscale(grad_scale)
            result, skipped = self.optimizer.step(*arguments), False
        if self.scheduler is not None and not self._by_epoch and not skipped:
            self.scheduler.step()
        return result

    def switch(self, on: bool) -> None:
        """Set whether the next backward averages gradients in the node. Collective over it."""
        if on and not self.syncs and self.scaler is not None and self.scaler.is_enabled():
            # Ranks that scaled differently would average unlike things.
            scale = torch.tensor([self.scaler.get_scale()], dtype=torch.float64)
            lowest = self.node.all_reduce(scale.to(self.node.device), "min").item()
            self.scaler.update(lowest)
        self.syncs = on
        if self._switch is not None:
            self._switch(on)

    def end_epoch(self, mean_loss: float) -> None:
        """Make the step of a per-epoch scheduler."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(mean_loss)
        elif self.scheduler is not None and self._by_epoch:
            self.scheduler.step()

    def _unscale(self, grad_scale: Tensor) -> None:
        grads = [
            p.grad
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if grads:
            torch._foreach_div_(grads, grad_scale.item())
