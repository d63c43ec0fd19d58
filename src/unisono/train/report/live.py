"""A page that shows a job while it runs: progress, the state of each rank, where it stands."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from unisono.launch.job import ENDS
from unisono.train.recording import directory as directories
from unisono.train.report import metrics, timeline
from unisono.train.report.data import RecordedRun, curves, log_tail
from unisono.train.report.page import page
from unisono.train.report.serving import LocalServer
from unisono.train.report.standing import judge, patience_s, place_of

ASK_EVERY_S = 3.0
"""Shortest time between two questions for stacks."""
LAST_LOOK_S = 2.0
"""How long an ended job is still shown to a page that looks at it."""
_LOG_BYTES = 4_000


class Watched(Protocol):
    """What is asked of a job; `unisono.Job` has it."""

    def status(self) -> str:
        """Return its state in one word."""
        ...

    def stacks(self) -> dict[int, str]:
        """Return where every rank stands."""
        ...


class LiveView:
    """Serves the page of a job from the start of the `with` block to its end."""

    def __init__(self, directory: Path, job: Watched, ranks: int) -> None:
        self._directory = directory
        self._job = job
        self._ranks = ranks
        self._began = time.time()
        self._stacks: dict[int, str] = {}
        self._asked_at = 0.0
        self._asking = threading.Lock()
        self._reading = threading.Lock()
        self._readers: dict[int, metrics.LineReader] = {}
        self._looked_at = 0.0
        self._has_seen_end = threading.Event()
        self._token = secrets.token_urlsafe(24)
        self._server = LocalServer(self._token, self._page, self.state)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="unisono-watch", daemon=True
        )

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self._server.server_port}/{self._token}/"

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook of this host."""
        return f'<iframe src="{self.url}" style="width: 100%; height: 560px; border: 0"></iframe>'

    def __enter__(self) -> LiveView:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let a page that is open see how it ended, then end the server."""
        if time.time() - self._looked_at < LAST_LOOK_S:
            self._has_seen_end.wait(LAST_LOOK_S)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def state(self, *, asks: bool = False) -> dict[str, Any]:
        """Return what the page shows; `asks`: with fresh stacks, whether a rank is quiet or not."""
        with self._reading:
            run = RecordedRun.read(self._directory, self._readers)
        status = self._job.status()
        if status in ENDS:
            self._has_seen_end.set()
        self._looked_at = now = time.time()
        parts = {part["rank"]: part for part in run.parts}
        quiet_s = {rank: self._quiet_s(run, part, now) for rank, part in parts.items()}
        running = [rank for rank, part in parts.items() if part["status"] == "running"]
        is_quiet = any(quiet_s[rank] > _patience_s(run, rank) for rank in running)
        if running and status == "running" and (asks or is_quiet):
            self._ask(force=asks)
        elif not is_quiet and now - self._asked_at > 2 * ASK_EVERY_S:
            self._stacks = {}
        unit, at, rates = metrics.throughput(run.merged)
        shares = {row["rank"]: row["share"] for row in timeline.shares(run.parts, run.lines)}
        return {
            "status": status,
            "seconds": now - self._began,
            "directory": str(self._directory),
            "steps": len(run.merged.steps),
            "metrics": curves(run.merged),
            "throughput": {"unit": unit, "steps": at, "values": rates},
            "ranks": [
                self._rank_state(run, parts[rank], quiet_s[rank]) | {"share": shares.get(rank)}
                if rank in parts
                else {"rank": rank, "state": "pending", "step": None, "quiet_s": None}
                for rank in range(self._ranks)
            ],
        }

    def _rank_state(
        self, run: RecordedRun, part: Mapping[str, Any], quiet_s: float
    ) -> dict[str, Any]:
        """Return what the page shows of a rank that has begun."""
        rank, state = part["rank"], part["status"]
        lines = run.lines.get(rank, ())
        if state == "running":
            patience = _patience_s(run, rank)
            state = judge(quiet_s, patience, rank, self._stacks, has_logged=bool(lines))
        stack = self._stacks.get(rank)
        return {
            "rank": rank,
            "state": state,
            "host": part["host"],
            "device": part["device"],
            "step": lines[-1]["step"] if lines else None,
            "quiet_s": quiet_s,
            "where": place_of(stack) if stack else None,
            "stack": stack,
            "trouble": part["trouble"],
            "log": log_tail(directories.log_path(self._directory, rank), _LOG_BYTES),
        }

    def _quiet_s(self, run: RecordedRun, part: Mapping[str, Any], now: float) -> float:
        """Return how long ago a rank logged, printed or began."""
        zero = run.config.get("started_ns", 0) / 1e9
        signs = [zero + part["began_s"]]
        signs += [zero + line["t"] for line in run.lines.get(part["rank"], ())[-1:]]
        with suppress(OSError):
            printed = directories.log_path(self._directory, part["rank"]).stat()
            signs += [printed.st_mtime] if printed.st_size else []
        return now - max(signs)

    def _ask(self, *, force: bool) -> None:
        """Ask all ranks where they stand, not too often; one at a time."""
        with self._asking:
            wait_s = 0.5 if force else ASK_EVERY_S
            if time.time() - self._asked_at > wait_s:
                self._stacks = self._job.stacks()
                self._asked_at = time.time()

    def _page(self) -> str:
        name = directories.read_json(self._directory / directories.CONFIG).get("name", "run")
        return page(f"{name}, live", "watch.js", {"name": name, "ranks": self._ranks})


def _patience_s(run: RecordedRun, rank: int) -> float:
    return patience_s([line["t"] for line in run.lines.get(rank, ())[-50:]])
