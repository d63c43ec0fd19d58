"""Training on the device: the numbers of the CPU under every schedule, and no wait of the host."""

from __future__ import annotations

import contextlib
import copy
import csv
import json

import pytest
import torch
import torch.nn.functional as F
from tests.accelerator.ranks import device_ranks, own_device
from torch import nn

import unisono
from unisono.data_parallel import DASO, DataParallel, DataParallelMultiGPU, DataParallelOptimizer
from unisono.nn import clip_grad_norm_
from unisono.train import log, record

pytestmark = device_ranks(2)


class Branches(nn.Module):
    """A small network with a norm, and a layer that only some steps use."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.often, self.seldom = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, way=0):
        x = F.relu(self.norm(self.stem(x))).mean((2, 3))
        return (self.seldom if way else self.often)(x)


def data(step, dtype=torch.float64):
    draw = torch.Generator().manual_seed(10 * step + unisono.world().rank)
    return torch.randn(4, 2, 6, 6, generator=draw, dtype=dtype), torch.arange(4) % 3


def trained(device, how):
    """Train for some steps; return the parameters."""
    torch.manual_seed(0)
    net = Branches().double().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    if how == "non-blocking":
        optimizer = DataParallelOptimizer(optimizer)
        model = DataParallel(net, optimizer=optimizer, bucket_mb=0.001)
    else:
        compression = how if how in ("bf16", "fp16") else None
        model = DataParallel(net, compression=compression)
    uneven = how.startswith("join")
    steps = 2 + 2 * unisono.world().rank if uneven else 4
    divide_by = "world" if how == "join of all" else "active"
    with model.join(divide_by=divide_by) if uneven else contextlib.nullcontext():
        for step in range(steps):
            one_step(model, optimizer, how, step, device)
    if how == "non-blocking":
        optimizer.finalize()
    return [p.detach().cpu() for p in net.state_dict().values()]


def one_step(model, optimizer, how, step, device):
    x, y = (t.to(device) for t in data(step))
    way = int(how == "unused" and step > 1 and unisono.world().rank == 1)
    optimizer.zero_grad()
    if how == "accumulation":
        with model.no_sync():
            F.cross_entropy(model(x[:2]), y[:2]).backward()
        F.cross_entropy(model(x[2:]), y[2:]).backward()
    else:
        F.cross_entropy(model(x, way), y).backward()
    if how == "clipping":
        model.clip_grad_norm(0.1)
    elif how == "clipping of parts":
        clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


HOW = (
    *("blocking", "non-blocking", "accumulation", "unused", "join", "join of all"),
    *("bf16", "fp16", "clipping", "clipping of parts"),
)


@device_ranks(2, timeout=120)
def test_data_parallel_gives_the_numbers_of_the_cpu(schedule):
    device = own_device()
    for how in HOW:
        for here, there in zip(trained("cpu", how), trained(device, how), strict=True):
            torch.testing.assert_close(there, here, msg=lambda text, how=how: f"{how}: {text}")


@pytest.mark.parametrize("is_scaled", [False, True])
def test_autocast_gives_the_numbers_of_one_process_on_the_device(is_scaled, schedule):
    """Each rank also trains alone on the batch of both: the mean of two equal halves."""
    device, dtype = own_device(), torch.float16 if is_scaled else torch.bfloat16
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    model = DataParallel(copy.deepcopy(alone))
    x, y = torch.randn(2, 4, 6).to(device), torch.randint(0, 3, (2, 4)).to(device)
    for net, rows in ((alone, slice(None)), (model, unisono.world().rank)):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("sim", init_scale=64.0, enabled=is_scaled)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("sim", dtype):
                out = net(x[rows])
                assert out.dtype == dtype
                loss = F.cross_entropy(out.flatten(0, -2), y[rows].flatten())
                assert loss.dtype == torch.float32
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.cpu(), wanted.cpu(), rtol=2e-2, atol=2e-3)


def daso_trained(device, ranks_per_node=1, **options):
    torch.manual_seed(0)
    net = nn.Linear(8, 1).double().to(device)
    sgd = torch.optim.SGD(net.parameters(), 0.05)
    options["ranks_per_node"] = ranks_per_node
    steps = DASO(sgd, 4, warmup_epochs=1, cooldown_epochs=1, **options)
    replica = DataParallelMultiGPU(net, steps)
    draw = torch.Generator().manual_seed(steps.communicator.rank)
    steps.last_batch = 4
    for _ in range(4):
        for _ in range(4):
            x = torch.randn(16, 8, generator=draw, dtype=torch.float64).to(device)
            steps.zero_grad()
            loss = (replica(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            steps.step()
        steps.epoch_loss_logic(loss.detach())
    return [p.detach().cpu() for p in net.parameters()]


def test_daso_gives_the_numbers_of_the_cpu(schedule):
    for here, there in zip(daso_trained("cpu"), daso_trained(own_device()), strict=True):
        torch.testing.assert_close(there, here)


@device_ranks(3, timeout=60)
def test_nodes_may_have_several_ranks_on_devices():
    device, nodes = own_device(), [2, 1]
    for here, there in zip(daso_trained("cpu", nodes), daso_trained(device, nodes), strict=True):
        torch.testing.assert_close(there, here)


@pytest.mark.parametrize("how", ["blocking", "non-blocking", "bf16"])
def test_the_host_waits_for_no_step_of_data_parallel(how):
    import simdev

    device = own_device()
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    if how == "non-blocking":
        optimizer = DataParallelOptimizer(optimizer)
    model = DataParallel(
        net,
        optimizer=optimizer if how == "non-blocking" else None,
        compression="bf16" if how == "bf16" else None,
    )
    x, y = (t.to(device) for t in data(0, torch.float32))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(3):
        step()
    with simdev.counters() as counted:
        step()
    assert counted.syncs == {}


def test_reset_parameters_leaves_the_generator_of_the_device_alone():
    net = Branches().to(own_device())
    before = torch.sim.get_rng_state()
    DataParallel(net, reset_parameters=True)
    assert torch.equal(before, torch.sim.get_rng_state())


def test_what_is_logged_is_not_waited_for_and_the_report_names_the_device(tmp_path, monkeypatch):
    import simdev

    monkeypatch.setattr("unisono.train.recording.run.FLUSH_NS", 10**12)
    device, rank = own_device(), unisono.world().rank
    with record(f"{tmp_path}/run") as run, simdev.patience(default_stream_s=0.2):
        log(step=0, loss=0.0)  # the first one is written at once
        x = torch.ones(1, device=device, requires_grad=True)
        with simdev.counters() as counted:
            for step in range(1, 4):
                loss = (x * (step + rank)).sum()
                log(step=step, loss=loss, rows=torch.tensor(step))
                loss.detach().zero_()  # what was logged does not change with it
        assert counted.syncs == {}
    unisono.world().barrier()
    with (run.dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [0.0, 1.5, 2.5, 3.5]
    part = json.loads((run.dir / f"rank-{rank}.json").read_text())
    assert part["device"] == f"{device} (Simulated accelerator)"
    assert "Simulated accelerator" in (run.dir / "report.html").read_text()
