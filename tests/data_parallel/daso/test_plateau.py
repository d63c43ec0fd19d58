"""When a metric counts as standing still."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data_parallel import DetectMetricPlateau

VALUES = [8, 6, 6.1, 5.9, 6, 6.2, 5, 5.1, 5.2, 5.3, 5.4, 5.5, 4, 7, 7, 7, 7, 7, 7, 3]
CASES = [
    ({"mode": "min", "threshold": 0.05, "patience": 2}, [4, 9, 15, 18]),
    ({"mode": "min", "threshold": 0.05, "patience": 2, "cooldown": 2}, [4, 9, 15]),
    (
        {"mode": "min", "threshold_mode": "abs", "threshold": 0.5, "patience": 1},
        [3, 5, 8, 10, 14, 16, 18],
    ),
    ({"mode": "max", "patience": 2}, [3, 6, 9, 12, 15, 18]),
    (
        {"mode": "max", "threshold_mode": "abs", "patience": 3, "cooldown": 1},
        [4, 9, 14, 19],
    ),
]


@pytest.mark.parametrize(("options", "plateaus"), CASES)
def test_plateaus_are_found_where_the_worked_table_says(options, plateaus):
    detector = DetectMetricPlateau(**options)
    assert [i for i, v in enumerate(VALUES) if detector.test_if_improving(v)] == plateaus
    assert detector.last_epoch == len(VALUES)


@pytest.mark.parametrize(("options", "plateaus"), CASES)
@pytest.mark.parametrize("cut", [0, 1, 7, 16])
def test_a_state_carried_over_in_the_middle_changes_nothing(options, plateaus, cut):
    first, second = DetectMetricPlateau(**options), DetectMetricPlateau()
    found = [i for i in range(cut) if first.plateaued(VALUES[i])]
    state = first.get_state()
    assert len(state) == 10
    second.set_state(state)
    found += [i for i in range(cut, len(VALUES)) if second.plateaued(VALUES[i])]
    assert found == plateaus


@given(st.lists(st.floats(-10, 10), max_size=30), st.sampled_from(["min", "max"]))
def test_a_reset_detector_answers_like_a_new_one(values, mode):
    used, new = DetectMetricPlateau(mode, patience=2), DetectMetricPlateau(mode, patience=2)
    for value in values:
        used.plateaued(value)
    used.reset()
    assert used.get_state() == new.get_state()
    assert used.best == (math.inf if mode == "min" else -math.inf)


@given(st.floats(-1e3, 1e3), st.floats(0, 0.5))
def test_an_equal_value_is_never_better_whatever_its_sign(value, threshold):
    for mode in ("min", "max"):
        detector = DetectMetricPlateau(mode, threshold=threshold)
        assert not detector.is_better(value, value)


def test_a_loss_that_is_not_a_number_counts_as_bad():
    detector = DetectMetricPlateau(patience=1)
    assert [detector.plateaued(v) for v in (math.nan, math.nan, 1.0, math.nan)] == [
        False, True, False, False,
    ]  # fmt: skip


def test_a_negative_loss_that_falls_is_an_improvement():
    detector = DetectMetricPlateau(patience=0, threshold=0.1)
    assert not detector.plateaued(-1.0)
    assert not detector.plateaued(-1.2)
    assert detector.plateaued(-1.25)


def test_an_unknown_mode_and_a_foreign_state_are_refused():
    with pytest.raises(ValueError, match="one of"):
        DetectMetricPlateau(mode="up")
    with pytest.raises(ValueError, match="missing"):
        DetectMetricPlateau().set_state({"best": 1.0})
