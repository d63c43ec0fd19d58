"""Around a training loop: checkpoints, and the record of a run with its report.

Names are loaded at first use: a launcher that writes a report does not load torch for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.train.checkpoint import Checkpoint, Restored
    from unisono.train.exact.run import ElasticRun, elastic
    from unisono.train.recording.report import Report, build_report
    from unisono.train.recording.run import Run, current_run, log, record, span
    from unisono.train.resumable import Resumable

_HOMES = {
    "checkpoint": "Checkpoint Restored",
    "exact.run": "ElasticRun elastic",
    "recording.report": "Report build_report",
    "recording.run": "Run current_run log record span",
    "resumable": "Resumable",
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
    for home, names in _HOMES.items():
        if name in names.split():
            value = getattr(importlib.import_module(f"unisono.train.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'unisono.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
