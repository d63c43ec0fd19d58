"""`unisono demo` and `bench`: programs of `examples/` and `benchmarks/`, which the package carries.

A demo is something to look at within two minutes, on the cores of this machine. Benchmarks print
every figure as a ratio to its reference; in a checkout they also update its page of results.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import unisono
from unisono.errors import MissingExtra, PlatformError, UnisonoError
from unisono.expect import expect_int

DIGITS = "digits"
DEMOS = {
    DIGITS: (
        "digits_compared.py",
        "one rank against many on handwritten digits: same loss, faster (default)",
    ),
    "forces": ("forces_graph_parallel.py", "forces from an energy; atoms split over ranks"),
    "flow": ("flow_domain_parallel.py", "a field in space, its grid split over ranks"),
    "error-bars": ("bayes_regression.py", "predictions with error bars, without sampling"),
    "elastic": ("elastic_digits.py", "a rank is killed every two seconds: the result is equal"),
    "daso": ("daso_two_nodes.py", "DASO against DDP over a slow network between nodes"),
}
"""Of each demo the program, and what it shows."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add these commands to the command line."""
    demo = commands.add_parser(
        "demo",
        help="train on real digits and see the report; more with --list",
        description="Train on scikit-learn's digits with one rank and with many, compare them and "
        "write a report. `unisono demo --list` names the other demos.",
    )
    demo.add_argument("name", nargs="?", default=DIGITS, help="which demo (digits)")
    demo.add_argument("--list", action="store_true", help="only list the demos")
    demo.add_argument("--on", default="cpu", help="cpu (default), gpu or another place")
    demo.add_argument("--ranks", type=int, metavar="N", help="number of ranks (2 to 4, by cores)")
    demo.add_argument("--epochs", type=int, default=16, metavar="N", help="passes over the data")
    demo.add_argument("--debug", action="store_true", help="show the launcher's own traceback")
    demo.set_defaults(execute=_demo)
    bench = commands.add_parser(
        "bench",
        help="run the benchmarks on this machine",
        description="Run benchmarks: each compares unisono with an alternative in the same run. "
        "Best on a machine that does nothing else.",
    )
    bench.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all)")
    bench.add_argument("--list", action="store_true", help="only list their names")
    bench.add_argument("--quick", action="store_true", help="few rounds, nothing written")
    bench.set_defaults(execute=_bench)


def carried(folder: str, file: str) -> Path:
    """Return the folder with `file`: that of a checkout, or the one that the package carries."""
    package = Path(unisono.__file__).parent
    homes = (package / f"_{folder}", package.parents[1] / folder)
    for home in homes:
        if (home / file).is_file():
            return home
    raise PlatformError.because(
        f"unisono's {folder}", f"no {file} in {homes[0]} or {homes[1]}", hint="reinstall unisono"
    )


def _unknown(command: str, word: str, names: Sequence[str]) -> UnisonoError:
    near = [*difflib.get_close_matches(word, names, n=1), names[0]]
    return PlatformError.because(
        f"unisono {command} {word}",
        f"names are {', '.join(names)}",
        hint=f"unisono {command} {near[0]}",
    )


def example_path(name: str) -> Path:
    """Return the path of a demo's program."""
    script, _ = DEMOS[name]
    return carried("examples", script) / script


def _demo(args: argparse.Namespace) -> int:
    """List the demos, or run the one that is named."""
    if args.list:
        for name, (_, shows) in DEMOS.items():
            print(f"{name:<12}{shows}")
        print("\nunisono demo NAME runs one")
        return 0
    if args.name not in DEMOS:
        raise _unknown("demo", args.name, list(DEMOS))
    for option, value in (("--ranks", args.ranks), ("--epochs", args.epochs)):
        if value is not None:
            expect_int(option, value, 1, error=PlatformError)
    words = ["--ranks", str(args.ranks or 2)]
    if args.name == DIGITS:
        if args.ranks == 1:
            finding = "one rank, to be compared with one"
            raise PlatformError.because("unisono demo --ranks 1", finding, hint="--ranks 2")
        if importlib.util.find_spec("sklearn") is None:
            raise MissingExtra.of("examples", "unisono demo trains on the digits of scikit-learn")
        words = [] if args.ranks is None else words
        words += ["--epochs", str(args.epochs), "--on", args.on]
    path = example_path(args.name)
    done = subprocess.run([sys.executable, str(path), *words], check=False)
    print(f"\nthe program is {path}")
    if args.name == DIGITS and done.returncode == 0:
        command = _command()
        latest = max(Path("runs").glob("demo*/report.html"), key=lambda path: path.stat().st_mtime)
        print("\ntry next:")
        for typed, what in (
            (f"{command} report {latest.parent}", "opens the report"),
            (f"{command} demo --list", "shows more: forces, flow, error bars, DASO"),
            (f"{command} run --watch --ranks 2 train.py", "runs your script, shown in a browser"),
        ):
            print(f"  {typed:<{34 + len(command)}} {what}")
    return int(done.returncode != 0)


def _command() -> str:
    """Return how to type this command here: by its path, where the shell would not find it."""
    from unisono.train.recording.launching import near

    here = Path(sys.executable).with_name("unisono")
    program = shutil.which("unisono")
    if not here.is_file() or (program is not None and Path(program).resolve() == here.resolve()):
        return "unisono"
    return str(near(here))


def _bench(args: argparse.Namespace) -> int:
    """Run the chosen scripts one after the other; 1 if one of them broke."""
    scripts = find_scripts()
    if args.list:
        print("\n".join(scripts))
        return 0
    is_broken = False
    for name in choose(args.names, list(scripts)):
        print(f"== {name}", flush=True)
        script = scripts[name]
        home = next(path for path in script.parents if (path / "harness.py").is_file())
        search_path = filter(None, (str(home), os.environ.get("PYTHONPATH")))
        ended = subprocess.run(
            [sys.executable, str(script), *(["--quick"] if args.quick else [])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path)},
            check=False,
        )
        if ended.returncode != 0:
            is_broken = True
            print(f"unisono: benchmark {name} ended with {ended.returncode}", file=sys.stderr)
    return int(is_broken)


def find_scripts() -> dict[str, Path]:
    """Return every benchmark by its name, as `comm` or `data_parallel/step`."""
    home = carried("benchmarks", "harness.py")
    return {
        path.relative_to(home).with_suffix("").as_posix(): path
        for path in sorted(home.rglob("*.py"))
        if "__main__" in path.read_text(encoding="utf-8")
    }


def choose(names: list[str], available: list[str]) -> list[str]:
    """Return the benchmarks that `names` mean; a folder's name means all in it, none means all."""
    chosen: list[str] = []
    for name in names or available:
        required = name.removesuffix(".py").removeprefix("benchmarks/")
        match = [k for k in available if k == required or k.startswith(f"{required}/")]
        if not match:
            raise _unknown("bench", required, available)
        chosen += [k for k in match if k not in chosen]
    return chosen
