"""A training that is killed again and again ends with the losses of one that never was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_training.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_that_is_killed_twenty_times_ends_with_the_same_losses(tmp_path):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["losses"]) == 50
    assert found["losses"] == found["expected"]
    assert found["interrupted saves"] >= 3, "kills have to hit saves"
    assert found["left"] == ["step-00000049", "step-00000050"]
