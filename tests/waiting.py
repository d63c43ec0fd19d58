"""How tests wait: for what they wait for, with a deadline that grows with the machine's load.

A rank that keeps the others waiting does so until they have their answers, of which `folder`, a
`tmp_path` that all ranks of a test share, tells.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist


def scaled_by_load(seconds):
    """Return how long something that takes so many seconds may take on this machine now."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition, seconds=90.0):
    """Return True when `condition()` holds; on an idle machine it must within so many seconds."""
    begin = time.monotonic()
    while not condition():
        waited = time.monotonic() - begin
        assert waited < scaled_by_load(seconds), f"waited {waited:.0f} s in vain"
        time.sleep(0.02)
    return True


def is_running(pid):
    """Whether a process runs; one that has ended, and whose parent has not looked yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answered(folder, rank=None):
    """Say that this rank, named where there is no world, has the answer that it waited for."""
    (folder / f"answered-{dist.get_rank() if rank is None else rank}").touch()


def wait_until_answered(folder, *ranks):
    """Return when these ranks have their answers."""
    wait_until(lambda: all((folder / f"answered-{rank}").exists() for rank in ranks), 30.0)
