"""16-bit, complex and integer tensors, and autocast: results in the dtype torch gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono.nn as unn
from unisono.topology import Partition

LOOSE = {torch.bfloat16: (3e-2, 6e-2), torch.float16: (4e-3, 1e-2), torch.float32: (1e-5, 1e-5)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_layer_keeps_the_dtype_and_equals_torch(dtype, proof):
    rtol, atol = LOOSE[dtype]
    for case in proof.zoo(dtype=dtype):
        ours, theirs = proof.pair(case.build, case.plain)
        own = [t.requires_grad_(t.is_floating_point()) for t in case.own_inputs()]
        whole = [t.clone().requires_grad_(t.is_floating_point()) for t in case.inputs]
        y, z = ours(*own), theirs(*whole)
        assert y.dtype == z.dtype == dtype, case.name
        y.float().square().mean().backward()
        if case.P_y.active and z.dim():
            z = z[case.P_y.local_slices(z.shape)]
        if case.P_y.active:
            torch.testing.assert_close(
                y, z, rtol=rtol, atol=atol, msg=lambda m, c=case: f"{c.name}: {m}"
            )
        for t in own:
            if t.requires_grad:
                assert t.grad.dtype == dtype, case.name
                assert t.grad.isfinite().all(), case.name
        for p in ours.parameters():
            assert p.grad is None or p.grad.dtype == dtype


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
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool], ids=str
)
def test_integers_are_moved(dtype):
    P, Q, first = Partition([3, 1]), Partition([1, 3]), Partition([1, 1])
    x = torch.arange(15).reshape(5, 3).to(dtype)
    own = x[P.local_slices(x.shape)]
    assert torch.equal(unn.Repartition(P, Q)(own), x[Q.local_slices(x.shape)])
    assert torch.equal(unn.AllGather(P, 0)(own), x)
    spread = unn.Broadcast(first, P)(x if first.active else torch.empty(0))
    assert torch.equal(spread, x)
    window = unn.HaloExchange(P, (3, 1), padding=((1, 1), (0, 0)))(own)
    assert window.dtype == dtype
    padded = nn.functional.pad(x.long(), (0, 0, 1, 1)).to(dtype)
    start = P.local_slices(x.shape)[0].start
    assert torch.equal(window, padded[start : start + len(window)])
    if dtype not in (torch.bool, torch.uint8):
        assert torch.equal(unn.AllSumReduce(P, 0)(x), 3 * x)
        assert torch.equal(unn.ReduceScatter(P, 0)(x), 3 * x[P.local_slices(x.shape)])
        total = unn.SumReduce(P, first)(x)
        assert torch.equal(total, 3 * x if first.active else torch.empty(5, 0, dtype=dtype))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0)])
def test_autocast_gives_what_torch_gives(ranks, proof):
    for case in proof.zoo(ranks, dtype=torch.float32):
        ours, theirs = proof.pair(case.build, case.plain)
        own = [t.requires_grad_(t.is_floating_point()) for t in case.own_inputs()]
        with torch.autocast("cpu", torch.bfloat16):
            y, z = ours(*own), theirs(*case.inputs)
        if case.P_y.active:
            assert y.dtype == z.dtype, case.name
            cut = z[case.P_y.local_slices(z.shape)] if z.dim() else z
            torch.testing.assert_close(
                y, cut, rtol=3e-2, atol=6e-2, msg=lambda m, c=case: f"{c.name}: {m}"
            )
        y.float().square().sum().backward()
        for t in own:
            assert t.grad is None or t.grad.dtype == torch.float32
        for p in ours.parameters():
            assert p.grad is None or p.grad.dtype == torch.float32


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
