"""Lint, format, types and layers, so that one command tells everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def passes(*command: str) -> None:
    """Run a tool of this environment in the repository; show all it says if it objects."""
    program = shutil.which(command[0], path=str(Path(sys.executable).parent))
    assert program is not None, f"{command[0]} is not installed: pip install -e '.[test]'"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing_to_correct():
    passes("ruff", "check", ".")


def test_ruff_finds_nothing_to_format():
    passes("ruff", "format", "--check", ".")


@pytest.mark.timeout(300)
def test_pyright_finds_no_type_error_in_src_benchmarks_and_examples():
    passes("pyright", "--pythonpath", sys.executable)


def test_imports_point_down_the_layers():
    passes("lint-imports")
