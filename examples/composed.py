"""Two ways to split on one mesh: batches along one axis, space or a graph along the other.

Images in strips, a graph in pieces, a Bayesian net on 2 x 2 ranks: each equals one process.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.func import functional_call

import unisono
from unisono import Mesh, Partition, bayes
from unisono.data_parallel import DataParallel
from unisono.graph_parallel import GraphPartition, GraphPlan, copy, radius_graph
from unisono.nn import full_state_dict, split

STEPS, ROWS = 3, 8


def shares(mesh, *data):
    """Yield what this place on the data axis has of each batch."""
    place, places = mesh.coordinate("data"), mesh.axes["data"]
    for batch in zip(*(values.split(ROWS) for values in data), strict=True):
        yield [values.tensor_split(places)[place] for values in batch]


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).double()


def train(model, loss_of, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(*batch).backward()
        optimizer.step()


def images(data, space, comm=None):
    """Convolutions over strips of each image, gradients averaged over parts of each batch."""
    mesh = Mesh(data=data, space=space, comm=comm)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    strips = Partition([1, 1, space, 1], comm=mesh.comm("space"))
    net = split(plain.double(), strips, blocks=True)
    model = DataParallel(net, mesh.comm("data"))

    def loss_of(x, y):
        return nn.functional.mse_loss(model(x[strips.local_slices(x.shape)]), y)

    train(model, loss_of, shares(mesh, normal(STEPS * ROWS, 1, 8, 8), normal(STEPS * ROWS, 3)))
    return torch.cat([value.flatten() for value in full_state_dict(net).values()])


class Messages(nn.Module):
    """Each rank of the graph computes the messages to its own nodes."""

    def __init__(self):
        super().__init__()
        self.message, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, features, plan):
        # `copy`: ranks use the same weights for different nodes, so their gradients are summed.
        weights = {name: copy(p, comm=plan.comm) for name, p in self.message.named_parameters()}
        results = []
        for x in features:
            neighbours = plan.extend(plan.scatter(x))[plan.edge_index[0]]
            sent = functional_call(self.message, weights, (neighbours,)).tanh()
            results.append(self.out(plan.reduce(sent.sum(0), grad="identity")))
        return torch.stack(results)


def graphs(data, graph, comm=None):
    """Message passing over pieces of a graph; features of its nodes come in batches."""
    mesh = Mesh(data=data, graph=graph, comm=comm)
    where = torch.rand(30, 3, generator=torch.Generator().manual_seed(1))
    edges = radius_graph(where, 0.4).edge_index
    plan = GraphPlan(GraphPartition.morton(where, graph), edges, comm=mesh.comm("graph"))
    torch.manual_seed(0)
    model = DataParallel(Messages().double(), mesh.comm("data"))
    batches = shares(mesh, normal(STEPS * ROWS, 30, 4))
    train(model, lambda x: (model(x, plan) / 100).square().mean(), batches)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def error_bars(data, other, comm=None):
    """A Bayesian network along the data axis; the other axis holds replicas."""
    mesh = Mesh(data=data, other=other, comm=comm)
    bayes.manual_seed(0)
    net = bayes.Sequential(bayes.Linear(3, 16), bayes.ReLU(), bayes.Linear(16, 1))
    exact = {"average": False, "cap_batch": "global", "comm": mesh.comm("data")}
    model = bayes.DDPSequential(net, bayes.DDPConfig([], backend="auto"), **exact)
    updater = bayes.OutputUpdater("cpu")
    for (x,) in shares(mesh, normal(STEPS * ROWS, 3).float()):
        model(x)
        seen, noise = x.sum(1).numpy(), torch.full((len(x),), 0.1).numpy()
        updater.update(model.output_z_buffer, seen, noise, model.input_delta_z_buffer)
        model.backward()
        model.step()
    return torch.cat([t.flatten() for pair in net.state_dict(tensors=True).values() for t in pair])


def main():
    parser = argparse.ArgumentParser(description="Two ways to split on one mesh")
    parser.add_argument("--ranks", type=int, default=2, help="along each axis")
    side, comm = parser.parse_args().ranks, unisono.world()
    other = side if comm.size == 1 else comm.size // side  # `unisono run` has started the ranks
    for part in (images, graphs, error_bars):
        alone = part(1, 1, comm.sub([comm.rank]))
        several = unisono.run(part, side, other, ranks=side * other)
        error = max((mine - alone).abs().max().item() for mine in several)
        print(f"{part.__name__}: {side} x {other} ranks differ from one process by {error:.0e}")
        assert error < 1e-5


main()
