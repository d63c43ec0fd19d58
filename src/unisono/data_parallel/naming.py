"""Tells in an error of a collective what was to travel with it, and why ranks did not meet."""

from __future__ import annotations

from unisono.errors import CollectiveMismatch, RankTimeout

Unfinished = (CollectiveMismatch, RankTimeout)
"""Errors of a collective in which ranks did not come together."""

BACKWARDS = "averaged backwards"
"""What is counted in the group, so that a rank that has run out of data can be told from others."""

_ALIKE = "samples() and join() go around the same backwards on all ranks, or on none"
_EQUALLY_MANY = (
    "equally many batches on all ranks (drop_last=True, or a DistributedSampler), or "
    "with model.join(): around the loop"
)


def named(error: CollectiveMismatch | RankTimeout, what: str) -> CollectiveMismatch | RankTimeout:
    """Return the error with `what` was to travel in front, and why ranks may disagree about it."""
    lines = [what, str(error)]
    if isinstance(error, CollectiveMismatch) and error.returned:
        lines[1] = lines[1].rpartition("\n  HINT: ")[0]
        lines += [
            f"  rank {rank} has finished: {counted.get(BACKWARDS, 0)} {BACKWARDS}"
            for rank, counted in sorted(error.returned.items())
        ]
        lines.append(f"  HINT: {_EQUALLY_MANY}")
    elif isinstance(error, CollectiveMismatch):
        lines.append(f"  HINT: {_ALIKE}")
    told = type(error)("\n".join(lines))
    told.__dict__.update(error.__dict__)
    return told
