"""What averaging gradients cost each rank, by step and as a share of the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def averaging_table(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each rank and each module whose gradients it averaged."""
    return [_row(part, costs) for part in parts for costs in part.get("averaging", ())]


def _row(part: Mapping[str, Any], costs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs of a module on a rank; shares are of the time that the rank was recorded."""
    steps, seconds = max(1, costs["steps"]), part["ended_s"] - part["began_s"]
    backward, forward = costs["wait_backward_s"], costs["wait_forward_s"]
    return {
        "rank": part["rank"],
        "module": costs["module"],
        "ranks": costs["ranks"],
        "steps": costs["steps"],
        "buckets": costs["buckets"],
        "bytes_per_step": round(costs["bytes"] / steps),
        "backward_s_per_step": backward / steps,
        "forward_s_per_step": forward / steps,
        "backward_share": backward / seconds if seconds > 0 else 0.0,
        "forward_share": forward / seconds if seconds > 0 else 0.0,
    }
