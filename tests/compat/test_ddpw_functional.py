"""The helpers give what one process with the joined batch would compute."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from unisono.comm import world
from unisono.compat.ddpw import functional as F
from unisono.errors import PlatformError
from unisono.launch import Platform

ROWS = {1: [6], 2: [4, 2], 3: [1, 0, 5]}


def model():
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    return nn.Sequential(*layers).double()


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


# DDP keeps the connections of its group until its own cycles are collected.
@pytest.mark.leaks("files")
@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3)])
def test_training_with_uneven_batches_equals_one_process(size):
    comm = world()
    x = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = model()
    alone(x).square().sum().backward()
    start = sum(ROWS[size][: comm.rank])
    mine = x[start : start + ROWS[size][comm.rank]]
    replica = F.to(model(), comm.rank)
    (replica(mine).square().sum() * size).backward()  # DDP averages over the ranks
    for (name, ours), theirs in zip(
        replica.module.named_parameters(), alone.parameters(), strict=True
    ):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, n=name: f"{n}: {text}")
    torch.testing.assert_close(replica.module[1].running_var, alone[1].running_var)
    torch.testing.assert_close(replica.module[1].running_mean, alone[1].running_mean)
    torch.testing.assert_close(replica.eval()(mine), alone.eval()(mine))


@pytest.mark.ranks(2)
def test_averages_agree_first_who_has_a_gradient():
    comm = world()
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.fill_(float(comm.rank))
    if comm.rank == 1:
        module.weight.grad = torch.full((1, 2), 4.0)
    F.average_params_grads(module)
    assert module.weight.tolist() == [[0.5, 0.5]]
    F.average_params_grads(module, False, False)
    F.average_params_grads(module, params=False, grads=True)
    assert module.weight.grad.tolist() == [[2.0, 2.0]]
    assert module.bias.grad is None


@pytest.mark.ranks(2)
def test_a_sparse_gradient_on_one_rank_is_refused_on_all_and_changes_nothing():
    table = nn.Embedding(3, 2, sparse=True)
    nn.init.constant_(table.weight, float(world().rank))
    if world().rank == 1:
        table(torch.tensor([1])).sum().backward()
    with pytest.raises(PlatformError, match="a sparse gradient"):
        F.average_params_grads(table, grads=True)
    assert table.weight.unique().tolist() == [float(world().rank)]


def test_a_module_without_parameters_or_world_is_only_moved():
    module = nn.ReLU()
    assert F.to(module, 0) is module
    assert F.device(module) == torch.device("cpu")
    assert F.device(nn.BatchNorm1d(1, affine=False)) == torch.device("cpu")
    F.average_params_grads(nn.Linear(1, 1), grads=True)
    assert F.has_batch_norm(model())
    assert not F.has_batch_norm(nn.Sequential(nn.LayerNorm(2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    ],
    ids=["SGD", "Adam", "LBFGS"],
)
def test_the_state_of_an_optimiser_moves_but_its_step_stays(make):
    weight = nn.Parameter(torch.ones(3))
    optimiser = make([weight])

    def closure():
        optimiser.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    F.optimiser_to(optimiser, "meta")
    places = {
        name: tensor.device.type
        for name, value in optimiser.state[weight].items()
        for tensor in (value if isinstance(value, list) else [value])
        if isinstance(tensor, torch.Tensor)
    }
    assert places
    assert all((kind == "cpu") == (name == "step") for name, kind in places.items()), places
    optimiser.param_groups[0]["capturable"] = True  # which wants its counter on the device
    F.optimiser_to(optimiser, "meta")
    step = optimiser.state[weight].get("step")
    assert not isinstance(step, torch.Tensor) or step.device.type == "meta"


def test_a_seed_sets_all_generators():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def draw():
        F.seed_generators(2**32 + 5)
        return random.random(), np.random.rand(), torch.rand(1).item()

    try:
        assert draw() == draw()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def test_a_sampler_shares_the_data_on_cpu_too():
    data = TensorDataset(torch.arange(6))
    assert F.get_dataset_sampler(data, 0, Platform(device="cpu")) is None
    shares = [
        list(F.get_dataset_sampler(data, rank, Platform(device="cpu", ranks=2), shuffle=False))
        for rank in range(2)
    ]
    assert shares == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(PlatformError, match="IterableDataset"):
        F.get_dataset_sampler(Endless(), 0, Platform(device="cpu", ranks=2))


def test_the_default_device_of_a_cpu_rank_stays():
    F.set_default_device(0, Platform(device="cpu"))
    with pytest.deprecated_call():
        F.set_device(0, Platform(device="cpu"))
    assert torch.zeros(1).device.type == "cpu"
