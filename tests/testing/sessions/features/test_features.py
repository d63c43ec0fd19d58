"""What a test on ranks may use."""

from __future__ import annotations

import os
import random
import threading
import unittest
import warnings
from pathlib import Path

import pytest
from support_module import Pair, doubled
from support_package.inner import scaled

GLOBAL_LOCK = threading.Lock()
SEEN = []
STARTS = []
OPENED = []


def rank():
    import torch.distributed as dist

    return dist.get_rank()


def size():
    import torch.distributed as dist

    return dist.get_world_size()


@pytest.mark.ranks(3)
def test_first():
    assert size() == 3


def test_count_starts(rank_pool):
    STARTS.append(rank_pool.starts)


@pytest.mark.ranks([1, 3])
@pytest.mark.parametrize("n", [2, 5])
def test_list_of_counts_with_parameters(n, rank_count):
    assert size() == rank_count
    assert n in (2, 5)


@pytest.mark.ranks(2)
def test_fixtures_of_plain_data_and_own_classes(numbers, plain, pair, tmp_path):
    assert numbers == {"a": 1, "b": [2, 3]}
    assert plain.value == 7
    assert isinstance(pair, Pair)
    (tmp_path / str(rank())).write_text("here")


@pytest.mark.ranks(2)
def test_functions_of_conftest_keep_their_messages(checker):
    checker(-1)


@pytest.mark.ranks(2)
def test_modules_next_to_the_tests_can_be_used():
    assert doubled(2) == 4
    assert scaled(2) == 6


@pytest.mark.ranks(2)
def test_fixture_that_cannot_travel(numbers, lock):
    pass


@pytest.mark.ranks(2)
def test_global_that_cannot_travel():
    GLOBAL_LOCK.acquire()


@pytest.mark.ranks(2)
def test_environment_and_directory_are_those_of_the_test(variable, elsewhere):
    assert os.environ["FROM_A_FIXTURE"] == variable
    assert Path.cwd().name.startswith("test_environment")


@pytest.mark.ranks(2)
def test_monkeypatch_works_in_the_rank(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "pi", 3)
    monkeypatch.setenv("PATCHED", "yes")
    assert torch.pi == 3


@pytest.mark.ranks(2)
def test_monkeypatch_was_undone():
    import torch

    assert torch.pi > 3
    assert "PATCHED" not in os.environ
    assert "FROM_A_FIXTURE" not in os.environ


@pytest.mark.ranks(2)
def test_settings_are_changed():
    import torch

    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["LEFT"] = "1"
    os.chdir("/")


@pytest.mark.ranks(2)
def test_settings_were_put_back():
    import torch

    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    assert "LEFT" not in os.environ
    assert Path.cwd() != Path("/")


@pytest.mark.ranks(2)
def test_generators_are_seeded_alike_each_time():
    import numpy
    import torch

    generator = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=generator))
    assert numpy.random.rand() == numpy.random.RandomState(0).rand()
    assert random.random() == random.Random(0).random()


@pytest.mark.ranks(2)
def test_skip_on_all_ranks():
    pytest.skip("not today")


@pytest.mark.ranks(2)
def test_skip_on_one_rank():
    if rank() == 1:
        pytest.skip("only here")


@pytest.mark.ranks(2)
def test_xfail_on_all_ranks():
    pytest.xfail("known")


@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="marked")
def test_marked_as_failing():
    assert rank() == 7


@pytest.mark.ranks(2)
def test_raises_works():
    with pytest.raises(ValueError, match="three"):
        raise ValueError("three")


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:loud")
def test_warning_filters_hold_in_the_ranks():
    with pytest.raises(UserWarning):
        warnings.warn("loud", stacklevel=1)
    with pytest.warns(UserWarning, match="quiet"):
        warnings.warn("quiet", stacklevel=1)


@pytest.mark.ranks(2)
def test_output_is_shown_with_its_rank():
    print("hello")
    os.write(1, b"from below\n")


@pytest.mark.ranks(2)
def test_globals_start_afresh_a():
    SEEN.append(1)
    assert SEEN == [1]


@pytest.mark.ranks(2)
def test_globals_start_afresh_b():
    SEEN.append(1)
    assert SEEN == [1]


class TestMethods:
    @pytest.mark.ranks(2)
    def test_method(self, numbers):
        assert numbers["a"] == 1
        assert size() == 2


@pytest.mark.ranks(2)
class TestMarkedClass:
    def test_method_of_marked_class(self):
        assert size() == 2


class Forwarding:
    """A pool that notes the worlds it opens."""

    def __init__(self, pool):
        self.pool, self.grace_s, self.owned = pool, pool.grace_s, pool.owned

    def open(self, world, **options):
        OPENED.append(world)
        return self.pool.open(world, **options)


class TestPoolOfAClass:
    @pytest.fixture
    def rank_pool(self, rank_pool):
        return Forwarding(rank_pool)

    @pytest.mark.ranks(2)
    def test_ranks_of_the_overriding_pool(self):
        assert size() == 2

    def test_the_overriding_pool_was_used(self):
        assert OPENED == [2]


class TestCase(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method_of_test_case(self):
        pass


@pytest.mark.ranks(2)
def test_returning_something_odd_is_no_failure():
    threading.Lock()


def test_pool_gives_values(rank_pool):
    assert rank_pool.run(rank, world=3) == [0, 1, 2]


def test_without_marker_runs_here(rank_count):
    assert rank_count == 1


def test_ranks_were_shared(rank_pool):
    print("starts", rank_pool.starts - STARTS[0])
