"""The trace: what was recorded, the table, the file for Perfetto."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from tests.waiting import scaled_by_load

from unisono import run
from unisono.comm import close_world, trace, world
from unisono.comm.health import trace as tracing
from unisono.errors import UnisonoError
from unisono.trace_file import load, table


@pytest.mark.ranks(2)
def test_each_call_is_one_event_with_its_bytes_and_site():
    comm = world()
    with trace() as t:
        comm.all_reduce(torch.ones(256))
        comm.all_gather(torch.ones(3 + comm.rank, 2, dtype=torch.float64), sizes=[3, 4])
        pending = comm.start.broadcast(torch.ones(4))
        assert len(t.events) == 2
        pending.wait()
    comm.barrier()
    first, second, third = t.events
    assert (first.op, first.sent, first.dtype) == ("all_reduce", 1024, "float32")
    assert second.received == 16 * (4 if comm.rank == 0 else 3)
    assert third.is_async
    assert "test_trace.py:" in first.site
    assert first.t_start <= first.t_end <= second.t_start
    assert [e.number for e in t.events] == sorted(e.number for e in t.events)
    assert 0 <= first.wait_ns <= first.t_end - first.t_start


def test_nothing_is_recorded_when_off():
    assert tracing.recorder is None
    world().all_reduce(torch.ones(2))
    with trace() as outer:
        with trace() as inner:
            world().barrier()
        world().all_reduce(torch.ones(1))
    assert [e.op for e in inner.events] == ["barrier"]
    assert [e.op for e in outer.events] == ["all_reduce"]
    assert tracing.recorder is None


@pytest.mark.ranks(3)
def test_the_saved_file_joins_all_ranks(tmp_path):
    comm = world()
    path = tmp_path / "trace.json"
    with trace(path):
        if comm.rank < 2:  # what not all ranks do does not change which calls belong together
            comm.exchange({1 - comm.rank: torch.ones(1)}, {1 - comm.rank: torch.ones(1)})
        comm.all_reduce(torch.ones(8))
        comm.barrier()
    if comm.rank == 0:
        content = json.loads(path.read_text())
        bars = [e for e in content["traceEvents"] if e["ph"] == "X"]
        assert sorted({e["pid"] for e in bars}) == [0, 1, 2]
        assert len(bars) == 8
        flows = [e["id"] for e in content["traceEvents"] if e["ph"] in "sf"]
        assert sorted(map(flows.count, set(flows))) == [3, 3]
        text = table(load(path))
        header, *rows = text.splitlines()
        assert " ".join(header.split()) == "op calls bytes total ms wait ms share slowest site"
        counts = {op: n for op, n, *_ in map(str.split, rows)}
        assert counts == {"all_reduce": "3", "barrier": "3", "exchange": "2"}
    comm.barrier()


def test_a_process_that_never_closes_its_world_still_leaves_its_trace(tmp_path):
    path = tmp_path / "whole.json"
    script = "import torch; from unisono.comm import world; world().all_reduce(torch.ones(4))"
    environment = {**os.environ, "UNISONO_TRACE": str(path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    assert [e["op"] for e in load(path)] == ["all_reduce"]


def test_a_launched_run_leaves_one_trace_of_all_ranks(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    monkeypatch.setenv("UNISONO_TRACE", str(path))
    run(lambda: world().all_reduce(torch.ones(4)), ranks=2)
    assert sorted(e["rank"] for e in load(path) if e["op"] == "all_reduce") == [0, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.ranks(2)
def test_a_trace_that_cannot_be_written_is_refused_on_all_ranks_at_its_start_and_end(tmp_path):
    comm = world()
    for path, reason in [
        (tmp_path / "none" / "t.json", "no folder that can be written"),
        (tmp_path, "this is a folder"),
    ]:
        with pytest.raises(UnisonoError, match=reason), trace(path):
            pytest.fail("the body ran although there is nowhere to save")
        assert tracing.recorder is None
        with trace() as t:
            comm.all_reduce(torch.ones(2))
        began = time.monotonic()
        with pytest.raises(UnisonoError, match=reason):
            t.save(path)
        assert time.monotonic() - began < scaled_by_load(3)
    t.save(tmp_path / "good.json")
    assert len(load(tmp_path / "good.json")) == 2


@pytest.mark.ranks(2, backend="shm")
def test_a_world_ends_at_once_and_warns_of_a_trace_that_was_not_written(tmp_path, monkeypatch):
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    monkeypatch.setenv("UNISONO_TRACE", str(tmp_path / "none" / "t.json"))
    monkeypatch.setattr(tracing, "_whole_run", trace().__enter__())
    began = time.monotonic()
    if rank == 0:
        with pytest.warns(RuntimeWarning, match="no folder that can be written"):
            close_world()
    else:
        close_world()
    assert time.monotonic() - began < scaled_by_load(3)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=2)


def test_a_process_alone_warns_of_a_trace_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_TRACE", str(tmp_path / "none" / "t.json"))
    monkeypatch.setattr(tracing, "recorder", None)
    monkeypatch.setattr(tracing.atexit, "register", lambda _: None)
    for end in (close_world, tracing._save_own_part):
        with pytest.warns(RuntimeWarning, match="none/t.json"):
            tracing.start_from_environment()
        with pytest.warns(RuntimeWarning, match="none/t.json"):
            end()
