"""Verbs on a device: the numbers of the CPU under every schedule, and a host that never waits."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.accelerator.conftest import SCHEDULES
from tests.accelerator.ranks import device_ranks, on_device, own_device
from tests.comm import test_verbs as on_cpu
from torch import nn

from unisono import Partition
from unisono.comm import Communicator, check, trace, world
from unisono.errors import UnisonoError
from unisono.nn import split

AS_ON_THE_CPU = (
    "test_a_scatter_of_known_blocks_counts_dims_from_the_end_alike_on_all_ranks",
    "test_all_equal_compares_values_and_types",
    "test_all_gather_along_any_dim_of_a_strided_tensor",
    "test_all_gather_joins_uneven_blocks",
    "test_all_reduce_in_place_keeps_layout_and_leaf",
    "test_all_reduce_sums_every_dtype_and_size",
    "test_all_reduce_with_other_ops",
    "test_all_to_all_delivers_rows_in_rank_order",
    "test_blocks_that_do_not_fit_are_refused_on_all_ranks_alike",
    "test_blocks_without_rows_of_strided_tensors_travel",
    "test_broadcast_reaches_ranks_that_bring_nothing",
    "test_every_verb_also_runs_async",
    "test_exchange_needs_no_order",
    "test_gather_and_scatter_are_inverse",
    "test_objects_travel",
    "test_reduce_gives_the_result_to_one_rank_only",
    "test_reduce_scatter_gives_each_rank_its_block",
    "test_what_a_verb_replaces_is_not_used_by_autograd_any_more",
)
"""Tests of `tests/comm/test_verbs.py` that hold on every transport."""


def run_on_device() -> None:
    """Run the tests of the CPU's verbs with tensors of the device, one after the other."""
    for name in AS_ON_THE_CPU:
        test = getattr(on_cpu, name)
        with pytest.MonkeyPatch.context() as patch, torch.device(own_device()):
            patch.setitem(test.__globals__, "world", on_device)
            test()


@device_ranks(3, timeout=60)
def test_a_verb_gives_what_it_gives_on_the_cpu(schedule):
    run_on_device()


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
def test_a_group_without_a_backend_for_the_device_goes_through_host_memory():
    run_on_device()


ON_MPI = """
from tests.accelerator.test_verbs import on_device, run_on_device
from unisono.comm import detect, start_world

start_world(detect(), backend="mpi", timeout_s=20)
run_on_device()
print(f"{on_device().device} {on_device().backend}\\n", end="", flush=True)
"""


@pytest.mark.mpi
def test_a_world_of_mpiexec_goes_through_host_memory(device_python, mpiexec, monkeypatch):
    monkeypatch.setenv("SIM_PATIENCE_MS", SCHEDULES["all_late"])
    words = [mpiexec, "-n", "2", device_python, "-W", "ignore", "-c", ON_MPI]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"sim:{rank} shm" in done.stdout


# -- the host ------------------------------------------------------------------------------------


def rows(comm: Communicator, n: int = 4) -> torch.Tensor:
    return torch.full((n, 2), comm.rank + 1.0, device=comm.device)


@device_ranks(2)
def test_no_verb_makes_the_host_wait_or_copies_to_the_device(schedule):
    import simdev

    comm = on_device()
    x, other = rows(comm), 1 - comm.rank
    sizes = [4] * comm.size
    with simdev.counters() as counted:
        comm.all_reduce(x, "mean")
        comm.all_reduce_(x.bfloat16(), "mean")
        comm.all_reduce(x, "sum64")
        comm.all_reduce(x.long(), "xor")
        comm.reduce(x, 1)
        comm.broadcast(x, 1)
        comm.all_gather(x)  # whose sizes are told over the CPU group
        comm.all_gather(x[: comm.rank + 1], sizes=[1, 2])
        comm.gather(x, 0)
        comm.scatter(torch.cat([x, x]) if comm.rank else None, 1)
        comm.reduce_scatter(x, sizes=[1, 3])
        comm.reduce_scatter(x)
        comm.all_to_all(x, [1, 3])
        comm.all_to_all(torch.cat([x, x]), sizes, sizes)
        comm.exchange({other: x}, {other: x})
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        comm.all_gather_object({"rank": comm.rank})
        comm.all_gather_ints([comm.rank])
        pending = comm.start.all_reduce(x)
        pending.wait()
        comm.sub([1, 0])
    assert counted.syncs == {}
    assert counted.bytes == {}


@device_ranks(2)
def test_a_verb_returns_before_kernels_that_were_put_before_it(schedule):
    import simdev

    comm = on_device()
    x = rows(comm)
    comm.all_reduce(x)
    began = time.monotonic()
    simdev._C.put_sleep(1.0)
    total = comm.all_reduce(x.mul_(2))
    pending = comm.start.all_reduce(x)
    assert not pending.done()
    second = pending.wait()
    assert time.monotonic() - began < 0.5
    assert total.tolist() == second.tolist() == [[6.0, 6.0]] * 4
    assert pending.done()


@device_ranks(2)
def test_a_rank_that_comes_a_second_later_is_no_failure(schedule):
    comm = on_device()
    x = rows(comm)
    for _ in range(2):  # a call that is new after the one before it is compared, and hosts meet
        comm.all_reduce(x)
    if comm.rank:
        time.sleep(1.2)
    began = time.monotonic()
    total = comm.all_reduce(x)
    assert time.monotonic() - began < 0.5
    assert total.tolist() == [[3.0, 3.0]] * 4


@device_ranks(2)
def test_a_barrier_returns_when_all_devices_have_done_what_was_put_before_it():
    import simdev

    comm = on_device()
    comm.barrier()
    began = time.monotonic()
    if comm.rank:
        simdev._C.put_sleep(0.5)
    comm.barrier()
    assert time.monotonic() - began >= 0.45  # it began a moment after the sleep was put


# -- memory and streams --------------------------------------------------------------------------


@device_ranks(2)
def test_tensors_that_nobody_else_holds_live_until_they_have_travelled(schedule):
    """Freed memory is filled with NaN when it is given out again."""
    comm = on_device()
    for _ in range(3):
        pending = [comm.start.all_gather(rows(comm, n), sizes=[n, n]) for n in (3, 5)]
        scratch = [torch.full((n, 2), -1.0, device=comm.device) for n in (3, 5, 3, 5)]
        for n, started in zip((3, 5), pending, strict=True):
            assert started.wait().tolist() == [[1.0, 1.0]] * n + [[2.0, 2.0]] * n
        del scratch


@device_ranks(2)
def test_what_one_stream_started_another_may_wait_for(schedule):
    comm = on_device()
    side = torch.Stream(device=comm.device)
    side.wait_stream(torch.accelerator.current_stream())
    pending = comm.start.all_reduce(rows(comm, 1000))
    while not pending.done():  # until then the backend holds the memory
        time.sleep(0.01)
    with side:
        doubled = pending.wait() * 2
    del pending
    # One of them would get the memory of the result, if that were free.
    scratch = [torch.full((1000, 2), -1.0, device=comm.device) for _ in range(8)]
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert doubled.unique().tolist() == [6.0]
    assert scratch[0].unique().tolist() == [-1.0]


# -- groups --------------------------------------------------------------------------------------


@pytest.mark.ranks(3, backend="sim:simccl")
def test_a_group_of_the_device_alone_gets_a_cpu_group_for_what_the_host_must_know(schedule):
    comm = Communicator.of(device=own_device())
    assert world().device.type == "sim"
    assert comm.all_gather_object(comm.rank) == [0, 1, 2]
    assert comm.all_gather(rows(comm, comm.rank)).shape == (3, 2)
    assert comm.all_equal("alike")
    assert comm.with_device("cpu").all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]
    part = comm.sub([2, 0])
    if part is not None:
        assert part.all_gather_ints([comm.rank]) == [(2,), (0,)]
        assert part.all_reduce(rows(comm)).tolist() == [[4.0, 4.0]] * 4


@device_ranks(3)
@pytest.mark.parametrize("is_connected", [False, True])
def test_the_first_exchange_of_a_group_needs_only_those_who_have_a_message(schedule, is_connected):
    device = own_device()
    comm = Communicator.of(dist.new_group([0, 1, 2]), device=device)
    if is_connected:
        comm.all_reduce(rows(comm))
    if comm.rank != 1:
        other = 2 - comm.rank
        large = torch.full((1 << 18,), float(comm.rank), device=device)
        got = comm.exchange({other: large}, {other: large})[other]
        assert got.unique().tolist() == [float(other)]
    around = {(comm.rank + 1) % 3: rows(comm)}
    came = comm.exchange(around, {(comm.rank - 1) % 3: rows(comm)})
    assert came[(comm.rank - 1) % 3].tolist() == [[(comm.rank - 1) % 3 + 1.0] * 2] * 4
    assert comm._post({}, {}).wait() == {}


@device_ranks(2)
def test_a_tensor_goes_by_the_backend_of_its_own_device(schedule):
    own_device()
    comm = world()
    assert (comm.device.type, comm.backend) == ("cpu", "shm")
    assert comm.with_device("sim").backend == "simccl"
    assert comm.all_reduce(torch.ones(2)).device.type == "cpu"
    x = torch.full((2,), comm.rank + 1.0, device="sim")
    assert comm.all_reduce(x).tolist() == [3.0, 3.0]
    assert comm.all_gather(x).device.type == "sim"


@device_ranks(4)
def test_sums_of_16_bit_floats_travel_as_they_are(schedule):
    comm = on_device()
    x = torch.full((3,), 256.0 if comm.rank == 0 else 0.75, device=comm.device)
    assert comm.all_reduce(x.bfloat16()).tolist() == [256.0] * 3  # in float32 they give 258
    large = torch.full((3,), 30000.0, dtype=torch.float16, device=comm.device)
    assert comm.all_reduce(large, "mean").tolist() == [30000.0] * 3


@device_ranks(2)
def test_check_mode_and_traces_know_verbs_of_the_device(schedule):
    comm = on_device()
    with check(), trace() as traced:
        assert comm.all_reduce(rows(comm)).tolist() == [[3.0, 3.0]] * 4
    assert [event.op for event in traced.events] == ["all_reduce"]


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.ranks(2, backend="shm")
def test_a_shm_group_carries_tensors_of_a_device_only_if_it_is_told_to():
    x = torch.ones(2, device=own_device())
    for call in (
        lambda: world().all_reduce(x),
        lambda: world()._post({1 - world().rank: x}, {1 - world().rank: x.clone()}),
    ):
        with pytest.raises(UnisonoError, match=r"works on cpu[\s\S]*with_device"):
            call()


@pytest.mark.ranks(2, backend="shm")
def test_a_partition_has_them_staged_and_says_so_once():
    x = torch.full((1, 1, 2, 4), world().rank + 1.0, device=own_device())
    net = nn.Conv2d(1, 1, 3, padding=1).to(x.device)
    with pytest.warns(UserWarning, match=r"sim travel through host memory: .* shm only") as warned:
        y = split(net, Partition([1, 1, 2, 1]))(x)
    assert len(warned) == 1
    torch.testing.assert_close(split(net, Partition([1, 1, 2, 1], comm=world()))(x).local, y.local)
    whole = torch.cat([torch.full((1, 1, 2, 4), n, device=x.device) for n in (1.0, 2.0)], 2)
    torch.testing.assert_close(y.whole().cpu(), net(whole).cpu())


@device_ranks(2)
def test_messages_of_one_exchange_lie_on_one_device():
    comm = on_device()
    other = 1 - comm.rank
    here, there = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")
    for sends, recvs in (({other: here}, {other: there}), ({other: torch.ones(2)}, {other: here})):
        with pytest.raises(UnisonoError, match="different devices"):
            comm._post(sends, recvs)
    with pytest.raises(UnisonoError, match="cpu"):
        comm.exchange({other: torch.ones(2)}, {other: here})


@device_ranks(2)
def test_a_tag_is_refused_where_the_backend_has_none():
    comm = on_device()
    with pytest.raises(UnisonoError, match="without tags"):
        comm.send(rows(comm), 1 - comm.rank, tag=5)
