"""TAGI on the device: the numbers of the CPU, and a NaN that is told without waiting for it."""

from __future__ import annotations

import json
import socket
import subprocess

import numpy as np
import pytest
import torch
from tests.accelerator.ranks import device_ranks, own_device

import unisono
from unisono import bayes
from unisono.errors import PartitionError, PlatformError, UnisonoError


def net_on(device):
    bayes.manual_seed(0)
    net = bayes.Sequential(
        bayes.Conv2d(1, 4, 3, padding=1, in_width=8, in_height=8),
        bayes.BatchNorm2d(4),
        bayes.ReLU(),
        bayes.AvgPool2d(2, 2),
        bayes.Linear(64, 3),
    )
    net.to_device(str(device))
    return net, bayes.OutputUpdater(net.device)


def learn(net, updater, x, y, var):
    out = net(x)
    updater.update(net.output_z_buffer, y, var, net.input_delta_z_buffer)
    net.backward()
    net.step()
    return out


def data(seed, rows=4):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(rows, 64)), draw.normal(size=rows * 3), np.full(rows * 3, 0.1)


def values(net):
    return {name: np.concatenate([np.ravel(t) for t in x]) for name, x in net.state_dict().items()}


@device_ranks(1)
def test_a_net_learns_the_same_on_the_device_from_arrays_and_from_tensors(schedule):
    device = own_device()
    nets = {kind: net_on("cpu" if kind == "cpu" else device) for kind in ("cpu", "sim", "tensors")}
    for step in range(3):
        outs = {}
        for kind, (net, updater) in nets.items():
            numbers = data(step)
            if kind == "tensors":
                numbers = [torch.tensor(a, dtype=torch.float32).to(device) for a in numbers]
            mean, var = learn(net, updater, *numbers)
            outs[kind] = [np.ravel(torch.as_tensor(t).cpu()) for t in (mean, var)]
        for kind in ("sim", "tensors"):
            np.testing.assert_allclose(outs[kind], outs["cpu"], rtol=1e-4, atol=1e-5)
    wanted = values(nets["cpu"][0])
    for kind in ("sim", "tensors"):
        for name, found in values(nets[kind][0]).items():
            np.testing.assert_allclose(found, wanted[name], rtol=1e-3, atol=1e-4)


@device_ranks(1)
def test_the_host_waits_only_for_the_arrays_that_it_gets():
    import simdev

    device = own_device()
    net, updater = net_on(device)
    arrays = data(0)
    tensors = [torch.tensor(a, dtype=torch.float32).to(device) for a in arrays]
    for given, waits in ((arrays, {"copy to host": 2}), (tensors, {})):
        for _ in range(3):
            learn(net, updater, *given)
        with simdev.counters() as counted:
            learn(net, updater, *given)
        assert counted.syncs == waits


@device_ranks(1)
def test_bad_numbers_are_refused_before_they_go_to_the_device():
    net, updater = net_on(own_device())
    x, y, var = data(0)
    with pytest.raises(PartitionError, match="mu_x"):
        net(np.where(x > 0, np.inf, x))
    net(x)
    for name, args in (("mu_obs", (y * np.inf, var)), ("var_obs", (y, -var))):
        with pytest.raises(PartitionError, match=name):
            updater.update(net.output_z_buffer, *args, net.input_delta_z_buffer)


@device_ranks(1)
@pytest.mark.parametrize("bad", ["x", "y", "var"])
def test_bad_numbers_on_the_device_change_nothing_and_are_told_later(bad):
    device = own_device()
    net, updater = net_on(device)
    good = [torch.tensor(a, dtype=torch.float32).to(device) for a in data(0)]
    learn(net, updater, *good)
    before = values(net)
    wrong = list(good)
    place = ["x", "y", "var"].index(bad)
    wrong[place] = wrong[place] * (-1 if bad == "var" else torch.nan if bad == "x" else torch.inf)

    def go_on():
        for _ in range(3):
            learn(net, updater, *wrong)
            torch.sim.synchronize()

    with pytest.raises(UnisonoError, match="sim"):
        go_on()
    for name, found in values(net).items():
        np.testing.assert_array_equal(found, before[name])


@device_ranks(2)
@pytest.mark.parametrize("statistics", [False, "running"])
def test_ranks_learn_together_as_on_the_cpu(statistics, schedule):
    rank, results = unisono.world().rank, []
    for device in (torch.device("cpu"), own_device()):
        net, updater = net_on(device)
        comm = unisono.world().with_device(device)
        config = bayes.DDPConfig([], "auto")
        ddp = bayes.DDPSequential(net, config, comm=comm, sync_norm_stats=statistics)
        assert net.device == str(device)
        for step in range(2):
            x, y, var = data(10 * step + rank)
            ddp(x)
            updater.update(ddp.output_z_buffer, y, var, ddp.input_delta_z_buffer)
            ddp.backward()
            ddp.step()
        results.append(values(net))
    for name, found in results[1].items():
        np.testing.assert_allclose(found, results[0][name], rtol=1e-3, atol=1e-4)


def together(device):
    net, updater = net_on(device)
    comm = unisono.world().with_device(device)
    ddp = bayes.DDPSequential(net, bayes.DDPConfig([], "auto"), comm=comm)

    def step(x, y, var):
        ddp(x)
        updater.update(ddp.output_z_buffer, y, var, ddp.input_delta_z_buffer)
        ddp.backward()
        ddp.step()

    return ddp, step


@device_ranks(2)
def test_the_host_waits_for_no_step_of_ranks_that_learn_together():
    import simdev

    device = own_device()
    numbers = [torch.tensor(a, dtype=torch.float32).to(device) for a in data(0)]
    _, step = together(device)
    for _ in range(3):
        step(*numbers)
    with simdev.counters() as counted:
        step(*numbers)
    assert counted.syncs == {}


@device_ranks(2)
def test_a_nan_on_the_device_of_one_rank_is_told_on_all():
    device = own_device()
    numbers = [torch.tensor(a, dtype=torch.float32).to(device) for a in data(0)]
    ddp, step = together(device)
    step(*numbers)
    if unisono.world().rank == 1:
        numbers[1] = numbers[1] * torch.inf

    def go_on():
        for _ in range(4):
            step(*numbers)
            torch.sim.synchronize()

    with pytest.raises(UnisonoError, match="rank 1: "):
        go_on()
    ddp.check_sync()


REPLICA = """
import json, sys
import torch
from unisono import bayes
from unisono.errors import PlatformError

rank, ids = int(sys.argv[1]), json.loads(sys.argv[2])
bayes.manual_seed(rank)
net = bayes.Sequential(bayes.Linear(2, 4), bayes.ReLU(), bayes.Linear(4, 1))
try:
    ddp = bayes.DDPSequential(net, bayes.DDPConfig(ids, "auto", rank, 2))
except PlatformError as error:
    print(error)
else:
    ddp.check_sync()
    print(ddp.get_device_with_index(), torch.accelerator.current_device_index())
"""


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1, 0], ["sim:1 1", "sim:0 0"]),
        ([], ["sim:0 0", "sim:1 1"]),
        ([1], ["1 of 2", "1 of 2"]),
        ([0, 5], ["1 of 2", "1 of 2"]),
        ([1, 1], ["1 of 2", "1 of 2"]),
    ],
)
def test_device_ids_choose_the_device_of_each_rank(ids, found, device_python, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    started = [
        subprocess.Popen(
            [device_python, "-c", REPLICA, str(rank), json.dumps(ids)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process, wanted in zip(started, found, strict=True):
        out, err = process.communicate(timeout=60)
        assert wanted in out, err


@device_ranks(2)
def test_device_ids_that_contradict_the_running_world_are_refused_on_all_ranks():
    own_device()
    net = bayes.Sequential(bayes.Linear(2, 4))
    with pytest.MonkeyPatch.context() as patch:
        world = unisono.world().with_device(own_device())
        patch.setattr("unisono.launch.world", lambda: world)
        bayes.DDPSequential(net, bayes.DDPConfig([0, 1], "auto"))
        with pytest.raises(PlatformError, match=r"\[1, 0\] != \[0, 1\]"):
            bayes.DDPSequential(net, bayes.DDPConfig([1, 0], "auto"))
