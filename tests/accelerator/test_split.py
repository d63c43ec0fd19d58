"""Split networks, layers, attention and graphs on the device, compared with the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.accelerator.ranks import device_ranks, own_device
from torch import nn

import unisono
import unisono.nn as split_layers
from unisono import Partition
from unisono.graph_parallel import (
    GraphParallel,
    GraphPartition,
    GraphPlan,
    graph_groups,
    radius_graph,
)
from unisono.nn import Split, split

pytestmark = device_ranks(2)


class Picture(nn.Module):
    """What networks for pictures are made of, a pool with padding and an upsampling among it."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.group, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.pool, self.last = nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.up(self.group(F.relu(self.norm(self.stem(x)))))
        gate = torch.sigmoid(x.mean((2, 3), keepdim=True))
        small = F.avg_pool2d(self.pool(x), 2)
        wide = F.interpolate(small, scale_factor=4, mode="bilinear")
        return self.last(wide * gate)


class Sequence(nn.Module):
    """A block of causal attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


def on(device):
    return unisono.world().with_device(device)


def picture_net(device):
    torch.manual_seed(0)
    strip = Partition([1, 1, 2, 1], comm=on(device))
    plain, images = Picture().double().to(device), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    own = images[strip.local_slices(images.shape)].to(device)
    target = torch.zeros(2, 16, 16, dtype=torch.long, device=device)
    return plain, split(plain, strip), own, target


def pictures(device):
    plain, net, x, target = picture_net(device)
    loss = F.cross_entropy(net(x), target)
    loss.backward()
    return [loss, *(p.grad for p in plain.parameters()), *plain.buffers()]


def sequences(device):
    results = []
    for way in ("ring", "ulysses", "gathered"):
        torch.manual_seed(0)
        rows = Partition([1, 2, 1], comm=on(device))
        plain, x = Sequence().double().to(device), torch.rand(2, 7, 8, dtype=torch.float64)
        y = split(plain, rows, attention=way)(x[rows.local_slices(x.shape)].to(device))
        y.square().sum().backward()
        results += [y.whole(), *(p.grad for p in plain.parameters())]
    return results


def layers(device):
    torch.manual_seed(0)
    strip = Partition([1, 1, 2, 1], comm=on(device))
    net = nn.Sequential(
        split_layers.DistributedConv2d(
            strip, in_channels=3, out_channels=4, kernel_size=3, padding=1
        ),
        split_layers.DistributedBatchNorm(strip, num_features=4),
        split_layers.DistributedMaxPool2d(strip, kernel_size=2),
        split_layers.DistributedUpsample(strip, scale_factor=2, mode="bilinear"),
    ).to(device, torch.float64)
    draw = torch.Generator().manual_seed(unisono.world().rank)
    x = torch.rand(2, 3, 4, 8, dtype=torch.float64, generator=draw).to(device).requires_grad_()
    y = net(x)
    loss = split_layers.DistributedCrossEntropyLoss(strip)
    loss(y, torch.ones(2, 4, 8, dtype=torch.long, device=device)).backward()
    return [y, x.grad, *(p.grad for p in net.parameters())]


def graph_plan(device):
    draw = torch.Generator().manual_seed(0)
    pos = (torch.rand(60, 3, dtype=torch.float64, generator=draw) * 3).to(device)
    edges = radius_graph(pos, 1.0).edge_index
    parts = GraphPartition.balanced(edges, len(pos), 2, order="morton", pos=pos)
    return GraphPlan(parts, edges, comm=on(device)), pos


def graphs(device):
    plan, pos = graph_plan(device)
    mine = plan.scatter(pos).requires_grad_()
    source, target = plan.edge_index
    term = torch.exp(-(plan.extend(mine)[source] - mine[target]).norm(dim=1)).sum()
    (force,) = torch.autograd.grad(-term, mine, create_graph=True)
    torch.manual_seed(0)
    net = GraphParallel(nn.Linear(3, 3).to(device), groups=graph_groups(2, comm=on(device)))
    sent = plan.message_pass(mine.detach().float(), lambda a, b, _: net(a - b).square())
    sent.sum().backward()
    energy = plan.reduce(term, grad="identity")
    return [energy, plan.gather(force.detach(), grad="slice"), sent, net.module.weight.grad]


@device_ranks(2, timeout=120)
def test_programs_give_the_numbers_of_the_cpu(schedule):
    device = own_device()
    for program in (pictures, sequences, layers, graphs):
        for here, there in zip(program(torch.device("cpu")), program(device), strict=True):
            assert there.device.type == "sim"
            torch.testing.assert_close(there.cpu(), here)


def test_the_host_waits_for_no_forward_and_backward():
    import simdev

    device = own_device()
    _, net, x, target = picture_net(device)
    plan, pos = graph_plan(device)
    rows = Partition([1, 2, 1], comm=on(device))
    tokens, nodes = torch.rand(2, 4, 8, device=device), plan.scatter(pos).requires_grad_()
    attends = [split(Sequence().to(device), rows, attention=w) for w in ("ring", "ulysses")]
    steps = {
        "pictures": lambda: F.cross_entropy(net(x), target).backward(),
        "graphs": lambda: plan.message_pass(nodes, lambda a, b, _: a * b).sum().backward(),
        "whole rows": lambda: plan.gather(plan.scatter(pos), grad="slice"),
        **{f"attention {i}": lambda n=n: n(tokens).sum().backward() for i, n in enumerate(attends)},
    }
    waits = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        with simdev.counters() as counted:
            step()
        waits[name] = counted.syncs
    assert waits == {name: {} for name in steps}


def test_dropout_draws_what_one_process_draws_on_the_device(schedule):
    device, net = own_device(), nn.Dropout(0.5)
    strip = Partition([1, 1, 2, 1], comm=on(device))
    whole = torch.ones(2, 3, 8, 8, device=device)
    torch.sim.manual_seed(3)
    y = net(whole)
    torch.sim.manual_seed(3)
    z = split(net, strip)(whole[strip.local_slices(whole.shape)])
    assert torch.equal(z.whole(), y)


def reductions():
    return {
        "sum": lambda x: x.sum(),
        "sum along the cut": lambda x: x.sum(2),
        "mean": lambda x: x.mean((2, 3)),
        "norm": lambda x: x.norm(),
        "softmax along the cut": lambda x: x.softmax(2),
        "log_softmax along the cut": lambda x: x.log_softmax(2),
        "softmax": lambda x: x.softmax(1),
        "normalize": lambda x: F.normalize(x, dim=2),
        "var": lambda x: x.var(2),
        "group norm": lambda x: F.group_norm(x, 3),
        "layer norm": lambda x: F.layer_norm(x, (8, 8)),
        "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
        "exp": lambda x: x.exp(),
        "cross entropy": lambda x: F.cross_entropy(x, x.argmax(1)),
        "matmul": lambda x: x @ x.new_ones(8, 4),
    }


@pytest.mark.parametrize("kind", ["sim", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_under_autocast_have_the_dtypes_of_torch_on_that_device(kind, dtype):
    device = own_device() if kind == "sim" else torch.device("cpu")
    torch.manual_seed(0)
    whole = torch.randn(2, 3, 8, 8).to(device, dtype)
    strip = Partition([1, 1, 2, 1], comm=on(device))
    wanted, found = {}, {}
    with torch.autocast(kind, torch.bfloat16):
        for name, function in reductions().items():
            plain = function(whole)
            cut = function(Split.of(whole[strip.local_slices(whole.shape)].contiguous(), strip))
            cut = cut.whole() if isinstance(cut, Split) else cut
            torch.testing.assert_close(cut.float().cpu(), plain.float().cpu(), rtol=2e-2, atol=2e-2)
            wanted[name], found[name] = plain.dtype, cut.dtype
    assert found == wanted


class Draws(nn.Module):
    """Draw a number of its own on the device: whether to pass at all, as drop path does."""

    def forward(self, x):
        return x * (torch.rand((), device=x.device) + torch.rand(()))


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_of_a_split_net_draw_the_same_numbers_on_the_device(alike):
    device, rank = own_device(), unisono.world().rank
    torch.manual_seed(0 if alike else rank)
    if not alike:  # on the device alone
        torch.default_generator.manual_seed(0)
    before = torch.sim.get_rng_state()
    net = split(Draws(), Partition([2, 1], comm=on(device)))
    drawn = net(torch.ones(1, 1, device=device)).whole().flatten().tolist()
    assert drawn[0] == drawn[1]
    assert not alike or not torch.equal(before, torch.sim.get_rng_state())
    if alike:  # as in one process on the device
        torch.manual_seed(0)
        assert Draws()(torch.ones(1, device=device)).item() == drawn[0]
    else:
        assert torch.equal(before, torch.sim.get_rng_state())
