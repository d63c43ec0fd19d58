"""How good predictions and their error bars are; arrays in, numbers out, NaN is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.bayes.hierarchical import tree_of
from unisono.bayes.toolbox import Utils
from unisono.errors import PartitionError

Floats = NDArray[np.float64]
REDUCTIONS = ("mean", "sum", "none")


def mse(prediction: ArrayLike, observation: ArrayLike) -> float:
    """Return the mean squared error."""
    found, seen = _paired(prediction=prediction, observation=observation)
    return float(np.nanmean(np.square(found - seen)))


def rmse(prediction: ArrayLike, observation: ArrayLike) -> float:
    """Return the root of the mean squared error."""
    return math.sqrt(mse(prediction, observation))


def log_likelihood(
    prediction: ArrayLike, observation: ArrayLike, std: ArrayLike, *, reduction: str = "mean"
) -> float | Floats:
    """Return the Gaussian log-likelihood of the observations.

    Args:
        prediction: means.
        observation: what was observed.
        std: standard deviations, with the observation noise in them.
        reduction: `"mean"`, `"sum"` or `"none"`.

    >>> log_likelihood([0.0], [0.0], [1.0])
    -0.918938...
    """
    if reduction not in REDUCTIONS:
        raise PartitionError.because(
            f"reduction={reduction!r}", f"reductions are {', '.join(REDUCTIONS)}", None, '"mean"'
        )
    found, seen, s = _paired(prediction=prediction, observation=observation, std=std)
    z = (seen - found) / s
    each = -0.5 * np.square(z) - np.log(s) - 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return each
    return float(np.nanmean(each) if reduction == "mean" else np.nansum(each))


def prediction_interval(
    mean: ArrayLike, std: ArrayLike, level: float = 0.95
) -> tuple[Floats, Floats]:
    """Return the ends of the central interval that holds `level` of a Gaussian.

    >>> low, high = prediction_interval([0.0], [1.0], 0.95)
    >>> round(float(high[0]), 2)
    1.96
    """
    middle, s = _paired(mean=mean, std=std)
    reach = _reach(level) * s
    return middle - reach, middle + reach


def coverage(mean: ArrayLike, std: ArrayLike, y: ArrayLike, level: float = 0.95) -> float:
    """Return the share of observations inside the central interval of `level`."""
    middle, s, seen = _paired(mean=mean, std=std, y=y)
    low, high = prediction_interval(middle, s, level)
    known = ~np.isnan(seen)
    return float(((low <= seen) & (seen <= high))[known].mean())


def calibration_curve(
    mean: ArrayLike, std: ArrayLike, y: ArrayLike, levels: Sequence[float] | None = None
) -> tuple[Floats, Floats]:
    """Return levels and the share of observations inside each central interval.

    Error bars that are right give a diagonal; below it they are too narrow.
    """
    asked = np.linspace(0.05, 0.95, 19) if levels is None else np.asarray(levels, dtype=float)
    return asked, np.array([coverage(mean, std, y, float(level)) for level in asked])


def crps(mean: ArrayLike, std: ArrayLike, y: ArrayLike) -> float:
    """Return the mean continuous ranked probability score of Gaussian predictions."""
    middle, s, seen = _paired(mean=mean, std=std, y=y)
    z = (seen - middle) / s
    pdf = np.exp(-0.5 * np.square(z)) / math.sqrt(2 * math.pi)
    cdf = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2)))
    return float(np.nanmean(s * (z * (2 * cdf - 1) + 2 * pdf - 1 / math.sqrt(math.pi))))


def classification_error(prediction: ArrayLike, label: ArrayLike) -> float:
    """Return the share of wrong labels."""
    found, known = np.asarray(prediction).reshape(-1), np.asarray(label).reshape(-1)
    if len(found) != len(known):
        raise PartitionError.because(
            f"classification_error of {len(found)} predictions",
            f"{len(known)} labels",
            f"{len(found)} != {len(known)}",
            f"{len(found)} labels, one for each prediction",
        )
    return float((found != known).mean())


class HRCSoftmaxMetric:
    """Labels and error rates from the outputs of a hierarchical softmax.

    Args:
        num_classes: number of classes; the net has `hrc_softmax.len` outputs.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.utils = Utils()
        self.hrc_softmax = tree_of(num_classes)

    def get_predicted_labels(self, m_pred: ArrayLike, v_pred: ArrayLike) -> NDArray[np.int32]:
        """Return the most probable label of each sample."""
        rows = np.asarray(m_pred).size // self.hrc_softmax.len
        return self.utils.get_labels(m_pred, v_pred, self.hrc_softmax, self.num_classes, rows)[0]

    def error_rate(self, m_pred: ArrayLike, v_pred: ArrayLike, label: ArrayLike) -> float:
        """Return the share of wrong labels."""
        return classification_error(self.get_predicted_labels(m_pred, v_pred), label)


def _paired(**arrays: ArrayLike) -> list[Floats]:
    """Return arrays that belong together entry by entry, in the shape of the largest.

    `[n, 1]` and `[n]` are paired, not spread out to `[n, n]`; one number goes with all entries.
    """
    found = [np.asarray(values, dtype=np.float64) for values in arrays.values()]
    shape = max(found, key=lambda a: a.size).shape
    try:
        return [
            a.reshape(shape) if a.size == np.prod(shape) else np.broadcast_to(a, shape)
            for a in found
        ]
    except ValueError:
        raise PartitionError.because(
            "a metric of arrays that belong together entry by entry",
            ", ".join(f"{name} of shape {a.shape}" for name, a in zip(arrays, found, strict=True)),
            " != ".join(str(a.size) for a in found),
            "as many observations as predictions; one number goes with all",
        ) from None


def _reach(level: float) -> float:
    if not 0 < level < 1:
        raise PartitionError.because(
            f"level={level}", "a share of the probability", "0 < level < 1", "level=0.95"
        )
    return NormalDist().inv_cdf(0.5 + level / 2)
