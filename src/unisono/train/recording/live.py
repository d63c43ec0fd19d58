"""A page that shows a job while it runs: progress, the state of each rank, where it stands.

Its small web server is for one reader: this host alone, and only with the token in the address.
Requests that were meant for another host name are refused, so that no page elsewhere can read it.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.launch.elastic.policy import read_events
from unisono.launch.job import ENDS
from unisono.launch.pool.stacks import outside_collectives, user_line
from unisono.train.recording import directory as directories
from unisono.train.recording.figures import curves, finite, log_tail, shares
from unisono.train.recording.reading import LineReader, RecordedRun, throughput
from unisono.train.recording.report import page

if TYPE_CHECKING:
    from unisono.launch.job import Job

ASK_EVERY_S = 3.0
"""Shortest time between two questions for stacks."""
LAST_LOOK_S = 2.0
"""How long an ended job is still shown to a page that looks at it."""
_LOG_BYTES = 4_000
QUIET_S = 5.0
"""A rank of which nothing was heard for so long is asked where it stands."""
QUIET_STEPS = 5.0
"""The same, in steps: slow steps are no reason to worry."""
START_S = 60.0
"""So long a rank may load data and build its model before it first logs."""
_VERB = re.compile(
    r'comm/(?:perform|collectives|messages)\.py", line \d+ in (?P<verb>(?!wait\b)[a-z]\w+)'
)
_TORCH = re.compile(r'torch/distributed/\S+\.py", line \d+ in (?P<verb>[a-z]\w+)')


class LiveView:
    """Serves the page of a job from the start of the `with` block to its end."""

    def __init__(self, directory: Path, job: Job, ranks: int) -> None:
        self._directory = directory
        self._job = job
        self._ranks = ranks
        self._began = time.time()
        self._stacks: dict[int, str] = {}
        self._asked_at = 0.0
        self._asking = threading.Lock()
        self._reading = threading.Lock()
        self._readers: dict[int, LineReader] = {}
        self._looked_at = 0.0
        self._has_seen_end = threading.Event()
        self._token = secrets.token_urlsafe(24)
        self._server = _Server(self, self._token)
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
        patience = {
            rank: patience_s([line["t"] for line in run.lines.get(rank, ())]) for rank in running
        }
        is_quiet = any(quiet_s[rank] > patience[rank] for rank in running)
        if running and status == "running" and (asks or is_quiet):
            self._ask(force=asks)
        elif not is_quiet and now - self._asked_at > 2 * ASK_EVERY_S:
            self._stacks = {}
        unit, at, rates = throughput(run.merged)
        share = {row["rank"]: row["share"] for row in shares(run.parts, run.lines)}
        return {
            "status": status,
            "seconds": now - self._began,
            "directory": str(self._directory),
            "steps": len(run.merged.steps),
            "metrics": curves(run.merged),
            "members": read_events(self._job.dir)[-40:],
            "throughput": {"unit": unit, "steps": at, "values": finite(rates)},
            "ranks": [
                self._rank_state(run, parts[rank], quiet_s[rank], patience.get(rank, 0.0))
                | {"share": share.get(rank)}
                if rank in parts
                else {"rank": rank, "state": "pending", "step": None, "quiet_s": None}
                for rank in range(self._ranks)
            ],
        }

    def _rank_state(
        self, run: RecordedRun, part: Mapping[str, Any], quiet_s: float, patience: float
    ) -> dict[str, Any]:
        """Return what the page shows of a rank that has begun."""
        rank, state = part["rank"], part["status"]
        lines = run.lines.get(rank, ())
        if state == "running":
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
            "log": log_tail(directories.rank_file(self._directory, rank, "log"), _LOG_BYTES),
        }

    def _quiet_s(self, run: RecordedRun, part: Mapping[str, Any], now: float) -> float:
        """Return how long ago a rank logged, printed or began."""
        zero = run.config.get("started_ns", 0) / 1e9
        signs = [zero + part["began_s"]]
        signs += [zero + line["t"] for line in run.lines.get(part["rank"], ())[-1:]]
        with suppress(OSError):
            printed = directories.rank_file(self._directory, part["rank"], "log").stat()
            signs += [printed.st_mtime] if printed.st_size else []
        return now - max(signs)

    def _ask(self, *, force: bool) -> None:
        """Ask all ranks where they stand, not too often; one at a time."""
        with self._asking:
            wait_s = 0.5 if force else ASK_EVERY_S
            if time.time() - self._asked_at > wait_s:
                self._stacks = self._job.stacks()
                self._asked_at = time.time()

    def page(self) -> str:
        """Return the page, which asks for the state again and again."""
        name = directories.read_json(self._directory / directories.CONFIG).get("name", "run")
        return page(f"{name}, live", "watch.js", {"name": name, "ranks": self._ranks})


def patience_s(times: Sequence[float]) -> float:
    """Return how long a rank may be quiet that logged at these seconds."""
    took = [b - a for a, b in pairwise(times[-50:])]
    return max(QUIET_S, QUIET_STEPS * statistics.median(took)) if took else QUIET_S


def place_of(stack: str) -> str:
    """Return where a rank stands in one line: `waits in all_reduce, train.py:31 in step`."""
    line = user_line(stack)
    calls = [match["verb"] for match in _VERB.finditer(stack)]
    calls = calls or [v for f in _TORCH.finditer(stack) if (v := f["verb"]) != "wrapper"]
    return f"waits in {calls[-1].rstrip('_')}, {line}" if calls else f"at {line}"


def judge(
    quiet_s: float, patience: float, rank: int, stacks: Mapping[int, str], *, has_logged: bool
) -> str:
    """Return `running`, `starting`, `waiting` (for others) or `stalled` for a rank not ended."""
    if quiet_s <= patience or not stacks:
        return "running"
    if rank in stacks and rank not in outside_collectives(stacks):
        return "waiting"
    return "stalled" if has_logged or quiet_s > START_S else "starting"


class _Server(ThreadingHTTPServer):
    """Answers on the loopback interface only; closing it waits for requests under way."""

    daemon_threads = False

    def __init__(self, view: LiveView, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.view, self.token = view, token

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed while we answered is no event; anything else is reported."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request. Everything without the right token and host gets the same refusal."""

    server: Any
    timeout = 2.0
    server_version = "unisono"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request for the page or for the state."""
        path, _, query = self.path.partition("?")
        _, token, *rest = f"{path}/".split("/")
        if not self._is_for_us() or not hmac.compare_digest(
            token.encode(errors="replace"), self.server.token.encode()
        ):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "forbidden\n")
        elif rest[0] == "state":
            state = self.server.view.state(asks=query == "ask")
            self._answer(HTTPStatus.OK, "application/json", json.dumps(state, allow_nan=False))
        elif rest[0] == "":
            self._answer(HTTPStatus.OK, "text/html", self.server.view.page())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "nothing here\n")

    def _is_for_us(self) -> bool:
        """Whether the request names this host: a page of another name may not read us."""
        port = self.server.server_port
        return self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        # A notebook of this host may show the page; no other site may.
        near = "http://127.0.0.1:* http://localhost:*"
        self.send_header("Content-Security-Policy", f"frame-ancestors {near}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the console belongs to the ranks."""
