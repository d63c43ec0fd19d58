"""pytagi's `metric` module."""

from __future__ import annotations

from unisono.bayes.metric import (
    HRCSoftmaxMetric,
    classification_error,
    log_likelihood,
    mse,
    rmse,
)

__all__ = [
    "HRCSoftmaxMetric",
    "classification_error",
    "log_likelihood",
    "mse",
    "rmse",
]
