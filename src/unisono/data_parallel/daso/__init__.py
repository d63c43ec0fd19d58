"""DASO: gradients averaged inside a node every batch, parameters between nodes every few."""

from __future__ import annotations

from unisono.data_parallel.daso.daso import DASO
from unisono.data_parallel.daso.schedule import (
    BatchPlan,
    DasoSchedule,
    DetectMetricPlateau,
    EpochCost,
    Skips,
)

__all__ = ["DASO", "BatchPlan", "DasoSchedule", "DetectMetricPlateau", "EpochCost", "Skips"]
