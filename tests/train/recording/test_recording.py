"""`record`, `log` and `span`: what each rank writes, and that nothing is left or slowed down."""

from __future__ import annotations

import csv
import gc
import html
import json
import os
import re
import sys
import threading
import time
import urllib.request
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.waiting import scaled_by_load

import unisono
from unisono.comm import trace
from unisono.comm.health import trace as tracing
from unisono.data_parallel import DataParallel, DataParallelOptimizer
from unisono.errors import PlatformError, Requeue, UnisonoError
from unisono.train import Report, current_run, log, record, span
from unisono.train.recording.directory import make_run_directory
from unisono.train.recording.figures import report_data
from unisono.train.recording.reading import RecordedRun


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory of its own, so that `runs/` is found there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(path):
    return json.loads(Path(path).read_text())


def rows_of(directory):
    with (directory / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("hygiene")
def test_a_record_of_one_process_has_every_file(here):
    with record("first", config={"lr": 0.1}) as run:
        assert current_run() is run
        for step in range(3):
            with span("forward"):
                value = torch.tensor(1.0 / (step + 1), requires_grad=True)
            log(loss=value, samples=8)
            value.detach().zero_()  # what was logged does not change with it
        unisono.world().all_reduce(torch.ones(3))
        print("printed by the program")
        print("and this on stderr", file=sys.stderr)
    assert current_run() is None
    assert run.dir == here / "runs" / "first"
    found = {path.name for path in run.dir.iterdir()}
    assert found == {
        *("config.json", "metrics.csv", "trace.json", "report.html"),
        *("rank-0.json", "rank-0.jsonl", "rank-0.log"),
    }
    assert [float(row["loss"]) for row in rows_of(run.dir)] == [1.0, 0.5, pytest.approx(1 / 3)]
    config = read(run.dir / "config.json")
    assert (config["status"], config["config"]) == ("done", {"lr": 0.1})
    assert config["versions"]["torch"] == torch.__version__
    assert {"host", "cores", "memory"} <= set(config["machine"])
    assert (run.dir / "rank-0.log").read_text() == "printed by the program\nand this on stderr\n"
    kinds = [
        (e["cat"], e["name"]) for e in read(run.dir / "trace.json")["traceEvents"] if e["ph"] == "X"
    ]
    assert kinds.count(("collective", "all_reduce")) == 1
    assert kinds.count(("span", "forward")) == 3


def test_a_taken_name_gets_a_number_and_nothing_is_overwritten(here):
    for expected in ("again", "again-2", "again-3"):
        with record("again") as run:
            pass
        assert run.dir.name == expected
    (here / "runs" / "empty").mkdir()
    assert make_run_directory("empty").name == "empty"
    assert make_run_directory("a b:c").name == "a_b_c"
    assert make_run_directory(f"{here}/elsewhere/x") == here / "elsewhere" / "x"
    with pytest.raises(PlatformError, match="no letter or digit"):
        make_run_directory("///")


def test_a_record_inside_a_record_is_the_outer_one(here):
    with record("outer") as outer:
        with record("inner", config={"seed": 3}) as inner:
            assert inner is outer
        log(loss=1.0)
    assert [path.name for path in (here / "runs").iterdir()] == ["outer"]
    assert read(outer.dir / "config.json")["config"] == {"seed": 3}


def test_a_failure_is_recorded_and_passes(here):
    before = sys.stdout, sys.stderr, tracing.recorder

    def fail():
        log(loss=2.0)
        return 1 / 0

    with pytest.raises(ZeroDivisionError), record("bad") as run:
        fail()
    assert (sys.stdout, sys.stderr, tracing.recorder) == before
    assert current_run() is None
    assert read(run.dir / "config.json")["status"] == "failed"
    assert "ZeroDivisionError" in (run.dir / "rank-0.log").read_text()
    assert "ZeroDivisionError" in (run.dir / "report.html").read_text()
    assert len(rows_of(run.dir)) == 1


def test_a_wish_to_start_again_or_to_exit_with_0_is_no_failure(here):
    for kind in (Requeue, SystemExit):
        with pytest.raises(kind), record("left") as run:
            raise kind
        assert read(run.dir / "config.json")["status"] == "done"


def test_what_is_no_number_is_refused(here):
    with record("wrong") as run:
        with pytest.raises(UnisonoError, match=r"log\(loss='high'\)"):
            log(loss="high")
        with pytest.raises(UnisonoError, match=r"shape \[3\]"):
            log(loss=torch.ones(3))
        for value in (10**400, torch.tensor(1j)):
            with pytest.raises(UnisonoError, match=r"(?s)log\(loss=.*HINT: a number"):
                log(loss=value)
        for step in ("x", 1.5, float("nan"), torch.tensor(1.5), torch.ones(2), 10**400, 2**53 + 1):
            with pytest.raises(UnisonoError, match=r"(?s)log\(step=.*HINT: count the steps"):
                log(step=step, loss=1.0)
        log(loss=torch.ones(1, 1), other=float("nan"))
        log(step=np.int64(4), loss=1.0)
        log(step=torch.tensor(5), loss=1.0)
    assert rows_of(run.dir)[0]["other"] == "nan"
    assert [row["step"] for row in rows_of(run.dir)] == ["0", "4", "5"]


def test_names_that_are_no_text_and_names_of_scripts_are_recorded(here):
    names = ["\udc80.png", "__proto__", "</script>", ""]  # the first as os.listdir gives it
    with record("names") as run:
        log(**dict.fromkeys(names, 1.0))
        with span(names[0]):
            pass
    assert list(rows_of(run.dir)[0])[2:] == ["\\udc80.png", *names[1:]]
    assert (run.dir / "report.html").read_text().count("</script>") == 2


@pytest.mark.usefixtures("hygiene")
def test_a_value_that_fails_at_the_end_leaves_nothing_open_and_is_recorded(here):
    class Lost:
        def __float__(self):
            raise RuntimeError("the device is lost")

    recording = record("lost")
    run = recording.__enter__()
    run._buffer.append((0, 0, 0, 0, {"loss": Lost()}))
    with pytest.raises(RuntimeError, match="lost"):
        recording.__exit__(None, None, None)
    part = read(run.dir / "rank-0.json")
    assert (part["status"], "the device is lost" in part["trouble"]) == ("failed", True)


def test_without_a_record_nothing_is_written_and_it_costs_next_to_nothing(here):
    begin = time.perf_counter()
    for _ in range(20_000):
        log(loss=1.0)
        with span("forward"):
            pass
    assert time.perf_counter() - begin < scaled_by_load(2.0)  # some 10 ms on a quiet machine
    assert list(here.iterdir()) == []


def test_a_trace_that_is_open_goes_on_under_a_record(here):
    with trace() as own, record("traced"):
        unisono.world().all_reduce(torch.ones(2))
    assert "all_reduce" in [event.op for event in own.events]


def test_steps_of_an_optimizer_are_marked_where_nothing_is_logged(here):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    with record("silent") as run:
        for _ in range(5):
            optimizer.step()
    optimizer.step()
    part = read(run.dir / "rank-0.json")
    assert len(part["marks"]) == 5
    assert part["marks"][-1][0] > part["marks"][0][0]
    stepping = RecordedRun.read(run.dir).stepping
    assert stepping.steps == [0, 1, 2, 3, 4]
    assert stepping.seconds == sorted(stepping.seconds)
    assert 0 < stepping.seconds[0] < 60


def test_what_was_logged_can_be_read_while_the_run_goes_on(here):
    with record("live") as run:
        log(loss=1.0)
        lines = (run.dir / "rank-0.jsonl").read_text().splitlines()
        assert [json.loads(line)["v"] for line in lines] == [{"loss": 1.0}]
        assert read(run.dir / "rank-0.json")["status"] == "running"


@pytest.mark.ranks(2, timeout=60)
def test_ranks_write_their_own_files_and_rank_0_the_report(tmp_path):
    comm = unisono.world()
    threads = threading.active_count()
    with record(f"{tmp_path}/two", config={"batch": 4}) as run:
        for step in range(4):
            with span("work"):
                comm.all_reduce(torch.ones(10))
            log(step=step, loss=float(comm.rank), samples=2)
        print(f"hello from {comm.rank}")
    comm.barrier()  # rank 0 has written it
    assert threading.active_count() == threads
    assert [float(row["loss"]) for row in rows_of(run.dir)] == [0.5] * 4
    assert [float(row["samples"]) for row in rows_of(run.dir)] == [4.0] * 4
    assert (run.dir / f"rank-{comm.rank}.log").read_text() == f"hello from {comm.rank}\n"
    part = read(run.dir / f"rank-{comm.rank}.json")
    calls = [event for event in part["events"] if event["op"] == "all_reduce"]
    assert len(calls) == 4
    assert part["wait_s"] + part["blocked_s"] > 0
    # One clock: a collective of both ranks overlaps on it.
    other = read(run.dir / f"rank-{1 - comm.rank}.json")
    theirs = [event for event in other["events"] if event["op"] == "all_reduce"]
    for mine, its in zip(calls, theirs, strict=True):
        assert max(mine["t_start"], its["t_start"]) < min(mine["t_end"], its["t_end"]) + 1_000_000
    config = read(run.dir / "config.json")
    assert [rank["rank"] for rank in config["ranks"]] == [0, 1]


def train_steps(model, steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(2, timeout=60)
def test_the_costs_of_averaging_are_recorded_of_models_old_gone_and_alive(tmp_path):
    comm = unisono.world()
    old = DataParallel(torch.nn.Linear(4, 3))
    idle = DataParallel(torch.nn.Linear(4, 2))
    train_steps(idle, 1)
    train_steps(old, 2)  # before the record: not counted
    with record(f"{tmp_path}/costs") as run:
        train_steps(old, 1)
        gone = DataParallel(torch.nn.Sequential(torch.nn.Linear(4, 1)))
        train_steps(gone, 3)
        totals, module = gone.stats(), weakref.ref(gone.module)
        del gone
        gc.collect()
        assert module() is None  # the record does not keep it alive
        alone = DataParallel(torch.nn.Linear(4, 1), comm.sub([comm.rank]))
        train_steps(alone, 1)  # averages with nobody
    train_steps(old, 1)  # after it: neither
    assert idle.stats().steps == 1  # nothing in the record: no row
    rows = read(run.dir / f"rank-{comm.rank}.json")["averaging"]
    kept = ("module", "ranks", "buckets", "steps")
    assert [[row[name] for name in kept] for row in rows] == [
        ["Linear", 2, 1, 1],
        ["Sequential", 2, 1, 3],
    ]
    assert rows[0]["bytes"] * 4 == old.stats().bytes
    assert 0 < rows[0]["wait_backward_s"] < old.stats().wait_backward_s
    for name in ("bytes", "wait_backward_s", "wait_forward_s"):
        assert rows[1][name] == getattr(totals, name)
    comm.barrier()  # rank 0 has written it
    shown = report_data(RecordedRun.read(run.dir))["averaging"]
    assert [(row["rank"], row["module"]) for row in shown] == [
        *((0, "Linear"), (0, "Sequential"), (1, "Linear"), (1, "Sequential"))
    ]


@pytest.mark.ranks(2, timeout=60)
def test_a_run_that_fails_keeps_the_costs_of_averaging(tmp_path):
    comm = unisono.world()
    model = DataParallel(torch.nn.Linear(4, 3))

    def fail():
        train_steps(model, 2)
        return 1 / 0

    with pytest.raises(ZeroDivisionError), record(f"{tmp_path}/broken") as run:
        fail()
    part = read(run.dir / f"rank-{comm.rank}.json")
    assert part["status"] == "failed"
    assert [(row["steps"], row["bytes"]) for row in part["averaging"]] == [(2, model.stats().bytes)]


@pytest.mark.ranks(2, timeout=60)
def test_a_name_that_cannot_be_made_is_refused_on_all_ranks_alike(tmp_path):
    if unisono.world().rank == 0:
        (tmp_path / "file").write_text("")
    unisono.world().barrier()
    with pytest.raises(PlatformError, match="cannot be made"), record(f"{tmp_path}/file/run"):
        pass


def _trained_late():
    """Train with every message late; return whether each step was deferred, and the weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    optimizer = DataParallelOptimizer(torch.optim.Adam(net.parameters(), lr=0.1))
    model = DataParallel(net, None, optimizer, bucket_mb=0.0005)
    engine = model._engine
    engine.has_arrived = lambda bucket: bucket not in engine.under_way
    owed = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + unisono.world().rank)
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        owed.append(model._deferred.active)
    model.finalize()
    return owed, torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)
def test_layer_wise_updates_stay_on_in_a_recorded_run_and_give_the_same_bits(tmp_path):
    plainly = _trained_late()
    with record(f"{tmp_path}/late") as run:
        recorded = _trained_late()
    assert recorded[0] == plainly[0] == [True] * 4
    assert torch.equal(recorded[1], plainly[1])
    assert run._mark_count == 4  # and each step is told once


def test_the_handle_of_a_record_comes_back_from_ranks_as_its_report(here):
    def train():
        with record("digits") as run:
            run.log(loss=0.5)
        return run

    for report in unisono.run(train, on="cpu", ranks=2, logs=unisono.Logs(console="none")):
        assert isinstance(report, Report)
        assert report.dir == (here / "runs" / "digits").absolute()
        assert "<iframe" in report._repr_html_()
    assert "srcdoc" not in Report(here).__repr__()


def test_run_records_and_hands_out_the_report(here, capsys):
    def train(steps):
        for step in range(steps):
            log(loss=1.0 / (step + 1))
        return steps

    results = unisono.run(train, 3, on="cpu", ranks=2, record="digits")
    assert list(results) == [3, 3]
    assert results.report.dir == (here / "runs" / "digits").absolute()
    assert "report in runs/digits/report.html" in capsys.readouterr().err
    assert results.report.path.read_text() in html.unescape(results.report._repr_html_())
    assert "0.5" in (results.report.dir / "metrics.csv").read_text()
    again = unisono.run(train, 2, on="inline", record=True)
    assert again.report.dir.name.endswith("train")
    with pytest.raises(unisono.errors.RankFailed):
        unisono.run(train, None, on="cpu", ranks=1, record="failed")
    assert (here / "runs" / "failed" / "report.html").is_file()
    assert unisono.run(train, 1, on="inline").report is None


def test_run_shows_a_page_while_it_lasts_below_the_cell_of_a_notebook(here, monkeypatch, capsys):
    shown: list[str] = []
    notebook = SimpleNamespace(
        get_ipython=lambda: object(),
        display=SimpleNamespace(display=lambda view: shown.append(ask(view._repr_html_()))),
    )

    def ask(frame):
        url = re.search(r'<iframe src="(http://127.0.0.1:[^"]+)"', frame)[1]
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert "frame-ancestors http://127.0.0.1:*" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Frame-Options"] is None
            return answer.read().decode()

    monkeypatch.setitem(sys.modules, "IPython", notebook)
    results = unisono.run(log, on="cpu", ranks=2, watch=True)
    assert "watch at http://127.0.0.1:" in capsys.readouterr().err
    assert "<title>log, live" in shown[0]
    assert results.report.path.is_file()


def test_files_with_the_command_line_are_private_and_it_can_be_left_out(here, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "hunter2"])
    before = os.umask(0)
    try:
        for name, keep in (("kept", True), ("left-out", False)):
            with record(name, command=keep) as run:
                log(loss=1.0)
            for file in ("config.json", "report.html"):
                assert (run.dir / file).stat().st_mode & 0o777 == 0o600
                assert ("hunter2" in (run.dir / file).read_text()) == keep
            assert read(run.dir / "config.json")["command"][0] == "train.py"
    finally:
        os.umask(before)


def test_calls_between_two_steps_of_an_optimizer_belong_to_one(here):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with record("steps") as run:
        for step in range(3):
            log(loss=step)
            log(accuracy=10 * step, samples=4)
            optimizer.step()
    rows = rows_of(run.dir)
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert [(row["loss"], row["accuracy"]) for row in rows] == [
        ("0", "0"),
        ("1", "10"),
        ("2", "20"),
    ]


def test_a_metric_that_comes_again_begins_a_step_without_an_optimizer(here):
    with record("steps") as run:
        for step in range(2):
            log(loss=step)
            log(accuracy=step)
        log(step=9, late=1.0)
        log(loss=2)
    assert [(r["step"], r["loss"], r["accuracy"]) for r in rows_of(run.dir)] == [
        ("0", "0", "0"), ("1", "1", "1"), ("2", "2", ""), ("9", "", ""),
    ]  # fmt: skip
