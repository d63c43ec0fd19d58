"""Split embedding tables and upsampling against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import PartitionError
from unisono.nn.embedding import DistributedEmbedding
from unisono.nn.upsampling import DistributedUpsample, Interpolate
from unisono.testing import check_parity
from unisono.topology import Partition

IDS = torch.tensor([[0, 5, 2, 2], [6, 1, 0, 3], [3, 3, 3, 6]])


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}]
)
def test_embedding_split_by_columns_or_rows_equals_torch(options):
    size = unisono.world().size
    for split in ("dim", "vocab"):
        for P in (Partition([1, 1, size]), Partition([size, 1, 1])):
            torch.manual_seed(2)
            plain = nn.Embedding(7, 5, **options, dtype=torch.float64)
            torch.manual_seed(2)
            layer = DistributedEmbedding(P, 7, 5, **options, split=split, dtype=torch.float64)
            for name, value in layer.state_dict().items():
                assert torch.equal(value, plain.state_dict()[name])
            where = P.local_slices((*IDS.shape, 5))
            ids = IDS[where[:2]]
            y, z = layer(ids), plain(IDS)
            here = where if split == "dim" else where[:2]
            torch.testing.assert_close(y, z[here])
            probe = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).reshape(z.shape)
            (y * probe[here]).sum().backward()
            (z * probe).sum().backward()
            expected = plain.weight.grad[layer._holdings["weight"].slices]
            torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.ranks([1, 2, 4])
def test_upsampling_equals_torch():
    size = unisono.world().size
    P = Partition([1, 1, size])
    for mode in ("nearest", "nearest-exact", "linear"):
        for how in ({"scale_factor": 2.0}, {"size": 11}, {"scale_factor": 1.7}, {"size": 3}):
            ours, plain = DistributedUpsample(P, **how, mode=mode), nn.Upsample(**how, mode=mode)
            check_parity(ours, plain, (2, 3, 7), P)


@pytest.mark.ranks(4)
def test_upsampling_of_images_equals_torch():
    for P in (Partition([1, 1, 2, 2]), Partition([2, 2, 1, 1])):
        for mode in ("nearest", "bilinear", "bicubic"):
            for aligned in (None, True) if mode != "nearest" else (None,):
                options = {"scale_factor": 2, "mode": mode, "align_corners": aligned}
                ours, plain = DistributedUpsample(P, **options), nn.Upsample(**options)
                check_parity(ours, plain, (2, 2, 5, 6), P)


def test_interpolate_is_the_local_part():
    x = torch.randn(1, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = nn.Upsample(size=12, mode="linear")(x)
    whole = ([0, 0, 0], [1, 1, 6], [1, 1, 6])
    out = Interpolate(*whole, [0, 0, 4], [1, 1, 9], [1, 1, 12], mode="linear")(x)
    torch.testing.assert_close(out, z[:, :, 4:9])
    with pytest.raises(PartitionError, match="needs point"):
        Interpolate([0, 0, 3], [1, 1, 6], [1, 1, 6], [0, 0, 0], [1, 1, 9], [1, 1, 12])


@pytest.mark.parametrize(
    "options",
    [{}, {"size": 3, "scale_factor": 2}, {"size": 3, "mode": "bilinear"}, {"size": (3, 4)}],
)
def test_upsampling_arguments_that_make_no_sense_are_refused(options):
    with pytest.raises(PartitionError, match="HINT"):
        DistributedUpsample(Partition([1, 1, 1]), **options)


def test_embedding_arguments_that_make_no_sense_are_refused():
    with pytest.raises(PartitionError, match="dim"):
        DistributedEmbedding(Partition([1, 1]), 4, 3, split="rows")
    with pytest.raises(PartitionError, match="padding_idx"):
        DistributedEmbedding(Partition([1, 1]), 4, 3, padding_idx=4)
