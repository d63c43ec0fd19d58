"""A part of torch's operator database; `operator_database.py` runs all of it."""

from __future__ import annotations

import pytest
from tests.nn.split_tensors import operator_database as operators

STEP = 48
"""One operator in so many."""


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize("first", [0, 24])
def test_operators_are_right_or_refused(first):
    bad = [
        f"{verdict.name} {case}: {why}"
        for op in operators.database()[first::STEP]
        for case, verdict, why in operators.all_verdicts(op, operators.Extent(samples=1))
        if verdict is not None and verdict >= operators.BAD
    ]
    assert not bad
