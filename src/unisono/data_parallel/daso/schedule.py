"""DASO's schedule: when nodes talk to each other. Pure arithmetic, no process and no torch.

Epochs choose the skips (how rarely nodes synchronise), batches follow a plan made from them. What a
synchronisation does to parameters is in `exchange.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unisono.expect import expect_choice, expect_float, expect_int, refusal

PATIENCE = 2
"""Cycling epochs without improvement before the skips change."""
FIRST_SKIP = 4
"""`global_skip` of the first cycling epoch, if the maximum allows it."""


class Skips(NamedTuple):
    """How rarely ranks synchronise in one epoch; all 0 means after every batch."""

    global_skip: int
    """Number of batches from one exchange of the nodes to the next."""
    local_skip: int
    """Batches from one average of gradients inside a node to the next, away from exchanges."""
    batches_to_wait: int
    """Batches between the start of an exchange and the use of its result; 0: waits at once."""


class BatchPlan(NamedTuple):
    """What happens around one batch."""

    local_sync: bool
    """Gradients are averaged in the node during backward."""
    merge: bool
    """The exchange in flight is used after the optimizer step."""
    send: bool
    """A new exchange is started, after the merge."""
    blocking: bool
    """All ranks get the mean of the nodes at once."""
    close: bool
    """The epoch ends with this batch."""


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
        return dict(vars(self))

    def set_state(self, state: dict[str, object]) -> None:
        """Continue from a state that `get_state` gave."""
        attributes = vars(self)
        if state.keys() != attributes.keys():
            raise refusal(
                ValueError,
                f"set_state of {sorted(state)}",
                f"missing {sorted(attributes.keys() - state.keys())}, "
                f"unknown {sorted(state.keys() - attributes.keys())}",
                hint="pass what get_state() returned",
            )
        attributes.update(state)


class DasoSchedule:
    """Skips of each epoch from the losses so far, and from them the plan of each batch.

    Args:
        total_epochs: epochs of the whole training.
        warmup_epochs: first epochs, synchronised after every batch.
        cooldown_epochs: last epochs, the same.
        max_global_skips: largest `global_skip`; 0 synchronises after every batch throughout.
        skip_reduction_factor: `global_skip` and `local_skip` are divided by this on a plateau.
        local_skip_factor: the largest `global_skip` over this gives `local_skip`.
        stability_level: relative improvement of the loss below which an epoch counts as a plateau.

    >>> schedule = DasoSchedule(total_epochs=8, warmup_epochs=1, cooldown_epochs=1)
    >>> [skips.global_skip for skips in schedule.preview([1.0] * 8)]
    [0, 4, 4, 4, 2, 2, 2, 0]
    """

    def __init__(
        self,
        total_epochs: int,
        warmup_epochs: int = 4,
        cooldown_epochs: int = 4,
        max_global_skips: int = 8,
        skip_reduction_factor: int = 2,
        local_skip_factor: int = 4,
        stability_level: float = 0.05,
    ) -> None:
        self.total_epochs = expect_int("total_epochs", total_epochs, 1)
        self.warmup_epochs = expect_int("warmup_epochs", warmup_epochs, 0)
        self.cooldown_epochs = expect_int("cooldown_epochs", cooldown_epochs, 0)
        self.max_global_skips = expect_int("max_global_skips", max_global_skips, 0)
        self.skip_reduction_factor = expect_int("skip_reduction_factor", skip_reduction_factor, 1)
        self.local_skip_factor = expect_int("local_skip_factor", local_skip_factor, 1)
        self.stability_level = expect_float("stability_level", stability_level, 0.0)
        self.detector = DetectMetricPlateau(patience=PATIENCE, threshold=self.stability_level)
        self.reset()

    def reset(self) -> None:
        """Go back to the first epoch."""
        self.epoch = 0
        self.detector.reset()
        self.skips = self._skips_of_epoch(Skips(0, 0, 0), None)

    @property
    def phase(self) -> str:
        """`"warmup"`, `"cycling"` or `"cooldown"`."""
        if self.epoch >= self.total_epochs - self.cooldown_epochs:
            return "cooldown"
        return "warmup" if self.epoch < self.warmup_epochs else "cycling"

    @property
    def never_cycles(self) -> bool:
        """Whether all epochs are warm-up or cool-down, or have no skips."""
        is_full = self.warmup_epochs + self.cooldown_epochs >= self.total_epochs
        return is_full or self.max_global_skips == 0

    def epoch_end(self, mean_loss: float) -> Skips:
        """Count an epoch that ended with this loss; return the skips of the next one."""
        self.epoch += 1
        self.skips = self._skips_of_epoch(self.skips, float(mean_loss))
        return self.skips

    def _skips_of_epoch(self, current: Skips, loss: float | None) -> Skips:
        if self.phase != "cycling" or self.max_global_skips == 0:
            return Skips(0, 0, 0)
        plateau = loss is not None and self.detector.plateaued(loss)
        if self.epoch == self.warmup_epochs:
            return Skips(min(FIRST_SKIP, self.max_global_skips), 1, 1)
        if not plateau:
            return current
        if current.global_skip == 1:
            local = max(1, self.max_global_skips // self.local_skip_factor)
            return Skips(self.max_global_skips, local, local)
        return Skips(
            max(1, current.global_skip // self.skip_reduction_factor),
            max(1, current.local_skip // self.skip_reduction_factor),
            max(1, current.batches_to_wait - 1),
        )

    def plan(self, batch: int, n_batches: int, sent_at: int | None) -> BatchPlan:
        """Return what happens around `batch` of an epoch of `n_batches`.

        Args:
            batch: 0-based number of the batch.
            n_batches: batches of the epoch.
            sent_at: batch that started the exchange in flight, None without one.
        """
        skip, local_skip, wait = self.skips
        last = n_batches - 1
        close = batch >= last
        on_beat = skip > 0 and batch % skip == 0
        near_exchange = skip > 0 and batch % skip <= wait
        return BatchPlan(
            local_sync=skip == 0
            or local_skip <= 1
            or batch % local_skip == 0
            or near_exchange
            or close,
            merge=sent_at is not None and not close and (batch == sent_at + wait or on_beat),
            # A result due at the last batch would be thrown away by the mean there.
            send=on_beat and wait > 0 and batch + wait < last,
            blocking=skip == 0 or close or (on_beat and wait == 0),
            close=close,
        )

    def preview(self, losses: Sequence[float]) -> list[Skips]:
        """Return the skips of the coming epochs if they ended with these losses. Changes nothing.

        Args:
            losses: loss at the end of each epoch, beginning with the current one.
        """
        rehearsal, skips = copy.deepcopy(self), [self.skips]
        for loss in losses[:-1]:
            skips.append(rehearsal.epoch_end(loss))
        return skips[: len(losses)]

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, skips and detector as plain values."""
        return {
            "epoch": self.epoch,
            "skips": list(self.skips),
            "detector": self.detector.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` gave."""
        self.epoch = state["epoch"]
        self.skips = Skips(*state["skips"])
        self.detector.set_state(state["detector"])
