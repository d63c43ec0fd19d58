"""What ranks logged becomes one value a step."""

from __future__ import annotations

import csv
import json
import math

from unisono.train.recording import reading


def line(step, t, attempt=0, **values):
    return {"step": step, "t": t, "a": attempt, "v": values, "blocked_s": 0.0, "wait_s": 0.0}


def test_a_metric_is_the_mean_over_ranks_and_samples_are_their_sum():
    merged = reading.merge(
        {
            0: [line(0, 1.0, loss=1.0, samples=3), line(1, 2.0, loss=0.5, samples=3)],
            1: [line(0, 1.5, loss=3.0, samples=2), line(1, 2.5, loss=0.7, samples=2)],
        },
        began_s=1.0,
    )
    assert merged.steps == [0, 1]
    assert merged.seconds == [0.5, 1.5]  # when the last rank had it
    assert merged.series["loss"].mean == [2.0, 0.6]
    assert (merged.series["loss"].low, merged.series["loss"].high) == ([1.0, 0.5], [3.0, 0.7])
    assert merged.series["samples"].mean == [5.0, 5.0]


def test_values_that_have_no_finite_sum_are_merged_all_the_same():
    lines = {rank: [line(0, 1.0, loss=1e308, other=math.nan)] for rank in range(2)}
    merged = reading.merge(lines)
    assert merged.series["loss"].mean == [math.inf]
    assert merged.series["loss"].high == [1e308]
    assert math.isnan(merged.series["other"].mean[0])


def test_a_rank_that_did_not_log_a_step_does_not_count_in_its_mean():
    merged = reading.merge({0: [line(4, 1.0, loss=1.0)], 1: [line(2, 1.0, loss=5.0)]})
    assert merged.series["loss"].steps == [2, 4]
    assert merged.series["loss"].mean == [5.0, 1.0]


def test_a_later_attempt_replaces_the_steps_it_repeats():
    lines = [line(0, 1.0, loss=9.0), line(1, 2.0, loss=8.0), line(1, 30.0, 1, loss=0.5)]
    merged = reading.merge({0: lines})
    assert merged.series["loss"].mean == [9.0, 0.5]
    assert merged.seconds == [1.0, 30.0]


def test_what_is_added_to_a_step_later_does_not_move_it_in_time():
    merged = reading.merge({0: [line(0, 1.0, loss=1.0), line(0, 9.0, accuracy=0.5)]})
    assert merged.seconds == [1.0]
    assert list(merged.series) == ["loss", "accuracy"]


def test_the_csv_has_a_row_a_step_and_gaps_where_nothing_was_logged(tmp_path):
    merged = reading.merge({0: [line(0, 0.25, loss=0.5), line(7, 1.0, accuracy=math.nan)]})
    reading.write_csv(tmp_path / "m.csv", merged)
    rows = list(csv.reader((tmp_path / "m.csv").read_text().splitlines()))
    assert rows == [
        ["step", "seconds", "loss", "accuracy"],
        ["0", "0.250000", "0.5", ""],
        ["7", "1.000000", "", "nan"],
    ]


def test_throughput_counts_samples_of_all_ranks_else_steps():
    with_samples = {r: [line(i, i * 0.5, samples=10) for i in range(9)] for r in range(2)}
    merged = reading.merge(with_samples)
    assert reading.throughput(merged, points=4) == ("samples/s", [2, 4, 6, 8], [40.0] * 4)
    assert reading.overall_throughput(merged) == 40.0
    plain = reading.merge({0: [line(i, i * 0.5, loss=1.0) for i in range(3)]})
    assert reading.throughput(plain) == ("steps/s", [1, 2], [2.0, 2.0])
    assert reading.overall_throughput(reading.merge({0: [line(0, 1.0, loss=1.0)]})) is None


def test_lines_that_are_cut_off_or_no_such_lines_are_left_out(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    wrong = (line("x", 1.0), line(1.5, 1.0), line(math.nan, 1.0), line(7, 1.0, loss="low"), [], {})
    good = line(0, 1.0, loss=math.inf)
    text = "\n".join(json.dumps(found) for found in (*wrong, good, line(2, None)))
    path.write_text(text + '\n{"step": 1, "t"')
    assert reading.LineReader(path).read_new().lines == [good]
    assert reading.merge({0: reading.LineReader(path).read_new().lines}).steps == [0]
    assert reading.LineReader(tmp_path / "none").read_new().lines == []


def test_lines_are_read_once_each_while_they_are_written(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    reader = reading.LineReader(path).read_new()
    first, second, third = (json.dumps(line(step, 1.0)) + "\n" for step in range(3))
    with path.open("a") as file:
        for text in (first + second[:4], second[4:], "broken\n", third):
            file.write(text)
            file.flush()
            reader.read_new()
    assert [line["step"] for line in reader.lines] == [0, 1, 2]
