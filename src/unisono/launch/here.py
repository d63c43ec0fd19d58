"""What this process knows of itself as a rank: its platform, device and process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from unisono.launch.platform import Platform


@dataclass(frozen=True, kw_only=True)
class Here:
    """A rank, seen from inside."""

    rank: int
    """Its place in the world."""
    local_rank: int
    """Its place on its node."""
    platform: Platform
    """What was asked for, with the address at which the ranks met."""
    device: torch.device
    """Where its tensors live."""
    group: ProcessGroup | None
    """Its process group; None where the platform wants none."""
    report_fd: int | None = None
    """The pipe to the launcher, if it has one."""


_here: Here | None = None


def here() -> Here | None:
    """Return what this process knows of itself; None if it is not a rank of a launcher of ours."""
    return _here


def set_here(value: Here | None) -> None:
    """Remember what this process is."""
    global _here
    _here = value
