"""`unisono run --record`: the files of a run, good or bad, wherever it is started."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from unisono.cli import main

SCRIPT = """
import sys

import torch

import unisono
from unisono import train

comm = unisono.world()
for step in range(4):
    comm.all_reduce(torch.ones(8))
    train.log(loss=comm.rank + 1.0, samples=3)
print("rank", comm.rank, "is through")
if "--fail" in sys.argv and comm.rank == 1:
    raise KeyError("missing")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "work.py").write_text(SCRIPT)
    return tmp_path


def read(path):
    return json.loads(path.read_text())


def test_a_run_leaves_everything_in_its_directory_and_nothing_else(interpreter, script):
    words = ["-m", "unisono", "run", "--record", "--ranks", "2", "work.py"]
    done = interpreter.run(words, cwd=script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] rank {r} is through" for r in range(2)]
    assert done.stderr.splitlines()[-1] == "unisono: report in runs/work/report.html"
    run = script / "runs" / "work"
    lines = (run / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,seconds,loss,samples"
    assert [line.split(",")[2:] for line in lines[1:]] == [["1.5", "6"]] * 4
    assert (run / "rank-1.log").read_text() == "rank 1 is through\n"
    config = read(run / "config.json")
    assert (config["status"], len(config["ranks"])) == ("done", 2)
    assert config["command"][-1] == "work.py"
    lanes = read(run / "trace.json")["traceEvents"]
    assert {e["pid"] for e in lanes if e["name"] == "all_reduce"} == {0, 1}
    assert {path.name for path in script.iterdir()} == {"work.py", "runs"}


def test_a_command_line_with_a_secret_need_not_be_recorded(script, monkeypatch):
    monkeypatch.chdir(script)
    words = ["run", "--record", "--no-command", "--on", "inline", "work.py", "--", "hunter2"]
    monkeypatch.setattr(sys, "argv", ["unisono", *words])
    assert main(words) == 0
    for path in (script / "runs" / "work").glob("*.*"):
        assert "hunter2" not in path.read_text()


def test_a_run_that_failed_has_a_report_too(interpreter, script):
    words = ["-m", "unisono", "run", "--record", "bad", "--ranks", "2", "work.py", "--", "--fail"]
    done = interpreter.run(words, cwd=script)
    assert done.returncode == 1
    assert "unisono: report in runs/bad/report.html" in done.stderr
    assert "KeyError: 'missing'" in done.stderr
    run = script / "runs" / "bad"
    assert read(run / "config.json")["status"] == "failed"
    assert "rank 1: KeyError" in (run / "report.html").read_text()
    assert "KeyError: 'missing'" in (run / "rank-1.log").read_text()


def test_ranks_that_torchrun_started_agree_on_one_directory(forked_python, script):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = ["-m", "unisono", "run", "--record", "joined", "work.py"]
    done = subprocess.run(
        [forked_python, *launch, *ours], cwd=script, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (script / "runs").iterdir()] == ["joined"]
    assert len(read(script / "runs" / "joined" / "config.json")["ranks"]) == 2


def test_a_run_in_this_process_is_recorded_and_leaves_it_as_it_was(script, monkeypatch, capsys):
    below = script / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    monkeypatch.setattr(sys, "argv", ["unisono"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", "--on", "inline", "--record=../here", "../work.py"]) == 0
    assert "rank 0 is through" in capsys.readouterr().out
    assert (script / "here" / "report.html").is_file()
    assert list(below.iterdir()) == []  # a path of its own leaves no runs/ here


def test_a_dry_run_makes_no_directory(script, monkeypatch, capsys):
    monkeypatch.chdir(script)
    assert main(["run", "--dry-run", "--record", "work.py"]) == 0  # not taken for the name
    assert not (script / "runs").exists()


def test_ctrl_c_ends_a_watched_run_and_its_page(script, monkeypatch, capsys):
    class Job:
        is_cancelled = False

        def wait(self):
            raise KeyboardInterrupt

        def cancel(self):
            self.is_cancelled = True

        def status(self):
            return "running"

    job = Job()
    monkeypatch.chdir(script)
    monkeypatch.setattr("unisono.train.recording.launching.submit_request", lambda _: job)
    assert main(["run", "--watch", "--ranks", "2", "work.py"]) == 130
    assert job.is_cancelled
    assert "watch at http://127.0.0.1:" in capsys.readouterr().err
    assert not [t for t in threading.enumerate() if t.name == "unisono-watch"]
