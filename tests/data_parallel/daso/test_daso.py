"""DASO's numbers against a simulation of all ranks in one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from tests.repeated import repeated
from torch import nn

from unisono.comm import world
from unisono.data_parallel import DASO, DasoSchedule, DataParallelMultiGPU, Skips

LR = 0.05
LAYOUTS = {4: [[2, 2], [1, 3]], 3: [[1, 1, 1], [3], [1, 2]], 2: [[1, 1]], 1: [[1]]}


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype))
    return model


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 3, generator=generator, dtype=dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def flat_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@dataclass
class Simulation:
    """Every rank's parameters, moved as the formulas say; plain SGD."""

    blocks: list[int]
    schedule: DasoSchedule
    sent: list[torch.Tensor] | None = None
    sent_at: int | None = None
    theta: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self):
        self.model = make_model()
        self.theta = [flat_of(self.model)] * sum(self.blocks)
        starts = [sum(self.blocks[:i]) for i in range(len(self.blocks))]
        self.nodes = [list(range(a, a + n)) for a, n in zip(starts, self.blocks, strict=True)]
        self.weights = [len(self.blocks) * n / sum(self.blocks) for n in self.blocks]

    def gradient(self, rank: int, step: int) -> torch.Tensor:
        parameters = list(self.model.parameters())
        nn.utils.vector_to_parameters(self.theta[rank], parameters)
        loss = loss_of(self.model, batch_of(rank, step))
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])

    def node_values(self) -> list[torch.Tensor]:
        """Bring each node together and return what it contributes."""
        for node in self.nodes:
            together = torch.stack([self.theta[r] for r in node]).mean(0)
            for r in node:
                self.theta[r] = together
        return [self.theta[node[0]] for node in self.nodes]

    def mean_of(self, values: list[torch.Tensor]) -> torch.Tensor:
        return sum(w * v for w, v in zip(self.weights, values, strict=True)) / len(values)

    def batch(self, batch: int, n_batches: int, step: int) -> None:
        plan = self.schedule.plan(batch, n_batches, self.sent_at)
        grads = [self.gradient(r, step) for r in range(len(self.theta))]
        for node in self.nodes:
            mean = torch.stack([grads[r] for r in node]).mean(0)
            for r in node:
                self.theta[r] = self.theta[r] - LR * (mean if plan.local_sync else grads[r])
        if plan.merge:
            waited, n_nodes = batch - self.sent_at, len(self.nodes)
            mean = self.mean_of(self.sent)
            if n_nodes > 1:
                self.theta = [
                    (2 * waited * t + n_nodes * mean) / (2 * waited + n_nodes) for t in self.theta
                ]
            self.sent_at = None
        if plan.blocking:
            mean = self.mean_of(self.node_values())
            self.theta = [mean] * len(self.theta)
        elif plan.send:
            self.sent, self.sent_at = self.node_values(), batch

    def own_values(self, n_epochs: int, n_batches: int) -> torch.Tensor:
        """Return this rank's parameters after each batch; rank 0 simulates for all. Collective."""
        everybody = None
        if world().rank == 0:
            seen = []
            for step in range(n_epochs * n_batches):
                self.batch(step % n_batches, n_batches, step)
                seen.append(torch.stack(self.theta))
                if step % n_batches == n_batches - 1:
                    self.schedule.epoch_end(1.0)
            everybody = torch.stack(seen)
        return world().broadcast_object(everybody, 0)[:, world().rank]


def assert_simulated(seen: list[torch.Tensor], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.stack(seen), expected, rtol=1e-12, atol=1e-13)


def run_daso(daso: DASO, model: nn.Module, n_epochs: int, n_batches: int) -> list[torch.Tensor]:
    """Train and return this rank's parameters after each batch."""
    rank, seen, step = world().rank, [], 0
    dtype = next(model.parameters()).dtype
    daso.last_batch = n_batches
    for _ in range(n_epochs):
        for _ in range(n_batches):
            daso.zero_grad()
            loss = loss_of(model, batch_of(rank, step, dtype))
            loss.backward()
            daso.step()
            seen.append(flat_of(model))
            step += 1
        daso.epoch_loss_logic(1.0)
    return seen


def build(blocks, total_epochs, dtype=torch.float64, optimizer=None, **options):
    """Return DASO and its wrapped model; ranks start from different weights."""
    model = make_model(seed=world().rank, dtype=dtype)
    inner = (optimizer or (lambda p: torch.optim.SGD(p, LR)))(model.parameters())
    daso = DASO(inner, total_epochs, ranks_per_node=blocks, **options)
    return daso, DataParallelMultiGPU(model, daso)


def with_skips(daso: DASO, *skips: int) -> None:
    daso.schedule.skips = Skips(*skips)


@pytest.mark.ranks([1, 2, 3, 4], timeout=120)
@repeated("skips", [(4, 1, 1), (1, 1, 1), (8, 2, 2), (3, 1, 0), (0, 0, 0)])
def test_every_batch_follows_the_formulas_for_every_layout_of_nodes(skips, rank_count):
    for blocks in LAYOUTS[rank_count]:
        daso, model = build(blocks, 9, warmup_epochs=0, cooldown_epochs=0)
        simulation = Simulation(blocks, DasoSchedule(9, 0, 0))
        with_skips(daso, *skips)
        simulation.schedule.skips = Skips(*skips)
        seen = run_daso(daso, model, 1, 12)
        assert_simulated(seen, simulation.own_values(1, 12))
        assert world().all_equal(seen[-1])


@pytest.mark.ranks(4, timeout=120, backend="shm")
def test_shared_memory_gives_the_same_numbers():
    daso, model = build([2, 2], 9, warmup_epochs=0, cooldown_epochs=0, sending_chunk_size=9)
    simulation = Simulation([2, 2], DasoSchedule(9, 0, 0))
    assert_simulated(run_daso(daso, model, 1, 10), simulation.own_values(1, 10))


@pytest.mark.ranks([1, 2, 3, 4], timeout=120)
@repeated("momentum", [0.0, 0.9])
def test_warm_up_is_large_batch_training(momentum, rank_count):
    alone = make_model()
    plain = torch.optim.SGD(alone.parameters(), LR, momentum=momentum)
    large_batches = []
    for step in range(6):
        plain.zero_grad()
        joined = torch.cat([batch_of(r, step) for r in range(rank_count)])
        loss_of(alone, joined).backward()
        plain.step()
        large_batches.append(flat_of(alone))
    expected = torch.stack(large_batches)
    for blocks in LAYOUTS[rank_count]:
        daso, model = build(
            blocks, 2, optimizer=lambda p: torch.optim.SGD(p, LR, momentum=momentum)
        )
        assert_simulated(run_daso(daso, model, 1, 6), expected)


@pytest.mark.ranks([2, 4], timeout=120)
@repeated("kind", ["sgd", "adam"])
def test_replicas_are_bitwise_equal_at_each_close(kind, rank_count):
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, LR, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, LR),
    }
    blocks = LAYOUTS[rank_count][0]
    wires = (torch.bfloat16, torch.float16, torch.float32)
    for wire in wires if rank_count == 2 else wires[:1]:
        daso, model = build(
            blocks, 6, dtype=torch.float32, optimizer=makers[kind], warmup_epochs=1,
            cooldown_epochs=1, downcast_type=wire,
        )  # fmt: skip
        seen = run_daso(daso, model, 3, 6)
        assert all(world().all_equal(seen[i]) for i in (5, 11, 17))
        assert not world().all_equal(seen[8])
        with_skips(daso, 8, 4, 2)
        assert world().all_equal(run_daso(daso, model, 1, 9)[-1])


@pytest.mark.ranks(3, timeout=120)
def test_the_size_of_messages_and_the_choice_of_groups_change_nothing():
    results = []
    for chunk, groups in ((10_000_000, True), (10_000_000, False), (1, False), (7, True)):
        daso, model = build(
            [1, 2], 4, dtype=torch.float32, warmup_epochs=1, cooldown_epochs=1,
            sending_chunk_size=chunk, use_mpi_groups=groups,
        )  # fmt: skip
        results.append(run_daso(daso, model, 3, 6)[-1])
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.ranks(2, timeout=120)
def test_updates_below_the_resolution_of_bfloat16_survive():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(100.0)
    daso = DASO(torch.optim.SGD(model.parameters(), 1.0), 3, ranks_per_node=1)
    wrapped = DataParallelMultiGPU(model, daso)
    daso.last_batch = 40
    for _ in range(40):
        daso.zero_grad()
        (wrapped(torch.ones(1, 1)) * 0.001).sum().backward()
        daso.step()
    assert model.weight.item() == pytest.approx(99.96, abs=1e-3)


@pytest.mark.ranks(2, timeout=120)
def test_weights_loaded_after_wrapping_are_not_rounded():
    for options in ({}, {"warmup_epochs": 0}):
        daso, model = build([1, 1], 5, dtype=torch.float32, **options)
        loaded = make_model(seed=7, dtype=torch.float32)
        model.module.load_state_dict(loaded.state_dict())
        daso.last_batch = 2
        for _ in range(2):
            daso.zero_grad()
            (0.0 * model(torch.ones(1, 3)).sum()).backward()
            daso.step()
        assert torch.equal(flat_of(model), flat_of(loaded))


@pytest.mark.ranks(2, timeout=120)
def test_a_frozen_parameter_is_neither_sent_nor_shifted():
    daso, model = build([1, 1], 5, warmup_epochs=0, cooldown_epochs=0)
    inner = model.module
    inner[0].bias.requires_grad_(False)
    frozen = inner[0].bias.detach().clone()
    daso.set_model(inner)
    before = flat_of(model)
    after = run_daso(daso, model, 2, 6)[-1]
    assert torch.equal(inner[0].bias, frozen)
    assert world().all_equal(after)
    assert (after - before).abs().max() > 1e-3
    inner[0].bias.requires_grad_(True)
    assert world().all_equal(run_daso(daso, model, 2, 6)[-1])
    assert not torch.equal(inner[0].bias, frozen)
    assert len(daso.exchange.flat.named) == 4


def test_one_process_trains_as_without_daso():
    daso, model = build(None, 6, warmup_epochs=1, cooldown_epochs=1, dtype=torch.float32)
    seen = run_daso(daso, model, 6, 5)
    alone = make_model(dtype=torch.float32)
    plain = torch.optim.SGD(alone.parameters(), LR)
    for step in range(30):
        plain.zero_grad()
        loss_of(alone, batch_of(0, step, torch.float32)).backward()
        plain.step()
        assert torch.equal(seen[step], flat_of(alone))
    assert daso.epoch == 6


@pytest.mark.ranks(4, timeout=120)
def test_ranks_of_a_node_with_momentum_meet_again_before_each_exchange():
    """Local steps leave momentum unlike; one rank of a node must not speak for the others."""
    daso, model = build(
        [2, 2], 9, warmup_epochs=0, cooldown_epochs=0,
        optimizer=lambda p: torch.optim.SGD(p, LR, momentum=0.9),
    )  # fmt: skip
    with_skips(daso, 4, 4, 1)
    run_daso(daso, model, 1, 8)
    assert daso.went_apart
    meetings = []
    daso.exchange.align = lambda: meetings.append((daso.rotation - 1) % 2)
    with_skips(daso, 1, 1, 1)
    run_daso(daso, model, 1, 4)
    assert meetings == [0, 1, 0]
