"""Metrics, scaling, windows, files of images, batches, questions about CUDA."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from scipy import stats

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


def test_a_falling_value_has_a_floor():
    assert bayes.exponential_scheduler(2.0, 0.1, 0.5, 2) == 0.5
    assert bayes.exponential_scheduler(2.0, 0.1, 0.5, 99) == 0.1


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
    with pytest.raises(UnisonoError, match="4 > 3"):
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
