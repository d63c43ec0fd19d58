"""`unisono plan`: what a training step would cost on another machine."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from unisono.errors import PlatformError

if TYPE_CHECKING:
    from unisono.plan import Calibration, Cluster

_RANGES = {
    **dict.fromkeys(("ranks", "nodes", "cores", "team"), (1, 10**9)),
    **dict.fromkeys(("batch", "rank_speed"), (1e-9, 1e9)),
    "overlap": (0, 1),
}
_EXAMPLES = """\
examples:
  unisono plan --calibrate                     measure links and cores of this machine
  unisono plan --model cnn                     predict for this machine
  unisono plan --model train.py:make --ranks 1024 --nodes 128 --link 10GB/s

MODEL is mlp, cnn, transformer, graph, bayes, or file.py:function: a function without
arguments that returns a model and the batch of one rank.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "plan",
        help="predict step time and memory on a larger machine",
        description="Predict step time, waiting and memory for each way to split a model, from "
        "measured times of the model on one core here and a latency-bandwidth model of the links.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="MODEL", help="a preset or file.py:function")
    parser.add_argument("--batch", type=float, metavar="N", help="samples per rank")
    there = parser.add_argument_group("the machine")
    there.add_argument("-n", "--ranks", type=int, metavar="N", help="ranks in total (cores here)")
    there.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (1)")
    there.add_argument("--link", metavar="RATE", help="network of a node: 10GB/s, 100Gbit/s, ...")
    there.add_argument("--latency", default="2us", metavar="T", help="latency of --link (2us)")
    there.add_argument("--node-link", metavar="RATE", help="inside a node (as measured here)")
    there.add_argument("--node-latency", default="2us", metavar="T", help="its latency (2us)")
    there.add_argument(
        "--cores", type=int, metavar="N", help="cores of a node (with --link one per rank)"
    )
    there.add_argument(
        "--rank-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="speed of a rank, in cores here (1)",
    )
    there.add_argument(
        "--overlap", type=float, default=1.0, metavar="0..1", help="share of --link hidden (1)"
    )
    there.add_argument("--team", type=int, metavar="N", help="ranks that share a sample (a node)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    kept = parser.add_argument_group("calibration")
    kept.add_argument("--calibrate", action="store_true", help="measure with ranks, and save")
    kept.add_argument("--calibration", type=Path, metavar="FILE", help="file to write or read")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Measure what is asked for, then print what each way would cost."""
    _check(args)
    if args.calibrate:
        _calibrate(args)
    if args.model is None:
        if args.calibrate:
            return 0
        _refuse("", "no --model", "unisono plan --model cnn")
    from unisono.plan import compare, load_subject, profile, read_calibration
    from unisono.plan.report import assumptions, table

    calibration = read_calibration(args.calibration)
    subject = load_subject(args.model)
    cluster = _cluster(args, calibration)
    workload = profile(subject)
    batch = args.batch or float(subject.samples)
    costs = compare(workload, cluster, batch, team=args.team)
    notes = assumptions(workload, cluster, batch, calibration.machine)
    if args.json:
        ways = [each.as_dict() for each in costs]
        print(json.dumps({"model": workload.name, "ways": ways, "assumptions": notes}, indent=1))
    else:
        print(table(costs))
        print("\nassumptions:\n" + "\n".join(f"  {line}" for line in notes))
    return 0


def _refuse(words: str, finding: str, hint: str) -> NoReturn:
    raise PlatformError.because(f"unisono plan {words}".rstrip(), finding, hint=hint)


def _check(args: argparse.Namespace) -> None:
    """Refuse what would fail after minutes of measuring."""
    from unisono.plan.quantities import read_rate, read_time

    ranks, nodes, team = args.ranks, args.nodes, args.team
    call = f"--ranks {ranks} --nodes {nodes}"
    for name, (least, most) in _RANGES.items():
        option, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if value is not None and not least <= value <= most:
            _refuse(f"{option} {value:g}", f"not between {least:g} and {most:g}", f"{option} 1")
    if nodes > 1 and args.link is None:
        _refuse(call, "no bandwidth between nodes", "--link 10GB/s --latency 2us")
    if nodes > 1 and ranks is None:
        _refuse(call, "no number of ranks", f"--ranks {8 * nodes}")
    if ranks is not None and ranks % nodes:
        fits = f"--ranks {nodes * (ranks // nodes + 1)}"
        _refuse(call, f"{ranks} ranks / {nodes} nodes = {ranks / nodes:g}", fits)
    if ranks is not None and team is not None and ranks % team:
        finding, fits = f"{ranks} ranks / {team} = {ranks / team:g} teams", math.gcd(ranks, team)
        _refuse(f"--ranks {ranks} --team {team}", finding, f"--team {fits}")
    for word in (args.latency, args.node_latency):
        read_time(word)
    for word in filter(None, (args.link, args.node_link)):
        read_rate(word)


def _cluster(args: argparse.Namespace, calibration: Calibration) -> Cluster:
    """Return the machine that the options describe; without a network, this one."""
    from dataclasses import replace

    from unisono.cores import usable_cores
    from unisono.plan import Cluster, Link
    from unisono.plan.quantities import read_rate, read_time

    ranks = args.ranks or usable_cores()
    if args.link is None and args.node_link is None:
        here = calibration.here(ranks)
        return replace(
            here, rank_speed=args.rank_speed, cores_per_node=args.cores or here.cores_per_node
        )
    # What ranks do to each other on this machine says nothing about another one.
    inner = replace(calibration.links["shm"], slowdown={})
    if args.node_link is not None:
        inner = Link(
            name=args.node_link,
            latency_s=read_time(args.node_latency),
            bytes_per_s=read_rate(args.node_link),
        )
    outer = inner
    if args.link is not None:
        outer = Link(
            name=args.link,
            latency_s=read_time(args.latency),
            bytes_per_s=read_rate(args.link),
            overlap=args.overlap,
        )
    return Cluster(
        nodes=args.nodes,
        ranks_per_node=ranks // args.nodes,
        inner=inner,
        outer=outer,
        cores_per_node=args.cores,
        rank_speed=args.rank_speed,
    )


def _calibrate(args: argparse.Namespace) -> None:
    from functools import partial

    from unisono.plan import calibrate, calibration_file, load_subject
    from unisono.plan.subject import PRESETS

    makers = [PRESETS[name] for name in ("mlp", "cnn")]
    if args.model is not None and args.model not in ("mlp", "cnn"):
        load_subject(args.model)  # so that an error is raised here and not by a rank
        makers.append(partial(load_subject, args.model))
    print("unisono: measuring on 1, 2 and 4 ranks, about half a minute", file=sys.stderr)
    calibration = calibrate(makers)
    path = args.calibration or calibration_file()
    calibration.write(path)
    print(calibration.describe())
    print(f"unisono: wrote {path}", file=sys.stderr)
