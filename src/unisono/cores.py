"""How many cores this process may use, and how many threads each rank then gets."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the number of cores: CPU affinity, limited by the quota of the control group."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cgroup_quota(cgroup)
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def cgroup_quota(cgroup: Path = _CGROUP) -> float | None:
    """Return the CPU quota of the control group in cores, version 2 or 1; None if unlimited."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        period = int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if limit <= 0 else limit / period


def threads_per_rank(local_ranks: int, cores: int) -> int:
    """Share `cores` among the ranks of a node; at least one thread each."""
    return max(1, cores // local_ranks)
