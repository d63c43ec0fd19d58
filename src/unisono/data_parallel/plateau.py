"""`DetectMetricPlateau`: has a metric stopped improving? Pure arithmetic, no process, no torch."""

from __future__ import annotations

import math

from unisono.errors import explain
from unisono.expect import expect_choice

__all__ = ["DetectMetricPlateau"]

_STATE = (
    "best",
    "num_bad_epochs",
    "cooldown_counter",
    "last_epoch",
    "mode_worse",
    "patience",
    "cooldown",
    "mode",
    "threshold",
    "threshold_mode",
)


class DetectMetricPlateau:
    """Watches one number an epoch and tells when it no longer gets better.

    Args:
        mode: `"min"` when smaller is better, `"max"` when larger is.
        patience: epochs without improvement that are still accepted.
        threshold: change that counts as an improvement.
        threshold_mode: `"rel"` (to the best value so far) or `"abs"`.
        cooldown: epochs after a plateau in which none is detected.

    >>> detector = DetectMetricPlateau(patience=1)
    >>> [detector.plateaued(loss) for loss in (3.0, 2.0, 2.0, 2.0, 1.0)]
    [False, False, False, True, False]
    """

    best: float
    num_bad_epochs: int
    cooldown_counter: int
    last_epoch: int

    def __init__(
        self,
        mode: str = "min",
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
    ) -> None:
        self.mode = expect_choice("mode", mode, ("min", "max"))
        self.patience = patience
        self.threshold = threshold
        self.threshold_mode = expect_choice("threshold_mode", threshold_mode, ("rel", "abs"))
        self.cooldown = cooldown
        self.mode_worse = math.inf if mode == "min" else -math.inf
        self.reset()

    def reset(self) -> None:
        """Forget every value seen."""
        self.best = self.mode_worse
        self.num_bad_epochs = 0
        self.cooldown_counter = 0
        self.last_epoch = 0

    @property
    def in_cooldown(self) -> bool:
        """Whether the detector still rests after a plateau."""
        return self.cooldown_counter > 0

    def is_better(self, a: float, best: float) -> bool:
        """Return whether `a` improves on `best` by more than the threshold."""
        falling = self.mode == "min"
        if math.isinf(best):
            return a < best if falling else a > best
        margin = self.threshold
        if self.threshold_mode == "abs":
            return a < best - margin if falling else a > best + margin
        # The bar lies beyond `best` in the better direction, whatever the sign of `best`.
        towards_zero = falling == (best >= 0)
        bar = best * (1 - margin if towards_zero else 1 + margin)
        return a < bar if falling else a > bar

    def test_if_improving(self, metric: float) -> bool:
        """Take the metric of an epoch; return True when a PLATEAU is detected.

        The name is HeAT's; `plateaued` says what it means.
        """
        value = float(metric)
        self.last_epoch += 1
        if self.is_better(value, self.best):
            self.best = value
            self.num_bad_epochs = 0
        else:
            self.num_bad_epochs += 1
        if self.in_cooldown:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs <= self.patience:
            return False
        self.cooldown_counter = self.cooldown
        self.num_bad_epochs = 0
        return True

    plateaued = test_if_improving

    def get_state(self) -> dict[str, object]:
        """Return everything the detector knows, as plain values."""
        return {name: getattr(self, name) for name in _STATE}

    def set_state(self, state: dict[str, object]) -> None:
        """Continue from a state that `get_state` gave."""
        if set(state) != set(_STATE):
            raise ValueError(
                explain(
                    f"set_state of {sorted(state)}",
                    f"missing {sorted(set(_STATE) - set(state))}, "
                    f"unknown {sorted(set(state) - set(_STATE))}",
                    hint="pass what get_state() returned",
                )
            )
        for name in _STATE:
            setattr(self, name, state[name])
