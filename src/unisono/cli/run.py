"""`unisono run`: a script, a module or a function on several ranks.

`--record` and `--watch` keep a record; `--detach` leaves a job to a scheduler.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import targets
from unisono.cli.outcome import SHELL
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

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
_ABOUT_RANKS = (
    *("on", "ranks", "nodes", "hosts", "gpus", "partition", "timeout_s", "max_restarts", "logs"),
    *("console", "record", "to", "check"),
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


def _ranks(text: str) -> int | tuple[int, int]:
    """Read a number of ranks, or the fewest and the most."""
    first, colon, last = text.partition(":")
    try:
        return (int(first), int(last)) if colon else int(text)
    except ValueError:
        number = NUMBERS.index(text.lower()) + 1 if text.lower() in NUMBERS else 2
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number\nHINT: --ranks {number}, or --ranks {number}:8 for "
            f"{number} to 8 ranks of an elastic job"
        ) from None


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
        print(
            f"unisono: {_count(request.ranks, 'rank')} on {request.place}, "
            f"{_count(request.platform.cpus_per_rank, 'thread')} each",
            file=sys.stderr,
        )
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
    from unisono.launch.request import checked_request

    fields = _fields(args)
    console = _console(args.console)
    logs = None
    if args.logs is not None or console != "auto":
        logs = Logs(dir=args.logs, console=console)
    request = checked_request(
        function,
        (),
        {},
        on=args.on,
        ranks=args.ranks,
        nodes=args.nodes,
        timeout_s=args.timeout_s,
        max_restarts=args.max_restarts,
        logs=logs,
        check=args.check,
        elastic=args.elastic or None,
        fields=fields,
        title=args.module or Path(args.target.rpartition(":")[2]).stem,
        is_script=is_script,
        spelling=SHELL,
    )
    _check_uses(fields, request)
    return request


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the platform that the command line gives."""
    fields: dict[str, Any] = {
        name: _setting(name, value) for name, value in _pairs(args.set, "--set field=value")
    }
    if args.env:
        fields["env"] = dict(_pairs(args.env, "--env NAME=value"))
    if args.gpus is not None:
        fields["n_gpus_per_node"] = args.gpus
    if args.partition is not None:
        fields["partition"] = args.partition
    if args.hosts is not None:
        fields["hosts"] = [host for host in args.hosts.split(",") if host]
    if args.no_detect:
        fields["detect"] = False
    return fields


def _check_uses(fields: Mapping[str, Any], request: RunRequest) -> None:
    """Raise for a field that the place does not take; files may have it for other places.

    In an existing world, or with UNISONO_FORCE_ON, the place is not the user's choice.
    """
    from unisono.launch.platform import places_of

    if os.environ.get("UNISONO_FORCE_ON") or request.joins_world:
        return
    for name, value in fields.items():
        places = places_of(name)
        if places and request.place not in places:
            raise PlatformError.because(
                SHELL.run(**{name: value}, on=request.place),
                f"{name} is used on {' and '.join(places)} only",
                hint=SHELL.options(on=places[0]),
            )


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


def _pairs(words: Sequence[str], usage: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise PlatformError.because(f"unisono run ... {word}", "no = in it", None, usage)
        pairs.append((name, value))
    return pairs


def _function(args: argparse.Namespace) -> tuple[Callable[[], object], bool]:
    """Return what each rank calls, and whether it is a whole script."""
    is_script = True
    if args.module is not None:
        targets.find_source(args.module, f"unisono run -m {args.module}")
        function = functools.partial(targets.run_module, args.module, args.forwarded)
    elif ":" in args.target and not args.target.endswith(".py"):
        function = targets.named_call(args.target, *parse_words(args.forwarded))
        is_script = False
    else:
        path = targets.check_script(args.target)
        function = functools.partial(targets.run_script, path, args.forwarded)
    if args.compat:
        function = functools.partial(call_served, args.compat, args.as_cpu, function)
    return function, is_script


def parse_words(words: Sequence[str]) -> tuple[list[object], dict[str, object]]:
    """Read words as arguments: Python literals, else strings; `name=value` are keywords.

    Example:
        >>> parse_words(["3", "adam", "lr=0.1"])
        ([3, 'adam'], {'lr': 0.1})
    """
    positional: list[object] = []
    keywords: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            keywords[name] = _literal(value)
        else:
            positional.append(_literal(word))
    return positional, keywords


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _setting(name: str, text: str) -> object:
    """Read a value of `--set` as Python or TOML, else as a plain string."""
    from unisono.launch.platform import KINDS

    value = _literal(text)
    if value is text:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
    kind = KINDS.get(name)
    return text if kind is not None and kind.fits(text) and not kind.fits(value) else value


def _console(text: str | None) -> Any:
    """Read `--console`; `Logs` checks it."""
    if text is None:
        return "auto"
    if all(part.strip().isdigit() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    return text


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
