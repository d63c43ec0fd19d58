"""What U-nets and GANs are made of, split: pads, dropout of channels, norms of samples, skips."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import PartitionError
from unisono.nn import check_replicas, distribute, full_state_dict, plan_report
from unisono.topology import Partition

DOUBLE = {"dtype": torch.float64}
PADS = [
    nn.ZeroPad1d((2, 1)), nn.ConstantPad1d((0, 3), 0.5), nn.ReflectionPad1d((3, 2)),
    nn.ReplicationPad1d(4), nn.CircularPad1d((1, 5)), nn.ZeroPad1d((-2, 3)),
    nn.ZeroPad2d((2, 0, 1, 3)), nn.ConstantPad2d(2, -1.5), nn.ReflectionPad2d((1, 2, 4, 0)),
    nn.ReplicationPad2d((3, 1, 0, 6)), nn.CircularPad2d((2, 2, 5, 1)), nn.ZeroPad2d((0, 0, 0, -1)),
    nn.ZeroPad3d((1, 0, 2, 1, 3, 1)), nn.ConstantPad3d(1, 2.0), nn.ReflectionPad3d(1),
    nn.ReplicationPad3d((0, 1, 2, 0, 1, 5)), nn.CircularPad3d((1, 1, 0, 1, 2, 2)),
]  # fmt: skip


def drawn(*shape, seed=1):
    """Return the same float64 tensor on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def grids(size, dims):
    """Return partitions along the height, the width, and batch and height together."""
    lines = [[1, 1, size, 1, 1], [1, 1, 1, size, 1], [2, 1, size // 2, 1, 1]]
    return [Partition(line[:dims]) for line in lines if torch.Size(line[:dims]).numel() == size]


@pytest.mark.ranks([1, 2, 3, 4], backend=["gloo", "shm"], timeout=90)
def test_padding_layers_equal_torch():
    """Sizes below and above the number of ranks: a pad may reach over several blocks."""
    size = unisono.world().size
    for pad in PADS:
        dims = 2 + len(pad.padding) // 2
        for shape in [(2, 2, 7, 5, 3)[:dims], (2, 2, 5, 3, 2)[:dims]]:
            for P in grids(size, dims):
                net, x = distribute(nn.Sequential(pad), P), drawn(*shape)
                where = P.local_slices(x.shape)
                own, whole = x[where].clone().requires_grad_(), x.clone().requires_grad_()
                y, z = net(own), pad(whole)
                there = P.local_slices(z.shape)
                torch.testing.assert_close(y, z[there], msg=lambda m, p=pad: f"{p}: {m}")
                probe = drawn(*z.shape, seed=2)
                (g,) = torch.autograd.grad((y**3 * probe[there]).sum(), own, create_graph=True)
                (h,) = torch.autograd.grad((z**3 * probe).sum(), whole, create_graph=True)
                torch.testing.assert_close(g, h[where])
                g.pow(2).sum().backward()
                h.pow(2).sum().backward()
                torch.testing.assert_close(own.grad, whole.grad[where])


@pytest.mark.ranks(2)
def test_a_pad_that_torch_refuses_is_refused_on_all_ranks():
    net = distribute(nn.Sequential(nn.ReflectionPad1d(4)), Partition([1, 1, 2]))
    with pytest.raises(PartitionError, match="reflect"):
        net(torch.ones(1, 1, 2))


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_channels_are_dropped_whole_and_samples_apart(kind):
    world = unisono.world()
    torch.manual_seed(world.rank)  # what else ranks draw does not matter
    dims = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}[kind]
    for P in grids(world.size, dims):
        state = torch.get_rng_state()
        net = distribute(nn.Sequential(kind(0.25)), P)
        x = torch.ones((4, 32, 7, 5, 2)[:dims], **DOUBLE)
        own = x[P.local_slices(x.shape)].requires_grad_()
        y = net(own)
        drawn_once = torch.Generator()
        drawn_once.set_state(state)
        torch.randint(2**62, (), generator=drawn_once)  # which call this was, for checkpointing
        assert torch.equal(torch.get_rng_state(), drawn_once.get_state())
        whole = torch.zeros_like(x)
        whole[P.local_slices(x.shape)] = y.detach()
        whole = world.all_reduce(whole)
        masks = whole.flatten(2)
        assert torch.equal(masks, masks[:, :, :1].expand_as(masks)), "parts of a channel differ"
        assert set(masks.unique().tolist()) <= {0.0, 1 / 0.75}
        assert not torch.equal(masks[0], masks[2]), "samples share their masks"
        assert 0.6 < (masks > 0).double().mean() < 0.9
        y.sum().backward()
        torch.testing.assert_close(own.grad, y.detach())
        again = net(own.detach())
        assert not torch.equal(again, y.detach()) or not y.numel()
        state = torch.get_rng_state()
        assert torch.equal(net.eval()(own), own)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_layer_for_single_samples_is_refused():
    with pytest.raises(PartitionError, match=r"0 is a Dropout3d[\s\S]*5 dims[\s\S]*Dropout2d"):
        distribute(nn.Sequential(nn.Dropout3d()), Partition([1, 1, 1, 1]))
    with pytest.raises(PartitionError, match=r"0 is an InstanceNorm2d[\s\S]*InstanceNorm1d"):
        distribute(nn.Sequential(nn.InstanceNorm2d(2)), Partition([1, 1, 1]))


def stage(inputs, outputs):
    """Return a convolution padded by reflection, normalised in groups."""
    return nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(inputs, outputs, 3), nn.GroupNorm(2, outputs), nn.SiLU(),
        nn.Dropout2d(0.0),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels, a skip joined by channels, instance norm below."""

    def __init__(self):
        super().__init__()
        self.top = stage(1, 4)
        self.down = nn.MaxPool2d(2)
        self.below = nn.Sequential(
            stage(4, 6), nn.ReplicationPad2d((1, 0, 0, 1)), nn.Conv2d(6, 6, 2),
            nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.ReLU(),
        )  # fmt: skip
        self.up = nn.Upsample(size=(11, 9), mode="bilinear")
        self.out = nn.Sequential(stage(10, 4), nn.Conv2d(4, 1, 1))

    def forward(self, x):
        """Return an image of the same size."""
        y = self.top(x)
        return self.out(torch.cat([y, self.up(self.below(self.down(y)))], 1))


@pytest.mark.ranks([1, 2, 3, 4], backend=["gloo", "shm"], timeout=90)
def test_a_unet_trains_as_one_process_does():
    size = unisono.world().size
    for P in grids(size, 4):
        torch.manual_seed(5)
        plain = UNet().double()
        net = distribute(plain, P, custom="recurse")
        ours, theirs = (torch.optim.Adam(n.parameters(), lr=0.01) for n in (net, plain))
        for step in range(5):
            x = drawn(3, 1, 11, 9, seed=step)
            y, z = net(x[P.local_slices(x.shape)]), plain(x)
            here = P.local_slices(z.shape)
            part = (y - x[here].tanh()).pow(2).sum() / x.numel()
            loss = (z - x.tanh()).pow(2).mean()
            torch.testing.assert_close(unisono.world().all_reduce(part.detach()), loss.detach())
            for value, optimizer in ((part, ours), (loss, theirs)):
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
        check_replicas(net)
        state = full_state_dict(net)
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value)
        copy.deepcopy(plain).load_state_dict(state)
        net.load_state_dict(plain.state_dict())
        x = drawn(2, 1, 11, 9)
        y, z = net.eval()(x[P.local_slices(x.shape)]), plain.eval()(x)
        torch.testing.assert_close(y, z[P.local_slices(z.shape)])


def test_the_report_of_a_unet_names_all_its_layers():
    told = plan_report(UNet(), (2, 1, 11, 9), Partition([1, 1, 2, 1]))
    for kind in ("ReflectionPad2d", "GroupNorm", "InstanceNorm2d", "Dropout2d", "ReplicationPad2d"):
        assert kind in told
