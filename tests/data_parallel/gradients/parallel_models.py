"""Models and the one-process twin that data-parallel tests compare with."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.repeated import repeated
from torch import nn
from torch.nn import functional as F

from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer

both_modes = repeated("blocking", [True, False])
both = pytest.mark.ranks(3, backend=["gloo", "shm"], timeout=60)

LOCAL = 4
"""Samples a rank."""


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.out = nn.Linear(6, 6)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(torch.tanh(self.into(x)))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(F.linear(x, self.inner.weight, self.inner.bias)))


class Added(nn.Module):
    """`Linear(x) + p`: autograd hands the same gradient to the bias and to p."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.p = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.linear(x) + self.p


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x)[0]


def encoder():
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def mlp():
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    )


class SettledNorm(nn.BatchNorm2d):
    """Batch norm with statistics that stand still: those of a batch depend on how it is split."""

    def __init__(self, channels):
        super().__init__(channels)
        self.eval()

    def train(self, mode=True):
        return super().train(False)


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        SettledNorm(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


SHAPES = {
    mlp: (6,),
    cnn: (2, 6, 6),
    Attention: (5, 6),
    encoder: (5, 6),
    Tied: (6,),
    Functional: (6,),
    Added: (6,),
}


def root_linear():
    return nn.Linear(6, 3)


SHAPES[root_linear] = (6,)

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}


def built(make, dtype=torch.float64):
    """Return a module and its copy, the same on all ranks."""
    torch.manual_seed(7)
    module = make().to(dtype)
    return module, copy.deepcopy(module)


def batch(shape, step=0, dtype=torch.float64, local=LOCAL):
    """Return the batch of all ranks, and this rank's part of it."""
    generator = torch.Generator().manual_seed(100 + step)
    comm = world()
    x = torch.randn(local * comm.size, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return x, x[comm.rank * local : (comm.rank + 1) * local]


def loss_of(output):
    """A mean over samples that depends on every output."""
    return (output.sin() + output.square()).mean()


def one_step(model, optimizer, x, set_to_none=False):
    """Make one step of an ordinary training loop."""
    optimizer.zero_grad(set_to_none=set_to_none)
    loss_of(model(x)).backward()
    optimizer.step()


def train_alike(ours, theirs, steps, shape=(6,), dtype=torch.float64):
    """Train `(model, optimizer)` on this rank's part of each batch, and its twin on the whole."""
    for step in range(steps):
        everything, mine = batch(shape, step, dtype)
        one_step(*ours, mine)
        one_step(*theirs, everything)


def assert_same_gradients(module, twin, rtol=1e-12):
    for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=rtol)


def assert_same_parameters(module, twin, rtol=1e-12):
    for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def assert_replicas_equal(module):
    """Every rank holds the very same bits."""
    flat = torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])
    assert world().all_equal(flat)


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9, weight_decay=0.1)


def wrapped(module, blocking, lr=0.1, **options):
    optimizer = DataParallelOptimizer(sgd(module, lr))
    return DataParallel(module, None, optimizer, blocking, **options), optimizer
