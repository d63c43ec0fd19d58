"""A rank that keeps the others waiting does so until they have their answer, not for some seconds.

`folder` is a `tmp_path`, which all ranks of a test share.
"""

from __future__ import annotations

import time

import torch.distributed as dist


def answered(folder, rank=None):
    """Say that this rank, named where there is no world, has the answer that it waited for."""
    (folder / f"answered-{dist.get_rank() if rank is None else rank}").touch()


def wait_until_answered(folder, *ranks, at_most_s=30.0):
    """Return when these ranks have their answers."""
    end = time.monotonic() + at_most_s
    while not all((folder / f"answered-{rank}").exists() for rank in ranks):
        assert time.monotonic() < end, f"not all of {ranks} have an answer after {at_most_s} s"
        time.sleep(0.01)
