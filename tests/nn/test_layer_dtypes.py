"""Complex tensors, and 16-bit sums on ranks that hold no part: results in the dtype torch gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono.nn as unn
from unisono.topology import Partition


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_layers_equal_torch(dtype, proof):
    P, flat = Partition([1, 1, 2]), Partition([1, 2])
    channels, one = Partition([1, 2, 1]), Partition([1, 1, 1])
    kw = {"dtype": dtype}
    pairs = [
        (lambda: unn.DistributedFeatureConv1d(P, 2, 3, 3, 2, 1, **kw),
         lambda: nn.Conv1d(2, 3, 3, 2, 1, **kw), (2, 2, 7), P, P),
        (lambda: unn.DistributedChannelConv1d(channels, one, channels, 2, 3, 3, **kw),
         lambda: nn.Conv1d(2, 3, 3, **kw), (2, 2, 7), channels, one),
        (lambda: unn.DistributedFeatureConvTranspose1d(P, 2, 3, 3, 2, **kw),
         lambda: nn.ConvTranspose1d(2, 3, 3, 2, **kw), (2, 2, 5), P, P),
        (lambda: unn.DistributedLinear(flat, Partition([1, 1]), flat, 5, 3, **kw),
         lambda: nn.Linear(5, 3, **kw), (2, 5), flat, Partition([1, 1])),
        (lambda: unn.DistributedLinearAllGather(flat, 5, 3, **kw), lambda: nn.Linear(5, 3, **kw),
         (2, 5), flat, flat),
        (lambda: unn.DistributedLinearReduceScatter(flat, 5, 3, **kw),
         lambda: nn.Linear(5, 3, **kw), (2, 5), flat, flat),
        (lambda: unn.DistributedPad(P, (2, 1), "circular", balance=True),
         lambda: nn.CircularPad1d((2, 1)), (1, 2, 6), P, P),
        (lambda: unn.Repartition(P, channels), nn.Identity, (1, 3, 5), P, channels),
    ]  # fmt: skip
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.complex64 else {}
    for build, plain, shape, P_x, P_y in pairs:
        ours, theirs = proof.pair(build, plain)
        proof.compare(ours, theirs, proof.drawn(*shape, dtype=dtype), P_x, P_y, **close)


@pytest.mark.ranks(3)
def test_autocast_sums_on_ranks_that_hold_no_part(proof):
    few, one = Partition([1, 2]), Partition([1, 1], ranks=[2])
    lines, last = Partition([1, 2, 1]), Partition([1, 1, 1], ranks=[2])
    for build, plain, shape, P_x, P_y in (
        (lambda: unn.DistributedLinear(few, one, few, 8, 5), lambda: nn.Linear(8, 5), (3, 8), few,
         one),
        (lambda: unn.DistributedGeneralConv1d(lines, last, lines, 4, 3, 3),
         lambda: nn.Conv1d(4, 3, 3), (2, 4, 6), lines, last),
    ):  # fmt: skip
        ours, theirs = proof.pair(build, plain)
        x = proof.drawn(*shape, dtype=torch.float32)
        own = x[P_x.local_slices(shape)] if P_x.active else torch.empty(0)
        with torch.autocast("cpu", torch.bfloat16):
            y, z = ours(own), theirs(x)
        assert y.dtype == torch.bfloat16
        if P_y.active:
            torch.testing.assert_close(y, z, rtol=3e-2, atol=3e-2)
        y.float().square().sum().backward()


@pytest.mark.ranks(2)
def test_averages_of_large_half_numbers_do_not_overflow():
    P = Partition([1, 1, 2])
    x = torch.full((1, 1, 16), 3e4, dtype=torch.float16)
    y = unn.DistributedAvgPool1d(P, 4)(x[..., :8])
    assert torch.equal(y, torch.full((1, 1, 2), 3e4, dtype=torch.float16))
