"""Split group and instance norm against torch's: values, derivatives, statistics, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.errors import PartitionError
from unisono.topology import Partition

DOUBLE = {"dtype": torch.float64}


def grids(size, dims):
    """Return partitions along the batch, the first dim of space, and both."""
    lines = [[size, 1, 1, 1, 1], [1, 1, size, 1, 1], [1, 1, 1, size, 1]]
    if size == 4:
        lines.append([2, 1, 2, 1, 1])
    return [Partition(line[:dims]) for line in lines if torch.Size(line[:dims]).numel() == size]


def scrambled(layer):
    """Return the layer with weights that are not all ones and zeros."""
    for number, p in enumerate(layer.parameters()):
        p.data = 0.5 + number + torch.arange(p.numel(), dtype=p.dtype) / 7
    return layer


@pytest.mark.ranks([1, 2, 3, 4], backend=["gloo", "shm"], timeout=60)
@pytest.mark.parametrize("shape", [(3, 6, 7), (2, 6, 5, 3), (1, 6, 2, 2), (2, 6, 3, 2, 2)])
def test_group_norm_equals_torch(shape, proof):
    """Odd sizes, fewer rows or samples than ranks, and cuts anywhere with empty blocks."""
    size = unisono.world().size
    x = proof.drawn(*shape) * 3 + 2
    for P in grids(size, len(shape)):
        for groups, affine, weights in (
            (1, True, "root"),
            (3, True, "replicated"),
            (6, False, "root"),
        ):
            theirs = scrambled(nn.GroupNorm(groups, 6, affine=affine, **DOUBLE))
            ours = unn.DistributedGroupNorm(P, groups, 6, affine=affine, weights=weights, **DOUBLE)
            ours.load_state_dict(theirs.state_dict())
            for seed in (0, 5) if P.shape[1] == 1 else (0,):
                proof.compare(ours, theirs, x, P, seed=seed)
            for name, value in ours.state_dict().items():
                torch.testing.assert_close(value, theirs.state_dict()[name])


@pytest.mark.ranks([1, 3])
def test_a_scale_without_a_shift_counts(proof):
    """`bias=False` must leave out the shift alone."""
    P = Partition([1, 1, unisono.world().size])
    for weights in ("replicated", "root"):
        theirs = scrambled(nn.GroupNorm(2, 4, bias=False, **DOUBLE))
        ours = unn.DistributedGroupNorm(P, 2, 4, bias=False, weights=weights, **DOUBLE)
        ours.load_state_dict(theirs.state_dict())
        proof.compare(ours, theirs, proof.drawn(2, 4, 7), P)


@pytest.mark.ranks([1, 2, 3])
def test_gradients_are_summed_at_the_end_and_clipped_as_in_one_process(proof):
    P = Partition([1, 1, unisono.world().size])
    plain = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True))
    plain = plain.double()
    net = unn.distribute(plain, P)
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


@pytest.mark.ranks([2, 4])
def test_channels_may_be_cut_between_groups(proof):
    size = unisono.world().size
    x = proof.drawn(2, 8, 5)
    for P in [Partition([1, size, 1]), Partition([1, 2, size // 2])]:
        for weights in ("replicated", "root"):
            theirs = scrambled(nn.GroupNorm(4, 8, **DOUBLE))
            ours = unn.DistributedGroupNorm(P, 4, 8, weights=weights, **DOUBLE)
            ours.load_state_dict(theirs.state_dict())
            proof.compare(ours, theirs, x, P)
    with pytest.raises(PartitionError, match=r"the cut at 4 lies inside a group: 4 % 8 = 4"):
        unn.DistributedGroupNorm(Partition([1, 2, size // 2]), 1, 8)


@pytest.mark.ranks([1, 2, 3, 4], backend=["gloo", "shm"], timeout=60)
@pytest.mark.parametrize("tracked", [False, True])
def test_instance_norm_equals_torch_and_tracks_its_statistics(tracked, proof):
    size = unisono.world().size
    kinds = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
    for shape in [(3, 2, 7), (2, 3, 2, 5), (1, 2, 3, 2, 2)]:
        x = proof.drawn(*shape) + 4
        for P in grids(size, len(shape)):
            options = {"affine": True, "track_running_stats": tracked, **DOUBLE}
            theirs = kinds[len(shape)](shape[1], **options)
            ours = unn.DistributedInstanceNorm(P, shape[1], **options)
            state = scrambled(theirs).state_dict()
            ours.load_state_dict(state)
            for _ in range(2):
                proof.compare(ours, theirs, x, P, seed=3)
                for name, value in ours.state_dict().items():
                    torch.testing.assert_close(value, theirs.state_dict()[name])
            unn.check_replicas(ours)
            proof.compare(ours.eval(), theirs.eval(), x, P)


@pytest.mark.ranks([1, 3])
def test_half_precision_is_computed_in_single(proof):
    size = unisono.world().size
    P = Partition([1, 1, size])
    x = (proof.drawn(2, 4, 301, dtype=torch.float32) + 100).bfloat16()
    ours = unn.DistributedGroupNorm(P, 2, 4)
    y = ours(x[P.local_slices(x.shape)])
    z = nn.functional.group_norm(x.float(), 2).bfloat16()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, z[P.local_slices(x.shape)])


@pytest.mark.ranks(3)
def test_large_means_leave_the_digits_of_the_variance(proof):
    P = Partition([1, 1, 3])
    x = proof.drawn(1, 2, 500, dtype=torch.float32) + 10000
    y = unn.DistributedGroupNorm(P, 1, 2)(x[P.local_slices(x.shape)])
    z = nn.GroupNorm(1, 2, **DOUBLE)(x.double())[P.local_slices(x.shape)]
    torch.testing.assert_close(y, z.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.ranks(3)
def test_ranks_outside_pass_nothing(proof):
    P = Partition([1, 1, 2], ranks=[0, 2])
    theirs = scrambled(nn.GroupNorm(2, 4, **DOUBLE))
    ours = unn.DistributedGroupNorm(P, 2, 4, **DOUBLE)
    ours.load_state_dict(theirs.state_dict())
    proof.compare(ours, theirs, proof.drawn(2, 4, 5), P)
    assert torch.equal(ours.state_dict()["weight"], theirs.weight)


@pytest.mark.ranks(2)
def test_shapes_may_change_on_one_rank_alone(proof):
    P = Partition([1, 1, 2])
    ours, theirs = unn.DistributedGroupNorm(P, 2, 4, **DOUBLE), nn.GroupNorm(2, 4, **DOUBLE)
    for points in (9, 10, 1, 9):
        proof.compare(ours, theirs, proof.drawn(2, 4, points), P)


@pytest.mark.ranks(2)
def test_what_cannot_be_normalised_is_refused_on_all_ranks():
    P, norms = Partition([1, 1, 2]), unn
    with pytest.raises(PartitionError, match="4 channels in 3 equal groups"):
        norms.DistributedGroupNorm(P, 3, 4)
    with pytest.raises(PartitionError, match="2 channels != 4"):
        norms.DistributedGroupNorm(P, 2, 4)(torch.ones(1, 2, 3))
    with pytest.raises(PartitionError, match=r"needs 3 to 5"):
        norms.DistributedInstanceNorm(Partition([1, 2]), 4)
    rows = 1 - unisono.world().rank  # one point in all
    with pytest.raises(PartitionError, match="one value a group"):
        norms.DistributedInstanceNorm(P, 4)(torch.ones(1, 4, rows))
    with pytest.raises(PartitionError, match="one value a group"):
        norms.DistributedGroupNorm(P, 4, 4)(torch.ones(1, 4, rows))


@pytest.mark.ranks([1, 2, 4], timeout=60)
def test_in_a_network_they_train_as_in_one_process():
    size = unisono.world().size
    P = Partition([1, 1, 2, 2] if size == 4 else [1, 1, size, 1])
    torch.manual_seed(3)
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 7 * 5, 3),
    ).double()  # fmt: skip
    net = unn.distribute(plain, P)
    ours, theirs = (torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, plain))
    for step in range(4):
        x = torch.randn(3, 2, 7, 5, generator=torch.Generator().manual_seed(step), **DOUBLE)
        y, z = net(x[P.local_slices(x.shape)]).pow(2).mean(), plain(x).pow(2).mean()
        torch.testing.assert_close(y, z)
        for loss, optimizer in ((y, ours), (z, theirs)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    unn.check_replicas(net)
    state = unn.full_state_dict(net)
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
