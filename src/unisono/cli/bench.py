"""`unisono bench`: the benchmarks on this machine, every figure a ratio to its reference.

The scripts are those of `benchmarks/`, which an installed package contains too. In a checkout they
also update its page of results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from unisono.cli.outcome import FAILED, OK
from unisono.cli.targets import carried, unknown_name

_JUDGED = {"ratio", "target", "verdict"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="run the benchmarks on this machine",
        description="Run benchmarks: each compares unisono with an alternative in the same run. "
        "Best on a machine that does nothing else.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all)")
    parser.add_argument("--list", action="store_true", help="only list their names")
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written")
    parser.add_argument("--json", action="store_true", help="print one JSON list of rows")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Run the chosen scripts one after the other; 1 if one of them broke."""
    scripts = find_scripts()
    if args.list:
        print("\n".join(scripts))
        return OK
    rows: list[dict[str, str]] = []
    broken: list[str] = []
    for name in choose(args.names, list(scripts)):
        if not args.json:
            print(f"== {name}", flush=True)
        script = scripts[name]
        home = next(path for path in script.parents if (path / "harness.py").is_file())
        search_path = filter(None, (str(home), os.environ.get("PYTHONPATH")))
        ended = subprocess.run(
            [sys.executable, str(script), *(["--quick"] if args.quick else [])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path)},
            stdout=subprocess.PIPE if args.json else None,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            broken.append(name)
            print(f"unisono: benchmark {name} ended with {ended.returncode}", file=sys.stderr)
        if args.json:
            rows += [{"benchmark": name} | row for row in read_rows(ended.stdout)]
    if args.json:
        print(json.dumps(rows, indent=1))
    return FAILED if broken else OK


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
            raise unknown_name("bench", "benchmarks", required, available)
        chosen += [k for k in match if k not in chosen]
    return chosen


def read_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of a benchmark's Markdown tables that have ratio, target and verdict.

    Keys are the names of the columns; the first one's is always `case`.
    """
    rows: list[dict[str, str]] = []
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif set(cells) >= _JUDGED:
            columns = ["case", *cells[1:]]
        elif columns and not set(line) <= set("|-: "):
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows
