"""`distribute`: an ordinary network becomes a split one; `plan_report`: what that will send."""

from __future__ import annotations

from unisono.nn.distribute.chain import DistributedSequential
from unisono.nn.distribute.distribute import distribute
from unisono.nn.distribute.report import plan_report

__all__ = ["DistributedSequential", "distribute", "plan_report"]
