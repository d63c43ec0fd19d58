"""Layers take arguments, and show attributes, in every way that torch's own do."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.compat.distdl import nn as distdl
from unisono.errors import PartitionError
from unisono.topology import Partition, halo
from unisono.topology.window import per_dim

two = np.int64(2)


def test_integers_of_numpy_are_features_axes_and_dims():
    one, three = np.int32(1), np.int64(3)
    whole = Partition([one, one])
    layer = unn.DistributedLinear(whole, whole, whole, in_features=three, out_features=two)
    assert (layer.in_features, type(layer.in_features)) == (3, int)
    assert layer(torch.ones(1, 3)).shape == (1, 2)
    cut = unn.Split.of(torch.ones(2, 3), whole)
    for y in (cut.sum(one), cut[one], cut.sum((one,)), cut.roll(one, one).sum(dim=one)):
        assert y.numel() in (2, 3)
    assert cut.movedim(np.int64(0), one).shape == (3, 2)
    with pytest.raises(TypeError, match="bool"):
        unn.DistributedLinear(whole, whole, whole, in_features=True, out_features=2)


@pytest.mark.parametrize("size", [2.5, [2.0, 2.0], None, "22", [2, 2, 2]])
def test_other_things_are_refused_as_sizes_by_name(size):
    with pytest.raises(PartitionError, match=r"(?s)stride=.*HINT: one int, or 2"):
        per_dim(size, 2, "stride")


def test_one_kernel_size_in_a_list_is_that_of_the_last_dim_of_a_halo():
    cuts = [(0, 4), (0, 5, 10)]
    assert halo.plan(cuts, (0, 0), [two]).window_shape == (4, 6)
    assert halo.plan(cuts, (0, 0), two) == halo.plan(cuts, (0, 0), 2)


@pytest.mark.ranks(2)
def test_layers_take_sizes_of_numpy():
    P = Partition([1, 1, 2, 1])
    x = torch.arange(49.0, dtype=torch.float64).reshape(1, 1, 7, 7)
    own = x[P.local_slices(x.shape)]
    for layer, plain in (
        (unn.DistributedMaxPool2d(P, [2], padding=np.array([1, 1])), nn.MaxPool2d(2, padding=1)),
        (unn.DistributedAvgPool2d(P, two), nn.AvgPool2d(2)),
        (unn.DistributedPad(P, np.array([1, 1])), nn.ZeroPad2d((1, 1, 0, 0))),
        (distdl.DistributedAvgPool2d(P, two, dilation=np.int64(1)), nn.AvgPool2d(2, 1)),
    ):
        y = plain(x)
        assert torch.equal(layer(own), y[P.local_slices(y.shape)])
    conv = unn.DistributedFeatureConv2d(
        P, two, two, two, [1], np.array([1, 1]), dtype=torch.float64
    )
    same = unn.DistributedFeatureConv2d(P, 2, 2, 2, 1, 1, dtype=torch.float64)
    assert conv._numbers == same._numbers
    assert unn.DistributedLayerNorm(P, np.int64(7)).normalized_shape == (7,)
    total = unn.AllSumReduce(P, axes_reduce=two)(own.sum())
    assert total == x.sum()
    assert unisono.world().size == 2


SHOWN = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "padding_mode", "dilation",
    "groups",
)  # fmt: skip


@pytest.mark.parametrize("library", [unn, distdl])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_show_their_settings_under_the_names_of_torch(library, dims):
    P = Partition((1,) * (2 + dims))
    plain = getattr(nn, f"Conv{dims}d")
    for case in (
        {"stride": 2, "padding": 1, "padding_mode": "circular", "dilation": 2, "groups": 2},
        {"padding": "same"},
        {"padding": "valid"},
    ):
        asked = plain(4, 2, 3, **case)
        for kind, partitions in (("Feature", (P,)), ("Channel", (P,) * 3), ("General", (P,) * 3)):
            layer = getattr(library, f"Distributed{kind}Conv{dims}d")(*partitions, 4, 2, 3, **case)
            for name in SHOWN:
                assert getattr(layer, name) == getattr(asked, name), name
    back = getattr(library, f"DistributedFeatureConvTranspose{dims}d")(P, 4, 2, 3, 2, 1, groups=2)
    asked = getattr(nn, f"ConvTranspose{dims}d")(4, 2, 3, 2, 1, groups=2)
    for name in (*SHOWN, "output_padding"):
        assert getattr(back, name) == getattr(asked, name), name


def test_a_convolution_with_unlike_sides_shows_pairs():
    layer = unn.DistributedFeatureConv1d(Partition([1, 1, 1]), 1, 1, 3, padding=[(1, 2)])
    assert layer.padding == ((1, 2),)


@pytest.mark.ranks(2)
def test_layers_and_losses_are_called_by_keyword_in_any_order():
    P = Partition([2, 1])
    logits = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([0, 2, 1, 1, 0])
    rows = P.local_slices(logits.shape)
    own, classes = logits[rows], target[rows[0]]
    entropy = nn.CrossEntropyLoss()(logits, target)
    for split in (unn.DistributedCrossEntropyLoss(P), distdl.DistributedCrossEntropyLoss(P)):
        for _ in range(2):  # before set-up and after it
            torch.testing.assert_close(split(target=classes, input=own), entropy)
            torch.testing.assert_close(split(own, target=classes), entropy)
            torch.testing.assert_close(split(input=own, target=classes), entropy)
        assert split._setups == 1
    l1 = unn.DistributedL1Loss(P)(target=own * 0, input=own)
    torch.testing.assert_close(l1, logits.abs().mean())
    norm = unn.DistributedLayerNorm(P, 3, dtype=torch.float64)
    torch.testing.assert_close(norm(input=own), nn.functional.layer_norm(own, (3,)))


@pytest.mark.ranks(2)
def test_a_keyword_that_forward_does_not_have_is_refused_before_set_up():
    layer = unn.DistributedMSELoss(Partition([2]))
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"DistributedMSELoss.forward\(\): .*'guess'"):
        layer(guess=x, target=x)
    assert not layer._distdl_is_setup
    assert layer(x, x) == 0


LAYERS = [
    kind
    for library in (unn, distdl)
    for kind in vars(library).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and "forward" in dir(kind)
]


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_what_every_layer_takes_first_is_called_input(kind):
    if kind in (unn.Module, unn.SplitModule, distdl.Module):  # these take what their call takes
        return
    assert list(inspect.signature(kind.forward).parameters)[1] == "input"
