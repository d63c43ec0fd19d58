"""Is this process a rank already? Asked often, and answered without torch where it can be."""

from __future__ import annotations

import os
import sys

_TRACES = (
    "RANK",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "SLURM_STEP_ID",
)
"""One of these variables is there in every process that a launcher started as a rank."""


def is_in_world() -> bool:
    """Whether this process is a rank already, by its process group or by its environment."""
    if has_process_group():
        return True
    if not any(name in os.environ for name in _TRACES):
        return False
    from unisono.environment import detect

    return detect().is_world


def has_process_group() -> bool:
    """Whether torch.distributed has been initialised here."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
