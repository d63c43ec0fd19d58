"""From what ranks wrote to what people look at: `metrics.csv`, `trace.json` and `report.html`.

A run can also go to experiment trackers, where a team keeps all of its runs. The process that
writes the report sends it, so metrics are means over ranks and ranks do not wait. A tracker that
fails costs a warning, never the run.
"""

from __future__ import annotations

import html
import importlib.util
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from unisono import trace_file
from unisono.errors import MissingExtra
from unisono.expect import expect, expect_choice
from unisono.launch.job_files import write_private
from unisono.train.recording import directory as directories
from unisono.train.recording import reading
from unisono.train.recording.figures import report_data
from unisono.train.recording.reading import RecordedRun

__all__ = ["Report", "build_report", "check_trackers", "conclude"]

_AGAINST = "against"
_FRAME = (
    '<iframe title="report" sandbox="allow-scripts" srcdoc="{page}" '
    'style="width: 100%; height: 720px; border: 0"></iframe>'
)
_BATCH = 1000
"""Metrics that MLflow takes in one call."""
_LONGEST = 6000
"""Characters that MLflow keeps of a parameter."""
_KEPT = ("rank", "host", "device", "backend", "threads", "status", "peak_mb", "layouts")


class Report:
    """The report of a recorded run; a notebook shows it below the cell.

    Args:
        directory: of the run, as `runs/NAME`.

    Attributes:
        dir: the same.

    >>> Report("runs/digits").path.as_posix()
    'runs/digits/report.html'
    """

    def __init__(self, directory: str | Path) -> None:
        self.dir = Path(directory)

    @property
    def path(self) -> Path:
        """The page."""
        return self.dir / directories.REPORT

    def _repr_html_(self) -> str:
        """Return the page in a frame; one that is not there yet is made of what there is."""
        if not self.path.is_file():
            build_report(self.dir)
        return _FRAME.format(page=html.escape(self.path.read_text(encoding="utf-8")))

    def __repr__(self) -> str:
        return f"Report({str(self.dir)!r})"


def build_report(directory: str | Path, *, against: Sequence[str | Path] | None = None) -> Path:
    """Make `metrics.csv`, `trace.json` and `report.html` of a run again; return the page. Local.

    Args:
        directory: of the run.
        against: directories of other runs, drawn beside it; remembered for the next time. None
            takes those of the last time.
    """
    home = Path(directory)
    directories.check_run(home, f"a report of {directory}")
    others = [Path(other).absolute() for other in against or ()]
    for other in others:
        directories.check_run(other, f"a report of {directory} against {other}")
    if against is None:
        recorded = directories.read_json(home / directories.CONFIG).get(_AGAINST, [])
        others = [Path(other) for other in recorded if (Path(other) / directories.CONFIG).is_file()]
    return _finish(RecordedRun.read(home), others)


def conclude(directory: Path) -> Path:
    """Make the files of a run that has ended, send it to its trackers, and return the page."""
    run = RecordedRun.read(directory)
    path = _finish(run)
    send(run)
    return path


def _finish(run: RecordedRun, against: Sequence[Path] = ()) -> Path:
    """Make the files of a run from what its ranks have written so far, and return the page."""
    directory = run.directory
    settings = run.config | {
        "status": run.status,
        "seconds": round(run.seconds, 3),
        "ranks": [{k: v for k, v in p.items() if k in _KEPT} for p in run.parts],
        _AGAINST: [str(path) for path in against],
    }
    directories.write_json(directory / directories.CONFIG, settings)
    reading.write_csv(directory / directories.METRICS, run.merged)
    calls = [event for part in run.parts for event in part.get("events", ())]
    spans = {part["rank"]: part.get("spans", ()) for part in run.parts}
    trace_file.write(directory / directories.TRACE, calls, spans)
    write_tensorboard(directory / directories.TENSORBOARD, run)
    data = report_data(run, [RecordedRun.read(path) for path in against])
    path = directory / directories.REPORT
    write_private(path, page(data["name"], "report.js", data).encode())
    return path


def page(title: str, script: str, data: dict[str, Any]) -> str:
    """Return a whole page: our style and scripts, and `data` for them."""
    # "</" would end the script element, "<!--" would hide its end.
    body = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return _PAGE.format(
        title=html.escape(title),
        style=_asset("style.css"),
        charts=_asset("charts.js"),
        script=_asset(script),
        data=body,
    )


def _asset(name: str) -> str:
    return (resources.files("unisono.train.recording") / "assets" / name).read_text(
        encoding="utf-8"
    )


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; connect-src 'self'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title} · unisono</title>
<style>
{style}</style>
</head>
<body>
<noscript>This page draws its figures with the script inside it; please allow scripts.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>
{charts}
{script}</script>
</body>
</html>
"""


# Experiment trackers.


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
    names = {name for part in run.parts for name in part.get("to", ())}
    for name in sorted(names | set(run.config.get("to", ()))):
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
