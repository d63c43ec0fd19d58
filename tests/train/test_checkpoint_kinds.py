"""Every kind of model goes on from a checkpoint as if nothing had been, on any number of ranks."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.functional import mse_loss

from unisono.bayes import LSTM, DDPConfig, DDPSequential, Linear, OutputUpdater, ReLU, Sequential
from unisono.comm import world
from unisono.data_parallel import DASO, DataParallel, DataParallelMultiGPU, DataParallelOptimizer
from unisono.graph_parallel import GraphPartition, GraphPlan
from unisono.nn import DistributedLinear, full_state_dict, split
from unisono.topology import Mesh, Partition
from unisono.train import Checkpoint


def numbers(i, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i))


def own_rows(x):
    return x.tensor_split(world().size)[world().rank]


class Plain:
    """Data-parallel, updates that are owed, a scheduler, a scaler, and values that ranks share."""

    def __init__(self):
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        torch_optimizer = torch.optim.Adam(self.inner.parameters(), 0.05)
        self.optimizer = DataParallelOptimizer(torch_optimizer)
        self.model = DataParallel(self.inner, optimizer=self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(torch_optimizer, 2, 0.5)

    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, i):
        x = numbers(i, 12, 4)
        loss = mse_loss(self.model(own_rows(x)), own_rows(x).prod(1, keepdim=True))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def result(self):
        self.model.finalize()
        return torch.cat([p.detach().flatten() for p in self.inner.parameters()])


class WithBuffers(Plain):
    """Batch norm: running values differ between ranks until the next forward; dropout: so do draws.

    On another number of ranks, batches have other statistics, so only the state can be compared.
    """

    continues_elsewhere = False

    def __init__(self):
        self.inner = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), 0.05)
        self.model = DataParallel(self.inner)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)


class Split:
    """Distributed layers: replicated weights, and blocks that each rank has its own of."""

    def __init__(self):
        size = world().size
        self.strips = Partition([1, 1, size, 1])
        plain = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh())
        self.conv = split(plain, self.strips, blocks=True)
        self.whole, self.columns = Partition([1, 1]), Partition([1, size])
        self.head = DistributedLinear(self.whole, self.columns, Partition([size, 1]), 6, 7)
        self.model = nn.ModuleDict({"conv": self.conv, "head": self.head})
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.03)

    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, i):
        self.optimizer.zero_grad()
        x, y = numbers(i, 2, 1, 8, 5), numbers(i, 4, 6)
        self.conv(x[self.strips.local_slices(x.shape)]).square().sum().backward()
        self.head(y if self.whole.active else y.new_empty(4, 0)).square().sum().backward()
        self.optimizer.step()

    def result(self):
        return torch.cat([v.detach().flatten() for v in full_state_dict(self.model).values()])


class Graph:
    """Message passing over a graph that is cut."""

    def __init__(self):
        edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 3], [1, 2, 3, 4, 5, 6, 0, 3, 0]])
        part = GraphPartition.contiguous(7, world().size)
        self.plan = GraphPlan(part, edges, comm=world())
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, i):
        self.optimizer.zero_grad()
        mine = self.plan.scatter(numbers(i, 7, 3))
        source, target = self.plan.edge_index
        sent = self.model(self.plan.extend(mine))[source]
        total = torch.zeros_like(mine).index_add(0, target, sent)
        (total.square().sum() / 7).backward()
        for p in self.model.parameters():
            p.grad = world().all_reduce(p.grad)
        self.optimizer.step()

    def result(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class Bayes:
    """A net of means and variances, over sequences that start at zero in each call."""

    def __init__(self):
        net = Sequential(LSTM(1, 2, 4), Linear(8, 8), ReLU(), Linear(8, 1))
        config = DDPConfig([], backend="auto")
        self.model = DDPSequential(net, config, average=False, cap_batch="global", comm=world())
        self.updater = OutputUpdater(self.model.get_device_with_index())

    def objects(self):
        return {"model": self.model}

    def step(self, i):
        x = own_rows(numbers(i, 12, 4))
        self.model(x.numpy())
        y = x.sum(1).numpy()
        self.updater.update(
            self.model.output_z_buffer, y, np.full_like(y, 0.1), self.model.input_delta_z_buffer
        )
        self.model.backward()
        self.model.step()

    def result(self):
        values = self.model.state_dict(tensors=True).values()
        return torch.cat([t.flatten() for layer in values for t in layer])


class Sharded(Plain):
    """The user's FSDP2 on one module, and the user's DTensors in another."""

    def __init__(self):
        mesh = Mesh(data=world().size).device_mesh
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.model = fully_shard(self.inner, mesh=mesh)
        self.columns = nn.Linear(4, 5, bias=False)
        distribute_module(self.columns, mesh, _by_rows)
        parameters = [*self.inner.parameters(), *self.columns.parameters()]
        self.optimizer = torch.optim.Adam(parameters, 0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def objects(self):
        return {**super().objects(), "columns": self.columns}

    def step(self, i):
        mesh = self.columns.weight.device_mesh
        x = distribute_tensor(numbers(i, 6, 4), mesh, [Shard(0)])
        self.columns.weight.grad = None
        (x.full_tensor() @ self.columns.weight.full_tensor().T).square().sum().backward()
        super().step(i)

    def result(self):
        parameters = [*self.inner.parameters(), *self.columns.parameters()]
        return torch.cat([p.full_tensor().detach().flatten() for p in parameters])


def _by_rows(_name, module, mesh):
    for name, p in list(module.named_parameters(recurse=False)):
        cut = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
        module.register_parameter(name, cut)


def daso_job():
    torch.manual_seed(0)
    inner = nn.Linear(4, 2)
    daso = DASO(
        torch.optim.Adam(inner.parameters(), 0.05),
        3,
        warmup_epochs=0,
        cooldown_epochs=0,
        ranks_per_node=1,
    )
    daso.last_batch = 8
    return DataParallelMultiGPU(inner, daso), daso


def daso_trained(directory, saves, until=7):
    model, daso = daso_job()
    checkpoint = Checkpoint(directory)
    first = 0
    if not saves:
        first = checkpoint.restore(model=model, optimizer=daso).step
    for i in range(first, until):
        x = numbers(100 * i + world().rank, 6, 4)
        daso.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        daso.step()
        if saves and i == 4:
            assert daso.sent_at == 4  # on its way, and not yet used
            checkpoint.save(5, model=model, optimizer=daso)
        if i == 7:
            daso.epoch_loss_logic(loss)
    return [p.detach().clone() for p in model.parameters()]


def test_daso_continues_with_replicas_apart_and_an_exchange_in_flight(rank_pool, tmp_path):
    whole = rank_pool.run(daso_trained, tmp_path, True, world=3)
    again = rank_pool.run(daso_trained, tmp_path, False, world=3)
    for expected, found in zip(whole, again, strict=True):
        assert all(map(torch.equal, expected, found))
    assert not torch.equal(whole[0][0], whole[1][0]), "replicas were not apart"


def daso_on_fewer(directory):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parameters = daso_trained(directory, False, until=8)
    return parameters, [str(w.message) for w in caught]


def test_daso_on_fewer_ranks_goes_on_without_what_was_in_flight(rank_pool, tmp_path):
    rank_pool.run(daso_trained, tmp_path, True, world=3)
    (first, words), (second, _) = rank_pool.run(daso_on_fewer, tmp_path, world=2)
    assert any("in flight is left out" in text for text in words)
    assert all(torch.isfinite(p).all() for p in first + second)


KINDS = [Plain, WithBuffers, Split, Graph, Bayes, Sharded]


def trained(kind, directory, saves):
    """Train four steps; after the second, save or restore. Return the state then and at the end."""
    torch.manual_seed(3 if saves else 4)  # a run that restores begins with other weights
    job, checkpoint = kind(), Checkpoint(directory)
    if saves:
        job.step(0)
        job.step(1)
        # Draws of the training, different on each rank.
        torch.rand(world().rank + 1), random.random(), np.random.rand()
        checkpoint.save(2, **job.objects())
    else:
        restored = checkpoint.restore(**job.objects())
        assert restored.step == 2
    middle = job.result()
    draws = [torch.rand(2).tolist(), random.random(), np.random.rand()]
    for i in (2, 3):
        job.step(i)
    return middle, job.result(), draws


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__, scope="module")
def kind(request):
    """One after the other: torch's DTensors hold their groups for ever, which costs the ranks."""
    return request.param


def test_a_run_that_was_interrupted_continues_bit_for_bit(kind, rank_pool, tmp_path):
    whole = rank_pool.run(trained, kind, tmp_path, True, world=2, timeout=60)
    again = rank_pool.run(trained, kind, tmp_path, False, world=2, timeout=60)
    for (_, expected, draws), (_, found, drawn) in zip(whole, again, strict=True):
        assert torch.equal(expected, found)
        assert draws == drawn
    assert whole[0][2] != whole[1][2], "ranks draw different numbers"


def test_a_checkpoint_of_four_ranks_continues_on_one_and_on_three(kind, rank_pool, tmp_path):
    whole = rank_pool.run(trained, kind, tmp_path, True, world=4, timeout=60)
    middle, end, _ = whole[0]
    for ranks in (1, 3):
        for found, later, _ in rank_pool.run(
            trained, kind, tmp_path, False, world=ranks, timeout=60
        ):
            assert torch.equal(middle, found)
            if getattr(kind, "continues_elsewhere", True):
                assert torch.allclose(end, later, atol=1e-5)
