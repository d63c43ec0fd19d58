"""Classes as paths in a binary tree: the hierarchical softmax.

A class number's bits, most significant first, are the turns at the inner nodes: +1 for 0, -1 for 1.
Each inner node is one output of the net, counted from 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.bayes.activation_moments import normal_cdf
from unisono.errors import PartitionError

_NOISE = 1 / 9
"""Variance that goes with a turn of +1 or -1."""


@dataclass
class HRCSoftmax:
    """The tree of some number of classes."""

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
    if num_classes < 2:
        raise PartitionError.because(
            f"a hierarchical softmax of {num_classes} classes",
            "a tree needs two leaves",
            f"{num_classes} < 2",
            "num_classes=2 or more",
        )
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


def class_probabilities(mean: Tensor, var: Tensor, tree: HRCSoftmax, num_classes: int) -> Tensor:
    """Return the probability of each class from the outputs `[batch, tree.len]`; not normalised."""
    if mean.shape[-1] < tree.len:
        raise PartitionError.because(
            f"{num_classes} classes by hierarchical softmax",
            f"{mean.shape[-1]} outputs a sample",
            f"{mean.shape[-1]} < {tree.len}",
            f"a last layer of {tree.len} outputs",
        )
    right = normal_cdf(mean / torch.sqrt(_NOISE + var))
    path = torch.tensor(tree.idx).view(num_classes, tree.num_obs) - 1
    turn = torch.tensor(tree.obs).view(num_classes, tree.num_obs)
    chosen = right[:, path.to(mean.device)]
    return torch.where(turn.to(mean.device) > 0, chosen, 1 - chosen).prod(-1)
