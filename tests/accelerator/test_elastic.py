"""`train.elastic` on the device: one hash for any number of ranks, also if one dies."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from tests.accelerator.conftest import SCHEDULES
from tests.accelerator.ranks import device_ranks, own_device
from torch import nn

import unisono
from unisono.errors import CheckpointError, PlatformError

PROGRAM = """
import hashlib, json, os, signal, time, warnings
from pathlib import Path
import torch
from torch import nn
import unisono

killed = Path("killed").absolute()

def train(steps, on_device, kills):
    warnings.simplefilter("error")
    device = unisono.world().device
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    model = nn.Sequential(*first, nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    drawn = torch.Generator().manual_seed(1)
    data = torch.randn(200, 1, 6, 6, generator=drawn), torch.randint(3, (200,), generator=drawn)
    if on_device:
        data = [t.to(device) for t in data]
    run = unisono.train.elastic(
        model, optimizer, data, batch_size=40, shards=6, steps=steps, clip=1.0
    )
    began = []
    for step in run:
        began.append(step.number)

        def loss(batch):
            if kills and step.number == 2 and os.environ["RANK"] == "1" and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.cross_entropy(model(batch.x.to(device)), batch.y.to(device))
            step.log(twice=2 * loss)
            return loss

        step(loss)
        time.sleep(0.3 if kills and killed.exists() and run.members == 1 else 0)
    assert abs(step.metrics["twice"] - 2 * step.loss) < 1e-6
    bits = hashlib.sha256()
    for tensor in model.state_dict().values():
        bits.update(tensor.cpu().numpy().tobytes())
    for p in model.parameters():
        for name, tensor in sorted(optimizer.state[p].items()):
            assert tensor.device.type == ("cpu" if name == "step" else device.type)
            bits.update(tensor.cpu().numpy().tobytes())
    return str(device), bits.hexdigest(), began[0]

found = {}
for how, ranks, *args in (
    ("one", 1, 20, True, False),
    ("two", 2, 20, True, False),
    ("data of the host", 2, 20, False, False),
    ("one dies", 2, 20, True, True),
):
    results = unisono.run(
        train, *args, on="sim", ranks=ranks, elastic=True, logs=unisono.Logs(console="none")
    )
    found[how] = list(results)
print(json.dumps(found))
"""


def test_any_number_of_ranks_has_the_same_hash_also_if_one_dies(
    device_python, monkeypatch, tmp_path
):
    monkeypatch.setenv("SIM_PATIENCE_MS", SCHEDULES["all_late"])
    # Kernels of this device are those of the CPU, whose sums depend on the number of threads.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = subprocess.run([device_python, file], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    hashes = {bits for results in found.values() for _, bits, _ in results}
    assert len(hashes) == 1
    assert [device for device, _, _ in found["two"]] == ["sim:0", "sim:1"]
    assert found["one dies"][1][2] >= 2  # it got the state of a member on another device


def loop_on(device, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.ones(32, 4, device=device)
    run = unisono.train.elastic(model, optimizer, data, batch_size=8, shards=4, **settings)
    return model, run


@device_ranks(1)
def test_the_host_waits_for_what_a_shard_leaves_on_the_board():
    import simdev

    model, run = loop_on(own_device())
    for step in run:
        with simdev.counters() as counted:
            step(lambda batch: model(batch[0]).mean())
    # Of each shard the numbers of its samples, its gradient and its loss; and the sum of all.
    assert counted.syncs == {"copy from host": 4 + 1, "copy to host": 4, "item": 4}


@device_ranks(1)
def test_a_step_leaves_generators_settings_and_the_current_device_alone():
    own_device()
    model, run = loop_on("sim:1", steps=2)
    states = torch.sim.get_rng_state_all()
    seen = []
    for step in run:

        def loss(batch):
            seen.append((torch.are_deterministic_algorithms_enabled(), torch.sim.current_device()))
            return model(batch[0]).mean()

        step(loss)
    assert set(seen) == {(True, 1)}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.sim.current_device() == 0
    for before, after in zip(states, torch.sim.get_rng_state_all(), strict=True):
        assert torch.equal(before, after)


@device_ranks(1)
def test_states_of_other_devices_and_models_on_two_devices_are_refused():
    _, there = loop_on(own_device())
    _, here = loop_on("cpu")
    for one, other in ((there, here), (here, there)):
        with pytest.raises(CheckpointError, match="device: "):
            one.load_state_dict(other.state_dict())
    apart = nn.Sequential(nn.Linear(4, 4).to("sim:0"), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(apart.parameters(), 0.1)
    with pytest.raises(PlatformError, match="cpu != sim:0"):
        unisono.train.elastic(apart, optimizer, torch.ones(32, 4), batch_size=8)
