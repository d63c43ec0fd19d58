"""An optimizer of its own on the means of the nodes: momentum across exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["OuterOptimizer"]


class OuterOptimizer:
    """Treats "last common value minus mean of the nodes" as a gradient and follows it.

    With `momentum=0, lr=1` a step gives the mean itself.

    Args:
        momentum: part of the last update that is kept.
        lr: length of a step.
        nesterov: look ahead along the momentum.
    """

    def __init__(self, momentum: float, lr: float, nesterov: bool) -> None:
        self.momentum = momentum
        self.lr = lr
        self.nesterov = nesterov
        self.velocity: list[Tensor] | None = None

    def restart(self) -> None:
        """Forget the momentum."""
        self.velocity = None

    def step(self, common: Sequence[Tensor], mean: Sequence[Tensor]) -> list[Tensor]:
        """Return the next common value from the last one and the mean of the nodes."""
        drift = [a - b for a, b in zip(common, mean, strict=True)]
        if self.velocity is None:
            self.velocity = [d.clone() for d in drift]
        else:
            self.velocity = [
                self.momentum * u + d for u, d in zip(self.velocity, drift, strict=True)
            ]
        directions = (
            [d + self.momentum * u for d, u in zip(drift, self.velocity, strict=True)]
            if self.nesterov
            else self.velocity
        )
        return [a - self.lr * d for a, d in zip(common, directions, strict=True)]
