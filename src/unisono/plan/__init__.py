"""Predict what a training step costs on another machine.

A latency-bandwidth model of the links, measured times of the model on one core, and one formula for
each way to split. Everything but `profile` and `calibrate` is arithmetic.
"""

from __future__ import annotations

from unisono.plan.calibration import (
    Calibration,
    calibrate,
    calibration_file,
    read_calibration,
)
from unisono.plan.cluster import Cluster, Link
from unisono.plan.prediction import Impossible, Prediction
from unisono.plan.profile import profile
from unisono.plan.subject import Subject, load_subject
from unisono.plan.ways import compare
from unisono.plan.workload import GraphInput, Workload
from unisono.removed import removed_name

__all__ = [
    "Calibration",
    "Cluster",
    "GraphInput",
    "Impossible",
    "Link",
    "Prediction",
    "Subject",
    "Workload",
    "calibrate",
    "calibration_file",
    "compare",
    "load_subject",
    "profile",
    "read_calibration",
]


def __getattr__(name: str) -> object:
    """Raise for a name that is gone, with what to write instead."""
    raise removed_name(f"{__name__}.{name}")
