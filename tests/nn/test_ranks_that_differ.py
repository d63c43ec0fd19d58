"""Ranks that bring something else than the others, or nothing: what they are told and get."""

from __future__ import annotations

import pytest
import torch

import unisono
import unisono.nn as unn
from unisono.errors import CollectiveMismatch, PartitionError
from unisono.topology import Partition


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_rank_that_gives_no_tensor_is_named_on_all():
    me = unisono.world().rank
    P = Partition([1, 1, 2, 1])
    x = torch.ones(1, 1, 4, 4)
    conv = unn.DistributedConv2d(P, in_channels=1, out_channels=1, kernel_size=3, padding=1)
    for layer in (conv, unn.DistributedBatchNorm(P, 1), unn.DistributedMaxPool2d(P, 2)):
        for _ in range(2):  # before the first set-up, and after it
            with pytest.raises(PartitionError, match="found: None"):
                layer(x if me == 0 else None)
            assert layer(x).shape[0] == 1
        for hollow in (True, me == 0):
            with pytest.raises(PartitionError, match="a tensor on meta"):
                layer(x.to("meta") if hollow else x)
        with pytest.raises(PartitionError, match="found: nothing"):
            layer(*([x] if me == 0 else []))
        assert layer(x).shape[0] == 1
        with pytest.raises(PartitionError, match="2 tensors, 1 expected"):
            layer(*([x] if me == 0 else [x, x]))
        assert layer(x).shape[0] == 1
    with pytest.raises(CollectiveMismatch, match=r"rank 0: 1 tensor\n *rank 1: 2 tensors"):
        unn.DistributedMaxPool2d(P, 2)(*([x] if me == 0 else [x, x]))


@pytest.mark.ranks(2)
def test_a_rank_outside_gets_a_tensor_without_elements_whatever_it_gives():
    P = Partition([1, 1, 1, 1])
    layers = [
        unn.DistributedConv2d(P, in_channels=1, out_channels=2, kernel_size=1),
        unn.DistributedMaxPool2d(P, 2),
        unn.DistributedBatchNorm(P, 1),
        unn.DistributedUpsample(P, scale_factor=2),
        unn.Repartition(P, P),
        unn.AllSumReduce(P, axes_reduce=(2,)),
    ]
    for layer in layers:
        x = torch.ones(3, 1, 4, 4, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        if not P.active:
            assert y.shape == (3, 0)
            assert x.grad is not None
            assert not x.grad.any()
            assert layer(torch.ones(0)).shape == (0,)
    whole = unn.Broadcast(P, P, preserve_batch=False)(torch.ones(3, 1, 4, 4))
    assert whole.shape == ((3, 1, 4, 4) if P.active else (0,))
    loss = unn.DistributedMSELoss(P)(torch.ones(3, 1, 4, 4), torch.zeros(3, 1, 4, 4))
    assert loss == (1.0 if P.active else 0.0)
