"""Where ranks find the device: `on=`, platforms, generators, checkpoints, and `unisono doctor`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.accelerator.ranks import device_ranks, own_device
from tests.waiting import scaled_by_load
from torch import nn

import unisono
from unisono import accelerator
from unisono.cli import self_test
from unisono.compat import ddpw_functional as functional
from unisono.data_parallel import DataParallel
from unisono.errors import PlatformError
from unisono.launch.context import seeded
from unisono.train import Checkpoint

PROGRAM = """
import json, sys
import torch
import unisono
from unisono import accelerator
from unisono.errors import PlatformError

def work():
    comm = unisono.world()
    there = comm.all_reduce(torch.ones(2, device=comm.device))
    here = comm.with_device("cpu").all_reduce(torch.ones(2))
    drawn = torch.rand(1, device=comm.device)
    current = torch.accelerator.current_device_index()
    return str(comm.device), current, [there.tolist(), here.tolist()], drawn.item()

found = {}
for on in ("sim", "gpu", None, unisono.Platform(device="sim", ranks=2, seed=None)):
    results = list(unisono.run(work, on=on, seed=1, logs=unisono.Logs(console="none")))
    found[on if isinstance(on, str) else type(on).__name__] = results
found["initialised here"] = accelerator.initialised()
torch.ones(1, device="sim:1")
found["initialised now"] = accelerator.initialised()
found["after first use"] = list(
    unisono.run(work, on="sim", seed=1, logs=unisono.Logs(console="none"))
)
for on, ranks in (("sim", 3), ("xpu", 1), ("sim:0", 1), ("cuda:1", 2)):
    try:
        unisono.run(work, on=on, ranks=ranks)
    except PlatformError as error:
        found[f"{on} {ranks}"] = str(error)
print(json.dumps(found))
"""


def test_ranks_run_on_the_device_by_any_of_its_names(device_python, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = subprocess.run([device_python, file], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for way in ("sim", "gpu", "NoneType", "Platform", "after first use"):
        for rank, (device, current, sums, drawn) in enumerate(found[way]):
            assert (device, current) == (f"sim:{rank}", rank)
            assert sums == [[2.0, 2.0], [2.0, 2.0]]
            assert drawn == found["sim"][rank][3]  # `seed` reaches the generator of the device
    assert found["sim"][0][3] != found["sim"][1][3]
    assert found["initialised here"] is None  # so that ranks can be forked
    assert found["initialised now"] == "sim"
    assert "3 ranks > 2 GPUs" in found["sim 3"]
    assert "0 GPUs of the kind 'xpu'" in found["xpu 1"]
    assert 'on="sim"' in found["sim:0 1"]
    assert "CUDA_VISIBLE_DEVICES=1" in found["cuda:1 2"]


OUT_OF_MEMORY = """
import json, sys, time
from pathlib import Path
import torch
import unisono

began = Path("began")

def work(waits_by):
    comm = unisono.world()
    x = torch.zeros(4, device=comm.device)
    for step in range(10**6):
        if comm.rank == 1 and step == 3:
            began.write_text(str(time.time()))
            kept = [torch.empty(1 << 20, device=comm.device) for _ in range(1000)]
        if waits_by == "barrier":
            comm.barrier()
        else:
            comm.all_reduce_(x).sum().item()

found = {}
for waits_by in ("barrier", "item"):
    try:
        unisono.run(work, waits_by, on="sim", logs=unisono.Logs(console="none"))
    except unisono.errors.RankFailed as error:
        seconds = time.time() - float(began.read_text())
        found[waits_by] = [error.rank, type(error.__cause__).__name__, str(error), seconds]
print(json.dumps(found))
"""


def test_a_rank_whose_device_is_full_is_named_and_the_others_stop(
    device_python, monkeypatch, tmp_path
):
    monkeypatch.setenv("SIM_MEMORY_MB", "64")
    file = tmp_path / "program.py"
    file.write_text(OUT_OF_MEMORY)
    done = subprocess.run([device_python, file], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for waits_by in ("barrier", "item"):
        rank, cause, message, seconds = found[waits_by]
        assert (rank, cause) == (1, "OutOfMemoryError")
        assert f"Tried to allocate {4 << 20} bytes" in message
        assert "program.py" in message
        assert "consequence: rank 0" in message
        assert seconds < scaled_by_load(2)


NO_CALL_FOLLOWS = """
import json
import time

import torch

import unisono
from unisono.errors import UnisonoError
from unisono.launch import Platform


def one_call_too_many():
    comm = unisono.world()
    x = comm.all_reduce(torch.ones(4, device=comm.device), "mean")
    return comm.all_reduce(x).tolist() if comm.rank == 0 else x.tolist()


def late(reads):
    comm = unisono.world()
    if comm.rank == 1:
        time.sleep(50)
    y = comm.all_reduce(torch.ones(4, device=comm.device))
    return y.tolist() if reads else None


found = {}
calls = {"many": (one_call_too_many,), "read": (late, True), "unread": (late, False)}
for name, call in calls.items():
    platform = Platform(device="sim", ranks=2, comm_timeout_s=2.0, verbose=False)
    began = time.monotonic()
    try:
        found[name] = str(unisono.run(*call, on=platform, timeout_s=40)), "", 0
    except UnisonoError as error:
        found[name] = type(error).__name__, str(error), time.monotonic() - began
print(json.dumps(found))
"""


def test_what_never_completes_is_an_error_although_no_call_follows(device_python, tmp_path):
    """Else ranks would return what an aborted transfer has left in memory."""
    script = tmp_path / "program.py"
    script.write_text(NO_CALL_FOLLOWS)
    done = subprocess.run([device_python, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    kind, message, _ = found["many"]
    assert kind == "RankFailed"
    assert "CollectiveMismatch" in message
    assert "rank 1 returned after 1 calls" in message
    for name in ("read", "unread"):
        kind, message, seconds = found[name]
        assert kind == "RankTimeout"
        assert "time.sleep(50)" in message
        assert seconds < scaled_by_load(15)


@device_ranks(1)
def test_a_block_with_a_seed_restores_the_generators_of_all_devices():
    own_device()
    states = torch.sim.get_rng_state_all()
    with seeded(7, 0):
        first = torch.rand(2, device="sim:0")
        torch.rand(2, device="sim:1")
    with seeded(7, 0):
        assert torch.equal(torch.rand(2, device="sim:0"), first)
    for before, after in zip(states, torch.sim.get_rng_state_all(), strict=True):
        assert torch.equal(before, after)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()


def train(model, optimizer, device, steps):
    draw = torch.Generator().manual_seed(unisono.world().rank)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=draw, dtype=torch.float64).to(device)
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


@device_ranks(2)
def test_a_restored_run_goes_on_with_the_numbers_of_the_device(schedule, tmp_path):
    """Dropout draws on the device: it is the same again only if its generator is in the file."""
    device = own_device()
    model = DataParallel(net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with Checkpoint(tmp_path) as saved:
        train(model, optimizer, device, 2)
        saved.save(2, model=model, optimizer=optimizer)
        straight = train(model, optimizer, device, 2)
        torch.manual_seed(5)
        saved.restore(model=model, optimizer=optimizer)
    for mine, wanted in zip(train(model, optimizer, device, 2), straight, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


@device_ranks(2)
@pytest.mark.parametrize(("before", "after"), [("cpu", "sim"), ("sim", "cpu")])
def test_checkpoints_move_between_cpu_and_device(before, after, schedule, tmp_path):
    device = {"sim": own_device(), "cpu": torch.device("cpu")}
    models = {kind: DataParallel(net().eval().to(place)) for kind, place in device.items()}
    optimizers = {kind: torch.optim.Adam(m.parameters(), 0.1) for kind, m in models.items()}
    with Checkpoint(tmp_path) as saved:
        train(models[before], optimizers[before], device[before], 2)
        saved.save(2, model=models[before], optimizer=optimizers[before])
        drawn = []
        for seed in range(2):
            torch.manual_seed(seed)
            saved.restore(model=models[after], optimizer=optimizers[after])
            drawn.append(torch.rand(3, device=device[after]).tolist())
    assert drawn[0] == drawn[1]  # also where the file has no state of that kind of device
    ends = [train(models[kind], optimizers[kind], device[kind], 2) for kind in (before, after)]
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)


@device_ranks(1)
def test_names_memory_and_copies_of_constants():
    device = own_device()
    assert accelerator.kind() == "sim"
    assert accelerator.is_kind("sim")
    assert accelerator.is_backend("simccl")
    assert not accelerator.is_kind("gpu")
    assert accelerator.name(device) == torch.sim.get_device_name(1)  # that of the model
    free, total = accelerator.memory(device) or (0, 0)
    assert 0 < free <= total
    constant = torch.arange(3)
    with torch.inference_mode():
        copy = accelerator.copied_once(constant, device)
    assert not copy.is_inference()
    assert accelerator.copied_once(constant, device) is copy
    assert accelerator.copied_once(constant, device, torch.float64).dtype == torch.float64


def test_the_doctor_compares_programs_on_the_device_with_the_cpu(device_python, monkeypatch):
    monkeypatch.setenv("SIM_PATIENCE_MS", "50,50")
    command = [device_python, "-m", "unisono", "doctor", "--on", "gpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name in ("rank 0", "rank 1", *self_test.PROGRAMS):
        assert checks[name]["status"] == "ok", checks[name]
    assert "sim:1" in checks["rank 1"]["found"]
    seconds = float(checks["late rank"]["found"].split()[-2])
    assert seconds < self_test.LATE_S / 2  # the host of the rank that was there went on


def test_the_doctor_names_the_result_that_is_not_that_of_the_cpu():
    x = torch.ones(3)
    assert self_test.difference([x, x], [x, x + 1e-4]) == ""
    assert "result 1" in self_test.difference([x, x], [x, x + 1])


@device_ranks(2)
def test_a_module_on_the_device_is_synchronised_with_its_batch_norms():
    rank, found = unisono.world().rank, []
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    for device in (torch.device("cpu"), own_device()):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        model = functional.to(plain, rank, device=device)
        assert functional.device(model) == device
        model(x.to(device)).square().sum().backward()
        tensors = *(p.grad for p in model.parameters()), *model.buffers()
        found.append([t.cpu() for t in tensors])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)


def places_of(count):
    """Return where ranks of a node with `count` devices put a module without saying which."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "count", lambda of=None: count)
        patch.setattr(functional, "detect", lambda: SimpleNamespace(local_size=3))
        return functional.device(functional.to(nn.Linear(1, 1), unisono.world().rank, False, "sim"))


@device_ranks(3)
def test_a_module_gets_a_device_of_its_own_or_the_one_that_its_rank_sees():
    rank = unisono.world().rank
    with pytest.raises(PlatformError, match="3 ranks of this node > 2"):  # on all of them
        places_of(2)
    with pytest.raises(PlatformError, match="0 visible"):
        places_of(0)
    assert places_of(1) == torch.device("sim", 0)  # each was bound to one
    if rank < 2:
        assert places_of(3) == torch.device("sim", rank)


# -- several nodes -------------------------------------------------------------------------------


TWO_NODES = """
import sys
import torch
import torch.distributed as dist
from mpi4py import MPI
from tests.accelerator.test_training import daso_trained

backend, place, world = sys.argv[1], sys.argv[2], MPI.COMM_WORLD
expected = daso_trained("cpu", 2, comm=world)  # in the world of MPI alone
dist.init_process_group(
    backend, init_method=f"file://{place}/{world.rank // 2}", rank=world.rank % 2, world_size=2
)
device = torch.device("sim", world.rank % 2) if "sim" in backend else torch.device("cpu")
torch.accelerator.set_device_index(world.rank % 2)
for found, wanted in zip(daso_trained(device, 2), expected, strict=True):
    torch.testing.assert_close(found, wanted)
print(f"rank {world.rank} of {world.size} agrees\\n", end="", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,sim:simccl"])
def test_torchs_groups_serve_inside_nodes_and_mpi_between_them(
    backend, device_python, mpiexec, tmp_path
):
    words = [mpiexec, "-n", "4", device_python, "-W", "ignore", "-c", TWO_NODES]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*words, backend, str(tmp_path)], capture_output=True, text=True, cwd=root, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4 agrees" in done.stdout
