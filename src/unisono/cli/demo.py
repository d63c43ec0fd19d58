"""`unisono demo`: something to look at within two minutes, on the cores of this machine.

Each is a program of `examples/`, which an installed package contains too.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from unisono.cli.outcome import FAILED, OK
from unisono.cli.targets import carried, unknown_name
from unisono.errors import MissingExtra, PlatformError
from unisono.expect import expect_int


class Demo(NamedTuple):
    """One demo: the program, and what it shows."""

    script: str
    shows: str


DIGITS = "digits"
DEMOS = {
    DIGITS: Demo(
        "digits_compared.py",
        "one rank against many on handwritten digits: same loss, faster (default)",
    ),
    "forces": Demo("forces_graph_parallel.py", "forces from an energy; atoms split over ranks"),
    "flow": Demo("flow_domain_parallel.py", "a field in space, its grid split over ranks"),
    "error-bars": Demo("bayes_regression.py", "predictions with error bars, without sampling"),
    "elastic": Demo("elastic_digits.py", "a rank is killed every two seconds: the result is equal"),
    "daso": Demo("daso_two_nodes.py", "DASO against DDP over a slow network between nodes"),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train on real digits and see the report; more with --list",
        description="Train on scikit-learn's digits with one rank and with many, compare them and "
        "write a report. `unisono demo --list` names the other demos.",
    )
    parser.add_argument("name", nargs="?", default=DIGITS, help="which demo (digits)")
    parser.add_argument("--list", action="store_true", help="only list the demos")
    parser.add_argument("--on", default="cpu", help="cpu (default), gpu or another place")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (2 to 4, by cores)")
    parser.add_argument("--epochs", type=int, default=16, metavar="N", help="passes over the data")
    parser.add_argument("--debug", action="store_true", help="show the launcher's own traceback")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """List the demos, or run the one that is named."""
    if args.list:
        for name, demo in DEMOS.items():
            print(f"{name:<12}{demo.shows}")
        print("\nunisono demo NAME runs one")
        return OK
    if args.name not in DEMOS:
        raise unknown_name("demo", "demos", args.name, list(DEMOS))
    for option, value in (("--ranks", args.ranks), ("--epochs", args.epochs)):
        if value is not None:
            expect_int(option, value, 1, error=PlatformError)
    words = ["--ranks", str(args.ranks or 2)]
    if args.name == DIGITS:
        if args.ranks == 1:
            results = "one rank, to be compared with one"
            raise PlatformError.because("unisono demo --ranks 1", results, hint="--ranks 2")
        if importlib.util.find_spec("sklearn") is None:
            raise MissingExtra.of("examples", "unisono demo trains on the digits of scikit-learn")
        words = [] if args.ranks is None else words
        words += ["--epochs", str(args.epochs), "--on", args.on]
    path = example_path(DEMOS[args.name].script)
    done = subprocess.run([sys.executable, str(path), *words], check=False)
    print(f"\nthe program is {path}")
    if args.name == DIGITS and done.returncode == 0:
        command = _command()
        latest = max(Path("runs").glob("demo*/report.html"), key=lambda path: path.stat().st_mtime)
        print("\ntry next:")
        for words, what in (
            (f"{command} report {latest.parent}", "opens the report"),
            (f"{command} demo --list", "shows more: forces, flow, error bars, DASO"),
            (f"{command} run --watch --ranks 2 train.py", "runs your script, shown in a browser"),
        ):
            print(f"  {words:<{34 + len(command)}} {what}")
    return OK if done.returncode == 0 else FAILED


def example_path(script: str) -> Path:
    """Return the path of an example in a checkout or in the installed package."""
    return carried("examples", script) / script


def _command() -> str:
    """Return how to type this command here: by its path, where the shell would not find it."""
    from unisono.train.recording.launching import near

    here = Path(sys.executable).with_name("unisono")
    results = shutil.which("unisono")
    if not here.is_file() or (results is not None and Path(results).resolve() == here.resolve()):
        return "unisono"
    return str(near(here))
