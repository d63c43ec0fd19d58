"""`unisono job`: look at a job in the background, wait for it, end it."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from unisono.cli.outcome import DEADLINE, FAILED, OK

if TYPE_CHECKING:
    from unisono.launch import Job


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "job",
        help="look at a detached job",
        description="Look at a job that `unisono run --detach` started, wait for it, or end it.",
    )
    parser.add_argument("action", choices=["status", "logs", "stacks", "cancel", "wait"])
    parser.add_argument("id", help="the id that --detach printed, or the job's directory")
    parser.add_argument("--rank", default="0", help="whose logs: a rank, or all")
    parser.add_argument("--follow", action="store_true", help="wait for more, to the job's end")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last N lines")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="longest wait")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Do what is asked with the job."""
    from unisono.launch import Job

    job = Job.attach(args.id)
    match args.action:
        case "status":
            reason = f": {job.reason}" if job.reason else ""
            print(f"{job.status()}, attempt {job.attempt}{reason}")
        case "logs":
            _print_logs(job, args)
        case "stacks":
            for rank, text in sorted(job.stacks().items()):
                print(f"--- rank {rank}\n{text}")
        case "cancel":
            job.cancel()
            print(job.status())
        case _:
            if not job.wait(args.timeout_s):
                return DEADLINE
            print(job.status())
            return OK if job.status() == "done" else FAILED
    return OK


def _print_logs(job: Job, args: argparse.Namespace) -> None:
    if args.rank != "all":
        _print_log(job, int(args.rank), args, prefix="")
        return
    numbers = [re.fullmatch(r"rank-(\d+)", path.stem) for path in job.dir.glob("rank-*.log")]
    for rank in sorted(int(match[1]) for match in numbers if match):
        _print_log(job, rank, args, prefix=f"[{rank}] ")


def _print_log(job: Job, rank: int, args: argparse.Namespace, *, prefix: str) -> None:
    lines = (
        job.logs(rank, follow=True) if args.follow else job.logs(rank, tail=args.tail).splitlines()
    )
    for line in lines:
        print(f"{prefix}{line}", flush=args.follow)
