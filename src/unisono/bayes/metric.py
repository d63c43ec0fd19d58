"""How good predictions and their error bars are; arrays in, numbers out, NaN is missing."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from unisono.bayes.data import Utils, check_one_each, checked_labels, tree_of
from unisono.bayes.moments import first_bad
from unisono.errors import MissingExtra, PartitionError
from unisono.expect import expect_choice, expect_int

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]


def mse(prediction: ArrayLike, observation: ArrayLike) -> float:
    """Return the mean squared error."""
    mean, seen = _paired(prediction=prediction, observation=observation)
    return float(np.nanmean(np.square(mean - seen)))


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
    expect_choice("reduction", reduction, ("mean", "sum", "none"), error=PartitionError)
    mean, seen, s = _paired(prediction=prediction, observation=observation, std=std)
    certain = (s == 0) & ~np.isnan(seen)
    if certain.any():
        hint = "np.hypot(std, noise), with the noise of an observation: observation_noise(...)"
        raise first_bad("std", torch.from_numpy(s), torch.from_numpy(certain), "zero", hint)
    z = (seen - mean) / s
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
    chosen = np.linspace(0.05, 0.95, 19) if levels is None else np.asarray(levels, dtype=float)
    return chosen, np.array([coverage(mean, std, y, float(level)) for level in chosen])


def observation_noise(
    mean: ArrayLike, std: ArrayLike, y: ArrayLike, *, level: float | None = None
) -> float | Floats:
    """Return the standard deviation of the observation noise, estimated from held-out data.

    The error of a prediction has two parts: what the net does not know (`std`), and the rest, the
    noise of an observation together with what the net cannot express. `np.hypot(std, noise)` is the
    error bar of a new observation. Data that the net has learnt from give too small a number.

    Args:
        mean: predictions of rows that the net has not seen, `[rows]` or `[rows, outputs]`.
        std: the net's own standard deviations, as `net.predict` gives them.
        y: what was observed there; NaN is missing.
        level: None for the most likely value; or a share such as 0.9 for the value with which
            intervals of that level hold that share of `y`, whatever its distribution.

    Returns:
        One number, or one for each of several outputs; 0 where the net's own `std` is wide enough
        already.

    >>> mean, std = np.zeros(4), np.full(4, 0.6)
    >>> round(observation_noise(mean, std, [1.0, -1.0, 1.0, -1.0]), 2)
    0.8
    """
    middle, s, seen = _paired(mean=mean, std=std, y=y)
    if middle.ndim > 1 and math.prod(middle.shape[1:]) > 1:
        columns = zip(*(a.reshape(len(a), -1).T for a in (middle, s, seen)), strict=True)
        return np.array([observation_noise(*column, level=level) for column in columns])
    square, variance = np.square(seen - middle), np.square(s)
    known = np.isfinite(square + variance)
    square, variance = square[known], variance[known]
    if len(square) < 2:
        raise PartitionError.because(
            "observation_noise(mean, std, y)",
            f"{len(square)} known observations",
            f"{len(square)} < 2",
            "rows that were kept apart from training, some dozens at least",
        )
    return math.sqrt(
        _likely(square, variance) if level is None else _covering(square, variance, level)
    )


def _likely(square: Floats, variance: Floats) -> float:
    """Return the noise variance with the largest Gaussian likelihood of these squared errors."""
    largest = float(square.max())
    if largest == 0.0:
        return 0.0
    # A row that claims certainty and is right would alone make no noise infinitely likely, whatever
    # the others say: its variance counts as a hundredth of the best of those, at least. What is
    # usual decides which rows these are: beside one row of a huge std all others look exact.
    spread = variance + square
    is_exact = spread <= 1e-8 * np.median(spread[spread > 0])
    floor = np.where(is_exact, 0.01 * spread[~is_exact].min(), 1e-300)
    likeliest = 0.0
    tried = np.concatenate([[0.0], np.geomspace(1e-10 * largest, largest, 200)])
    for _ in range(4):  # the likelihood may have several peaks: look everywhere, then closer
        total = np.maximum(variance + tried[:, None], floor)
        best = int(np.argmin((np.log(total) + square / total).sum(1)))
        around = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
        likeliest = float(tried[best])
        tried = np.linspace(*around, 60)
    return likeliest


def _covering(square: Floats, variance: Floats, level: float) -> float:
    """Return the noise variance with which intervals of `level` hold that share of the errors."""
    needed = np.sort(square / _reach(level) ** 2 - variance)
    place = math.ceil((len(needed) + 1) * level) - 1  # one new observation among them
    return max(0.0, float(needed[min(place, len(needed) - 1)]))


def crps(mean: ArrayLike, std: ArrayLike, y: ArrayLike) -> float:
    """Return the mean continuous ranked probability score of Gaussian predictions."""
    middle, s, seen = _paired(mean=mean, std=std, y=y)
    off = np.abs(seen - middle)
    z = np.divide(off, s, out=np.zeros_like(off), where=s > 0)
    pdf = np.exp(-0.5 * np.square(z)) / math.sqrt(2 * math.pi)
    cdf = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2)))
    each = s * (z * (2 * cdf - 1) + 2 * pdf - 1 / math.sqrt(math.pi))
    return float(np.nanmean(np.where(s > 0, each, off)))  # a distance, where nothing is uncertain


def classification_error(prediction: ArrayLike, label: ArrayLike) -> float:
    """Return the share of wrong labels."""
    predicted, known = np.asarray(prediction).reshape(-1), np.asarray(label).reshape(-1)
    check_one_each("classification_error", predicted, known)
    return float((predicted != known).mean())


def brier_score(probabilities: ArrayLike, label: ArrayLike) -> float:
    """Return the mean squared distance between probabilities and what came true.

    Args:
        probabilities: `[rows, classes]`.
        label: the true class of each row.

    >>> brier_score([[0.8, 0.2], [0.4, 0.6]], [0, 1])
    0.2...
    """
    predicted, known = _classes(probabilities, label)
    true = np.zeros_like(predicted)
    true[np.arange(len(known)), known] = 1.0
    return float(np.square(predicted - true).sum(1).mean())


def reliability_curve(
    probabilities: ArrayLike, label: ArrayLike, bins: int = 10
) -> tuple[Floats, Floats, Floats]:
    """Return how sure a classifier was, how often it was right, and how many rows that is.

    Rows are sorted into bins of equal width by the probability of the class they were given.

    Args:
        probabilities: `[rows, classes]`.
        label: the true class of each row.
        bins: their number, between 0 and 1.

    Returns:
        Mean probability, share of right answers, and share of all rows, for each bin; the first two
        are NaN where there are no rows.
    """
    expect_int("bins", operator.index(bins), 1, error=PartitionError)
    predicted, known = _classes(probabilities, label)
    sure, right = predicted.max(1), predicted.argmax(1) == known
    place = np.minimum((sure * bins).astype(int), bins - 1)
    rows = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        return (
            np.bincount(place, sure, bins) / rows,
            np.bincount(place, right, bins) / rows,
            rows / max(len(known), 1),
        )


def expected_calibration_error(probabilities: ArrayLike, label: ArrayLike, bins: int = 15) -> float:
    """Return how far a classifier's probabilities are from how often it is right (ECE).

    The mean over the bins of `reliability_curve`, each with the weight of its rows.

    >>> expected_calibration_error([[0.9, 0.1], [0.9, 0.1]], [0, 1])
    0.4
    """
    sure, right, share = reliability_curve(probabilities, label, bins)
    return float(np.nansum(np.abs(sure - right) * share))


def reliability_plot(
    probabilities: ArrayLike, label: ArrayLike, bins: int = 10, *, ax: Axes | None = None
) -> Axes:
    """Draw `reliability_curve`: bars at the diagonal are right, below it they promise too much.

    Args:
        probabilities: `[rows, classes]`.
        label: the true class of each row.
        bins: their number.
        ax: where to draw; None for a figure of its own.

    Returns:
        The axes; `reliability_plot(...).figure.savefig("classes.png")`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    sure, right, share = reliability_curve(probabilities, label, bins)
    if ax is None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtra.of("plot", "reliability_plot", str(error)) from error
        ax = Figure(figsize=(4.2, 4), layout="constrained").subplots()
    middles = (np.arange(bins) + 0.5) / bins
    gap = expected_calibration_error(probabilities, label, bins)
    ax.bar(middles, np.nan_to_num(right), width=0.94 / bins, color="#53a2dd", label="right")
    ax.plot([0, 1], [0, 1], color="#777777", linewidth=1, linestyle="--")
    ax.plot(sure, right, "o", color="#1f5fa8", markersize=4, label="mean probability in the bin")
    for at, height, part in zip(middles, right, share, strict=True):
        if part:
            ax.annotate(f"{part:.0%}", (at, height), ha="center", va="bottom", fontsize=7)
    ax.set(
        xlim=(0, 1), ylim=(0, 1.05), xlabel="probability of the class that was given",
        ylabel="share of right answers", title=f"calibration error {gap:.3f}",
    )  # fmt: skip
    ax.legend(loc="upper left", frameon=False, fontsize=8)
    return ax


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

    def get_probabilities(self, m_pred: ArrayLike, v_pred: ArrayLike) -> Floats:
        """Return the probability of each class `[samples, classes]`; each row adds up to 1."""
        tree, classes = self.hrc_softmax, self.num_classes
        flat = np.asarray(self.utils.obs_to_label_prob(m_pred, v_pred, tree, classes), dtype=float)
        rows = flat.reshape(-1, classes)
        return rows / rows.sum(1, keepdims=True)

    def error_rate(self, m_pred: ArrayLike, v_pred: ArrayLike, label: ArrayLike) -> float:
        """Return the share of wrong labels."""
        return classification_error(self.get_predicted_labels(m_pred, v_pred), label)


def _classes(probabilities: ArrayLike, label: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """Return probabilities `[rows, classes]` and labels that fit them."""
    predicted, labels = np.asarray(probabilities, dtype=np.float64), np.asarray(label).reshape(-1)
    if predicted.ndim != 2 or len(predicted) != len(labels):
        raise PartitionError.because(
            f"probabilities of shape {predicted.shape} and {len(labels)} labels",
            "one row for each label, one column for each class",
            hint="probabilities [rows, classes], as many rows as labels; np.stack([1 - p, p], 1) "
            "for the probability p of class 1",
        )
    off = np.abs(predicted.sum(1) - 1)
    if len(predicted) and not (off.max() < 1e-3 and predicted.min() >= -1e-6):  # NaN too
        row = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
        raise PartitionError.because(
            f"probabilities of shape {predicted.shape}",
            f"row {row} is {predicted[row].tolist()}",
            f"their sum is {predicted[row].sum():.3f}",
            "each row adds up to 1; scipy.special.softmax for scores",
        )
    return predicted, checked_labels(labels, predicted.shape[1])


def _paired(**arrays: ArrayLike) -> list[Floats]:
    """Return arrays that belong together entry by entry, in the shape of the largest.

    `[n, 1]` and `[n]` are paired, not spread out to `[n, n]`; one number goes with all entries.
    """
    read = [np.asarray(values, dtype=np.float64) for values in arrays.values()]
    shape = max(read, key=lambda a: a.size).shape
    try:
        paired = [
            a.reshape(shape) if a.size == np.prod(shape) else np.broadcast_to(a, shape).copy()
            for a in read
        ]
    except ValueError:
        raise PartitionError.because(
            "a metric of arrays that belong together entry by entry",
            ", ".join(f"{name} of shape {a.shape}" for name, a in zip(arrays, read, strict=True)),
            " != ".join(str(a.size) for a in read),
            "as many observations as predictions; one number goes with all",
        ) from None
    if "std" in arrays:
        std = torch.from_numpy(paired[list(arrays).index("std")])
        if bool((std < 0).any()):
            raise first_bad("std", std, std < 0, "negative", "np.sqrt(variance)")
    return paired


def _reach(level: float) -> float:
    if not 0 < level < 1:
        raise PartitionError.because(
            f"level={level}", "a share of the probability", "0 < level < 1", "level=0.95"
        )
    return NormalDist().inv_cdf(0.5 + level / 2)
