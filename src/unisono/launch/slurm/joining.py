"""Ranks that the user's own `srun` started: how they find each other without a launcher of ours."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.launch.job_files import check_ours
from unisono.launch.rendezvous import meet

if TYPE_CHECKING:
    import torch.distributed as dist

    from unisono.environment import Environment

START_S = 300.0
"""Longest wait for the ranks to find each other."""


@contextmanager
def meeting_in_step(environment: Environment) -> Iterator[tuple[dist.Store, Environment]]:
    """Yield the store of a step, and the environment with its address. Collective over the step.

    They meet through a file of a private directory, which is gone after the block.
    """
    directory = _directory(environment)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_ours(directory)
    nonce = secrets.token_hex(8) if environment.rank == 0 else ""
    try:
        store, address = meet(
            environment, directory / "rendezvous.json", nonce=nonce, timeout_s=START_S
        )
        yield store, replace(environment, master=address)
    finally:
        if environment.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)


def _directory(environment: Environment) -> Path:
    """Return a directory that all ranks of the step see, and no other step uses."""
    own = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    name = "slurm-" + ".".join(os.environ.get(variable, "0") for variable in own)
    if environment.job_dir is not None:
        return environment.job_dir / name
    if environment.nodes == 1:
        return Path(tempfile.gettempdir(), f"unisono-{os.getuid()}-{name}")
    return Path(".unisono", name).absolute()
