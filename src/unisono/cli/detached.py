"""`unisono run --detach`: a process of its own supervises the ranks, and this one returns."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from unisono.errors import RankFailed

if TYPE_CHECKING:
    from unisono.launch.request import Request


def start(args: argparse.Namespace) -> int:
    """Start the supervising process with the same words, and print the id of its job."""
    from unisono.launch.job_files import LOCAL_JOBS

    cut = args.words.index("--") if "--" in args.words else len(args.words)
    own = [word for word in args.words[:cut] if word != "--detach"]
    words = [*own, *args.words[cut:]]
    logs = [] if args.logs is not None else ["--logs", str(LOCAL_JOBS)]
    env = {name: value for name, value in os.environ.items() if name != "UNISONO_RUN_ID"}
    process = subprocess.Popen(
        [sys.executable, "-m", "unisono", "run", "--supervise", *logs, *words],
        env=env,  # so that it does not end with a rank that starts it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        _, errors = process.communicate()
        raise RankFailed(f"the job did not start\n{errors}", exit_code=process.returncode)
    _tell(*line.strip().split(" ", 1))
    return 0


def queue(request: Request) -> int:
    """Submit a job of a scheduler, which supervises it, and print its id."""
    from unisono.launch.job import submit_request

    job = submit_request(request)
    _tell(job.id, str(job.dir))
    return 0


def _tell(job: str, directory: str) -> None:
    """Print the id for programs, and for people what to do with it."""
    print(job, flush=True)
    text = f"unisono: in {directory}; unisono job logs {job} --follow shows its output"
    print(text, file=sys.stderr)


def supervise(request: Request) -> int:
    """Be the supervising process: print the id, let go of the terminal, wait for the end."""
    from unisono.launch.job import submit_request
    from unisono.launch.stopping import signals_of_launcher

    job = submit_request(request)
    print(job.id, job.dir, flush=True)
    _let_go()
    with signals_of_launcher():
        try:
            job.wait()
        except BaseException:
            job.cancel()
            raise
    return 0 if job.status() == "done" else 1


def _let_go() -> None:
    """Give back the pipes to the process that started us; it does not wait for our end."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
