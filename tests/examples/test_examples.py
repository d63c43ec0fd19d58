"""Every example runs as a user would run it, is short, and ends well."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example, interpreter, tmp_path):
    done = interpreter.run([str(example), "--ranks", "2"], cwd=tmp_path, timeout_s=110.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), "an example shows something"
    assert list(tmp_path.glob("unisono-*")) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example):
    assert len(example.read_text().splitlines()) < 120


def test_there_are_examples():
    assert EXAMPLES
