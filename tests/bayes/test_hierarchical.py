"""The tree of classes, and labels in and out of it."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.bayes import HRCSoftmaxMetric, Utils, metric

PATHS = {
    2: [[1], [1]],
    3: [[1, 2], [1, 2], [1, 3]],
    5: [[1, 2, 4]] * 2 + [[1, 2, 5]] * 2 + [[1, 3, 6]],
    10: [[1, 2, 4, 7]] * 2
    + [[1, 2, 4, 8]] * 2
    + [[1, 2, 5, 9]] * 2
    + [[1, 2, 5, 10]] * 2
    + [[1, 3, 6, 11]] * 2,
}
MEAN = np.linspace(-1, 1, 11)
VAR = 0.1 + 0.05 * np.arange(11)
PROBABILITIES = [
    0.000133721,
    0.0000854341,
    0.000455535,
    0.000192151,
    0.00408457,
    0.00116138,
    0.00724268,
    0.00140614,
    0.0612870,
    0.00818679,
]


@pytest.mark.parametrize(("classes", "paths"), PATHS.items())
def test_small_trees_have_the_printed_paths(classes, paths):
    tree = Utils().get_hierarchical_softmax(classes)
    assert np.reshape(tree.idx, (classes, -1)).tolist() == paths
    assert tree.len == max(map(max, paths))
    assert tree.num_obs == len(paths[0])


@pytest.mark.parametrize(("classes", "num_obs", "length"), [(100, 7, 102), (1000, 10, 1001)])
def test_large_trees_have_the_printed_sizes(classes, num_obs, length):
    tree = Utils().get_hierarchical_softmax(classes)
    assert (tree.num_obs, tree.len) == (num_obs, length)
    turns = {
        tuple(zip(o, i, strict=True))
        for o, i in zip(
            np.reshape(tree.obs, (classes, -1)).tolist(),
            np.reshape(tree.idx, (classes, -1)).tolist(),
            strict=True,
        )
    }
    assert len(turns) == classes  # no two classes share a path


def test_labels_become_turns_and_outputs():
    obs, idx, num_obs = Utils().label_to_obs([3, 7], 10)
    assert obs.tolist() == [1, 1, -1, -1, 1, -1, -1, -1]
    assert idx.tolist() == [1, 2, 4, 8, 1, 2, 5, 10]
    assert num_obs == 4


def test_probabilities_are_the_printed_ones():
    tools = Utils()
    tree = tools.get_hierarchical_softmax(10)
    prob = tools.obs_to_label_prob(MEAN, VAR, tree, 10)
    assert np.allclose(prob, PROBABILITIES, rtol=2e-5)
    labels, flat = tools.get_labels(np.tile(MEAN, 2), np.tile(VAR, 2), tree, 10, 2)
    assert labels.tolist() == [8, 8]
    assert labels.dtype == np.int32
    assert flat.shape == (20,)
    wrong, _ = tools.get_errors(np.tile(MEAN, 2), np.tile(VAR, 2), [8, 1], tree, 10, 2)
    assert wrong.tolist() == [0, 1]


def test_the_metric_finds_labels_of_any_batch():
    measure = HRCSoftmaxMetric(10)
    mean, var = np.tile(MEAN, 3), np.tile(VAR, 3)
    assert measure.get_predicted_labels(mean, var).tolist() == [8, 8, 8]
    assert measure.error_rate(mean, var, [8, 8, 0]) == pytest.approx(1 / 3)
    assert metric.classification_error([1, 2, 3, 4], [1, 2, 0, 0]) == 0.5
    assert measure.get_predicted_labels([], []).shape == (0,)  # of a rank without rows
    assert measure.get_probabilities([], []).shape == (0, 10)


def test_one_hot_rows_are_flat():
    assert Utils().label_to_one_hot([1, 0], 3).tolist() == [0, 1, 0, 1, 0, 0]
