"""What looking for silent mistakes adds to a training step: the MLP over shm with two ranks.

python benchmarks/data_parallel/check.py [--quick]
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import Row, markdown, parser_for, publish, take_turns
from workloads import Step, backend_group, variant

import unisono
from unisono.comm import check
from unisono.data_parallel.replicas import EVERY, ReplicaCheck


def checked(step: Step) -> Step:
    """Return the step in check mode."""

    def run() -> None:
        with check():
            step()

    return run


def unchecked(step: Step) -> Step:
    """Return the step without what is always looked for."""
    off = dict.fromkeys(("see_forward", "end_forward", "compare"), mock.DEFAULT)

    def run() -> None:
        with mock.patch.multiple(ReplicaCheck, **off):
            for _ in range(EVERY):
                step()

    return run


def several(step: Step) -> Step:
    """Return as many steps as lie between two comparisons."""

    def run() -> None:
        for _ in range(EVERY):
            step()

    return run


def calls_of(step: Step) -> int:
    """Return how many functions a step calls, those of torch's modules included."""
    count = 0

    def see(_frame: FrameType, event: str, _value: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def measure(quick: bool) -> list[Row]:
    """Compare a step in check mode, and a plain one, with the same step without checks."""
    torch.set_num_threads(1)
    shm = backend_group("shm")
    plain = variant("blocking", "MLP", shm)
    steps = {"check mode": checked(variant("blocking", "MLP", shm)), "plain": plain}
    rounds, warm_up, count = (9, 5, 20) if quick else (25, 50, 8)
    times = take_turns(shm, steps, rounds=rounds, warm_up=warm_up, repeats=count)
    row = times["check mode"].row(
        "MLP, 2 ranks, shm: check mode", times["plain"], "the same step", 1.10
    )
    counts = [calls_of(step) for step in steps.values()]
    note = f"{row.note}, {counts[0] - counts[1]} calls of functions more than {counts[1]}"
    for _ in range(EVERY):
        plain()  # past the comparisons of the beginning
    rounds = 7 if quick else 25
    turns = {"on": several(plain), "off": unchecked(plain)}
    times = take_turns(shm, turns, rounds=rounds, warm_up=1)
    case = f"MLP, 2 ranks, shm: {EVERY} steps, what is always looked for"
    return [replace(row, note=note), times["on"].row(case, times["off"], "without it", 1.01)]


if __name__ == "__main__":
    quick = parser_for(__doc__).parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = unisono.run(measure, quick, ranks=2)[0]
    publish("Data parallel: check mode", markdown(rows), write=not quick)
