"""`unisono job`: look at a job of a scheduler, wait for it, end it."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from unisono.errors import PlatformError
from unisono.expect import expect_int

if TYPE_CHECKING:
    from unisono.launch import Job

_PAUSE_S = 0.1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "job",
        help="inspect or cancel a job of a scheduler",
        description="Inspect a job that `unisono run --on slurm` or `unisono.submit` queued.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, (function, words) in _ACTIONS.items():
        action = actions.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        action.add_argument("id", help="what --detach printed, or the job's directory")
        action.set_defaults(execute=function)
        if name == "logs":
            action.add_argument("--rank", type=_rank, metavar="R", help="a rank (0), or all")
            action.add_argument("--follow", action="store_true", help="continue until the job ends")
            action.add_argument("--tail", type=_count, metavar="N", help="only the last N lines")
        elif name == "wait":
            action.add_argument("--timeout-s", type=float, metavar="S", help="longest wait")


def _rank(text: str) -> int | str:
    return text if text == "all" else _count(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 0")
    return int(text)


def _attached(args: argparse.Namespace) -> Job:
    from unisono.launch import Job

    return Job.attach(args.id)


def _status(args: argparse.Namespace) -> int:
    job = _attached(args)
    reason = f": {job.reason}" if job.reason else ""
    print(f"{job.status()}, attempt {job.attempt}{reason}")
    return 0


def _logs(args: argparse.Namespace) -> int:
    """Print what one rank has printed, or all of them, now or until the job ends."""
    from unisono.launch.logs import Console, LogReader

    job = _attached(args)
    if args.rank is None and job.ranks > 1:
        print(f"unisono: rank 0 of {job.ranks}; --rank all shows every rank", file=sys.stderr)
    ranks = range(job.ranks)
    if args.rank != "all":
        ranks = [expect_int("--rank", args.rank or 0, 0, job.ranks, error=PlatformError)]
    console = Console(ranks, prefix=args.rank == "all")
    logs = [
        (LogReader(job.dir / f"rank-{rank}.log", tail=args.tail), console.stream(rank, 0))
        for rank in ranks
    ]
    is_over = False
    while not is_over:
        is_over = not args.follow or job.done()
        for log, stream in logs:
            stream.feed(log.new())
        time.sleep(0 if is_over else _PAUSE_S)
    for _, stream in logs:
        stream.close()
    return 0


def _stacks(args: argparse.Namespace) -> int:
    job = _attached(args)
    stacks = job.stacks()
    for rank, text in sorted(stacks.items()):
        print(f"--- rank {rank}\n{text}")
    if not stacks:
        print(f"unisono: no rank of this job runs here ({job.status()})", file=sys.stderr)
    return 0


def _cancel(args: argparse.Namespace) -> int:
    job = _attached(args)
    job.cancel()
    print(job.status())
    if not job.done():
        text = f"unisono: cancellation was requested in {job.dir}, but has not happened yet"
        print(text, file=sys.stderr)
        return 1
    return 0


def _wait(args: argparse.Namespace) -> int:
    job = _attached(args)
    is_over = job.wait(args.timeout_s)
    print(job.status())
    if not is_over:
        text = f"unisono: job {job.id} has not ended within {args.timeout_s:g} s"
        print(text, file=sys.stderr)
        return 124
    return int(job.status() != "done")


_ACTIONS = {
    "status": (_status, "show its state in one line"),
    "logs": (_logs, "show the output of its ranks"),
    "stacks": (_stacks, "show what each of its ranks is executing now"),
    "cancel": (_cancel, "end all its ranks"),
    "wait": (_wait, "wait for its end; exit code 0 if it is done, 1 if it failed"),
}
