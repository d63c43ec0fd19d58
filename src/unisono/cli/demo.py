"""`unisono demo`: something to look at within two minutes, on the cores of this machine.

The digits compare one rank with many and end in a report; the others are the programs of
`examples/`, which an installed package carries along.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import unisono
from unisono.cli.outcome import FAILED, OK
from unisono.errors import PlatformError


class Demo(NamedTuple):
    """One demo: the program, and what it shows."""

    script: str
    shows: str


DIGITS = "digits"
SLURM = "slurm"
DEMOS = {
    DIGITS: Demo("", "one rank against many on handwritten digits: same loss, faster (default)"),
    "forces": Demo("forces_graph_parallel.py", "forces from an energy; atoms split over ranks"),
    "flow": Demo("flow_domain_parallel.py", "a field in space, its grid split over ranks"),
    "error-bars": Demo("bayes_regression.py", "predictions with error bars, without sampling"),
    "daso": Demo("daso_two_nodes.py", "DASO against DDP over a slow network between nodes"),
    SLURM: Demo("", "the batch script of a SLURM job, shown and not sent"),
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
    parser.add_argument("--list", action="store_true", help="name the demos and stop")
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
        near = difflib.get_close_matches(args.name, DEMOS, n=1)
        raise PlatformError.because(
            f"unisono demo {args.name}",
            f"demos: {', '.join(DEMOS)}",
            hint=f"unisono demo {near[0] if near else DIGITS}",
        )
    for option in ("ranks", "epochs"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise PlatformError.because(
                f"unisono demo --{option} {value}", f"fewer {option} than 1", hint=f"--{option} 2"
            )
    if args.name == DIGITS:
        from unisono.cli.demo_digits import compare

        return compare(args.on, args.ranks, args.epochs)
    if args.name == SLURM:
        return _show_batch_script(args.ranks or 4)
    return _run_example(example_path(DEMOS[args.name].script), args.ranks or 2)


def example_path(script: str) -> Path:
    """Return where an example lies: in a checkout, or in the installed package."""
    package = Path(unisono.__file__).parent
    homes = (package / "_examples", package.parents[1] / "examples")
    for home in homes:
        if (home / script).is_file():
            return home / script
    raise PlatformError.because(
        "unisono demo", f"no {script} in {homes[0]} or {homes[1]}", hint="reinstall unisono"
    )


def _run_example(path: Path, ranks: int) -> int:
    """Run an example in an interpreter of its own, as a user would."""
    done = subprocess.run([sys.executable, str(path), "--ranks", str(ranks)], check=False)
    print(f"\nthe program is {path}")
    return OK if done.returncode == 0 else FAILED


def _show_batch_script(ranks: int) -> int:
    """Print what would be sent to a cluster."""
    from unisono.cli.demo_digits import train
    from unisono.launch import dry_run

    print(dry_run(train, 16, 1, on="slurm", nodes=2, ranks=ranks))
    print("\nunisono run --on slurm --nodes 2 train.py would send such a job and wait for it")
    return OK
