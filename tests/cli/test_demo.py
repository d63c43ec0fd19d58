"""`unisono demo`: what it shows, what it leaves, and the other demos."""

from __future__ import annotations

import json
import re
import sys

import pytest

from unisono.cli import main, shipped


@pytest.mark.timeout(240)
def test_the_demo_compares_one_rank_with_two_and_says_what_to_try_next(interpreter, tmp_path):
    words = ["-m", "unisono", "demo", "--ranks", "2", "--epochs", "6"]
    done = interpreter.run(words, cwd=tmp_path, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] training: 100%|" in done.stderr
    assert "[1] training" not in done.stderr
    rows = {line[:18].strip(): line[18:].split() for line in done.stdout.splitlines()}
    assert rows["samples/s"][2].endswith("x")
    assert float(rows["in communication"][0].rstrip("%")) < 5  # alone there is nobody to wait for
    assert float(rows["test accuracy"][1].rstrip("%")) > 90
    assert rows["replicas agree"][0] == "yes"
    assert float(rows["last loss"][-1]) < 1e-3  # the curves are the same
    assert "report in runs/demo/report.html" in done.stdout
    *_, first, second, third = done.stdout.rstrip().splitlines()
    assert first.split("  ")[1].endswith("unisono report runs/demo")
    assert "unisono demo --list" in second
    assert "unisono run --watch" in third
    text = (tmp_path / "runs" / "demo" / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [run["name"] for run in data["against"]] == ["demo-alone"]
    assert {metric["name"] for metric in data["metrics"]} == {"loss", "test_accuracy"}
    assert data["timeline"]["lanes"][1]["events"]


def test_commands_to_try_are_shown_as_this_shell_finds_them(tmp_path, monkeypatch):
    program = tmp_path / ".venv" / "bin" / "unisono"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert shipped._command() == ".venv/bin/unisono"
    monkeypatch.setenv("PATH", str(program.parent))
    assert shipped._command() == "unisono"


def test_the_demo_without_scikit_learn_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo"]) == 2
    assert 'pip install "unisono[examples]"' in capsys.readouterr().err


def test_every_demo_of_the_list_is_there(capsys):
    assert main(["demo", "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line][:-1]
    assert listed == ["digits", "forces", "flow", "error-bars", "elastic", "daso"]
    for name in ("forces", "flow", "error-bars", "elastic", "daso"):
        assert shipped.example_path(name).is_file()


def test_a_demo_is_run_with_the_ranks_asked_for_and_its_failure_is_ours(
    tmp_path, monkeypatch, capfd
):
    script = tmp_path / "shows.py"
    script.write_text("import sys\nprint('got', sys.argv[1:])\nsys.exit(sys.argv[2] == '3')\n")
    monkeypatch.setattr(shipped, "example_path", lambda name: script)
    assert main(["demo", "forces", "--ranks", "2"]) == 0
    assert "got ['--ranks', '2']" in capfd.readouterr().out
    assert main(["demo", "forces", "--ranks", "3"]) == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["force"], "unisono demo forces"), (["xyz"], "unisono demo digits"), (["--ranks", "1"], "2")],
)
def test_what_is_no_demo_gets_a_hint(words, hint, capsys):
    assert main(["demo", *words]) == 2
    assert f"{hint}\n" in capsys.readouterr().err
