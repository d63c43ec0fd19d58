"""Metrics, scaling, windows, files of images, batches, questions about CUDA."""

from __future__ import annotations

import math
import struct
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import datasets
from sklearn.metrics import brier_score_loss
from tests.bayes.nets import trained

from unisono import bayes
from unisono.bayes import Normalizer, Utils, cuda, metric
from unisono.comm import Communicator
from unisono.errors import UnisonoError

RNG = np.random.default_rng(0)


def test_metrics_skip_missing_observations():
    y = np.array([1.0, np.nan, 3.0])
    assert metric.mse([1.0, 2.0, 1.0], y) == 2.0
    assert metric.rmse([1.0, 2.0, 1.0], y) == pytest.approx(2**0.5)
    each = stats.norm.logpdf([1.0, 3.0], [1.0, 1.0], [1.0, 2.0])
    got = metric.log_likelihood([1.0, 2.0, 1.0], y, [1.0, 5.0, 2.0])
    assert got == pytest.approx(each.mean())
    total = metric.log_likelihood([1.0, 2.0, 1.0], y, [1.0, 5.0, 2.0], reduction="sum")
    assert total == pytest.approx(each.sum())


def test_coverage_and_calibration_of_a_true_gaussian():
    mean, std = RNG.normal(size=20_000), RNG.uniform(0.5, 2.0, 20_000)
    y = mean + std * RNG.normal(size=20_000)
    assert metric.coverage(mean, std, y, 0.9) == pytest.approx(0.9, abs=0.01)
    levels, shares = metric.calibration_curve(mean, std, y)
    assert np.abs(levels - shares).max() < 0.015
    _, narrow = metric.calibration_curve(mean, std / 2, y)
    assert (narrow < levels).all()
    low, high = metric.prediction_interval([1.0], [2.0], 0.5)
    assert (low[0], high[0]) == pytest.approx(stats.norm(1, 2).interval(0.5))


def test_rows_and_columns_are_paired_and_not_spread_out():
    """`predict` gives `[n, 1]`, a data set often has `[n]`: numpy would compare all with all."""
    y, column = np.arange(4.0), np.zeros((4, 1))
    for score in (metric.coverage, metric.crps):
        assert score(column, column + 1, y) == score(column[:, 0], 1.0, y)
    likely = metric.log_likelihood(column, y, column + 1)
    assert likely == metric.log_likelihood(column[:, 0], y, 1.0)
    assert metric.rmse(y[:, None], y) == 0.0
    assert metric.mse(np.ones((4, 2)), 2 * np.ones(2)) == 1.0  # one row for all


def test_crps_is_the_integral_of_its_definition():
    z = np.linspace(-12, 12, 200_001)
    integrand = (stats.norm(0.3, 1.5).cdf(z) - (z >= 1.0)) ** 2
    assert metric.crps([0.3], [1.5], [1.0]) == pytest.approx(np.trapezoid(integrand, z), abs=1e-4)
    assert metric.crps([0.3, 0.3, 0.3], 0.0, [1.0, 0.3, np.nan]) == pytest.approx(0.35)  # distances


def test_scaling_goes_there_and_back():
    data = RNG.normal(3.0, 5.0, (50, 2))
    data[3, 1] = np.nan
    mu, std = Normalizer.compute_mean_std(data)
    unit = Normalizer.standardize(data, mu, std)
    assert np.allclose(np.nanstd(unit, axis=0), 1)
    assert np.allclose(Normalizer.unstandardize(unit, mu, std), data, equal_nan=True)
    assert np.allclose(Normalizer.unstandardize_std([1.0, 1.0], std), std)
    top, low = Normalizer.compute_max_min(data)
    unit = Normalizer().max_min_norm(data, top, low)
    assert (np.nanmin(unit), np.nanmax(unit)) == pytest.approx((0, 1))
    assert np.allclose(Normalizer.max_min_unnorm(unit, top, low), data, equal_nan=True)
    assert np.allclose(Normalizer.max_min_unnorm_std(1.0, top, low), top - low)


def test_rolling_windows_of_some_columns():
    series = np.arange(20.0).reshape(10, 2)
    x, y = Utils().create_rolling_window(series, [1], 3, 2, 2, 2)
    assert x.shape == ((10 - 3 - 2) // 2 + 1, 6)
    assert y.tolist() == [[7, 9], [11, 13], [15, 17]]
    assert x[1].tolist() == [4, 5, 6, 7, 8, 9]
    with pytest.raises(UnisonoError, match=r"10 < 9 \+ 2"):
        Utils().create_rolling_window(series, [1], 9, 2, 2, 1)


def test_the_upper_triangle_is_written_row_by_row():
    assert Utils().get_upper_triu_cov(2, 2, 3.0).tolist() == [9, 0, 9, 9, 0, 9]


def test_image_files_are_read(tmp_path):
    pixels, labels = RNG.integers(0, 256, (3, 2, 2), np.uint8), np.array([7, 0, 2], np.uint8)
    images = tmp_path / "images"
    images.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 3, 2, 2) + pixels.tobytes())
    names = tmp_path / "labels"
    names.write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 3) + labels.tobytes())
    x, y = Utils().load_mnist_images(images, names, 2)
    assert np.allclose(x * 255, pixels[:2].reshape(-1))
    assert y.tolist() == [7, 0]
    with pytest.raises(UnisonoError, match="from 0 to 3"):
        Utils().load_mnist_images(images, names, 4)
    records = RNG.integers(0, 256, (2, 3073), np.uint8)
    (tmp_path / "cifar").write_bytes(records.tobytes())
    x, y = Utils().load_cifar_images(tmp_path / "cifar", 2)
    assert x.shape == (6144,)
    assert y.tolist() == records[:, 0].tolist()


def test_cuda_questions_never_raise_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    assert not cuda.is_available()
    assert not cuda.is_nccl_available()
    assert cuda.get_device_count() == 0
    assert cuda.get_current_device() == -1
    assert not cuda.set_device(0)
    assert not cuda.is_device_available(0)
    with pytest.raises(UnisonoError, match="CUDA device 0"):
        cuda.get_device_properties(0)


class _Ranks:
    """Enough of a communicator for a pure function."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 10, 12])
def test_batches_share_every_row_once_and_are_equally_many(size, rows):
    x = np.arange(rows)
    shares = [list(bayes.batches(x, x, 2, seed=1, comm=_Ranks(rank, size))) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    seen = [int(v) for share in shares for a, _ in share for v in a]
    assert sorted(seen) == list(range(rows))
    assert all(len(a) <= 2 for share in shares for a, _ in share)


def test_batches_change_with_the_epoch_and_repeat_with_the_seed():
    def order(**options):
        return [
            int(v)
            for a, _ in bayes.batches(torch.arange(9), torch.arange(9), 2, **options)
            for v in a
        ]

    assert order(seed=1, epoch=0) == order(seed=1, epoch=0)
    assert order(seed=1, epoch=0) != order(seed=1, epoch=1)
    assert order(shuffle=False) == list(range(9))
    assert len(order(drop_last=True)) == 8
    with pytest.raises(UnisonoError, match="9 != 8"):
        list(bayes.batches(np.arange(9), np.arange(8), 2))


def test_a_world_of_one_gets_everything():
    (one,) = bayes.batches(np.arange(3), np.arange(3), 8, comm=Communicator.of(None))
    assert sorted(one[0]) == [0, 1, 2]


def sets_of_sklearn():
    """Return inputs and targets of three data sets that come with scikit-learn."""
    wine = datasets.load_wine().data
    return {
        "diabetes": datasets.load_diabetes(return_X_y=True),
        "wine": (np.delete(wine, 0, 1), wine[:, 0]),
        "friedman": datasets.make_friedman1(500, noise=1.0, random_state=0),
    }


def predicted(x, y, seed):
    """Train on 60% of the rows; return mean, std and y of the next 20% and the last 20%."""
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order], y[order]
    first, second = int(0.6 * len(x)), int(0.8 * len(x))
    x = ((x - x[:first].mean(0)) / x[:first].std(0)).astype(np.float32)
    y = ((y - y[:first].mean()) / y[:first].std()).astype(np.float32)
    bayes.manual_seed(seed)
    net = bayes.Sequential(bayes.Linear(x.shape[1], 50), bayes.ReLU(), bayes.Linear(50, 1))
    for epoch in range(5):
        for a, b in bayes.batches(x[:first], y[:first, None], 16, epoch=epoch):
            trained(net, a, b, 0.5**2)
    return [
        (*net.predict(x[rows]), y[rows]) for rows in (slice(first, second), slice(second, None))
    ]


@pytest.mark.parametrize(
    ("name", "level"),
    [("diabetes", None), ("wine", None), ("friedman", None), ("diabetes", 0.9), ("friedman", 0.9)],
)
def test_with_the_noise_of_held_out_rows_intervals_hold_what_they_promise(name, level):
    x, y = sets_of_sklearn()[name]
    shares, bare = [], []
    for seed in range(8):
        held, (mean, std, seen) = predicted(x, y, seed)
        noise = metric.observation_noise(*held, level=level)
        shares.append(metric.coverage(mean, np.hypot(std, noise), seen, 0.9))
        bare.append(metric.coverage(mean, std, seen, 0.9))
    # one split of 36 wines is off by 5% by chance; the mean of eight is not
    assert 0.86 <= np.mean(shares) <= 0.94, shares
    assert np.mean(bare) < 0.88, "without the noise they are too narrow"


def test_observation_noise_finds_the_truth():
    own, noise = RNG.uniform(0.05, 1.0, 20_000), 0.4
    y = np.hypot(own, noise) * RNG.normal(size=20_000)
    assert metric.observation_noise(np.zeros(20_000), own, y) == pytest.approx(noise, abs=0.02)
    assert metric.observation_noise(0.0, own, y, level=0.9) == pytest.approx(noise, abs=0.05)
    pair = np.stack([y, 3 * y], 1)
    found = metric.observation_noise(np.zeros((20_000, 2)), np.stack([own, 3 * own], 1), pair)
    assert found == pytest.approx([noise, 3 * noise], abs=0.06)
    y[::3] = np.nan
    assert metric.observation_noise(0.0, own, y) == pytest.approx(noise, abs=0.03)
    assert metric.observation_noise([0.0, 0.0], [1.0, 1.0], [0.1, -0.1]) == 0.0
    assert metric.observation_noise(np.zeros(9), np.zeros(9), [0.0, *[1.0, -1.0] * 4]) == (
        pytest.approx(math.sqrt(8 / 9), abs=0.01)
    )


@pytest.mark.parametrize("std", [0.0, 1e-9])
def test_a_row_that_is_certain_and_right_does_not_hide_the_noise_of_the_others(std):
    own, y = np.full(40, 0.5), np.hypot(0.5, 1.0) * RNG.normal(size=40)
    without = metric.observation_noise(0.0, own, y)
    assert without == pytest.approx(1.0, abs=0.5)
    own[0] = std
    y[0] = std / 3
    assert metric.observation_noise(0.0, own, y) == pytest.approx(without, abs=0.2)


@pytest.mark.parametrize("std", [1e2, 1e5, 1e30, math.inf, math.nan])
def test_a_row_of_a_huge_std_does_not_hide_the_noise_of_the_others(std):
    own, y = np.full(400, 0.1), np.hypot(0.1, 1.0) * RNG.normal(size=400)
    own[7] = std
    for level in (None, 0.9):
        assert metric.observation_noise(0.0, own, y, level=level) == pytest.approx(1.0, abs=0.25)


def test_observation_noise_needs_two_observations():
    with pytest.raises(UnisonoError, match="1 known"):
        metric.observation_noise([0.0, 0.0], [1.0, 1.0], [0.1, np.nan])


def test_scores_of_classes():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), 20_000)
    label = (p.cumsum(1) > rng.random((20_000, 1))).argmax(1)  # drawn as the probabilities say
    true = np.eye(4)[label]
    assert metric.brier_score(p, label) == pytest.approx(((p - true) ** 2).sum(1).mean())
    pair = np.stack([1 - p[:, 0], p[:, 0]], 1)
    binary = 2 * brier_score_loss(label == 0, p[:, 0])
    assert metric.brier_score(pair, label == 0) == pytest.approx(binary)
    assert metric.expected_calibration_error(p, label) < 0.02
    sharp = p**3 / (p**3).sum(1, keepdims=True)  # promises too much
    assert metric.expected_calibration_error(sharp, label) > 0.15
    sure, right, share = metric.reliability_curve(p, label, 10)
    assert share.sum() == pytest.approx(1)
    assert np.isnan(sure[:2]).all(), "the largest of four is 0.25 at least"
    assert np.nanmax(np.abs(sure - right)) < 0.05
    assert metric.expected_calibration_error([[1.0, 0.0]], [0]) == 0.0
    for wrong, told in (
        (([0.2, 0.8], [0, 1]), "np.stack"),
        (([[0.2, 0.7]], [0]), "their sum is 0.900"),
        (([[np.nan, 0.7]], [0]), "nan"),
        (([[0.2, 0.8]], [2]), "2 classes"),
        (([[0.2, 0.8]], [0.9]), "not integers"),
        (([[0.2, 0.8]], [0, 1]), "2 labels"),
    ):
        with pytest.raises(UnisonoError, match=told):
            metric.brier_score(*wrong)


def test_a_reliability_plot_shows_the_curve(tmp_path):
    p = RNG.dirichlet(np.ones(3), 500)
    label = (p.cumsum(1) > RNG.random((500, 1))).argmax(1)
    axes = metric.reliability_plot(p, label, 5)
    _, right, _ = metric.reliability_curve(p, label, 5)
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(np.nan_to_num(right))
    assert f"{metric.expected_calibration_error(p, label, 5):.3f}" in axes.get_title()
    axes.figure.savefig(tmp_path / "plot.png")
    assert metric.reliability_plot(p, label, ax=axes) is axes


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnisonoError, match=r"unisono\[plot\]"):
        metric.reliability_plot([[0.5, 0.5]], [0])


def test_probabilities_of_a_tree_of_classes_add_up_to_one():
    measure = bayes.HRCSoftmaxMetric(10)
    mean, var = RNG.normal(size=(3, measure.hrc_softmax.len)), np.full((3, 11), 0.5)
    p = measure.get_probabilities(mean, var)
    assert p.shape == (3, 10)
    assert p.sum(1) == pytest.approx(np.ones(3))
    assert (p.argmax(1) == measure.get_predicted_labels(mean, var)).all()
    assert metric.brier_score(p, [0, 1, 2]) > 0
