"""A test that never ends, in ranks that have children."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest


@pytest.mark.ranks(2, timeout=300)
def test_never_ends():
    import torch.distributed as dist

    subprocess.Popen(["sleep", "300"])
    Path(__file__).with_name(f"started{dist.get_rank()}").touch()
    while True:
        time.sleep(1)
