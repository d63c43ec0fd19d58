"""Split norms against torch's: values, first and second derivatives, statistics, refusals."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.errors import PartitionError
from unisono.topology import Partition

DOUBLE = {"dtype": torch.float64}


WEIGHTS = ("replicated", "root")


SHAPES = [(4, 6, 7), (2, 6, 5, 3), (1, 6, 2, 2), (2, 6, 3, 2, 2)]
CASES = {
    "batch": ("BatchNorm", lambda s: s[1:2], [{}, {"momentum": None}, {"affine": False}]),
    "batch without shift": ("BatchNorm", lambda s: s[1:2], [{"bias": False}]),
    "one group": ("GroupNorm", lambda s: (1, s[1]), [{}, {"affine": False}]),
    "three groups": ("GroupNorm", lambda s: (3, s[1]), [{}, {"bias": False}]),
    "a group for each channel": ("GroupNorm", lambda s: (s[1], s[1]), [{}]),
    "instance": ("InstanceNorm", lambda s: s[1:2], [{"affine": True}]),
    "tracked instance": ("InstanceNorm", lambda s: s[1:2], [{"track_running_stats": True}]),
    "layer": ("LayerNorm", lambda s: (s[2:],), [{}, {"bias": False}]),
    "layer with channels": ("LayerNorm", lambda s: (s[1:],), [{}, {"elementwise_affine": False}]),
    "RMS": ("RMSNorm", lambda s: (s[2:],), [{}]),
    "RMS with channels": ("RMSNorm", lambda s: (s[1:],), [{"eps": 0.1}]),
}


def grids(size, dims, groups):
    """Return partitions along each dim, and along two; channels are cut between groups."""
    lines = [tuple(size if i == axis else 1 for i in range(dims)) for axis in range(dims)]
    if size == 4:
        lines += [(2, 1, 2, 1, 1)[:dims], (1, 2, 2, 1, 1)[:dims]]
    return [Partition(line) for line in lines if groups is None or groups % line[1] == 0]


@pytest.mark.ranks([1, 2, 3, 4], timeout=60)
@pytest.mark.parametrize("name", CASES)
def test_norms_equal_torch_however_the_tensor_is_cut(name, proof):
    """Odd sizes, fewer points than ranks, and blocks that are uneven or empty."""
    kind, sizes, choices = CASES[name]
    for number, (shape, options) in enumerate(product(SHAPES, choices)):
        each_dim = f"{len(shape) - 2}d" if kind in ("BatchNorm", "InstanceNorm") else ""
        arguments, options = sizes(shape), {**options, **DOUBLE}
        groups = arguments[0] if kind == "GroupNorm" else None
        for place, P in enumerate(grids(unisono.world().size, len(shape), groups)):
            theirs = getattr(nn, kind + each_dim)(*arguments, **options)
            make = getattr(unn, f"Distributed{kind}")
            ours = make(P, *arguments, **options, weights=WEIGHTS[number % 2])
            ours, theirs = paired(ours, theirs)
            x, seed = proof.drawn(*shape) * 3 + 2, 5 * ((number + place) % 2)
            compare(proof, ours, theirs, x, P, seed=seed)
            if getattr(ours, "track_running_stats", False):
                compare(proof, ours, theirs, x, P, seed=7)
                unn.check_replicas(ours)
                compare(proof, ours.eval(), theirs.eval(), x, P, seed=seed)


def paired(ours, theirs):
    """Give both the same weights and statistics, not all ones and zeros; return both."""
    with torch.no_grad():
        for number, value in enumerate(theirs.state_dict().values()):
            if value.is_floating_point():
                value.copy_(0.5 + number + torch.arange(value.numel()).view(value.shape) / 7)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(proof, ours, theirs, x, P, **how):
    """Compare what a norm computes, and its state after that."""
    proof.compare(ours, theirs, x, P, **how)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name])


@pytest.mark.ranks([2, 3])
def test_channels_of_split_tensors_stay_cut_in_norms_and_class_losses(proof):
    P, x = Partition([1, unisono.world().size, 1]), proof.drawn(2, 6, 5)
    where = P.local_slices(x.shape)
    for plain in (
        nn.BatchNorm1d(6, **DOUBLE),
        nn.GroupNorm(3, 6, **DOUBLE),  # on two ranks the cut lies inside a group
        nn.InstanceNorm1d(6, affine=True, **DOUBLE),
    ):
        net = unn.split(copy.deepcopy(plain), P, strict=True)
        for is_training in (True, False):
            for each in (net, plain):
                each.train(is_training)
                each.zero_grad()
            y, z = net(x[where]), plain(x)
            assert list(y.cuts) == [1]
            torch.testing.assert_close(y.local, z[where])
            y.pow(3).sum().backward()
            z.pow(3).sum().backward()
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        torch.testing.assert_close(net.state_dict(), plain.state_dict())
    labels = torch.arange(10).view(2, 5) % 6
    for weight, reduction in product((None, torch.arange(6.0).double()), ("mean", "none")):
        options = {"weight": weight, "reduction": reduction, "label_smoothing": 0.1}
        loss = nn.functional.cross_entropy(
            unn.Split.of(x[where], P, strict=True), labels, **options
        )
        torch.testing.assert_close(loss, nn.functional.cross_entropy(x, labels, **options))


@pytest.mark.ranks(4)
def test_scale_and_shift_are_stored_on_first_ranks():
    P = Partition([2, 1, 1, 2])
    norm = unn.DistributedBatchNorm(P, 6, weights="root")
    assert (norm.weight.numel() == 6) == (P.rank == 0)
    norm = unn.DistributedLayerNorm(P, (5, 4), weights="root")
    assert (norm.weight.numel() > 0) == (P.index[:2] == (0, 0))


@pytest.mark.ranks([1, 2, 3])
def test_gradients_are_summed_at_the_end_and_clipped_as_in_one_process(proof):
    P = Partition([1, 1, unisono.world().size])
    plain = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True))
    plain = plain.double()
    net = unn.split(copy.deepcopy(plain), P, blocks=True)
    with unn.no_sync(net):
        for seed in range(2):
            x = proof.drawn(2, 2, 9, seed=seed)
            y, z = net(x[P.local_slices(x.shape)]), plain(x)
            y.pow(3).sum().backward()
            z.pow(3).sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    norm = unn.clip_grad_norm_(net, 0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))


@pytest.mark.ranks(3)
def test_large_means_leave_the_digits_of_the_variance(proof):
    P = Partition([1, 1, 3])
    x = proof.drawn(1, 2, 500, dtype=torch.float32) + 10000
    y = unn.DistributedGroupNorm(P, 1, 2)(x[P.local_slices(x.shape)])
    z = nn.GroupNorm(1, 2, **DOUBLE)(x.double())[P.local_slices(x.shape)]
    torch.testing.assert_close(y, z.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.ranks(2)
def test_what_cannot_be_normalised_is_refused_on_all_ranks():
    P, two = Partition([1, 1, 2]), Partition([2, 1])
    with pytest.raises(PartitionError, match=r"the cut at 4 lies inside a group: 4 % 8 = 4"):
        unn.DistributedGroupNorm(Partition([1, 2, 1]), 1, 8)
    with pytest.raises(PartitionError, match="4 channels in 3 equal groups"):
        unn.DistributedGroupNorm(P, 3, 4)
    with pytest.raises(PartitionError, match=r"\[2\] != \[4\]"):
        unn.DistributedGroupNorm(P, 2, 4)(torch.ones(1, 2, 3))
    with pytest.raises(PartitionError, match=r"needs 3 to 5"):
        unn.DistributedInstanceNorm(Partition([1, 2]), 4)
    rows = 1 - unisono.world().rank  # one point in all
    with pytest.raises(PartitionError, match="4 <= 4"):
        unn.DistributedInstanceNorm(P, 4)(torch.ones(1, 4, rows))
    with pytest.raises(PartitionError, match="4 <= 4"):
        unn.DistributedGroupNorm(P, 4, 4)(torch.ones(1, 4, rows))
    with pytest.raises(PartitionError, match="3 <= 3"):
        unn.DistributedBatchNorm(two, 3)(torch.ones(rows, 3))
    assert unn.DistributedBatchNorm(two, 3).eval()(torch.ones(rows, 3)).shape == (rows, 3)
    with pytest.raises(PartitionError, match="running statistics"):  # none, so the batch's are used
        unn.DistributedBatchNorm(two, 3, track_running_stats=False).eval()(torch.ones(rows, 3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_of_16_bit_values_are_not_rounded(dtype, proof):
    # A variance above 65504 is no float16; a mean of 100.3 in bfloat16 shifts all values by 0.3.
    P = Partition([2, 1, 1])
    shift = torch.tensor([0.0, 100.3]).view(1, 2, 1)
    x = (proof.drawn(6, 2, 40).float() * torch.tensor([400.0, 1.0]).view(1, 2, 1) + shift).to(dtype)
    where = P.local_slices(x.shape)
    close = {"rtol": 1e-2, "atol": 1e-2}
    for kept in (dtype, torch.float32):  # of the parameters; as under autocast
        norm, plain = unn.DistributedBatchNorm(P, 2, dtype=kept), nn.BatchNorm1d(2)
        state = {"weight": torch.tensor([0.5, 0.625]), "bias": torch.tensor([0.5, 0.75])}
        norm.load_state_dict(state, strict=False)
        plain.load_state_dict(state, strict=False)
        y, z = norm(x[where]), plain(x.float())
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), z[where].detach(), **close)
    small = torch.tensor([1e-4, 3.3e-6])  # with eps 1e-7, which is 0 in float16
    ours = unn.DistributedInstanceNorm(P, 2, 1e-7, track_running_stats=True, dtype=dtype).eval()
    ours.running_var.copy_(small)
    x = (x / 1000).to(dtype)
    ref = nn.InstanceNorm1d(2, 1e-7, track_running_stats=True).eval()
    ref.running_var.copy_(ours.running_var)
    close = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(ours(x[where]).float(), ref(x.float())[where], **close)
