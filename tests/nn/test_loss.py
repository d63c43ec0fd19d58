"""Losses of split tensors against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from unisono import nn as loss
from unisono.errors import CollectiveMismatch, PartitionError
from unisono.topology import Partition


def drawn(*shape, seed=1):
    """Return the same float64 tensor on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.ranks([1, 2, 3, 4])
def test_an_ignored_label_need_not_be_a_class():
    """Of values and derivatives with other labels see `test_drawn_features`."""
    size = unisono.world().size
    x, weight = drawn(4, 5, 3), torch.linspace(0.5, 2, 5, dtype=torch.float64)
    target = torch.tensor([[0, 4, 2], [1, 255, 3], [4, 4, 0], [2, 1, 255]])
    for P in (Partition([1, size, 1]), Partition([size, 1, 1]), Partition([1, 1, size])):
        where = P.local_slices(x.shape)
        own, whole = x[where].clone().requires_grad_(), x.clone().requires_grad_()
        y = loss.DistributedCrossEntropyLoss(P, weight, 255)(own, target[where[0], where[2]])
        z = nn.CrossEntropyLoss(weight, ignore_index=255)(whole, target)
        torch.testing.assert_close(y, z)
        y.backward()
        z.backward()
        torch.testing.assert_close(own.grad, whole.grad[where])


@pytest.mark.ranks(2)
def test_a_change_that_one_rank_sees_is_met_whatever_dtype_the_sum_has():
    P = Partition([1, 2])
    for kinds, cast in (((32, 64), False), ((64, 32), False), ((16, 16), True), ((16, 16), False)):
        layer = loss.DistributedMSELoss(P)
        for length in (4, 5, 4):  # blocks of 2 and 2, then of 3 and 2
            x, t = (
                drawn(3, length).to(getattr(torch, f"{'b' if k == 16 else ''}float{k}")) * scale
                for k, scale in zip(kinds, (1, 2), strict=True)
            )
            here = P.local_slices(x.shape)
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                found, expected = layer(x[here], t[here]), nn.MSELoss()(x, t)
            close = {"rtol": 0.02, "atol": 0.02} if 16 in kinds else {}
            torch.testing.assert_close(found, expected, **close)


@pytest.mark.ranks(3)
def test_a_rank_outside_gets_a_zero_tied_to_the_graph():
    P = Partition([2])
    layer = loss.DistributedMSELoss(P)
    if P.active:
        x = torch.ones(2, requires_grad=True)
        value = layer(x, torch.zeros(2))
    else:
        value = layer(torch.empty(0), torch.empty(0))
        assert value.shape == ()
    value.backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["rows split", "classes split"])
def test_a_target_that_is_no_class_is_refused_on_all_ranks(shape):
    P = Partition(shape)
    layer = loss.DistributedCrossEntropyLoss(P)
    x, target = torch.randn(P.local_shape((4, 6))), torch.zeros(4 // shape[0], dtype=torch.long)
    for stray in (-1, 6):
        target[0] = stray
        with pytest.raises(PartitionError, match=rf"HINT: .*ignore_index={stray}"):
            layer(x, target)
        target[0] = 5
        assert layer(x, target).isfinite()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_of_16_bit_losses_are_summed_in_32_bits(dtype):
    # Sums beyond 65504 are no float16, and a bfloat16 counts whole numbers up to 256 only.
    P = Partition([2, 1])
    x, t = torch.full((700, 101), 3.0, dtype=dtype), torch.zeros(700, 101, dtype=dtype)
    where = P.local_slices(x.shape)
    target = torch.arange(700) % 101
    for layer, plain, goal in (
        (loss.DistributedMSELoss(P), nn.MSELoss(), t),
        (loss.DistributedL1Loss(P), nn.L1Loss(), t),
        (loss.DistributedKLDivLoss(P, "batchmean"), nn.KLDivLoss(reduction="batchmean"), t + 1),
        (loss.DistributedNLLLoss(P), nn.NLLLoss(), target),
        (loss.DistributedNLLLoss(P, torch.full((101,), 200.0)), nn.NLLLoss(), target),
    ):
        spot = where[: goal.dim()]
        for _ in range(2):  # set-up, then with the word inside
            own, whole = x[where].clone().requires_grad_(), x.float().requires_grad_()
            y, z = layer(own, goal[spot]), plain(whole, goal.float() if goal.dim() > 1 else goal)
            assert y.dtype == own.dtype
            torch.testing.assert_close(y.float(), z, rtol=torch.finfo(dtype).eps, atol=0.0)
            y.backward()
            z.backward()
            close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7}
            torch.testing.assert_close(own.grad.float(), whole.grad[where], **close)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_class_losses_of_16_bit_values_lose_no_digits(dtype):
    # 70000 classes: a sum of as many exponentials, or of their logits, is no float16.
    x = (drawn(2, 70000) / 8 - 3).to(dtype)
    target = torch.tensor([1, 40000])
    for P in (Partition([1, 2]), Partition([2, 1])):
        where = P.local_slices(x.shape)
        for smooth in (0.0, 0.2):
            ours = loss.DistributedCrossEntropyLoss(P, label_smoothing=smooth)
            y = ours(x[where], target[where[0]])
            z = nn.CrossEntropyLoss(label_smoothing=smooth)(x.float(), target)
            assert y.dtype == dtype
            torch.testing.assert_close(y.float(), z, rtol=torch.finfo(dtype).eps, atol=0.0)
            with torch.autocast("cpu", torch.bfloat16):
                y = ours(x[where], target[where[0]])
            torch.testing.assert_close(y, z)  # in float32, as torch's


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_ranks_whose_dtypes_differ_are_told_so():
    P = Partition([2, 1])
    x, t = torch.ones(3, 4), torch.zeros(3, 4)
    classes = torch.tensor([0, 1, 2])
    first = unisono.world().rank == 0

    def other(value):
        return value if first else value.double()

    def refused(layer, *given):
        with pytest.raises(CollectiveMismatch, match=r"rank 0: torch.float32\n.*float64"):
            layer(*given)

    for reduction in ("mean", "none"):
        mse = loss.DistributedMSELoss(P, reduction)
        for _ in range(2):  # before the first set-up, and after it
            refused(mse, other(x), t)
            refused(mse, x, other(t))
            assert mse(x, t).mean() == 1
        ce = loss.DistributedCrossEntropyLoss(P, reduction=reduction)
        refused(ce, other(x), classes)
        assert ce(x, classes).dtype == x.dtype
