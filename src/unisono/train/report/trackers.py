"""Experiment trackers: what a report says of a run, sent to where a team keeps all of its runs.

Whoever writes the report of a run sends it, so metrics are means over ranks and ranks wait for
nobody. A tracker that fails costs a warning, never the run.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unisono.errors import MissingExtra
from unisono.expect import expect, expect_choice
from unisono.train.recording import directory as directories
from unisono.train.report.data import RecordedRun

_BATCH = 1000
"""Metrics that MLflow takes in one call."""
_LONGEST = 6000
"""Characters that MLflow keeps of a parameter."""


def check_trackers(to: str | Sequence[str]) -> tuple[str, ...]:
    """Return the trackers that `to` names; raise for one that is unknown or not installed."""
    expect("to", to, (str, list, tuple), 'to="mlflow"')
    names = (to,) if isinstance(to, str) else tuple(dict.fromkeys(to))
    for name in names:
        expect_choice("to", name, _SENDERS)
        if importlib.util.find_spec(name) is None:
            raise MissingExtra.of(name, f"record(to={to!r})", f"{name} is not installed")
    return names


def send(run: RecordedRun) -> None:
    """Send a run that has ended, and whose report is written, to the trackers it asked for."""
    wanted = {name for part in run.parts for name in part.get("to", ())}
    for name in sorted(wanted | set(run.config.get("to", ()))):
        try:
            _SENDERS[name](run)
        except Exception as error:  # a server that is away, a full disk, a version of theirs
            warnings.warn(f"{run.directory} was not sent to {name}: {error}", stacklevel=2)


def write_tensorboard(directory: Path, run: RecordedRun) -> bool:
    """Write all metrics as scalars below `directory`; return whether TensorBoard is installed.

    What an earlier report wrote there is replaced, so that no curve is drawn twice.
    """
    if importlib.util.find_spec("tensorboard") is None or not run.merged.series:
        return False
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(directory, ignore_errors=True)
    with SummaryWriter(str(directory)) as writer:
        for name, step, at, value in _points(run):
            writer.add_scalar(name, value, step, walltime=at)
    return True


def _to_tensorboard(run: RecordedRun) -> None:
    """Every report has these files where TensorBoard is installed."""


def _to_mlflow(run: RecordedRun) -> None:
    """Send a run to the store and experiment that MLflow's own settings name."""
    import mlflow
    from mlflow.entities import Metric, Param

    client = mlflow.MlflowClient()
    with mlflow.start_run(run_name=run.directory.name, log_system_metrics=False) as opened:
        name = opened.info.run_id
    metrics = [Metric(key, value, int(at * 1e3), step) for key, step, at, value in _points(run)]
    for first in range(0, len(metrics), _BATCH):
        client.log_batch(name, metrics=metrics[first : first + _BATCH])
    for key, value in _settings(run).items():
        client.log_batch(name, params=[Param(key, str(value)[:_LONGEST])])
    for file in _FILES:
        client.log_artifact(name, str(run.directory / file))
    client.set_terminated(name, "FAILED" if run.status == "failed" else "FINISHED")


def _to_wandb(run: RecordedRun) -> None:
    """Send a run to Weights & Biases, or into files below the run with `WANDB_MODE=offline`."""
    import wandb

    by_step: dict[int, dict[str, float]] = {}
    for key, step, _, value in _points(run):
        by_step.setdefault(step, {})[key] = value
    folder = str(run.directory)
    target = wandb.init(name=run.directory.name, config=_settings(run), dir=folder)
    for step in sorted(by_step):
        target.log(by_step[step], step=step)
    artifact = wandb.Artifact(f"report-{target.id}", type="report")
    for file in _FILES:
        artifact.add_file(str(run.directory / file))
    target.log_artifact(artifact)
    target.finish(exit_code=1 if run.status == "failed" else 0)


_SENDERS: dict[str, Callable[[RecordedRun], None]] = {
    "tensorboard": _to_tensorboard,
    "mlflow": _to_mlflow,
    "wandb": _to_wandb,
}
_FILES = (directories.REPORT, directories.METRICS)
"""What goes along as files."""


def _points(run: RecordedRun) -> Iterator[tuple[str, int, float, float]]:
    """Yield metric, step, moment in seconds and mean over ranks of all that was logged."""
    began = run.config.get("started_ns", 0) / 1e9
    for name, series in run.merged.series.items():
        for step, seconds, value in zip(series.steps, series.seconds, series.mean, strict=True):
            if math.isfinite(value):
                yield name, step, began + seconds, value


def _settings(run: RecordedRun) -> dict[str, Any]:
    """Return what the program said of itself, and how many ranks it had."""
    return {"ranks": len(run.parts), **run.config.get("config", {})}
