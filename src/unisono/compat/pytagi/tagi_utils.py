"""pytagi's `tagi_utils` module."""

from __future__ import annotations

from unisono.bayes import HRCSoftmax, Normalizer, Utils, exponential_scheduler

__all__ = [
    "HRCSoftmax",
    "Normalizer",
    "Utils",
    "exponential_scheduler",
]
