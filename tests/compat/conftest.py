"""What tests of other libraries' programs share: how a user starts them."""

from __future__ import annotations

import os
import subprocess

import pytest


@pytest.fixture
def printed_by(forked_python, tmp_path):
    """Return a function that runs a script, behind other words, and returns what it printed."""

    def run(script, *before, **environment):
        done = subprocess.run(
            [*before, forked_python, str(script)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
