"""`unisono run`: a script, a module or a function on several ranks."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from unisono.errors import PlatformError

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
        description="Run a script, a module or a function on several ranks of this host.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", help="script.py, or package.module:function")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module as a script")
    parser.add_argument("--on", help="cpu (default) or inline")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (2)")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="deadline in seconds")
    parser.add_argument(
        "--max-restarts", type=int, metavar="N", help="new attempts after a failure"
    )
    parser.add_argument("--logs", metavar="DIR", help="keep the logs of all ranks below DIR")
    parser.add_argument("--console", metavar="WHO", help="auto, all, rank0, none, or ranks as 0,2")
    parser.add_argument("--debug", action="store_true", help="show the launcher's own traceback")
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
    from unisono.launch import Logs, run
    from unisono.launch.cores import threads_per_rank, usable_cores
    from unisono.launch.request import checked_request

    function, is_script = _function(args)
    logs = Logs(dir=args.logs, console=_console(args.console))
    options = {
        "on": args.on,
        "ranks": args.ranks,
        "timeout_s": args.timeout_s,
        "max_restarts": args.max_restarts,
        "logs": logs,
    }
    request = checked_request(function, (), {}, nodes=None, **options)
    threads = threads_per_rank(request.ranks, usable_cores())
    print(
        f"unisono: {_count(request.ranks, 'rank')} on {request.place}, "
        f"{_count(threads, 'thread')} each",
        file=sys.stderr,
    )
    results = run(function, **options)
    if not is_script:
        for rank, value in enumerate(results):
            if value is not None:
                print(f"[{rank}] {value!r}")
    return 0


def _function(args: argparse.Namespace) -> tuple[Callable[[], object], bool]:
    """Return what each rank calls, and whether it is a whole script."""
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
