"""What watching over ranks costs: CPU time of launcher and warm server during a chatty job.

    python benchmarks/launch_overhead.py [--quick]

Two ranks sleep and print ten lines a second; the reference is the wall time of the job.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path

from harness import Row, markdown, parser_for, publish

import unisono
from unisono.launch.pool.client import get_server


def chat(seconds: float) -> None:
    """Print ten lines a second, and do nothing else."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print("another tenth of a second has passed", flush=True)
        time.sleep(0.1)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, without that of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def overhead(seconds: float) -> tuple[float, float]:
    """Return the CPU time of launcher and server during a job, and its wall time."""
    server = get_server().pid
    before = cpu_s(os.getpid()) + cpu_s(server)
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        unisono.run(chat, seconds, on="cpu", ranks=2)
    wall = time.perf_counter() - begin
    return cpu_s(os.getpid()) + cpu_s(server) - before, wall


def main() -> None:
    options = parser_for(__doc__).parse_args()
    seconds = 3.0 if options.quick else 20.0
    unisono.run(chat, 0.1, on="cpu", ranks=2, logs=unisono.Logs(console="none"))
    spent, wall = overhead(seconds)
    rows = [Row(f"launch_overhead: {seconds:g} s, 20 lines/s", spent, wall, "wall time", 0.01)]
    publish("Watching over ranks", markdown(rows), write=not options.quick)


if __name__ == "__main__":
    main()
