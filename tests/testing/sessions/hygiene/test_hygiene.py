"""Tests that leave things behind, and tests that do not."""

from __future__ import annotations

import pytest

IN_A_PROCESS = ["variable", "thread", "process", "file", "nothing"]
ON_THE_HOST = ["shared_memory", "temporary"]


@pytest.mark.parametrize("what", IN_A_PROCESS + ON_THE_HOST)
def test_plain(leak, what):
    leak(what)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", IN_A_PROCESS)
def test_one_rank(leak, what):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        leak(what)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ON_THE_HOST)
def test_host(leak, what):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        leak(what)


@pytest.mark.ranks(2)
def test_setting():
    import torch

    torch.set_default_dtype(torch.float64)


@pytest.mark.ranks(2)
def test_group_of_a_rank_is_not_a_leak():
    import torch.distributed as dist

    dist.new_group([0, 1])


@pytest.mark.leaks("environment")
def test_allowed(leak):
    leak("variable")


@pytest.mark.ranks(2)
@pytest.mark.leaks("environment")
def test_allowed_on_ranks(leak):
    leak("variable")


@pytest.mark.leaks("environment")
def test_other_kinds_are_still_found(leak):
    leak("thread")


def test_failure_is_told_once(leak):
    leak("variable")
    raise ValueError("first")
