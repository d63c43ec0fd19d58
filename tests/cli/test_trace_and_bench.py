"""`unisono trace` and `bench`: what they show, and how they refuse."""

from __future__ import annotations

import pytest
import torch

import unisono
from unisono.cli import main, shipped
from unisono.comm import trace


def traced(path, verb="all_reduce"):
    """Write the trace of two calls in a world of one."""
    with trace(path):
        for _ in range(2):
            getattr(unisono.world(), verb)(torch.ones(4))


def test_trace_prints_a_table_of_the_saved_calls(tmp_path, capsys):
    traced(tmp_path / "trace.json")
    assert main(["trace", str(tmp_path / "trace.json")]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["op", "calls"]
    assert row.split()[:2] == ["all_reduce", "2"]


def test_trace_joins_the_files_of_a_directory(tmp_path, capsys):
    traced(tmp_path / "trace.json.rank0")
    traced(tmp_path / "trace.json.rank1", "broadcast")
    whole = tmp_path / "whole.json"
    assert main(["trace", str(tmp_path), "--chrome", str(whole)]) == 0
    text = capsys.readouterr().out
    assert "all_reduce" in text
    assert "broadcast" in text
    assert main(["trace", str(whole)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_trace_finds_the_parts_of_a_run_that_was_not_closed(tmp_path, capsys):
    traced(tmp_path / "run.json.rank0")
    assert main(["trace", str(tmp_path / "run.json")]) == 0
    assert "all_reduce" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "not json", "[1, 2]"])
def test_trace_refuses_what_is_not_a_trace(tmp_path, content, capsys):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    assert main(["trace", str(path)]) == 2
    assert "HINT:" in capsys.readouterr().err


def test_bench_lists_its_scripts(capsys):
    assert main(["bench", "--list"]) == 0
    names = capsys.readouterr().out.split()
    assert {"comm", "launch", "transports"} <= set(names)
    assert "harness" not in names


def test_bench_names_mean_scripts_and_folders():
    known = ["comm", "data_parallel/daso", "data_parallel/step", "launch"]
    assert shipped.choose([], known) == known
    assert shipped.choose(["data_parallel"], known) == known[1:3]
    assert shipped.choose(["benchmarks/comm.py", "comm"], known) == ["comm"]


def test_bench_suggests_the_nearest_name(capsys):
    assert main(["bench", "transport"]) == 2
    assert "HINT: unisono bench transports" in capsys.readouterr().err


def test_bench_runs_a_script_and_tells_when_it_broke(tmp_path, monkeypatch, capfd):
    (tmp_path / "harness.py").write_text("HEAD = 'ours'\n")
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("from harness import HEAD  # __main__\nprint(HEAD)\n")
    bad.write_text("raise SystemExit(3)  # __main__\n")
    monkeypatch.setattr(shipped, "find_scripts", lambda: {"bad": bad, "good": good})
    assert main(["bench"]) == 1
    captured = capfd.readouterr()
    assert captured.out.splitlines()[-2:] == ["== good", "ours"]
    assert "bad ended with 3" in captured.err
