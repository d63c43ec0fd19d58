"""Streams that cannot go on: who is to blame is named in time, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.accelerator.ranks import BOTH, device_ranks, own_device
from tests.waiting import scaled_by_load

from unisono.comm import Communicator, check, world
from unisono.comm.health import watchdog
from unisono.errors import CollectiveMismatch, RankFailed, RankTimeout, UnisonoError

DEADLINE_S = 1.0


def on_device() -> Communicator:
    """Return the world for the device, in which sums of three numbers are known to all ranks."""
    comm = world().with_device(own_device())
    for _ in range(2):
        comm.all_reduce(torch.ones(3, device=comm.device))
        comm.barrier()
    comm.all_reduce(torch.ones(3, device=comm.device))
    comm.all_reduce(torch.ones(3, device=comm.device)).tolist()
    return comm.with_timeout(DEADLINE_S)


def until_raised(call, limit_s: float = 10.0) -> tuple[UnisonoError, float]:
    """Return the first error of repeated calls, and after how long it came."""
    began = time.monotonic()
    try:
        while time.monotonic() - began < limit_s:
            call()
            time.sleep(0.02)
    except UnisonoError as error:  # of a call, or between two of them
        return error, time.monotonic() - began
    pytest.fail(f"nothing was raised within {limit_s} s")


def until_done(pending) -> None:
    while not pending.done():
        time.sleep(0.02)
    pending.wait()


def come_too_late() -> None:
    time.sleep(DEADLINE_S + 2.5)


@device_ranks(3)
def test_the_late_rank_is_named_with_its_line_and_all_raise_in_their_next_call():
    comm = on_device()
    x = torch.ones(3, device=comm.device)
    if comm.rank == 1:
        come_too_late()
        began = time.monotonic()
        with pytest.raises(RankTimeout, match="waited for this rank and has given up"):
            comm.all_reduce(x)
        assert time.monotonic() - began < 0.5
        return
    began = time.monotonic()
    comm.all_reduce(x)
    assert time.monotonic() - began < 0.5
    error, waited_s = until_raised(lambda: comm.all_reduce(x))
    assert DEADLINE_S < waited_s < DEADLINE_S + 2.0
    assert error.rank == 1
    assert "all_reduce(sum) #7" in str(error)
    if isinstance(error, RankTimeout):  # else another rank was faster to say so
        assert error.missing == (1,)
        assert "come_too_late" in error.stacks[1]
        assert "test_deadlines.py" in error.site
    with pytest.raises(type(error)):
        comm.all_gather_object("over the CPU group of the same ranks")


@device_ranks(2)
def test_a_host_that_reads_a_result_gets_the_error_in_its_place():
    comm = on_device()
    if comm.rank == 1:
        come_too_late()
        return
    began = time.monotonic()
    with pytest.raises(RankTimeout, match="rank 1 has not arrived"):
        comm.all_reduce(torch.ones(3, device=comm.device)).tolist()
    assert DEADLINE_S < time.monotonic() - began < DEADLINE_S + 2.0
    with pytest.raises(RankTimeout):
        comm.all_reduce(torch.ones(3, device=comm.device))


@device_ranks(2)
@pytest.mark.parametrize("verb", ["barrier", "wait"])
def test_waits_of_the_host_end_with_the_error_itself(verb):
    comm = on_device()
    if comm.rank == 1:
        come_too_late()
        return
    pending = comm.start.all_reduce(torch.ones(3, device=comm.device))
    began = time.monotonic()
    wait = comm.barrier if verb == "barrier" else partial(until_done, pending)
    with pytest.raises(RankTimeout, match="rank 1 has not arrived"):
        wait()
    assert DEADLINE_S < time.monotonic() - began < DEADLINE_S + 2.0


@device_ranks(2)
def test_a_message_that_never_comes_names_its_sender():
    comm = on_device()
    if comm.rank == 1:
        come_too_late()
        return
    error, waited_s = until_raised(lambda: comm.recv(((3,), torch.float32), 1))
    assert isinstance(error, RankTimeout)
    assert error.missing == (1,)
    assert "no message came from rank 1" in str(error)
    assert waited_s < DEADLINE_S + 2.0


@device_ranks(2)
def test_the_watchdog_looks_after_transfers_and_dies_in_a_fork():
    comm = on_device()
    comm.all_reduce(torch.ones(3, device=comm.device)).tolist()
    began = time.monotonic()
    while any(lane.is_busy for lane in list(watchdog.lanes)):
        assert time.monotonic() - began < scaled_by_load(5.0)
        time.sleep(0.05)
    child = os.fork()
    if child == 0:
        os._exit(int("unisono-watchdog" in [thread.name for thread in threading.enumerate()]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert comm.all_reduce(torch.ones(3, device=comm.device)).tolist() == [2.0] * 3


MORTAL = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from unisono.comm import world
from unisono.errors import UnisonoError

rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
backend, store = "cpu:gloo,sim:simccl", f"file://{store}"
dist.init_process_group(backend, init_method=store, rank=rank, world_size=3)
torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
comm = world().with_device(torch.device("sim", rank % torch.accelerator.device_count()))
x = torch.ones(2, device=comm.device)
for _ in range(2):
    comm.all_reduce(x)
    comm.barrier()
if rank == 1:
    time.sleep(0.8)
    print(json.dumps(time.time()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce(x)
    if how == "synchronize":
        torch.accelerator.synchronize()
    while True:
        time.sleep(0.02)
        comm.all_reduce(x)
except UnisonoError as error:
    print(json.dumps([type(error).__name__, error.rank, str(error), time.time()]), flush=True)
time.sleep(1.0)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["calls", "synchronize"])
def test_a_rank_that_dies_while_others_have_work_queued_is_named_in_time(
    how, tmp_path, device_python
):
    script = tmp_path / "mortal.py"
    script.write_text(MORTAL)
    arguments = [str(tmp_path / "store"), how]
    ranks = [
        subprocess.Popen(
            [device_python, str(script), str(rank), *arguments],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        for rank in range(3)
    ]
    told = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    died_at = told[1]
    for survivor in (told[0], told[2]):
        kind, rank, text, raised_at = survivor
        assert (kind, rank) == (RankFailed.__name__, 1), text
        assert "all_reduce" in text
        assert raised_at - died_at < scaled_by_load(2.0)


# -- ranks that bring different things -----------------------------------------------------------


def unlike_calls(comm):
    """Calls of which rank 1 makes another one, and what the error says of them."""
    x, odd = torch.ones(4, device=comm.device), comm.rank == 1
    return {
        "dtype": (lambda: comm.all_reduce(x.int() if odd else x), "int32"),
        "length": (lambda: comm.all_reduce(x[:3] if odd else x), "bytes"),
        "reduction": (lambda: comm.all_reduce(x, "max" if odd else "sum"), "max"),
        "root": (lambda: comm.broadcast(x, int(odd)), "root 1"),
        "verb": (lambda: comm.all_gather(x, sizes=[4, 4]) if odd else comm.all_reduce(x), "gather"),
        "dim": (lambda: comm.all_gather(x.view(2, 2), int(odd), sizes=[2, 2]), "dim"),
        "device": (lambda: comm.all_reduce(x.cpu() if odd else x), r"float32 \[4\] on sim"),
    }


@device_ranks(2, backend=BOTH)
@pytest.mark.parametrize("kind", ["dtype", "length", "reduction", "root", "verb", "dim", "device"])
def test_calls_that_differ_are_refused_on_all_ranks_with_their_lines(kind):
    comm = on_device()
    comm.all_reduce(torch.ones(4, device=comm.device))
    call, words = unlike_calls(comm)[kind]
    with pytest.raises(CollectiveMismatch, match=words) as caught:
        call()
    assert str(caught.value).count("test_deadlines.py") == 2
    with pytest.raises(UnisonoError):
        comm.all_reduce(torch.ones(4, device=comm.device))


@device_ranks(2)
@pytest.mark.parametrize("kind", ["dtype", "length", "device"])
def test_a_call_that_is_new_on_one_rank_only_is_found_without_an_exchange(kind):
    comm = world().with_device(own_device())
    x = torch.ones(4, device=comm.device)
    for _ in range(3):
        comm.all_reduce(x)
    call, words = unlike_calls(comm)[kind]
    with pytest.raises(CollectiveMismatch, match=words if kind == "device" else "float32"):
        call().tolist()


@device_ranks(2)
def test_known_calls_are_not_compared_again(monkeypatch):
    comm = on_device()
    x = torch.ones(4, device=comm.device)

    def step():
        comm.all_reduce(x)
        comm.all_gather(x, sizes=[4, 4])
        comm.all_to_all(x, [comm.rank + 1, 3 - comm.rank], [1 + 2 * comm.rank, 2])

    step()
    step()
    monkeypatch.setattr(type(comm._engine.host), "all_gather_ints", None)
    step()
    assert comm.all_reduce(x).tolist() == [2.0] * 4


@device_ranks(2)
def test_check_mode_names_devices_that_differ():
    comm = on_device()
    x = torch.ones(4, device=comm.device if comm.rank else "cpu")
    with check(), pytest.raises(CollectiveMismatch, match=r"different devices[\s\S]*device=sim"):
        comm.all_reduce(x)
