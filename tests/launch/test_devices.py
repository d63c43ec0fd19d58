"""GPUs and Apple GPUs: what is decided is tested anywhere, what runs on them where they are."""

from __future__ import annotations

import pytest
import torch

import unisono
from unisono import accelerator
from unisono.comm import lifecycle as start
from unisono.compat.ddpw import functional
from unisono.environment import Environment
from unisono.errors import PlatformError
from unisono.launch.context import enter_world, set_here
from unisono.launch.request import resolve
from unisono.launch.settings import read_configuration

QUIET = unisono.Logs(console="none")


def gpus(monkeypatch, count, *, is_rank=False, kind="cuda"):
    """Make this process believe that it sees `count` GPUs of a kind."""
    monkeypatch.setattr(accelerator, "kind", lambda: kind if count else None)
    monkeypatch.setattr(accelerator, "count", lambda of=None: count if of in (None, kind) else 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if is_rank:
        monkeypatch.setenv("LOCAL_RANK", "0")


def place(on, **given):
    return resolve(on, given, read_configuration())


def test_all_visible_gpus_are_taken_where_nothing_is_said(monkeypatch):
    gpus(monkeypatch, 3)
    word, platform = place(None)
    assert (word, platform.world_size) == ("gpu", 3)
    assert [platform.torch_device(i) for i in range(3)] == [
        torch.device("cuda", i) for i in range(3)
    ]
    assert place("gpu", ranks=2)[1].world_size == 2
    assert place("cuda")[0] == "gpu"
    gpus(monkeypatch, 0)
    assert place(None)[0] == "cpu"


def test_a_gpu_is_whatever_accelerator_the_machine_has_and_a_kind_can_be_named(monkeypatch):
    gpus(monkeypatch, 2, kind="xpu")
    for on in (None, "gpu", "XPU"):
        word, platform = place(on)
        assert (word, platform.world_size) == ("gpu", 2)
        assert platform.torch_device(1) == torch.device("xpu", 1)
    platform = unisono.Platform(device="xpu", ranks=2)
    assert platform.but(hosts=()).torch_device(0).type == "xpu"
    assert platform.but(device="cpu").torch_device(0).type == "cpu"
    assert platform.but(device="gpu").accelerator is None
    with pytest.raises(PlatformError, match="2 ranks > 0 GPUs of the kind 'cuda'"):
        unisono.run(print, on="cuda", ranks=2)
    with pytest.raises(PlatformError, match="'xpu'"):
        unisono.run(print, on="xpu", ranks=3)


def test_an_apple_gpu_is_taken_only_where_it_is_asked_for(monkeypatch):
    gpus(monkeypatch, 1, kind="mps")
    assert place(None)[0] == "cpu"
    assert place("gpu")[1].torch_device(0) == torch.device("mps", 0)


def test_more_ranks_than_gpus_are_refused_with_both_numbers_and_a_way_out(monkeypatch):
    gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(PlatformError) as caught:
        unisono.run(print, on="gpu", ranks=4)
    message = str(caught.value)
    assert "4 ranks > 2 GPUs" in message
    assert "CUDA_VISIBLE_DEVICES='0,1'" in message
    assert "HINT: on='cpu', ranks=4" in message
    gpus(monkeypatch, 0)
    with pytest.raises(PlatformError, match="0 GPUs visible"):
        unisono.run(print, on=unisono.Platform(device="gpu"))


def test_ranks_share_gpus_where_the_user_says_so(monkeypatch):
    gpus(monkeypatch, 2)
    platform = unisono.Platform(device="gpu", ranks=4, oversubscribe=True)
    platform.validate()
    assert [platform.torch_device(i).index for i in range(4)] == [0, 1, 0, 1]


def test_a_rank_that_sees_one_gpu_takes_it_whatever_its_number(monkeypatch):
    gpus(monkeypatch, 1, is_rank=True)
    platform = unisono.Platform(device="gpu", n_gpus_per_node=4)
    assert platform.torch_device(3) == torch.device("cuda", 0)


def test_ranks_under_mpi_take_gpus_where_they_are_asked_for_and_there(monkeypatch):
    gpus(monkeypatch, 2, is_rank=True)
    platform = unisono.Platform(device="mpi", n_gpus_per_node=2)
    assert (platform.world_size, platform.torch_device(1)) == (2, torch.device("cuda", 1))
    assert unisono.Platform(device="mpi", ranks=2).torch_device(1).type == "cpu"
    gpus(monkeypatch, 0, is_rank=True)
    assert platform.torch_device(1).type == "cpu"


def test_a_gpu_script_is_rehearsed_on_processes_unchanged(monkeypatch):
    gpus(monkeypatch, 0)
    monkeypatch.setenv("UNISONO_FORCE_ON", "cpu")
    platform = unisono.Platform(device="gpu", n_gpus_per_node=2)
    results = unisono.run(lambda: str(unisono.world().device), on=platform, logs=QUIET)
    assert list(results) == ["cpu", "cpu"]


def test_the_device_is_set_before_the_group_is_made(monkeypatch):
    gpus(monkeypatch, 2, is_rank=True)
    order = []
    monkeypatch.setattr(accelerator, "set_device", lambda device: order.append(str(device)))
    monkeypatch.setattr(
        start,
        "start_world",
        lambda _env, **given: order.append((given["device"], given["backend"])),
    )
    monkeypatch.setattr("unisono.launch.context.own_group", lambda _groups: None)
    platform = unisono.Platform(device="gpu", n_gpus_per_node=2, seed=None)
    environment = Environment(kind="unisono", rank=1, size=2, local_rank=1, local_size=2)
    try:
        here = enter_world(environment, platform, store=None, name="test")
    finally:
        set_here(None)
    assert here.device == torch.device("cuda", 1)
    assert order == ["cuda:1", (torch.device("cuda", 1), None)]


def test_a_machine_without_an_apple_gpu_says_so(monkeypatch):
    gpus(monkeypatch, 0)
    with pytest.raises(PlatformError, match="no Apple GPU") as caught:
        unisono.run(print, on="mps")
    assert "HINT" in str(caught.value)
    gpus(monkeypatch, 1, kind="mps")
    word, platform = place("mps")
    assert (word, platform.world_size, platform.torch_device(0).type) == ("mps", 1, "mps")


def cuda_work():
    """Reduce on the GPU of this rank; return where that was, and a tensor of it."""
    comm = unisono.world()
    x = comm.all_reduce(torch.full((4,), comm.rank + 1.0, device=comm.device))
    return torch.cuda.current_device(), str(comm.device), comm.backend, x


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_rank_for_each_gpu_reduces_over_nccl():
    count = torch.cuda.device_count()
    results = unisono.run(cuda_work, on="gpu", logs=QUIET, timeout_s=120)
    assert len(results) == count
    for rank, (current, device, backend, x) in enumerate(results):
        assert (current, device) == (rank, f"cuda:{rank}")
        assert "nccl" in backend
        assert torch.equal(x, torch.full((4,), count * (count + 1) / 2))  # and on the CPU by now
    with pytest.raises(PlatformError, match=f"{count + 1} ranks > {count} GPU"):
        unisono.run(cuda_work, on="gpu", ranks=count + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_module_is_moved_to_the_gpu_of_its_rank_and_synchronised():
    def train():
        rank = unisono.world().rank
        torch.manual_seed(rank)
        model = functional.to(torch.nn.Linear(3, 2), rank)
        model(torch.ones(1, 3, device=unisono.world().device)).sum().backward()
        weight = model.module.weight
        return str(functional.device(model)), weight.detach(), weight.grad

    results = list(unisono.run(train, on="gpu", logs=QUIET, timeout_s=120))
    for rank, (device, weight, gradient) in enumerate(results):
        assert device == f"cuda:{rank}"
        assert torch.equal(weight, results[0][1])
        assert torch.equal(gradient, results[0][2])


@pytest.mark.mps
@pytest.mark.skipif(not accelerator.count("mps"), reason="no Apple GPU")
def test_one_rank_works_on_the_apple_gpu():
    def work():
        comm = unisono.world()
        return str(comm.device), comm.all_reduce(torch.ones(3, device=comm.device))

    ((device, x),) = unisono.run(work, on="mps", logs=QUIET, timeout_s=120)
    assert device.startswith("mps")
    assert torch.equal(x, torch.ones(3))
