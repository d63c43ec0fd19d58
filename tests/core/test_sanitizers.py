"""`make sanitize`: the core without Python under the sanitizers of the compiler, for a moment."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ("2,100,1", "3,100,2", "5,40,3")


def has_sanitizers(folder):
    """Whether a compiler is there that brings the libraries of its sanitizers."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None or shutil.which("make") is None:
        return False
    source = folder / "empty.cpp"
    source.write_text("int main() {}")
    words = [compiler, "-fsanitize=thread", str(source), "-o", str(folder / "empty")]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_core_is_clean_under_the_sanitizers(tmp_path):
    if not has_sanitizers(tmp_path):
        pytest.skip("no compiler with sanitizers, or no make")
    stress = f"STRESS={' '.join(RUNS)}"
    words = ["make", "-j2", "sanitize", f"SANITIZED={tmp_path}", stress, "OPTIMIZED=-O0"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("ok: ") == 2 * len(RUNS)
    assert "WARNING" not in run.stderr
