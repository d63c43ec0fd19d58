"""From what ranks wrote to what people look at: `metrics.csv`, `trace.json` and `report.html`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono import trace_file
from unisono.train.recording import directory as directories
from unisono.train.report import metrics
from unisono.train.report.data import RecordedRun, report_data
from unisono.train.report.page import page
from unisono.train.report.tensorboard import write_tensorboard

__all__ = ["build_report", "finish"]

_AGAINST = "against"
_KEPT = ("rank", "host", "device", "backend", "threads", "status", "peak_mb", "layouts")


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
        known = directories.read_json(home / directories.CONFIG).get(_AGAINST, [])
        others = [Path(other) for other in known if (Path(other) / directories.CONFIG).is_file()]
    return finish(home, others)


def finish(directory: Path, against: Sequence[Path] = ()) -> Path:
    """Make the files of a run from what its ranks have written so far, and return the page."""
    run = RecordedRun.read(directory)
    known = run.config | {
        "status": run.status,
        "seconds": round(run.seconds, 3),
        "ranks": [{k: v for k, v in p.items() if k in _KEPT} for p in run.parts],
        _AGAINST: [str(path) for path in against],
    }
    directories.write_json(directory / directories.CONFIG, known)
    metrics.write_csv(directory / directories.METRICS, run.merged)
    calls = [event for part in run.parts for event in part.get("events", ())]
    spans = {part["rank"]: part.get("spans", ()) for part in run.parts}
    trace_file.write(directory / directories.TRACE, calls, spans)
    write_tensorboard(directory / directories.TENSORBOARD, run)
    data = report_data(run, [RecordedRun.read(path) for path in against])
    path = directory / directories.REPORT
    directories.write_private(path, page(data["name"], "report.js", data))
    return path
