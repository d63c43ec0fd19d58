"""Several ways to split at once, on the axes of one mesh: each equals one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn.functional import mse_loss

from unisono import Mesh, Partition
from unisono.bayes import DDPConfig, DDPSequential, Linear, OutputUpdater, ReLU, Sequential
from unisono.bayes import manual_seed as bayes_seed
from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer
from unisono.graph_parallel import GraphPartition, GraphPlan
from unisono.graph_parallel import copy as copy_region
from unisono.nn import full_state_dict
from unisono.nn import split as split_network
from unisono.train import Checkpoint

STEPS, ROWS = 3, 5


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def share(mesh, x):
    return x.tensor_split(mesh.axes["data"])[mesh.coordinate("data")]


def weighted(mesh, loss, rows):
    """Scale a mean over own rows, so that the mean over ranks is the mean over all rows."""
    return loss * rows * mesh.axes["data"] / ROWS


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.out = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, features, plan):
        weights = dict(self.message.named_parameters())
        weights = {name: copy_region(p, comm=plan.comm) for name, p in weights.items()}
        source, target = plan.edge_index
        results = []
        for whole in features:
            x = plan.scatter(whole)
            sent = functional_call(self.message, weights, (plan.extend(x)[source],)).tanh()
            at_nodes = sent.new_zeros(len(x), 6).index_add(0, target, sent)
            results.append(self.out(plan.reduce(at_nodes.sum(0), grad="identity")))
        return torch.stack(results)


def messages(mesh, comm):
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 3], [1, 2, 3, 4, 5, 6, 0, 3, 0]])
    plan = GraphPlan(GraphPartition.contiguous(7, comm.size), edges, comm=comm)
    torch.manual_seed(2)
    net = Messages().double()
    model = DataParallel(net, mesh.comm("data"))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for x in normal(STEPS, ROWS, 7, 4):
        optimizer.zero_grad()
        mine = share(mesh, x)
        weighted(mesh, model(mine, plan).square().mean(), len(mine)).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.ranks(4)
def test_pieces_of_a_graph_inside_of_data_parallel_equal_one_process():
    alone = world().sub([world().rank])
    expected = messages(Mesh(data=1, comm=alone), alone)
    mesh = Mesh(data=2, graph=2)
    for found, value in zip(messages(mesh, mesh.comm("graph")), expected, strict=True):
        assert torch.allclose(found, value, atol=1e-10)


def bayesian(mesh):
    bayes_seed(0)
    net = Sequential(Linear(3, 8), ReLU(), Linear(8, 1))
    config = DDPConfig([], backend="auto")
    model = DDPSequential(net, config, average=False, cap_batch="global", comm=mesh.comm("data"))
    updater = OutputUpdater(model.get_device_with_index())
    for x in normal(STEPS, ROWS, 3).float():
        mine = share(mesh, x)
        model(mine)
        noise = torch.full((len(mine),), 0.1).numpy()
        seen = mine.sum(1).numpy()
        updater.update(model.output_z_buffer, seen, noise, model.input_delta_z_buffer)
        model.backward()
        model.step()
    model.check_sync()
    values = model.state_dict(tensors=True).values()
    return torch.cat([t.flatten() for layer in values for t in layer])


@pytest.mark.ranks(4)
def test_a_bayesian_net_on_one_axis_of_a_mesh_equals_one_process():
    expected = bayesian(Mesh(data=1, comm=world().sub([world().rank])))
    assert torch.allclose(bayesian(Mesh(data=2, space=2)), expected, atol=1e-5)


def convolutions():
    torch.manual_seed(1)
    head = [nn.Flatten(), nn.Linear(27, 2)]
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), *head).double()


def one_process(x, y):
    net = convolutions()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for a, b in zip(x, y, strict=True):
        optimizer.zero_grad()
        mse_loss(net(a), b).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["blocking", "owed", "fsdp2"])
def test_strips_of_images_inside_of_data_parallel_equal_one_process(kind, tmp_path):
    x, y = normal(STEPS, ROWS, 1, 7, 6), normal(STEPS, ROWS, 2)
    expected = one_process(x, y)
    mesh = Mesh(data=2, space=2)
    strips = Partition([1, 1, 2, 1], comm=mesh.comm("space"))
    split = split_network(convolutions(), strips, blocks=True)
    if kind == "fsdp2":
        fully_shard(split, mesh=mesh.device_mesh["data"])
    optimizer = torch.optim.SGD(split.parameters(), 0.1, momentum=0.9)
    model = split
    if kind == "owed":
        optimizer = DataParallelOptimizer(optimizer)
        model = DataParallel(split, mesh.comm("data"), optimizer)
    elif kind == "blocking":
        model = DataParallel(split, mesh.comm("data"))
    for a, b in zip(x, y, strict=True):
        optimizer.zero_grad()
        mine = share(mesh, a)
        out = model(mine[strips.local_slices(mine.shape)])
        weighted(mesh, mse_loss(out, share(mesh, b)), len(mine)).backward()
        optimizer.step()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(STEPS, model=model, optimizer=optimizer)
    # Read back by a plain network: the state knows neither axis.
    plain = convolutions()
    nn.init.zeros_(plain[0].weight)
    checkpoint.restore(model=plain, partial=True)
    for name, value in plain.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-10), name
    restored = split_network(convolutions(), strips, blocks=True)
    again = torch.optim.SGD(restored.parameters(), 0.1, momentum=0.9)
    checkpoint.restore(model=restored, optimizer=again)
    for name, value in full_state_dict(restored).items():
        assert torch.equal(value, plain.state_dict()[name])


def perceptron():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # its advice on in-place operations
@pytest.mark.ranks(4)
def test_the_users_dtensors_on_another_axis_of_the_mesh(tmp_path):
    mesh = Mesh(data=2, model=2)
    plain = perceptron()
    cut = parallelize_module(
        copy.deepcopy(plain),
        mesh.device_mesh["model"],
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    fully_shard(cut, mesh=mesh.device_mesh["data"])
    ours, theirs = (torch.optim.Adam(net.parameters(), 0.05) for net in (cut, plain))
    checkpoint = Checkpoint(tmp_path)
    for i, x in enumerate(normal(4, 6, 4)):
        for net, optimizer, rows in ((cut, ours, share(mesh, x)), (plain, theirs, x)):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
        if i == 1:
            checkpoint.save(2, model=cut, optimizer=ours)
            fresh = perceptron()
            again = torch.optim.Adam(fresh.parameters(), 0.05)
            checkpoint.restore(model=fresh, optimizer=again)  # two cuts in, none out
    for x in normal(4, 6, 4)[2:]:
        again.zero_grad()
        fresh(x).square().mean().backward()
        again.step()
    for p, q, r in zip(cut.parameters(), plain.parameters(), fresh.parameters(), strict=True):
        assert torch.allclose(p.full_tensor(), q, atol=1e-10)
        assert torch.allclose(r, q, atol=1e-10)
