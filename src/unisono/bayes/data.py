"""What programs around a net need: batches, scaled data, labels, images, windows."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from unisono.bayes.moments import check_count, integers
from unisono.comm import Communicator, world
from unisono.errors import PartitionError
from unisono.expect import expect_int

Array = NDArray[Any]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
_TINY = 1e-10
_NOISE = 1 / 9
"""Variance that goes with a turn of +1 or -1 in a tree of classes."""


def batches(
    x: Any,
    y: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    comm: Communicator | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield `(x, y)` of `batch_size` rows per rank. Local.

    All ranks use one permutation and yield the same number of batches; together they see every row
    once. The last batch is shared out evenly, so it may be smaller, or empty on some ranks.

    Args:
        x: rows of inputs, array or tensor.
        y: rows of observations.
        batch_size: rows of this rank; a step of all ranks has `batch_size * world size`.
        shuffle: whether to permute the rows.
        seed: of the permutation, together with `epoch`.
        epoch: number of the pass over the data.
        drop_last: leave out a last batch that is not full on all ranks.
        comm: the ranks that share the data; default: the running world.

    >>> [len(rows) for rows, _ in batches(np.arange(10), np.arange(10), 4)]
    [4, 4, 2]
    """
    ranks = world() if comm is None else comm
    x, y = (t if isinstance(t, Tensor) else np.asarray(t) for t in (x, y))
    expect_int("batch_size", operator.index(batch_size), 1, error=PartitionError)
    check_count("batches of x and y", len(x), len(y), "as many rows of x as of y")
    order = np.arange(len(x))
    if shuffle:
        order = np.random.default_rng([seed, epoch]).permutation(len(x))
    together = batch_size * ranks.size
    for start in range(0, len(x), together):
        rows = order[start : start + together]
        if drop_last and len(rows) < together:
            return
        share = np.array_split(rows, ranks.size)[ranks.rank]
        yield _taken(x, share), _taken(y, share)


def _taken(data: Any, rows: np.ndarray) -> Any:
    return data[torch.from_numpy(rows)] if isinstance(data, Tensor) else data[rows]


class Normalizer:
    """Scale data by mean and standard deviation, or by its range.

    Args:
        method: kept for callers.
    """

    def __init__(self, method: str | None = None) -> None:
        self.method = method

    @staticmethod
    def standardize(data: ArrayLike, mu: ArrayLike, std: ArrayLike) -> Array:
        """Return `(data - mu) / std`."""
        return (np.asarray(data) - np.asarray(mu)) / (np.asarray(std) + _TINY)

    @staticmethod
    def unstandardize(norm_data: ArrayLike, mu: ArrayLike, std: ArrayLike) -> Array:
        """Return the data in its own unit."""
        return np.asarray(norm_data) * (np.asarray(std) + _TINY) + np.asarray(mu)

    @staticmethod
    def unstandardize_std(norm_std: ArrayLike, std: ArrayLike) -> Array:
        """Return standard deviations in the data's own unit."""
        return np.asarray(norm_std) * (np.asarray(std) + _TINY)

    def max_min_norm(self, data: ArrayLike, max_value: ArrayLike, min_value: ArrayLike) -> Array:
        """Return the data with its range moved to 0 to 1."""
        low = np.asarray(min_value)
        return (np.asarray(data) - low) / (np.asarray(max_value) - low + _TINY)

    @staticmethod
    def max_min_unnorm(norm_data: ArrayLike, max_value: ArrayLike, min_value: ArrayLike) -> Array:
        """Return the data in its own range."""
        low = np.asarray(min_value)
        return np.asarray(norm_data) * (np.asarray(max_value) - low + _TINY) + low

    @staticmethod
    def max_min_unnorm_std(
        norm_std: ArrayLike, max_value: ArrayLike, min_value: ArrayLike
    ) -> Array:
        """Return standard deviations in the data's own range."""
        return np.asarray(norm_std) * (np.asarray(max_value) - np.asarray(min_value) + _TINY)

    @staticmethod
    def compute_mean_std(data: ArrayLike) -> tuple[Array, Array]:
        """Return mean and standard deviation of each column; NaN is missing."""
        return np.nanmean(np.asarray(data), axis=0), np.nanstd(np.asarray(data), axis=0)

    @staticmethod
    def compute_max_min(data: ArrayLike) -> tuple[Array, Array]:
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


@dataclass
class HRCSoftmax:
    """Classes as paths in a binary tree, for a hierarchical softmax.

    A class number's bits, most significant first, are the turns at the inner nodes: +1 for 0, -1
    for 1. Each inner node is one output of the net, counted from 1.
    """

    obs: list[float] = field(default_factory=list)
    """Turns of all classes, `num_obs` each."""
    idx: list[int] = field(default_factory=list)
    """Outputs at which they are taken."""
    num_obs: int = 0
    """Turns of one class."""
    len: int = 0
    """Outputs that the net needs."""


def tree_of(num_classes: int) -> HRCSoftmax:
    """Return the tree of `num_classes` classes.

    >>> tree_of(3)
    HRCSoftmax(obs=[1.0, 1.0, 1.0, -1.0, -1.0, 1.0], idx=[1, 2, 1, 2, 1, 3], num_obs=2, len=3)
    """
    expect_int("num_classes", operator.index(num_classes), 2, error=PartitionError)
    depth = math.ceil(math.log2(num_classes))
    counts = [num_classes]
    for _ in range(depth):
        counts.append(math.ceil(counts[-1] / 2))
    counts = counts[::-1]  # nodes per level, the root first
    starts = [1 + sum(counts[: level + 1]) for level in range(depth)]
    tree = HRCSoftmax(num_obs=depth)
    for label in range(num_classes):
        tree.obs += [-1.0 if label >> (depth - 1 - turn) & 1 else 1.0 for turn in range(depth)]
        tree.idx.append(1)
        tree.idx += [(label >> (depth - 1 - turn)) + starts[turn] for turn in range(depth - 1)]
    tree.len = max(tree.idx)
    return tree


class Utils:
    """Conversions between labels, files and arrays; no state."""

    def label_to_obs(self, labels: ArrayLike, num_classes: int) -> tuple[Floats, Ints, int]:
        """Return the turns of each label, the outputs they belong to, and turns per label.

        >>> Utils().label_to_obs([3], 10)
        (array([ 1.,  1., -1., -1.], dtype=float32), array([1, 2, 4, 8], dtype=int32), 4)
        """
        tree = tree_of(num_classes)
        known = checked_labels(labels, num_classes)
        obs = np.array(tree.obs, dtype=np.float32).reshape(num_classes, -1)
        idx = np.array(tree.idx, dtype=np.int32).reshape(num_classes, -1)
        return obs[known].reshape(-1), idx[known].reshape(-1), tree.num_obs

    def label_to_one_hot(self, labels: ArrayLike, num_classes: int) -> Floats:
        """Return one-hot rows of the labels, flat."""
        rows = np.eye(num_classes, dtype=np.float32)
        return rows[checked_labels(labels, num_classes)].reshape(-1)

    def get_hierarchical_softmax(self, num_classes: int) -> HRCSoftmax:
        """Return the tree of `num_classes` classes."""
        return tree_of(num_classes)

    def obs_to_label_prob(
        self, ma: ArrayLike, Sa: ArrayLike, hr_softmax: HRCSoftmax, num_classes: int
    ) -> Floats:
        """Return the probability of each class, flat; `ma`, `Sa` are outputs of any batch."""
        return _probabilities(ma, Sa, hr_softmax, num_classes).reshape(-1)

    def get_labels(
        self,
        ma: ArrayLike,
        Sa: ArrayLike,
        hr_softmax: HRCSoftmax,
        num_classes: int,
        batch_size: int,
    ) -> tuple[Ints, Floats]:
        """Return predicted labels `[batch]` and probabilities, flat `[batch * classes]`."""
        prob = _probabilities(ma, Sa, hr_softmax, num_classes, batch_size)
        return prob.argmax(1).astype(np.int32), prob.reshape(-1)

    def get_errors(
        self,
        ma: ArrayLike,
        Sa: ArrayLike,
        labels: ArrayLike,
        hr_softmax: HRCSoftmax,
        num_classes: int,
        batch_size: int,
    ) -> tuple[Ints, Floats]:
        """Return 1 where the prediction is wrong `[batch]`, and probabilities, flat."""
        predicted, prob = self.get_labels(ma, Sa, hr_softmax, num_classes, batch_size)
        true = checked_labels(labels, num_classes)
        check_one_each("get_errors", predicted, true)
        return (predicted != true).astype(np.int32), prob

    def load_mnist_images(
        self, image_file: str | Path, label_file: str | Path, num_images: int
    ) -> tuple[Floats, Ints]:
        """Read images (flat, 0 to 1) and labels of two idx-ubyte files."""
        images = _idx_values(image_file, num_images)
        labels = _idx_values(label_file, num_images)
        return images.astype(np.float32) / np.float32(255), labels.astype(np.int32)

    def load_cifar_images(self, image_file: str | Path, num: int) -> tuple[Floats, Ints]:
        """Read `num` records of one label and 3072 bytes; images are flat, 0 to 1."""
        raw = np.frombuffer(Path(image_file).read_bytes(), np.uint8)
        stored = len(raw) // 3073
        expect_int(f"num of {image_file}", operator.index(num), 0, stored + 1, error=PartitionError)
        records = raw[: num * 3073].reshape(num, 3073)
        images = records[:, 1:].reshape(-1).astype(np.float32) / np.float32(255)
        return images, records[:, 0].astype(np.int32)

    def create_rolling_window(
        self,
        data: ArrayLike,
        output_col: ArrayLike,
        input_seq_len: int,
        output_seq_len: int,
        num_features: int,
        stride: int,
    ) -> tuple[Floats, Floats]:
        """Cut a series `[time, features]` into windows and what follows each.

        Returns:
            X `[n, input_seq_len * num_features]` and Y `[n, output_seq_len * columns]` with
            `n = (time - input_seq_len - output_seq_len) // stride + 1`.
        """
        series = np.asarray(data, dtype=np.float32)
        columns = np.atleast_1d(np.asarray(output_col, dtype=np.int64))
        width = series.shape[1] if series.ndim == 2 else num_features
        request = f"windows of {num_features} features of a series of shape {series.shape}"
        check_count(request, width, num_features, f"num_features={width}")
        lengths = {"input_seq_len": input_seq_len, "output_seq_len": output_seq_len}
        for name, count in {**lengths, "stride": stride}.items():
            expect_int(name, operator.index(count), 1, error=PartitionError)
        for column in columns.tolist():
            expect_int("output_col", column, 0, width, error=PartitionError)
        series = series.reshape(-1, num_features)
        free = len(series) - input_seq_len - output_seq_len
        if free < 0:
            request = f"windows of {input_seq_len} + {output_seq_len} steps"
            wrong = f"{len(series)} < {input_seq_len} + {output_seq_len}"
            raise PartitionError.because(request, arithmetic=wrong, hint="a shorter input_seq_len")
        starts = range(0, free // stride * stride + 1, stride)
        x = np.stack([series[s : s + input_seq_len].reshape(-1) for s in starts])
        ends = [s + input_seq_len for s in starts]
        y = np.stack([series[e : e + output_seq_len, columns].reshape(-1) for e in ends])
        return x, y

    def get_upper_triu_cov(self, batch_size: int, num_data: int, sigma: float) -> Floats:
        """Return the upper triangle, row by row, of `sigma^2 I`, once for each of the batch."""
        matrix = np.eye(num_data, dtype=np.float32) * np.float32(sigma**2)
        return np.tile(matrix[np.triu_indices(num_data)], batch_size)


def check_one_each(request: str, predictions: Array, labels: Array) -> None:
    """Refuse labels that are not one for each prediction."""
    count = len(predictions)
    hint = f"{count} labels, one for each prediction"
    check_count(f"{request} of {count} predictions", count, len(labels), hint)


def checked_labels(labels: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Return labels, flat; refuse what is not the number of a class."""
    flat = np.asarray(labels).reshape(-1)
    known = integers(torch.from_numpy(flat.astype(np.float64)), "labels").numpy()
    wrong = np.flatnonzero((known < 0) | (known >= num_classes))
    if len(wrong):
        raise PartitionError.because(
            f"labels of {num_classes} classes",
            f"labels[{wrong[0]}] = {known[wrong[0]]}",
            f"labels are 0 to {num_classes - 1}",
            "labels that count from 0" if known.min() < 0 else f"num_classes={known.max() + 1}",
        )
    return known


def _probabilities(
    ma: ArrayLike, Sa: ArrayLike, tree: HRCSoftmax, num_classes: int, batch: int | None = None
) -> Floats:
    """Return the probability of each class `[batch, classes]`; rows need not add up to 1."""
    mean, var = (torch.from_numpy(np.array(t, dtype=np.float32).reshape(-1)) for t in (ma, Sa))
    rows = mean.numel() // tree.len if batch is None else batch
    outputs = mean.numel() // rows if rows else tree.len
    if mean.numel() != var.numel() or rows * outputs != mean.numel() or outputs < tree.len:
        raise PartitionError.because(
            f"{num_classes} classes by hierarchical softmax, {rows} samples",
            f"{mean.numel()} means and {var.numel()} variances",
            f"{rows} * {tree.len} outputs are needed",
            f"the outputs of the whole batch; a last layer of {tree.len} outputs",
        )
    mean, var = mean.view(rows, outputs), var.view(rows, outputs)
    right = torch.special.ndtr(mean / torch.sqrt(_NOISE + var))
    path = torch.tensor(tree.idx).view(num_classes, tree.num_obs) - 1
    turn = torch.tensor(tree.obs).view(num_classes, tree.num_obs)
    chosen = right[:, path]
    return torch.where(turn > 0, chosen, 1 - chosen).prod(-1).numpy()


def _idx_values(path: str | Path, count: int) -> Array:
    raw = Path(path).read_bytes()
    dims = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    if not dims or len(raw) < 4 + 4 * dims:
        raise PartitionError.because(
            f"{count} records of {path}",
            f"{len(raw)} bytes that start with {raw[:4]!r}",
            "an idx file of bytes starts with 00 00 08 and its number of dims",
            "the unpacked *-ubyte file (gunzip it first)",
        )
    sizes = struct.unpack(f">{dims}I", raw[4 : 4 + 4 * dims])
    request = f"num_images of {path}"
    expect_int(request, operator.index(count), 0, sizes[0] + 1, error=PartitionError)
    each = int(np.prod(sizes[1:], dtype=np.int64))
    return np.frombuffer(raw, np.uint8, count * each, 4 + 4 * dims)
