"""The chooser is pure; every algorithm it may choose gives the same result as the native one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm import world
from unisono.comm.engines.algorithms import ALGORITHMS, choose, forcing, parse_forced
from unisono.errors import UnisonoError


@given(
    verb=st.sampled_from([*ALGORITHMS, "broadcast"]),
    nbytes=st.integers(0, 1 << 30),
    even=st.booleans(),
    size=st.integers(1, 64),
    backend=st.sampled_from(["gloo", "shm", "mpi4py"]),
    rounds_once=st.booleans(),
)
def test_the_choice_is_one_of_the_table_and_possible(
    verb, nbytes, even, size, backend, rounds_once
):
    name = choose(verb, nbytes, even, size, backend, rounds_once=rounds_once)
    assert name in ALGORITHMS.get(verb, ("native",))
    if size > 1 and backend == "gloo":
        if verb == "all_gather" and not even:
            assert name != "native"
        if verb in ("all_reduce", "reduce_scatter") and rounds_once:
            assert name != "native"


@pytest.mark.parametrize(
    ("verb", "nbytes", "size", "expected"),
    [
        ("all_gather", 1 << 10, 2, "all_to_all"),
        ("all_gather", 10 << 20, 2, "broadcasts"),
        ("all_gather", 1 << 10, 9, "native"),
        ("reduce_scatter", 1 << 10, 4, "all_to_all"),
        ("reduce_scatter", 10 << 20, 4, "all_to_all"),
        ("all_reduce", 1 << 10, 2, "all_to_all"),
        ("all_reduce", 1 << 10, 4, "all_to_all"),
        ("all_reduce", 10 << 20, 4, "native"),
    ],
)
def test_gloo_follows_the_threshold_table(verb, nbytes, size, expected):
    assert choose(verb, nbytes, True, size, "gloo") == expected


def test_the_environment_can_force_an_algorithm(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGO", "all_gather:broadcasts, all_reduce:all_to_all")
    assert choose("all_gather", 10, True, 2, "gloo") == "broadcasts"
    assert choose("all_reduce", 1 << 30, True, 2, "gloo") == "all_to_all"
    monkeypatch.setenv("UNISONO_ALGO", "all_gather:ring")
    with pytest.raises(UnisonoError, match="'all_gather:ring' names no algorithm"):
        choose("all_gather", 10, True, 2, "gloo")
    assert parse_forced("") == {}


@pytest.mark.ranks([2, 3, 4])
def test_every_algorithm_gives_the_bits_of_the_native_one():
    comm = world()
    generator = torch.Generator().manual_seed(comm.rank)
    for rows in (comm.size, 3 * comm.size):
        x = torch.randint(-9, 9, (rows, 5), generator=generator).float()
        for name in ALGORITHMS["all_reduce"]:
            with forcing("all_reduce", name):
                assert torch.equal(
                    comm.all_reduce(x), comm.all_gather(x).view(comm.size, rows, 5).sum(0)
                )
        with forcing("all_gather", "native"):
            expected = comm.all_gather(x)
        for name in ALGORITHMS["all_gather"]:
            with forcing("all_gather", name):
                assert torch.equal(comm.all_gather(x), expected)
        total = expected.view(comm.size, rows, 5).sum(0)
        for name in ALGORITHMS["reduce_scatter"]:
            with forcing("reduce_scatter", name):
                assert torch.equal(comm.reduce_scatter(x), total.chunk(comm.size)[comm.rank])


@pytest.mark.ranks([3, 4])
def test_sums_are_the_same_bits_on_every_rank():
    comm = world()
    generator = torch.Generator().manual_seed(comm.rank)
    for n in (5, 50_000):
        x = torch.randn(n, generator=generator) * 10.0 ** (comm.rank * 3)
        assert comm.all_equal(comm.all_reduce(x))
