"""`unisono run`: a script, a module or a function on several ranks; and `compare`, which asks why
one rank and several give other results.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import targets
from unisono.cli.words import (
    SHELL,
    parse_console,
    parse_field,
    parse_pairs,
    parse_words,
)
from unisono.compat.libraries import LIBRARIES
from unisono.compat.serving import AS_CPU, call_served, notice, serving
from unisono.errors import PlatformError

if TYPE_CHECKING:
    from unisono.launch.request import RunRequest

_EXAMPLES = """\
examples:
  unisono run --ranks 4 train.py --epochs 3
  unisono run --ranks 2 -m package.train --epochs 3
  unisono run --ranks 2 package.module:train 3 lr=0.1

Arguments after the script go to the script; everything after -- does in any case.
"""

_ABOUT_RANKS = (
    *("on", "ranks", "nodes", "hosts", "gpus", "partition", "timeout_s", "max_restarts", "logs"),
    *("console", "record", "check"),
)
"""Options for ranks that the command starts."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "run",
        help="run a script or a function on several ranks",
        description="Run a script, a module or a function on several ranks.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", help="script.py, or package.module:function")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module as a script")
    places = parser.add_argument_group("sizes and places")
    places.add_argument("--on", help="cpu, gpu, mps, mpi, ray, slurm, inline, or a profile")
    places.add_argument(
        "-n",
        "--ranks",
        type=_ranks,
        metavar="N",
        help="number of ranks (2 on cpu and mpi); 2:8 for 2 to 8 ranks of an elastic job",
    )
    places.add_argument("--nodes", type=int, metavar="N", help="number of hosts (1)")
    places.add_argument("--hosts", metavar="A,B", help="the hosts of --on mpi")
    places.add_argument("--gpus", type=int, metavar="N", help="GPUs per node, with one rank each")
    places.add_argument("--partition", metavar="NAME", help="partition of the cluster")
    places.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of Platform"
    )
    places.add_argument(
        "--env", action="append", default=[], metavar="K=V", help="environment variable of ranks"
    )
    places.add_argument("--no-detect", action="store_true", help="do not join an existing world")
    places.add_argument(
        "--compat",
        action="append",
        default=[],
        choices=list(LIBRARIES),
        help="let `import NAME` find unisono's version; repeatable",
    )
    places.add_argument(
        "--as-cpu",
        action="store_true",
        help="run a program for CUDA on CPUs (with --compat pytagi)",
    )
    how = parser.add_argument_group("checks, deadlines, restarts, elastic jobs")
    how.add_argument(
        "--check",
        action="store_true",
        default=None,
        help="look for silent mistakes: replicas that drift, equal batches, ...",
    )
    how.add_argument("--timeout-s", type=float, metavar="S", help="deadline in seconds")
    how.add_argument("--max-restarts", type=int, metavar="N", help="new attempts after a failure")
    how.add_argument(
        "--elastic", action="store_true", help="ranks may die and join (unisono.train.elastic)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--logs", metavar="DIR", help="keep the logs of all ranks below DIR")
    out.add_argument(
        "--console", metavar="WHO", help="whose output to show: auto, all, rank0, none, or 0,2"
    )
    out.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="NAME",
        help="record the run in runs/NAME, with a report.html; a NAME with a slash is a path",
    )
    out.add_argument("--watch", action="store_true", help="show the run in a browser, and record")
    out.add_argument(
        "--no-command", action="store_true", help="leave the command line out of the record"
    )
    out.add_argument("--debug", action="store_true", help="show the launcher's own traceback")
    other = parser.add_argument_group("instead of running now")
    other.add_argument("--dry-run", action="store_true", help="only check the request and show it")
    other.add_argument("--detach", action="store_true", help="queue a job (slurm), print its id")
    parser.set_defaults(execute=execute)
    _add_compare(commands)


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="say why one rank and several give other results",
        description="Run a script on several numbers of ranks, the first of them twice. Print the "
        "first step and tensor that differ by more than rounding, and the cause.",
        epilog="example: unisono compare --ranks 1,2,4 train.py -- --epochs 1",
    )
    parser.add_argument("target", help="script.py, or package.module:function")
    parser.add_argument(
        "-n", "--ranks", type=_counts, default="1,2", metavar="N,M", help="1,2 if not given"
    )
    parser.add_argument("--on", help="where ranks run, as for unisono run")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="steps to follow (50)")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="deadline of each run")
    parser.add_argument(
        "--record", metavar="NAME", help="keep it in runs/NAME, with a report: curves, modules"
    )
    parser.set_defaults(execute=_compare)


def _compare(args: argparse.Namespace) -> int:
    """Compare, print the table, write a record with its report if asked."""
    from unisono.testing.comparing import compare
    from unisono.train.recording.launching import near

    function, is_script = _script_or_call(args.target, args.forwarded)
    comparison = compare(
        function,
        ranks=args.ranks,
        on=args.on,
        steps=args.steps,
        timeout_s=args.timeout_s,
        name=Path(args.target).name,
        is_script=is_script,
    )
    print(comparison)
    if args.record is not None:
        print(f"unisono: report in {near(comparison.record(args.record))}", file=sys.stderr)
    return int(not comparison.is_equal)


def _counts(text: str) -> list[int]:
    """Read several numbers of ranks."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        words = f"{text!r} is not a list of numbers\nHINT: --ranks 1,2,4"
        raise argparse.ArgumentTypeError(words) from None


def _ranks(text: str) -> int | tuple[int, int]:
    """Read a number of ranks, or the fewest and the most."""
    first, colon, last = text.partition(":")
    try:
        return (int(first), int(last)) if colon else int(text)
    except ValueError:
        hint = "--ranks 2, or --ranks 2:8 for 2 to 8 ranks of an elastic job"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number\nHINT: {hint}") from None


def execute(args: argparse.Namespace) -> int:
    """Run what the command line asks for."""
    if args.record and args.target is None and args.module is None:
        args.target, args.record = args.record, ""  # --record script.py
    if args.watch and args.record is None:
        args.record = ""
    if args.target is None and args.module is None and args.forwarded:
        args.target, *rest = args.forwarded  # unisono run -- script.py --epochs 3
        args.forwarded = rest[rest[:1] == ["--"] :]
    if (args.target is None) == (args.module is None):
        raise PlatformError.because(
            "unisono run",
            "no script, module or function" if args.target is None else "a script and a module",
            None,
            "unisono run --ranks 2 script.py -- arguments of the script",
        )
    for name in args.compat:
        print(f"unisono: {notice(LIBRARIES[name])}", file=sys.stderr)
    if args.as_cpu:
        print(f"unisono: {AS_CPU}", file=sys.stderr)
    with serving(*args.compat, as_cpu=args.as_cpu):
        return _execute(args)


def _execute(args: argparse.Namespace) -> int:
    """Check the request and carry it out, in a process that serves the chosen libraries."""
    from unisono.launch.api import execute as execute_request
    from unisono.launch.api import submit_request
    from unisono.launch.places.slurm.cluster import in_allocation

    function, is_script = _function(args)
    if is_script and _starts_its_own_ranks(args):
        print("unisono: the script starts its ranks (--ranks N: the command does)", file=sys.stderr)
        if not args.dry_run:
            function()
        return 0
    request = _request(args, function, is_script=is_script)
    if args.dry_run:
        return _show(args, request)
    if args.detach and (request.place != "slurm" or in_allocation()):
        raise PlatformError.because(
            f"unisono run --detach {SHELL.options(on=request.place)}",
            "only a scheduler looks after a job whose launcher has ended",
            hint="--on slurm; or the same command without --detach, in tmux or behind nohup",
        )
    _note_missing_gpus(args, request)
    with _recording(args, request) as (request, directory):
        if args.detach:  # to a scheduler, which supervises it
            job = submit_request(request)
            print(job.id, flush=True)
            text = f"in {job.dir}; unisono job logs {job.id} --follow shows its output"
            print(f"unisono: {text}", file=sys.stderr)
            return 0
        threads = _count(request.platform.cpus_per_rank, "thread")
        size = f"{_count(request.ranks, 'rank')} on {request.place}"
        print(f"unisono: {size}, {threads} each", file=sys.stderr)
        if args.watch and directory is not None:
            from unisono.train.recording.launching import watched

            results = watched(request, directory)
        else:
            results = execute_request(request)
    if not is_script:
        for rank, text in enumerate(results):
            if text is not None:
                print(f"[{rank}] {text}")
    return 0


def _starts_its_own_ranks(args: argparse.Namespace) -> bool:
    """Whether to leave that to the script: DDPW's do it, unless an option is about ranks."""
    from unisono.launch.request import is_in_world

    flags = ("set", "env", "no_detect", "detach")
    is_about_ranks = any(getattr(args, name) for name in flags)
    is_about_ranks |= any(getattr(args, name) is not None for name in _ABOUT_RANKS)
    return "ddpw" in args.compat and not is_about_ranks and not is_in_world()


def _request(
    args: argparse.Namespace, function: Callable[[], object], *, is_script: bool
) -> RunRequest:
    """Check what the command line asks for."""
    from unisono.launch import Logs
    from unisono.launch.platform import places_of
    from unisono.launch.request import checked_request

    fields, console = _fields(args), parse_console(args.console)
    same = ("on", "ranks", "nodes", "timeout_s", "max_restarts", "check")
    request = checked_request(
        function,
        (),
        {},
        **{name: getattr(args, name) for name in same},
        logs=None
        if args.logs is None and console == "auto"
        else Logs(dir=args.logs, console=console),
        elastic=args.elastic or None,
        fields=fields,
        title=args.module or Path(args.target.rpartition(":")[2]).stem,
        is_script=is_script,
        spelling=SHELL,
    )
    if os.environ.get("UNISONO_FORCE_ON") or request.joins_world:
        return request  # the place is not the user's choice
    for name, value in fields.items():  # files may have fields of other places
        places = places_of(name)
        if places and request.place not in places:
            raise PlatformError.because(
                SHELL.run(**{name: value}, on=request.place),
                f"{name} is used on {' and '.join(places)} only",
                hint=SHELL.options(on=places[0]),
            )
    return request


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the platform that the command line gives."""
    fields: dict[str, Any] = {
        name: parse_field(name, value) for name, value in parse_pairs(args.set, "--set field=value")
    }
    if args.env:
        fields["env"] = dict(parse_pairs(args.env, "--env NAME=value"))
    hosts = args.hosts and [host for host in args.hosts.split(",") if host]
    options = {"n_gpus_per_node": args.gpus, "partition": args.partition, "hosts": hosts}
    fields |= {name: value for name, value in options.items() if value is not None}
    if args.no_detect:
        fields["detect"] = False
    return fields


def _show(args: argparse.Namespace, request: RunRequest) -> int:
    """Print the ranks and what the scheduler says of them; start nothing."""
    from unisono.launch.api import describe_request

    print(describe_request(request))
    if request.place == "slurm" and shutil.which("sbatch") is not None:
        from unisono.launch.places.slurm.submit import judge_script

        print(judge_script(request))
    _note_missing_gpus(args, request)
    ranks = _count(request.ranks, "rank")
    print(f"unisono: {ranks} on {request.place} can be started", file=sys.stderr)
    return 0


def _note_missing_gpus(args: argparse.Namespace, request: RunRequest) -> None:
    """Say so if `--gpus` only counts ranks, because they run on cores."""
    if args.gpus is not None and request.place == "cpu":
        text = f"--gpus {args.gpus} only counts ranks: they run on cpu, without a GPU"
        print(f"unisono: {text} (--on gpu requires GPUs)", file=sys.stderr)


def _function(args: argparse.Namespace) -> tuple[Callable[[], object], bool]:
    """Return what each rank calls, and whether it is a whole script."""
    if args.module is not None:
        targets.find_source(args.module, f"unisono run -m {args.module}")
        function = functools.partial(targets.run_module, args.module, args.forwarded)
        is_script = True
    else:
        function, is_script = _script_or_call(args.target, args.forwarded)
    if args.compat:
        function = functools.partial(call_served, args.compat, args.as_cpu, function)
    return function, is_script


def _script_or_call(target: str, words: list[str]) -> tuple[Callable[[], object], bool]:
    if ":" in target and not target.endswith(".py"):
        return targets.named_call(target, *parse_words(words)), False
    return functools.partial(targets.run_script, targets.check_script(target), words), True


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _recording(
    args: argparse.Namespace, request: RunRequest
) -> contextlib.AbstractContextManager[tuple[RunRequest, Path | None]]:
    """Return a block in which ranks record, if `--record` is there."""
    if args.record is None:
        return contextlib.nullcontext((request, None))
    from unisono.train.recording.launching import recorded

    target = args.module or args.target
    return recorded(
        request,
        args.record or Path(target.replace(":", ".")).name.removesuffix(".py"),
        watch=args.watch,
        detach=args.detach,
        has_command=not args.no_command,
    )
