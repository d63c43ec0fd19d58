"""hypothesis on ranks: the same values everywhere, shrinking, stalls."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st


def rank():
    import torch.distributed as dist

    return dist.get_rank()


def agreed(n):
    import torch
    import torch.distributed as dist

    x = torch.tensor([n, -n])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist() == [n, -n]


@pytest.mark.ranks(3)
def test_start_the_ranks():
    assert 0 <= rank() < 3


@pytest.mark.ranks(3)
@settings(max_examples=50)
@given(n=st.integers(-1000, 1000))
def test_all_ranks_get_the_same_values(n):
    assert agreed(n)


@pytest.mark.ranks(2)
@given(st.integers(0, 500), st.booleans())
def test_failure_is_shrunk(n, flag):
    agreed(n)
    assert n < 100 or rank() == 0


@pytest.mark.ranks(2)
@settings(max_examples=20)
@given(n=st.integers())
def test_assume_drops_examples(n):
    assume(n % 2 == 0)
    assert n % 2 == 0


@pytest.mark.ranks(2, timeout=1)
@settings(max_examples=20)
@given(n=st.integers(0, 50))
def test_stall_is_told_with_its_example(n):
    if rank() == 1 and n >= 0:
        time.sleep(100)


@pytest.mark.ranks(2)
@settings(max_examples=5)
@example(n=77)
@given(n=st.integers(0, 50))
def test_explicit_example_is_run(n):
    assert n != 77


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("offset", [3])
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(0, 50))
def test_parameters_and_fixtures_and_draws(n, offset, tmp_path, rank_count):
    assert offset == 3
    assert n <= 50
    assert tmp_path.exists()


class TestMethods:
    def upper(self):
        return 50

    @pytest.mark.ranks(2)
    def test_plain_method_beside_a_drawn_one(self):
        assert self.upper() == 50

    @pytest.mark.ranks(2)
    @settings(max_examples=5)
    @given(n=st.integers(0, 50))
    def test_method(self, n):
        assert self.upper() == 50
        assert 0 <= n <= 50


@pytest.mark.ranks(2)
@given(data=st.data())
def test_interactive_data_cannot_travel(data):
    pass


@given(n=st.integers(0, 3))
def test_without_ranks(n):
    assert n <= 3
