"""The same script under every starter gives the same result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = Path(__file__).parents[2] / "examples" / "launch_everywhere.sh"


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_one_script_under_every_starter_gives_the_same_result(warm_python, tmp_path):
    beside = str(Path(sys.executable).parent)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": warm_python,  # each interpreter is a fork of the warm one
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        ["sh", str(SHOW)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = re.split(r"^== (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    shown = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(shown) >= 3
    for starter, output in shown.items():
        for rank in range(2):
            assert f"hello from rank {rank} of 2; all our ranks add up to 1" in output, starter
        assert "returned: [0, 1]" in output, starter
    if "mpi" in os.environ.get("UNISONO_REQUIRE", "").split(","):
        assert "mpiexec" in shown
