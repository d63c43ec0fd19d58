"""The metrics of a run for TensorBoard, where that is installed."""

from __future__ import annotations

import importlib.util
import math
import shutil
from pathlib import Path

from unisono.train.report.data import RecordedRun


def write_tensorboard(directory: Path, run: RecordedRun) -> bool:
    """Write all metrics as scalars below `directory`; return whether TensorBoard is installed.

    What an earlier report wrote there is replaced, so that no curve is drawn twice.
    """
    if importlib.util.find_spec("tensorboard") is None or not run.merged.series:
        return False
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(directory, ignore_errors=True)
    began = run.config.get("started_ns", 0) / 1e9
    with SummaryWriter(str(directory)) as writer:
        for name, series in run.merged.series.items():
            for step, seconds, value in zip(series.steps, series.seconds, series.mean, strict=True):
                if math.isfinite(value):
                    writer.add_scalar(name, value, step, walltime=began + seconds)
    return True
