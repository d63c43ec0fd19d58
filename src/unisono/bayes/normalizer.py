"""`Normalizer`: data to unit scale and back, and the schedule of a falling noise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_TINY = 1e-10
Floats = NDArray[Any]


class Normalizer:
    """Scale data by mean and standard deviation, or by its range.

    Args:
        method: kept for callers.
    """

    def __init__(self, method: str | None = None) -> None:
        self.method = method

    @staticmethod
    def standardize(data: ArrayLike, mu: ArrayLike, std: ArrayLike) -> Floats:
        """Return `(data - mu) / std`."""
        return (np.asarray(data) - np.asarray(mu)) / (np.asarray(std) + _TINY)

    @staticmethod
    def unstandardize(norm_data: ArrayLike, mu: ArrayLike, std: ArrayLike) -> Floats:
        """Return the data in its own unit."""
        return np.asarray(norm_data) * (np.asarray(std) + _TINY) + np.asarray(mu)

    @staticmethod
    def unstandardize_std(norm_std: ArrayLike, std: ArrayLike) -> Floats:
        """Return standard deviations in the data's own unit."""
        return np.asarray(norm_std) * (np.asarray(std) + _TINY)

    def max_min_norm(self, data: ArrayLike, max_value: ArrayLike, min_value: ArrayLike) -> Floats:
        """Return the data with its range moved to 0 to 1."""
        low = np.asarray(min_value)
        return (np.asarray(data) - low) / (np.asarray(max_value) - low + _TINY)

    @staticmethod
    def max_min_unnorm(norm_data: ArrayLike, max_value: ArrayLike, min_value: ArrayLike) -> Floats:
        """Return the data in its own range."""
        low = np.asarray(min_value)
        return np.asarray(norm_data) * (np.asarray(max_value) - low + _TINY) + low

    @staticmethod
    def max_min_unnorm_std(
        norm_std: ArrayLike, max_value: ArrayLike, min_value: ArrayLike
    ) -> Floats:
        """Return standard deviations in the data's own range."""
        return np.asarray(norm_std) * (np.asarray(max_value) - np.asarray(min_value) + _TINY)

    @staticmethod
    def compute_mean_std(data: ArrayLike) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of each column; NaN is missing."""
        return np.nanmean(np.asarray(data), axis=0), np.nanstd(np.asarray(data), axis=0)

    @staticmethod
    def compute_max_min(data: ArrayLike) -> tuple[Floats, Floats]:
        """Return largest and smallest value of each column; NaN is missing."""
        return np.nanmax(np.asarray(data), axis=0), np.nanmin(np.asarray(data), axis=0)


def exponential_scheduler(
    curr_v: float, min_v: float, decaying_factor: float, curr_iter: float
) -> float:
    """Return `curr_v * decaying_factor**curr_iter`, at least `min_v`.

    >>> exponential_scheduler(1.0, 0.3, 0.5, 1), exponential_scheduler(1.0, 0.3, 0.5, 5)
    (0.5, 0.3)
    """
    return max(curr_v * decaying_factor**curr_iter, min_v)
