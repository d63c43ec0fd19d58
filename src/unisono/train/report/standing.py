"""Where the ranks of a running job stand: who works, who waits, who has not been heard of. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from unisono.launch.stacks import outside_collectives, user_line

QUIET_S = 5.0
"""A rank of which nothing was heard for so long is asked where it stands."""
QUIET_STEPS = 5.0
"""The same, in steps: slow steps are no reason to worry."""
START_S = 60.0
"""So long a rank may load data and build its model before it first logs."""
_VERB = re.compile(r'comm/(?:collectives|messages)\.py", line \d+ in (?P<verb>[a-z]\w+)')
_TORCH = re.compile(r'torch/distributed/\S+\.py", line \d+ in (?P<verb>[a-z]\w+)')


def patience_s(times: Sequence[float]) -> float:
    """Return how long a rank may be quiet that logged at these seconds."""
    took = [b - a for a, b in pairwise(times[-50:])]
    return max(QUIET_S, QUIET_STEPS * statistics.median(took)) if took else QUIET_S


def place_of(stack: str) -> str:
    """Return where a rank stands in one line: `waits in all_reduce, train.py:31 in step`."""
    line = user_line(stack)
    calls = [found["verb"] for found in _VERB.finditer(stack)]
    calls = calls or [v for f in _TORCH.finditer(stack) if (v := f["verb"]) != "wrapper"]
    return f"waits in {calls[-1].rstrip('_')}, {line}" if calls else f"at {line}"


def judge(
    quiet_s: float, patience: float, rank: int, stacks: Mapping[int, str], *, has_logged: bool
) -> str:
    """Return `running`, `starting`, `waiting` (for others) or `stalled` for a rank not ended."""
    if quiet_s <= patience or not stacks:
        return "running"
    if rank in stacks and rank not in outside_collectives(stacks):
        return "waiting"
    return "stalled" if has_logged or quiet_s > START_S else "starting"
