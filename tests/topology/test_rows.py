"""Row plans: checked when made, compared by value."""

from __future__ import annotations

import pickle

from unisono.topology import RowPlan


def test_rows_are_grouped_by_the_rank_that_gets_them() -> None:
    plan = RowPlan.from_lists(5, [[], [4, 0], [1]], recv_sizes=[0, 3, 2])
    assert plan.send_index.tolist() == [4, 0, 1]
    assert plan.send_sizes == (0, 2, 1)
    assert plan.recv_sizes == (0, 3, 2)


def test_equal_plans_have_equal_hashes_and_other_rows_are_unequal() -> None:
    plan = RowPlan.from_lists(5, [[1], [2]], [1, 1])
    assert plan == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
    assert plan != RowPlan.from_lists(5, [[1], [3]], [1, 1])
    assert plan != RowPlan.from_lists(6, [[1], [2]], [1, 1])
    assert plan != "plan"
