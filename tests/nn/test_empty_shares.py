"""Ranks without points take part in every backward that other ranks run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono.nn as unn
from unisono.topology import Partition

KW = {"dtype": torch.float64}
PAIRS = {
    "convolution": (
        lambda P, w: unn.DistributedFeatureConv1d(P, 2, 3, 1, **KW, weights=w),
        lambda: nn.Conv1d(2, 3, 1, **KW),
    ),
    "transposed convolution": (
        lambda P, w: unn.DistributedFeatureConvTranspose1d(P, 2, 3, 1, **KW, weights=w),
        lambda: nn.ConvTranspose1d(2, 3, 1, **KW),
    ),
    "batch norm": (
        lambda P, w: unn.DistributedBatchNorm(P, 2, **KW, weights=w),
        lambda: nn.BatchNorm1d(2, **KW),
    ),
    "batch norm in eval": (
        lambda P, w: unn.DistributedBatchNorm(P, 2, **KW, weights=w).eval(),
        lambda: nn.BatchNorm1d(2, **KW).eval(),
    ),
    "group norm": (
        lambda P, w: unn.DistributedGroupNorm(P, 1, 2, **KW, weights=w),
        lambda: nn.GroupNorm(1, 2, **KW),
    ),
    "instance norm": (
        lambda P, w: unn.DistributedInstanceNorm(P, 2, affine=True, **KW, weights=w),
        lambda: nn.InstanceNorm1d(2, affine=True, **KW),
    ),
    "layer norm": (
        lambda P, w: unn.DistributedLayerNorm(P, (2, 2), **KW, weights=w),
        lambda: nn.LayerNorm((2, 2), **KW),
    ),
}


@pytest.mark.ranks(3)
def test_second_derivatives_of_a_plain_sum_meet_ranks_without_points():
    """The first gradient then depends on the weight alone, which an empty share must know too."""
    P = Partition([1, 1, 3])
    x = torch.randn(2, 2, 2, **KW, generator=torch.Generator().manual_seed(1))
    where = P.local_slices(x.shape)
    for name, (build, make) in PAIRS.items():
        for weights in ("replicated", "root"):
            torch.manual_seed(4)
            plain = make()
            torch.manual_seed(4)
            layer = build(P, weights)
            own, whole = x[where].clone().requires_grad_(), x.clone().requires_grad_()
            (mine,) = torch.autograd.grad(layer(own).sum(), own, create_graph=True)
            (theirs,) = torch.autograd.grad(plain(whole).sum(), whole, create_graph=True)
            torch.testing.assert_close(mine, theirs[where])
            assert mine.requires_grad == theirs.requires_grad, name
            mine.square().sum().backward()
            theirs.square().sum().backward()
            for key, p in plain.named_parameters():
                holding, got = layer._holdings[key], layer.get_parameter(key).grad
                if p.grad is None:
                    assert got is None or not got.any(), name
                elif 0 not in holding.shape:
                    torch.testing.assert_close(got, p.grad[holding.slices])
