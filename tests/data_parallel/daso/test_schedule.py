"""DASO's schedule and plateaus: worked tables, and what holds always; and ranks that form nodes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data_parallel import BatchPlan, DasoSchedule, DetectMetricPlateau, Skips
from unisono.data_parallel.daso.exchange import NodeLayout
from unisono.errors import MeshError

OFF = Skips(0, 0, 0)


def repeated(*runs: tuple[tuple[int, int, int], int]) -> list[Skips]:
    return [Skips(*skips) for skips, times in runs for _ in range(times)]


def with_skips(*skips: int) -> DasoSchedule:
    schedule = DasoSchedule(10, warmup_epochs=0, cooldown_epochs=0)
    schedule.skips = Skips(*skips)
    return schedule


def trace(schedule: DasoSchedule, n_batches: int, groups: int = 2) -> list[str]:
    """Write down what each batch of an epoch does, as DASO would do it."""
    lines: list[str] = []
    sent_at, rotation = None, 0
    for batch in range(n_batches):
        plan = schedule.plan(batch, n_batches, sent_at)
        words: list[str] = [] if plan.local_sync else ["local off"]
        if plan.merge:
            words.append(f"merge {batch - sent_at}")
            sent_at = None
        if plan.blocking or plan.send:
            words.append(f"{'mean' if plan.blocking else 'send'} {rotation % groups}")
            rotation += 1
            sent_at = batch if plan.send else None
        lines.append(", ".join([*words, "close"] if plan.close else words))
    return lines


CYCLE = [
    (
        DasoSchedule(14, 2, 2),
        repeated(
            (OFF, 2), ((4, 1, 1), 3), ((2, 1, 1), 3), ((1, 1, 1), 3), ((8, 2, 2), 1), (OFF, 2)
        ),
    ),
    (
        DasoSchedule(20),
        repeated(
            (OFF, 4), ((4, 1, 1), 3), ((2, 1, 1), 3), ((1, 1, 1), 3), ((8, 2, 2), 3), (OFF, 4)
        ),
    ),
    (
        DasoSchedule(24, 0, 0, max_global_skips=16),
        repeated(
            ((4, 1, 1), 4), ((2, 1, 1), 3), ((1, 1, 1), 3), ((16, 4, 4), 3), ((8, 2, 3), 3),
            ((4, 1, 2), 3), ((2, 1, 1), 3), ((1, 1, 1), 2),
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "expected"), CYCLE)
def test_skips_of_a_loss_that_never_improves_follow_the_worked_table(schedule, expected):
    assert schedule.preview([1.0] * len(expected)) == expected
    live = [schedule.skips]
    live += [schedule.epoch_end(1.0) for _ in expected[1:]]
    assert live == expected
    schedule.reset()
    assert schedule.skips == expected[0]


@pytest.mark.parametrize(
    ("skips", "n_batches", "expected"),
    [
        (
            (4, 1, 1), 10,
            ["send 0", "merge 1", "", "", "send 1", "merge 1", "", "", "", "mean 0, close"],
        ),
        (
            (8, 2, 2), 12,
            ["send 0", "", "merge 2", "local off", "", "local off", "", "local off", "send 1", "",
             "merge 2", "mean 0, close"],
        ),
        ((1, 1, 1), 4, ["send 0", "merge 1, send 1", "merge 1", "mean 0, close"]),
        (
            (2, 1, 1), 7,
            ["send 0", "merge 1", "send 1", "merge 1", "send 0", "merge 1", "mean 1, close"],
        ),
        ((0, 0, 0), 4, ["mean 0", "mean 1", "mean 0", "mean 1, close"]),
        ((3, 1, 0), 5, ["mean 0", "", "", "mean 1", "mean 0, close"]),
        ((4, 1, 1), 1, ["mean 0, close"]),
        ((4, 1, 1), 2, ["", "mean 0, close"]),
    ],
)  # fmt: skip
def test_batches_follow_the_worked_traces(skips, n_batches, expected):
    assert trace(with_skips(*skips), n_batches) == expected


def test_phases_follow_the_epoch_and_improvement_keeps_the_skips():
    schedule = DasoSchedule(9, 2, 3)
    phases, skips = [schedule.phase], [schedule.skips]
    for epoch in range(8):
        skips.append(schedule.epoch_end(0.5**epoch))
        phases.append(schedule.phase)
    assert phases == ["warmup"] * 2 + ["cycling"] * 4 + ["cooldown"] * 3
    assert skips == repeated((OFF, 2), ((4, 1, 1), 4), (OFF, 3))


def test_no_warmup_starts_in_cycling():
    schedule = DasoSchedule(5, warmup_epochs=0, cooldown_epochs=0)
    assert schedule.phase == "cycling"
    assert schedule.skips == (4, 1, 1)


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_the_first_skip_is_capped_by_the_maximum(largest):
    schedule = DasoSchedule(50, 0, 0, max_global_skips=largest, skip_reduction_factor=3)
    seen = schedule.preview([1.0] * 50)
    assert max(s.global_skip for s in seen) == largest
    assert min(min(s) for s in seen) == 1


def test_a_maximum_of_zero_synchronises_after_every_batch_and_keeps_the_phases():
    schedule = DasoSchedule(6, 1, 1, max_global_skips=0)
    assert set(schedule.preview([1.0] * 6)) == {OFF}
    schedule.epoch_end(1.0)
    assert schedule.phase == "cycling"


SCHEDULES = st.builds(
    DasoSchedule,
    st.integers(1, 40),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.05, 0.5]),
)
LOSSES = st.lists(st.floats(0, 10), min_size=1, max_size=40)


@given(SCHEDULES, LOSSES, st.integers(1, 30))
def test_what_holds_for_every_schedule(schedule, losses, n_batches):
    largest = schedule.max_global_skips
    for loss in losses:
        skips = schedule.skips
        if schedule.phase == "cycling" and largest:
            assert 1 <= skips.global_skip <= largest
            assert 1 <= skips.local_skip <= max(1, largest)
            assert skips.batches_to_wait >= 1
        else:
            assert skips == OFF
        sent_at = None
        for batch in range(n_batches):
            plan = schedule.plan(batch, n_batches, sent_at)
            assert plan.close == (batch == n_batches - 1)
            assert not plan.merge or sent_at is not None
            if plan.merge:
                sent_at = None
            assert not (plan.send and plan.blocking)
            if plan.send:
                assert sent_at is None, "two exchanges in flight"
                sent_at = batch
            if plan.close:
                assert plan.blocking
                assert sent_at is None, "a result nobody would use"
            if sent_at is not None:
                assert plan.local_sync, "a node drifts apart while its parameters travel"
        schedule.epoch_end(loss)


@given(SCHEDULES, LOSSES, st.integers(0, 40))
def test_a_state_carried_over_continues_alike(schedule, losses, cut):
    twin = DasoSchedule(
        schedule.total_epochs, schedule.warmup_epochs, schedule.cooldown_epochs,
        schedule.max_global_skips, schedule.skip_reduction_factor, schedule.local_skip_factor,
        schedule.stability_level,
    )  # fmt: skip
    for loss in losses[:cut]:
        schedule.epoch_end(loss)
    twin.load_state_dict(schedule.state_dict())
    for loss in losses[cut:]:
        assert schedule.epoch_end(loss) == twin.epoch_end(loss)
    assert schedule.state_dict() == twin.state_dict()


@given(SCHEDULES, LOSSES)
def test_a_preview_changes_nothing(schedule, losses):
    before = schedule.state_dict()
    schedule.preview(losses)
    assert schedule.state_dict() == before


def test_a_plan_has_the_five_named_parts():
    assert with_skips(4, 1, 1).plan(0, 10, None) == BatchPlan(
        local_sync=True, merge=False, send=True, blocking=False, close=False
    )


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


def test_nodes_follow_hostnames_even_when_ranks_alternate():
    layout = NodeLayout.of_hosts(["b", "a", "b", "a"])
    assert layout.nodes == ((0, 2), (1, 3))
    assert layout.groups == ((0, 1), (2, 3))
    assert layout.weights == (1.0, 1.0)
    assert [layout.node_of(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_uneven_nodes_have_as_many_groups_as_the_smallest_node_has_ranks():
    layout = NodeLayout.of_blocks(6, [1, 3, 2])
    assert layout.nodes == ((0,), (1, 2, 3), (4, 5))
    assert layout.groups == ((0, 1, 4),)
    assert layout.weights == (0.5, 1.5, 1.0)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_rank_is_in_one_node_and_weights_add_up_to_the_number_of_nodes(hosts):
    layout = NodeLayout.of_hosts(hosts)
    assert sorted(rank for node in layout.nodes for rank in node) == list(range(len(hosts)))
    assert [node[0] for node in layout.nodes] == sorted(node[0] for node in layout.nodes)
    assert sum(layout.weights) == pytest.approx(len(layout.nodes))
    for group in layout.groups:
        assert [layout.node_of(rank) for rank in group] == list(range(len(layout.nodes)))
    flat = [rank for group in layout.groups for rank in group]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize(
    ("ranks_per_node", "arithmetic"),
    [(3, "4 / 3"), (0, "4 / 0"), ([1, 2], "1 \\+ 2 = 3"), ([4, 0], "= 4"), ([], "= 0")],
)
def test_blocks_that_do_not_make_up_the_ranks_are_refused_with_the_arithmetic(
    ranks_per_node, arithmetic
):
    with pytest.raises(MeshError, match=arithmetic):
        NodeLayout.of_blocks(4, ranks_per_node)


def test_equal_blocks_of_consecutive_ranks():
    assert NodeLayout.of_blocks(4, 2).nodes == ((0, 1), (2, 3))
    assert NodeLayout.of_blocks(3, 1).groups == ((0, 1, 2),)
    assert NodeLayout.of_blocks(3, 3).groups == ((0,), (1,), (2,))
