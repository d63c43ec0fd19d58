"""A real browser for tests of pages: what it makes of them, what it complains of, how they look."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Chromium:
    """Loads pages without a screen; a profile of its own each time, so nothing is left behind."""

    program: str
    folder: Path

    def dom(self, url: str, *, wait_ms: int = 2000, dark: bool = False) -> tuple[str, list[str]]:
        """Return the page after its scripts have run, and what it wrote to its console."""
        words = ["--dump-dom", "--enable-logging=stderr", f"--virtual-time-budget={wait_ms}"]
        done = self._run(url, *words, *_scheme(dark))
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    def screenshot(self, url: str, path: Path, *, size: str, dark: bool = False) -> None:
        """Write a picture of the page."""
        words = [f"--screenshot={path}", f"--window-size={size}", "--hide-scrollbars"]
        self._run(url, *words, "--virtual-time-budget=2000", *_scheme(dark))

    def _run(self, url: str, *words: str) -> subprocess.CompletedProcess[str]:
        profile = self.folder / "profile"
        # Everything that would start more processes or look for a network is left off.
        quiet = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        still = ("--disable-background-networking", "--disable-component-update", "--no-first-run")
        done = subprocess.run(
            [self.program, *quiet, *still, f"--user-data-dir={profile}", *words, url],
            capture_output=True,
            text=True,
            timeout=110,
            env={**os.environ, "HOME": str(self.folder), "TMPDIR": str(self.folder)},
            check=False,
        )
        shutil.rmtree(profile, ignore_errors=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done


def _scheme(dark: bool) -> list[str]:
    return ["--blink-settings=preferredColorScheme=0"] if dark else []


@pytest.fixture
def chromium(tmp_path_factory):
    """The browser; a test without one is skipped, or fails where UNISONO_REQUIRE names it."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        if "chromium" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail("UNISONO_REQUIRE wants chromium, but there is none on PATH")
        pytest.skip("no chromium on PATH")
    return Chromium(program, tmp_path_factory.mktemp("chromium"))


@pytest.fixture
def a_run(tmp_path):
    """Write the directory of a run as its ranks would have: `a_run("name", ranks=2)`."""

    def write(name="run", *, ranks=2, steps=40, step_s=0.1, trouble=None, status="done", loss=None):
        directory = tmp_path / name
        directory.mkdir()
        config = {
            "name": name,
            "command": ["unisono", "run", "train.py"],
            "directory": str(tmp_path),
            "started": "2026-01-02T03:04:05+00:00",
            "started_ns": time.time_ns() - int((1 + steps * step_s) * 1e9),
            "machine": {"host": "laptop", "processor": "a processor"},
            "versions": {"python": "3.12.0", "unisono": "0.1.0", "torch": "2.13.0"},
            "git": {"commit": "0123456789abcdef", "branch": "main", "is_dirty": True},
        }
        (directory / "config.json").write_text(json.dumps(config))
        for rank in range(ranks):
            lines = [_line(step, rank, step_s, loss) for step in range(steps)]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (directory / f"rank-{rank}.jsonl").write_text(text)
            part = _part(rank, ranks, steps, step_s, trouble if rank == 1 else None, status)
            (directory / f"rank-{rank}.json").write_text(json.dumps(part))
            log = f"epoch 1\r epoch 2\nrank {rank} says <b>hello</b> & </script>\n"
            (directory / f"rank-{rank}.log").write_text(log)
        return directory

    return write


def _line(step, rank, step_s, loss):
    at = 1.0 + (step + 1) * step_s
    values = {"loss": 1 / (step + 1) + 0.01 * rank if loss is None else loss(step), "samples": 32}
    timing = {"blocked_s": 0.3 * step_s * step, "wait_s": 0.2 * step_s * step}
    return {"step": step, "t": at, "a": 0, "v": values, **timing}


_COSTS = {
    "buckets": 3,
    "steps": 40,
    "bytes": 40 * 1_250_000,
    "wait_backward_s": 0.5,
    "wait_forward_s": 0.1,
}


def _part(rank, ranks, steps, step_s, trouble, status):
    def ns(seconds):
        return int(1e9 * (1.0 + seconds))

    call = {"op": "all_reduce", "algorithm": "x", "group": "world", "rank": rank, "is_async": False}
    size = {"sent": 400, "received": 400, "dtype": "float32", "site": "/home/me/train.py:31"}
    begins = [step * step_s + 0.6 * step_s for step in range(steps)]
    ends = [(step + 0.9) * step_s for step in range(steps)]
    waits = {"wait_ns": int(0.2e9 * step_s)}
    events = [
        {**call, **size, **waits, "number": i, "t_start": ns(a), "t_end": ns(b)}
        for i, (a, b) in enumerate(zip(begins, ends, strict=True))
    ]
    sums = {
        "op": "all_reduce",
        "site": "/home/me/train.py:31",
        "calls": steps,
        "bytes": 800 * steps,
    }
    part = {
        "rank": rank,
        "size": ranks,
        "host": "laptop",
        "pid": 100 + rank,
        "device": "cpu",
        "backend": "shm",
        "threads": 1,
        "attempt": 0,
        "began_s": 1.0,
        "status": "failed" if trouble else status,
        "trouble": trouble,
    }
    if part["status"] == "running":
        return part
    return {
        **part,
        "ended_s": 1.0 + steps * step_s,
        "peak_mb": 200.0,
        "blocked_s": 1.2,
        "wait_s": 0.8,
        "sums": [{**sums, "blocked_ns": int(1.2e9), "wait_ns": int(0.8e9)}],
        "averaging": [{"module": "Digits", "ranks": ranks, **_COSTS}] if ranks > 1 else [],
        "events": events,
        "spans": [
            ["forward", ns(step * step_s), ns((step + 0.5) * step_s)] for step in range(steps)
        ],
        "marks": [],
        "config": {"lr": 0.1},
    }
