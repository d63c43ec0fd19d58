"""A rank is killed or stopped at every step of every kernel: what the others say, and how soon."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mortal_core.py")
KERNELS = [
    "barrier",
    "small all_reduce",
    "large all_reduce",
    "placed all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "placed all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "placed all_to_all",
    "ints",
    "shared_buffer",
    "small message",
    "large message",
]
AT_ONCE = 16
"""Worlds at the same time."""
STOP_DEADLINE_S = 0.6


@pytest.fixture(scope="module")
def faulty_worlds():
    """Return a function that takes a kernel through all its steps, one world for each.

    It is a plain interpreter: of a small process, hundreds of forks cost less than its start.
    """
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    known = {}  # the first step past the end

    def run(kernel, signal, victim):
        """Return the worlds in which the victim was hit; the steps after them are past the end."""
        hit, first = [], 1
        while first < 200:
            last = min(known.get((kernel, victim), first + 5), first + AT_ONCE - 1)
            steps = list(range(first, max(first, last) + 1))
            request = {"kernel": kernel, "signal": signal, "steps": steps, "victim": victim}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert answer["left"] == []
            hit += [world for world in answer["worlds"] if world["hit"]]
            whole = [world for world in answer["worlds"] if not world["hit"]]
            for world in whole:
                assert [report["error"] for report in world["reports"]] == [None] * 3, world
            if whole:
                known[kernel, victim] = len(hit) + 1
                return hit
            first += len(steps)
        raise AssertionError(f"{kernel} has no end")

    yield run
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    process.stdout.close()


def survivors(worlds, victim):
    return [
        (world["step"], rank, report)
        for world in worlds
        for rank, report in enumerate(world["reports"])
        if rank != victim
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kernel", "victim"),
    [*((kernel, 1) for kernel in KERNELS), ("large all_reduce", 0), ("shared_buffer", 0)],
)
def test_a_rank_killed_at_any_step_is_named_soon(faulty_worlds, kernel, victim):
    worlds = faulty_worlds(kernel, "SIGKILL", victim)
    assert [world["step"] for world in worlds] == list(range(1, len(worlds) + 1))
    assert worlds, "no step was taken"
    seconds = []
    for step, rank, report in survivors(worlds, victim):
        assert report is not None, (step, rank)
        assert (report["error"], report["rank"]) == ("RankFailed", victim), (step, rank, report)
        seconds.append(report["seconds"])
    # Dozens of processes start at once here, so a few may be late for want of a core.
    assert statistics.median(seconds) < 0.5
    assert max(seconds) < 5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rank_stopped_at_any_step_is_named_at_the_deadline(faulty_worlds, kernel):
    victim = 1
    for step, rank, report in survivors(faulty_worlds(kernel, "SIGSTOP", victim), victim):
        assert report is not None, (step, rank)
        # Whoever gives up first tells the others, who then need not wait for their own deadline.
        assert report["error"] in ("RankTimeout", "RankFailed"), (step, rank, report)
        named = [*report["missing"], report["rank"]]
        if "message" in kernel:  # a third rank, in a barrier, sees neither end of it come
            named = [other for other in named if other == victim]
        assert set(named) - {None} == {victim}, (step, rank, report)
        assert STOP_DEADLINE_S * 0.5 < report["seconds"] < STOP_DEADLINE_S * 3 + 5
