"""The pure files stay pure; a plan costs by its neighbours, not by the size of the partition."""

from __future__ import annotations

import gc
import pickle
import statistics
import subprocess
import sys
import time

import pytest

from unisono.topology import decompose, halo, overlap

PURE = ("decompose", "window", "halo", "resample", "fanout", "overlap", "draw")


def test_pure_files_load_without_torch() -> None:
    imports = "; ".join(f"import unisono.topology.{name}" for name in PURE)
    code = f"import sys; {imports}; print(any(m.split('.')[0] == 'torch' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def seconds_for(side: int) -> float:
    """Median time of one inner rank's plan on a `side` x `side` partition."""
    cuts = [
        (0, 1),
        (0, 16),
        decompose.split_cuts(16 * side, side),
        decompose.split_cuts(16 * side, side),
    ]
    times: list[float] = []
    for _ in range(15):
        start = time.perf_counter()
        halo.plan(cuts, (0, 0, side // 2, side // 2), (3, 3), padding=1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_a_plan_for_64_by_64_ranks_costs_at_most_ten_of_8_by_8() -> None:
    gc.collect()
    ratios = [seconds_for(64) / seconds_for(8) for _ in range(3)]
    assert min(ratios) <= 10, ratios


def test_a_plan_touches_only_ranks_that_overlap() -> None:
    side = 64
    cuts = [decompose.split_cuts(4 * side, side)] * 2
    plan = halo.plan(cuts, (10, 10), 3, padding=1)
    assert len(plan.sends) == len(plan.recvs) == 8
    moves = overlap.overlaps(
        [decompose.split_cuts(256, 64)], range(64), [decompose.split_cuts(256, 63)], range(63), 30
    )
    assert len(moves.sends) <= 2


def test_halo_plans_are_frozen_hashable_and_hold_integers_only() -> None:
    plan = halo.plan([(0, 5, 10), (0, 3)], (0, 0), 3, padding=1, padding_mode="reflect")
    again = halo.plan([(0, 5, 10), (0, 3)], (0, 0), 3, padding=1, padding_mode="reflect")
    assert plan == again == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(again)
    with pytest.raises(AttributeError):
        plan.fill = 1.0  # type: ignore[misc]
