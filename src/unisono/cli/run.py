"""`unisono run`: a script, a module or a function on several ranks."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.cli import aliased, detached
from unisono.errors import PlatformError

if TYPE_CHECKING:
    from unisono.launch.request import Request

_EXAMPLES = """\
examples:
  unisono run --ranks 4 train.py -- --epochs 3
  unisono run --ranks 2 -m package.train -- --epochs 3
  unisono run --ranks 2 package.module:train -- 3 lr=0.1
"""


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
    places.add_argument("--on", help="cpu, gpu, mps, mpi, slurm, inline, or a profile")
    places.add_argument(
        "-n", "--ranks", type=int, metavar="N", help="number of ranks (2 on cpu and mpi)"
    )
    places.add_argument("--nodes", type=int, metavar="N", help="number of hosts (1)")
    places.add_argument("--gpus", type=int, metavar="N", help="GPUs, and ranks, of each node")
    places.add_argument("--partition", metavar="NAME", help="partition of the cluster")
    places.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of Platform"
    )
    places.add_argument(
        "--env", action="append", default=[], metavar="K=V", help="a variable for the ranks"
    )
    places.add_argument("--no-detect", action="store_true", help="do not join an existing world")
    places.add_argument("--compat", choices=["ddpw"], help="let `import ddpw` find unisono's")
    how = parser.add_argument_group("how")
    how.add_argument("--timeout-s", type=float, metavar="S", help="deadline in seconds")
    how.add_argument("--max-restarts", type=int, metavar="N", help="new attempts after a failure")
    how.add_argument("--logs", metavar="DIR", help="keep the logs of all ranks below DIR")
    how.add_argument("--console", metavar="WHO", help="auto, all, rank0, none, or ranks as 0,2")
    how.add_argument("--dry-run", action="store_true", help="show the ranks, start nothing")
    how.add_argument("--check", action="store_true", help="check the request, start nothing")
    how.add_argument("--detach", action="store_true", help="run in the background, print the id")
    how.add_argument("--supervise", action="store_true", help=argparse.SUPPRESS)
    how.add_argument("--debug", action="store_true", help="show the launcher's own traceback")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Run what the command line asks for."""
    if (args.target is None) == (args.module is None):
        raise PlatformError.because(
            "unisono run",
            "no script, module or function" if args.target is None else "a script and a module",
            None,
            "unisono run --ranks 2 script.py -- arguments of the script",
        )
    from unisono.launch.conventions import Convention
    from unisono.launch.run import execute as execute_request

    function, is_script = _function(args)
    request = _request(args, function)
    if args.dry_run or args.check:
        return _show(args, request)
    if args.detach:
        return detached.queue(request) if request.place == "slurm" else detached.start(args)
    if args.supervise:
        return detached.supervise(request)
    print(
        f"unisono: {_count(request.ranks, 'rank')} on {request.place}, "
        f"{_count(request.platform.cpus_per_rank, 'thread')} each",
        file=sys.stderr,
    )
    results = execute_request(request, Convention())
    if not is_script:
        for rank, value in enumerate(results):
            if value is not None:
                print(f"[{rank}] {value!r}")
    return 0


def _request(args: argparse.Namespace, function: Callable[[], object]) -> Request:
    """Check what the command line asks for."""
    from unisono.launch import Logs
    from unisono.launch.request import checked_request

    fields: dict[str, Any] = {
        name: _literal(value) for name, value in _pairs(args.set, "--set field=value")
    }
    if args.env:
        fields["env"] = dict(_pairs(args.env, "--env NAME=value"))
    if args.gpus is not None:
        fields["n_gpus_per_node"] = args.gpus
    if args.partition is not None:
        fields["partition"] = args.partition
    if args.no_detect:
        fields["detect"] = False
    directory = args.logs
    console = _console("none" if args.supervise else args.console)
    logs = None
    if directory is not None or console != "auto" or args.supervise:
        logs = Logs(dir=directory, console=console)
    return checked_request(
        function,
        (),
        {},
        on=args.on,
        ranks=args.ranks,
        nodes=args.nodes,
        timeout_s=args.timeout_s,
        max_restarts=args.max_restarts,
        logs=logs,
        fields=fields,
    )


def _show(args: argparse.Namespace, request: Request) -> int:
    """Print the ranks, or that all is well; start nothing."""
    from unisono.launch.job import describe_request

    if args.dry_run:
        print(describe_request(request))
        return 0
    if request.place == "slurm":
        from unisono.launch.slurm.submission import judge_script

        print(judge_script(request))
    print(f"unisono: {_count(request.ranks, 'rank')} on {request.place} can be started")
    return 0


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
    function, is_script = _plain_function(args)
    if args.compat is not None:
        return functools.partial(aliased.call_with_alias, args.compat, function), is_script
    return function, is_script


def _plain_function(args: argparse.Namespace) -> tuple[Callable[[], object], bool]:
    from unisono.launch import script

    if args.module is not None:
        return functools.partial(script.run_module, args.module, args.forwarded), True
    if ":" in args.target and not args.target.endswith(".py"):
        positional, keywords = parse_words(args.forwarded)
        return functools.partial(_named(args.target), *positional, **keywords), False
    path = script.check_script(args.target)
    return functools.partial(script.run_script, path, args.forwarded), True


def _named(target: str) -> Callable[..., object]:
    """Import `package.module:function`."""
    module_name, _, function_name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PlatformError.because(
            f"unisono run {target}",
            f"{error}",
            None,
            "package.module:function, importable from here",
        ) from error
    try:
        return functools.reduce(getattr, function_name.split("."), module)
    except AttributeError:
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise PlatformError.because(
            f"unisono run {target}",
            f"no {function_name!r} in {module_name}",
            None,
            f"it has: {', '.join(functions[:8])}" if functions else None,
        ) from None


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


def _console(text: str | None) -> Any:
    """Read `--console`; `Logs` says which words it knows."""
    if text is None:
        return "auto"
    if all(part.strip().isdigit() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
