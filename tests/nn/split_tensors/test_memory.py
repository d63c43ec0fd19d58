"""What a split network keeps for its backward: close to its share, nothing twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono.nn as unn
from unisono import Partition
from unisono.nn import split


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outer) for _ in range(3)])
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += self.norms[2](self.short(x))
        return F.relu(y, inplace=True)


class UNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = self.part(2, width)
        self.deep = self.part(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 3, 2, 1, 1)
        self.last = self.part(2 * width, 2)

    def part(self, inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.InstanceNorm2d(outer), nn.PReLU(),
            nn.Conv2d(outer, outer, 3, padding=1), nn.GroupNorm(1, outer), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        deep = self.up(self.deep(F.max_pool2d(first, 2)))
        return self.last(torch.cat([first, deep], 1))


class Transformer(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.zeros(1, 256, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        qkv = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
        return (x + self.narrow(F.gelu(self.wide(self.norms[1](x))))).mean(1)


def conv_net() -> nn.Module:
    layers = [(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*[layer for pair in layers for layer in pair])


def residual_net() -> nn.Module:
    stem = [nn.Conv2d(3, 4, 7, 2, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    blocks = [Residual(4, 4, 1), Residual(4, 8, 2), Residual(8, 8, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


NETS = {"conv": conv_net, "residual": residual_net, "unet": UNet, "transformer": Transformer}


def kept_bytes(net: nn.Module, x: Tensor) -> int:
    """Return the bytes that autograd keeps of a forward, parameters aside; shared ones once."""
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(t: Tensor) -> Tensor:
        memory = t.untyped_storage()
        if memory.data_ptr() not in parameters:
            kept[memory.data_ptr()] = memory.nbytes(), t  # held, so that no address comes twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = net(x)
    assert y.requires_grad
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NETS)
def test_activations_kept_per_rank_are_close_to_its_share(name):
    partition, shape = Partition([1, 1, 2, 1]), (1, 2 if name == "unet" else 3, 64, 64)
    torch.manual_seed(0)
    net, x = NETS[name](), torch.randn(shape)
    whole = kept_bytes(net, x)
    own = kept_bytes(split(net, partition), x[partition.local_slices(shape)].clone())
    assert own <= 0.6 * whole, f"{own} of {whole} bytes: {own / whole:.2f}"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NETS)
def test_with_rows_and_columns_cut_four_ranks_keep_a_quarter_each(name):
    partition, shape = Partition([1, 1, 2, 2]), (1, 2 if name == "unet" else 3, 64, 64)
    torch.manual_seed(0)
    net, x = NETS[name](), torch.randn(shape)
    whole = kept_bytes(net, x)
    parts = split(net, partition, strict=True)  # tokens of both dims, too, without gathering
    own = kept_bytes(parts, x[partition.local_slices(shape)].clone())
    assert own <= 0.34 * whole, f"{own} of {whole} bytes: {own / whole:.2f}"


@pytest.mark.ranks(2)
def test_windows_of_pooling_and_transposed_convolution_are_not_kept():
    partition = Partition([1, 1, 2, 1])
    x = torch.randn(1, 4, 64, 64)
    for plain, layer in (
        (nn.MaxPool2d(3, 2, 1), unn.DistributedMaxPool2d(partition, 3, 2, 1)),
        (nn.AvgPool2d(3, 2, 1), unn.DistributedAvgPool2d(partition, 3, 2, 1)),
        (
            nn.ConvTranspose2d(4, 4, 3, 2, 1, 1),
            unn.DistributedFeatureConvTranspose2d(partition, 4, 4, 3, 2, 1, 1),
        ),
    ):
        whole = kept_bytes(nn.Sequential(nn.ReLU(), plain), x.clone().requires_grad_())
        parts = split(nn.Sequential(nn.ReLU(), plain), partition)
        for net in (parts, nn.Sequential(nn.ReLU(), layer)):
            block = x[partition.local_slices(x.shape)].clone().requires_grad_()
            own = kept_bytes(net, block)
            assert own <= 0.55 * whole, f"{type(plain).__name__}: {own} of {whole} bytes"
