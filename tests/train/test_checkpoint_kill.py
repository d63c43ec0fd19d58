"""A training that is killed again and again ends with the losses of one that never was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_training.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_that_is_killed_again_and_again_ends_with_the_same_losses(interpreter, tmp_path):
    done = interpreter.run([str(PROGRAM), str(tmp_path)], cwd=tmp_path, timeout_s=590)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["losses"]) == 16
    assert found["losses"] == found["expected"]
    assert found["interrupted saves"] >= 1, "kills have to hit saves"
    assert found["left"] == ["step-00000015", "step-00000016"]
