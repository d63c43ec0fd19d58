"""Which steps a timeline shows, and where the time of a rank went."""

from __future__ import annotations

import pytest

from unisono.train.recording import figures


def event(begin, end, *, wait=0, op="all_reduce"):
    fields = {"sent": 8, "received": 8, "is_async": False, "site": "/a/b/train.py:3"}
    return {"op": op, "t_start": begin, "t_end": end, "wait_ns": wait, **fields}


def part(rank, *, events=(), spans=(), marks=(), **more):
    return {"rank": rank, "attempt": 0, "events": events, "spans": spans, "marks": marks, **more}


def lines_at(seconds):
    return [{"a": 0, "t": float(t), "blocked_s": 0.0, "wait_s": 0.0} for t in seconds]


def test_lanes_hold_what_happens_in_the_shown_steps_in_seconds():
    second = 10**9
    events = [event(i * second, i * second + second // 2, wait=second // 4) for i in range(20)]
    built = figures.timeline([part(0, events=events), part(1, events=events)], lines_at(range(20)))
    assert len(built["steps"]) == figures.SHOWN_STEPS
    shown = built["steps"][built["shown"]]
    assert shown["end"] - shown["begin"] == 1.0
    first = built["lanes"][1]["events"][0]
    assert (first["end"] - first["begin"], first["wait"], first["site"]) == (
        0.5,
        0.25,
        "train.py:3",
    )


def test_without_steps_the_whole_record_is_shown_and_without_anything_nothing():
    built = figures.timeline([part(0, events=[event(10**9, 3 * 10**9)])], [])
    assert built["steps"] == [{"number": None, "begin": 1.0, "end": 3.0}]
    assert figures.timeline([part(0)], []) is None


def test_optimizer_steps_stand_in_where_nothing_is_logged():
    marks = [(i * 10**9, 0, 0) for i in range(12)]
    built = figures.timeline([part(0, events=[event(0, 12 * 10**9)], marks=marks)], [])
    assert built["steps"][0]["number"] is not None


def test_shares_are_those_between_the_first_and_the_last_logged_step():
    lines = [
        {"a": 0, "t": 10.0, "blocked_s": 5.0, "wait_s": 4.0},  # start-up does not count
        {"a": 0, "t": 20.0, "blocked_s": 7.0, "wait_s": 5.5},
    ]
    (row,) = figures.shares([part(0)], {0: lines})
    assert (row["compute"], row["move"], row["wait"], row["share"]) == (8.0, 0.5, 1.5, 0.2)


def test_shares_fall_back_to_optimizer_steps_then_to_the_whole_record():
    marks = [(10**9, 0, 0), (5 * 10**9, 10**9, 10**9 // 2)]
    whole = {"began_s": 1.0, "ended_s": 11.0, "blocked_s": 5.0, "wait_s": 0.0}
    rows = figures.shares([part(0, marks=marks, **whole), part(1, **whole), part(2)], {})
    assert [(row["rank"], row["share"]) for row in rows] == [(0, 0.25), (1, 0.5)]


def test_calls_of_all_ranks_are_summed_up_by_place():
    sums = {"op": "barrier", "site": "/x/train.py:9", "calls": 2, "bytes": 0}
    parts = [part(r, sums=[{**sums, "blocked_ns": 10**9, "wait_ns": 10**8}]) for r in range(3)]
    (row,) = figures.call_table(parts)
    assert (row["op"], row["site"], row["calls"]) == ("barrier", "train.py:9", 6)
    assert row["seconds"] == pytest.approx(3.0)
