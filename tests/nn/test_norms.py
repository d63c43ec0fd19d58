"""Split normalisation against torch's, statistics and second derivatives too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import PartitionError
from unisono.nn.layers.norm import (
    DistributedBatchNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from unisono.topology import Partition


def drawn(*shape):
    """Return the same float64 tensor on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def scrambled(layer):
    """Return a state whose weights are not all ones and zeros."""
    state = {
        name: 0.5 + torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape) / 7
        for name, value in layer.state_dict().items()
        if value.is_floating_point()
    }
    return {**layer.state_dict(), **state}


def compare(layer, plain, P, x, cuts=None):
    """Compare value, gradients, second derivative and state."""
    where = cuts or P.local_slices(x.shape)
    own = x[where].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    y, z = layer(own), plain(whole)
    torch.testing.assert_close(y, z[where])
    probe = torch.linspace(-1, 1, z.numel(), dtype=x.dtype).reshape(z.shape)
    (g,) = torch.autograd.grad((y**2 * probe[where]).sum(), own, create_graph=True)
    (h,) = torch.autograd.grad((z**2 * probe).sum(), whole, create_graph=True)
    torch.testing.assert_close(g, h[where])
    (g**2).sum().backward()
    (h**2).sum().backward()
    torch.testing.assert_close(own.grad, whole.grad[where])
    mine, theirs = layer(x[where]), plain(x)
    if mine.requires_grad:
        (mine * probe[where]).sum().backward()
        (theirs * probe).sum().backward()
    for name, p in layer.named_parameters():
        expected = getattr(plain, name).grad[layer._holdings[name].slices]
        torch.testing.assert_close(p.grad, expected)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@pytest.mark.ranks([1, 2, 4])
def test_batch_norm_uses_the_statistics_of_the_whole_tensor():
    size = unisono.world().size
    x = drawn(4, 6, 7)
    for P in (Partition([size, 1, 1]), Partition([1, 1, size]), Partition([1, size, 1])):
        for options in ({}, {"momentum": None}, {"affine": False}):
            layer = DistributedBatchNorm(P, 6, **options, dtype=x.dtype)
            plain = nn.BatchNorm1d(6, **options, dtype=x.dtype)
            compare(layer, plain, P, x)
            layer.eval()
            plain.eval()
            where = P.local_slices(x.shape)
            torch.testing.assert_close(layer(x[where]), plain(x)[where])


@pytest.mark.ranks(4)
def test_batch_norm_of_unequal_blocks_and_images():
    x = drawn(5, 3, 4, 6)
    P = Partition([2, 1, 1, 2])
    compare(DistributedBatchNorm(P, 3, dtype=x.dtype), nn.BatchNorm2d(3, dtype=x.dtype), P, x)


@pytest.mark.ranks([1, 2, 3])
def test_layer_norm_counts_what_each_rank_holds():
    size = unisono.world().size
    x = drawn(3, 4, 7)
    for P in (Partition([1, 1, size]), Partition([size, 1, 1]), Partition([1, size, 1])):
        compare(DistributedLayerNorm(P, 7, dtype=x.dtype), nn.LayerNorm(7, dtype=x.dtype), P, x)
        for eps in (None, 0.1):
            ours = DistributedRMSNorm(P, 7, eps, dtype=x.dtype)
            compare(ours, nn.RMSNorm(7, eps, dtype=x.dtype), P, x)
    P = Partition([1, 1, size])
    both = nn.LayerNorm([4, 7], dtype=x.dtype)
    layer = DistributedLayerNorm(P, [4, 7], dtype=x.dtype)
    state = scrambled(both)
    both.load_state_dict(state)
    layer.load_state_dict(state)
    compare(layer, both, P, x)


@pytest.mark.ranks(2)
def test_layer_norm_moves_its_parameters_to_unbalanced_blocks():
    x = drawn(3, 7)
    P = Partition([1, 2])
    cut = slice(0, 6) if P.root.rank == 0 else slice(6, 7)
    plain = nn.LayerNorm(7, dtype=x.dtype)
    plain.load_state_dict(scrambled(plain))
    layer = DistributedLayerNorm(P, 7, dtype=x.dtype)
    layer.load_state_dict(plain.state_dict())
    compare(layer, plain, P, x, (slice(None), cut))


def test_one_value_a_channel_is_refused_in_training():
    layer = DistributedBatchNorm(Partition([1, 1]), 3)
    with pytest.raises(PartitionError, match="1 <= 1"):
        layer(torch.ones(1, 3))
    layer.eval()
    assert layer(torch.ones(1, 3)).shape == (1, 3)
    with pytest.raises(PartitionError, match="running statistics"):  # none, so the batch's are used
        DistributedBatchNorm(Partition([1, 1]), 3, track_running_stats=False).eval()(
            torch.ones(1, 3)
        )


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(PartitionError, match="4 channels != 3"):
        DistributedBatchNorm(Partition([1, 1]), 3)(torch.ones(2, 4))
    with pytest.raises(PartitionError, match="normalized_shape"):
        DistributedLayerNorm(Partition([1, 1]), 3)(torch.ones(2, 4))


def test_sixteen_bits_keep_their_dtype():
    layer = DistributedBatchNorm(Partition([1, 1]), 3, dtype=torch.float32)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), nn.BatchNorm1d(3)(x.float()), rtol=0.02, atol=0.02)


@pytest.mark.ranks([1, 4])
def test_scale_and_shift_stored_on_first_ranks_get_the_gradients_of_all():
    size = unisono.world().size
    x = drawn(4, 6, 5, 4)
    shape = [2, 1, 1, 2] if size == 4 else [1, 1, 1, 1]
    P = Partition(shape)
    layer = DistributedBatchNorm(P, 6, dtype=x.dtype, weights="root")
    plain = nn.BatchNorm2d(6, dtype=x.dtype)
    plain.load_state_dict(scrambled(plain))
    layer.load_state_dict(plain.state_dict())
    compare(layer, plain, P, x)
    assert (layer.weight.numel() == 6) == (P.rank == 0)
    layer = DistributedLayerNorm(P, (5, 4), dtype=x.dtype, weights="root")
    plain = nn.LayerNorm((5, 4), dtype=x.dtype)
    plain.load_state_dict(scrambled(plain))
    layer.load_state_dict(plain.state_dict())
    compare(layer, plain, P, x)
    assert (layer.weight.numel() > 0) == (P.index[:2] == (0, 0))


@pytest.mark.ranks([1, 2, 3])
def test_batch_norm_with_a_scale_and_no_shift():
    """It took the scale for absent, too."""
    size = unisono.world().size
    x = drawn(4, 6, 7)
    for P in (Partition([size, 1, 1]), Partition([1, 1, size])):
        for weights in ("replicated", "root"):
            plain = nn.BatchNorm1d(6, bias=False, dtype=torch.float64)
            layer = DistributedBatchNorm(P, 6, bias=False, dtype=torch.float64, weights=weights)
            state = scrambled(plain)
            plain.load_state_dict(state)
            layer.load_state_dict(state)
            compare(layer, plain, P, x)
            plain.zero_grad()
            layer.zero_grad()
            compare(layer.eval(), plain.eval(), P, x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_of_16_bit_values_are_not_rounded(dtype):
    # A variance above 65504 is no float16; a mean of 100.3 in bfloat16 shifts all values by 0.3.
    P = Partition([2, 1, 1])
    shift = torch.tensor([0.0, 100.3]).view(1, 2, 1)
    x = (drawn(6, 2, 40).float() * torch.tensor([400.0, 1.0]).view(1, 2, 1) + shift).to(dtype)
    where = P.local_slices(x.shape)
    close = {"rtol": 1e-2, "atol": 1e-2}
    for kept in (dtype, torch.float32):  # of the parameters; as under autocast
        norm, plain = DistributedBatchNorm(P, 2, dtype=kept), nn.BatchNorm1d(2)
        state = {k: v for k, v in scrambled(plain).items() if k in ("weight", "bias")}
        state = {k: v.to(dtype).float() for k, v in state.items()}
        norm.load_state_dict(state, strict=False)
        plain.load_state_dict(state, strict=False)
        y, z = norm(x[where]), plain(x.float())
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), z[where].detach(), **close)
    small = torch.tensor([1e-4, 3.3e-6])  # with eps 1e-7, which is 0 in float16
    ours = DistributedInstanceNorm(P, 2, 1e-7, track_running_stats=True, dtype=dtype).eval()
    ours.running_var.copy_(small)
    x = (x / 1000).to(dtype)
    ref = nn.InstanceNorm1d(2, 1e-7, track_running_stats=True).eval()
    ref.running_var.copy_(ours.running_var)
    close = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(ours(x[where]).float(), ref(x.float())[where], **close)
