"""benchmarks/RESULTS.md: one page whose first table shows every ratio with its target."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from unisono.comm import world

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = """\
# Benchmarks

## First: a step

Measured on 2026-01-02, x86_64, 2 cores.

| case | ours | reference | ratio | target | verdict |
|---|---:|---:|---:|---:|---|
| one | 1 us | 2 us gloo | 0.50 | <= 0.6 | ok (2x faster) |
| two | 1 us | 1 us gloo | 1.00 | - | - |

| what | a | b | c | ratio | target | verdict |
|---|---|---|---|---|---|---|
| bytes | 1 | 2 | 3 | 0.99 | 0.98 to 1.02 | MISSED |

| no | verdict here |
|---|---|
| a | 0.3 |

## Second

Measured on arm64.

| case | ratio | target | verdict |
|---|---:|---:|---|
| three | 0.006 | <= 0.05 | ok |
"""


@pytest.fixture(scope="module")
def summary():
    spec = importlib.util.spec_from_file_location("summary", BENCHMARKS / "summary.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_opens_with_a_summary_what_missed_and_every_ratio(summary):
    page = summary.with_summary(PAGE)
    top, _, rest = page.partition("\n## First")
    assert "2 of 3 targets reached. Machine 1: x86_64, 2 cores. Machine 2: arm64." in top
    table = top.partition("## Every ratio and its target\n")[2]
    assert [line for line in table.splitlines() if line.startswith("| [")] == [
        "| [First: a step](#first-a-step) | one | 0.50 | <= 0.6 | ok | 2026-01-02 | 1 |",
        (
            "| [First: a step](#first-a-step) | bytes | 0.99 | 0.98 to 1.02 | **missed** "
            "| 2026-01-02 | 1 |"
        ),
        "| [Second](#second) | three | 0.006 | <= 0.05 | ok | - | 2 |",
    ]
    assert "## First" + rest == PAGE.partition("\n\n")[2]  # the sections stay as they are
    titles = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert titles[:3] == ["Summary", "What missed its target", "Every ratio and its target"]
    short, _, rest = page.partition("## What missed its target\n")
    missed = rest.partition("\n## ")[0]
    assert "| [First: a step](#first-a-step) | 2 | 1 | 1 |" in short
    assert "| [Second](#second) | 1 | 1 | - |" in short
    assert [line for line in missed.splitlines() if line.startswith("| [")] == [
        "| [First: a step](#first-a-step) | bytes | 0.99 | 0.98 to 1.02 |"
    ]


def test_the_page_in_the_repository_is_up_to_date(summary):
    page = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    assert summary.with_summary(page).rstrip() == page.rstrip()


@pytest.fixture
def harness(summary, monkeypatch):
    monkeypatch.setitem(sys.modules, "summary", summary)
    spec = importlib.util.spec_from_file_location("harness", BENCHMARKS / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "harness", module)
    spec.loader.exec_module(module)
    return module


def test_candidates_take_turns_in_both_orders_and_ratios_are_those_of_a_round(harness):
    calls = []
    candidates = {name: functools.partial(calls.append, name) for name in "ab"}
    before = {"a": lambda: calls.append("fill")}
    harness.take_turns(world(), candidates, rounds=2, warm_up=0, before=before)
    assert calls == ["fill", "a", "b", "b", "fill", "a"]
    ours, reference = harness.Timing([2.0, 4.0, 6.0]), harness.Timing([1.0, 1.0, 2.0])
    row = ours.row("x", reference, "ref", 3.0)
    assert (row.ratio, row.verdict, row.note) == (3.0, "ok", "rounds 2.00-4.00")


def test_publishing_renews_section_and_summary(harness, monkeypatch, tmp_path, capsys):
    results = tmp_path / "RESULTS.md"
    results.write_text(PAGE)
    monkeypatch.setattr(harness, "RESULTS", results)
    row = harness.Row("x", 1.0, 2.0, "ref", 1.25, at_least=0.75)
    assert (row.verdict, row.aim) == ("MISSED", "0.75 to 1.25")
    assert harness.Row("x", 1.0, 1.0, "ref", 1.25, at_least=0.75).verdict == "ok"
    assert harness.Row("x", 1.0, 2.0, "ref", 1.25).aim == "<= 1.25"
    harness.publish("Second", harness.markdown([row]))
    page = results.read_text()
    assert "| [Second](#second) | x | 0.50 | 0.75 to 1.25 | **missed** | 20" in page
    assert "three" not in page
    assert page.count("## Second\n") == 1
    assert "1 of 3 targets reached." in page
    before = page
    harness.publish("Third", "text", write=False)
    assert results.read_text() == before


def test_an_installed_package_is_not_written_to(interpreter, tmp_path):
    installed = tmp_path / "site-packages" / "unisono" / "_benchmarks"
    installed.mkdir(parents=True)
    for name in ("harness.py", "summary.py", "RESULTS.md"):
        shutil.copy(BENCHMARKS / name, installed / name)
    before = (installed / "RESULTS.md").read_bytes()
    code = "import harness; harness.publish('Transports', 'other words')"
    done = interpreter.run(["-c", code], cwd=installed)
    assert "other words" in done.stdout, done.stderr
    assert (installed / "RESULTS.md").read_bytes() == before
