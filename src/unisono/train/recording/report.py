"""From what ranks wrote to what people look at: `metrics.csv`, `trace.json` and `report.html`."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from unisono import trace_file
from unisono.launch.job_files import write_private
from unisono.train.recording import directory as directories
from unisono.train.recording import reading
from unisono.train.recording.figures import report_data
from unisono.train.recording.reading import RecordedRun

__all__ = ["Report", "build_report", "conclude"]

_AGAINST = "against"
_FRAME = (
    '<iframe title="report" sandbox="allow-scripts" srcdoc="{page}" '
    'style="width: 100%; height: 720px; border: 0"></iframe>'
)
_KEPT = ("rank", "host", "device", "backend", "threads", "status", "peak_mb")


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
    """Make the files of a run that has ended, and return the page."""
    return _finish(RecordedRun.read(directory))


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
