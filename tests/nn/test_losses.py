"""Losses of split tensors against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tests.nn.drawing import RANKS, quick
from torch import nn

import unisono
import unisono.nn as unn
from unisono.errors import PartitionError
from unisono.topology import Partition


def curved(gradient, x):
    """Return the gradient of the squares of a gradient: zeros where it does not depend on `x`."""
    if not gradient.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad((gradient**2).sum(), x, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


LOSSES = {
    "L1Loss": [{}],
    "MSELoss": [{}],
    "PoissonNLLLoss": [{}, {"full": True}, {"log_input": False, "eps": 1e-3}],
    "BCELoss": [{}],
    "BCEWithLogitsLoss": [{}],
    "KLDivLoss": [{}, {"log_target": True}],
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.ranks(RANKS)
@settings(quick, max_examples=2, phases=[Phase.explicit, Phase.generate])
@example(shape=[3, 4], axis=1, seed=0)  # few, since each is tried with every loss and reduction
@example(shape=[2, 1, 3], axis=2, seed=7)
@example(shape=[4], axis=0, seed=3)
@example(shape=[1], axis=0, seed=0)  # one point, and ranks with none
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    seed=st.integers(0, 40),
)
def test_losses_of_elements_equal_torch(shape, axis, seed, proof):
    size = unisono.world().size
    axis %= len(shape)
    P = Partition([size if i == axis else 1 for i in range(len(shape))])
    x, t = proof.drawn(*shape), proof.drawn(*shape, seed=2).sigmoid()
    cuts = proof.cuts_of(shape, P.shape, seed)
    where = proof.own_slices(P, cuts)
    for name, options in LOSSES.items():
        ours, plain = getattr(unn, f"Distributed{name}"), getattr(nn, name)
        values = x.sigmoid() if name == "BCELoss" else x
        if name == "PoissonNLLLoss":
            values = x.abs() + 0.1
        for more in options:
            for reduction in ours._valid_reductions:
                own = values[where].clone().requires_grad_()
                whole = values.clone().requires_grad_()
                target = t.log() if more.get("log_target") else t
                y = ours(P, reduction=reduction, **more)(own, target[where])
                z = plain(reduction=reduction, **more)(whole, target)
                if reduction == "none":
                    torch.testing.assert_close(y, z[where])
                    y, z = y.sum(), z.sum()
                else:
                    torch.testing.assert_close(y, z)
                g, h = (
                    torch.autograd.grad(v, i, create_graph=True)[0]
                    for v, i in ((y, own), (z, whole))
                )
                torch.testing.assert_close(g, h[where])
                torch.testing.assert_close(curved(g, own), curved(h, whole)[where])


@pytest.mark.ranks(RANKS)
@quick
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    axis=st.integers(0, 3),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    weighted=st.booleans(),
    smooth=st.sampled_from([0.0, 0.3]),
    ignored=st.sampled_from([-100, 0]),
    seed=st.integers(0, 40),
)
def test_losses_of_classes_equal_torch(
    shape, axis, reduction, weighted, smooth, ignored, seed, proof
):
    size = unisono.world().size
    axis %= len(shape)
    P = Partition([size if i == axis else 1 for i in range(len(shape))])
    x = proof.drawn(*shape)
    target = torch.randint(
        shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(seed)
    )
    target.view(-1)[-1] = ignored
    weight = torch.linspace(0.5, 2, shape[1], dtype=x.dtype) if weighted else None
    where = proof.own_slices(P, proof.cuts_of(shape, P.shape, seed))
    spot = (where[0], *where[2:])
    options = {"ignore_index": ignored, "reduction": reduction}
    for ours, theirs, values in (
        (
            unn.DistributedCrossEntropyLoss(P, weight, **options, label_smoothing=smooth),
            nn.CrossEntropyLoss(weight, **options, label_smoothing=smooth),
            x,
        ),
        (
            unn.DistributedNLLLoss(P, weight, **options),
            nn.NLLLoss(weight, **options),
            x.log_softmax(1),
        ),
    ):
        own, whole = values[where].clone().requires_grad_(), values.clone().requires_grad_()
        y, z = ours(own, target[spot]), theirs(whole, target)
        torch.testing.assert_close(y, z[spot] if reduction == "none" else z, equal_nan=True)
        y, z = y.sum(), z.sum()  # every class rank holds every position, and seeds it alike
        g, h = (torch.autograd.grad(v, i, create_graph=True)[0] for v, i in ((y, own), (z, whole)))
        torch.testing.assert_close(g, h[where], equal_nan=True)
        torch.testing.assert_close(curved(g, own), curved(h, whole)[where], equal_nan=True)


def drawn(*shape, seed=1):
    """Return the same float64 tensor on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.ranks([1, 2, 3, 4])
def test_an_ignored_label_need_not_be_a_class():
    size = unisono.world().size
    x, weight = drawn(4, 5, 3), torch.linspace(0.5, 2, 5, dtype=torch.float64)
    target = torch.tensor([[0, 4, 2], [1, 255, 3], [4, 4, 0], [2, 1, 255]])
    for P in (Partition([1, size, 1]), Partition([size, 1, 1]), Partition([1, 1, size])):
        where = P.local_slices(x.shape)
        own, whole = x[where].clone().requires_grad_(), x.clone().requires_grad_()
        y = unn.DistributedCrossEntropyLoss(P, weight, 255)(own, target[where[0], where[2]])
        z = nn.CrossEntropyLoss(weight, ignore_index=255)(whole, target)
        torch.testing.assert_close(y, z)
        y.backward()
        z.backward()
        torch.testing.assert_close(own.grad, whole.grad[where])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["rows split", "classes split"])
def test_a_target_that_is_no_class_is_refused_on_all_ranks(shape):
    P = Partition(shape)
    layer = unn.DistributedCrossEntropyLoss(P)
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
        (unn.DistributedMSELoss(P), nn.MSELoss(), t),
        (unn.DistributedL1Loss(P), nn.L1Loss(), t),
        (unn.DistributedKLDivLoss(P, "batchmean"), nn.KLDivLoss(reduction="batchmean"), t + 1),
        (unn.DistributedNLLLoss(P), nn.NLLLoss(), target),
        (unn.DistributedNLLLoss(P, torch.full((101,), 200.0)), nn.NLLLoss(), target),
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
