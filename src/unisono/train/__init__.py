"""Around a training loop: checkpoints, and the record of a run with its report.

Names are loaded at first use: a launcher that writes a report does not load torch for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.train.checkpoint import Checkpoint, Restored
    from unisono.train.exact.run import ElasticRun, elastic
    from unisono.train.recording.opening import current_run, log, record, span
    from unisono.train.recording.run import Run
    from unisono.train.report.building import Report, build_report
    from unisono.train.resumable import Resumable

_HOMES = {
    "Checkpoint": "unisono.train.checkpoint",
    "ElasticRun": "unisono.train.exact.run",
    "Report": "unisono.train.report.building",
    "Restored": "unisono.train.checkpoint",
    "Resumable": "unisono.train.resumable",
    "Run": "unisono.train.recording.run",
    "build_report": "unisono.train.report.building",
    "current_run": "unisono.train.recording.opening",
    "elastic": "unisono.train.exact.run",
    "log": "unisono.train.recording.opening",
    "record": "unisono.train.recording.opening",
    "span": "unisono.train.recording.opening",
}

__all__ = [
    "Checkpoint",
    "ElasticRun",
    "Report",
    "Restored",
    "Resumable",
    "Run",
    "build_report",
    "current_run",
    "elastic",
    "log",
    "record",
    "span",
]


def __getattr__(name: str) -> object:
    """Load a public name from its home, once."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'unisono.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
