"""Scale on paper: what a training step would cost on a machine that is not here.

A latency-bandwidth model of the links, measured times of the model on one core, and one formula for
each way to split. Everything but `profile` (and the parts of samples that its workload is asked for
later) and `calibrate` is arithmetic.
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
from unisono.plan.subject import GraphInput, Potential, Subject, load_subject
from unisono.plan.ways import Curve, compare, scaling
from unisono.plan.workload import Workload

__all__ = [
    "Calibration",
    "Cluster",
    "Curve",
    "GraphInput",
    "Impossible",
    "Link",
    "Potential",
    "Prediction",
    "Subject",
    "Workload",
    "calibrate",
    "calibration_file",
    "compare",
    "load_subject",
    "profile",
    "read_calibration",
    "scaling",
]
