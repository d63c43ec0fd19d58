"""Verbs on a device: the numbers of the CPU under every schedule, and a host that never waits."""

from __future__ import annotations

import pytest
import torch
from tests.accelerator.ranks import device_ranks, own_device
from tests.comm import test_verbs as on_cpu

from unisono.comm import Communicator, world

AS_ON_THE_CPU = (
    "test_a_reduction_in_place_of_a_lazily_negated_element",
    "test_a_scatter_of_known_blocks_counts_dims_from_the_end_alike_on_all_ranks",
    "test_all_equal_compares_values_and_types",
    "test_all_gather_along_any_dim_of_a_strided_tensor",
    "test_all_gather_joins_uneven_blocks",
    "test_all_reduce_in_place_keeps_layout_and_leaf",
    "test_all_reduce_sums_every_dtype_and_size",
    "test_all_reduce_with_other_ops",
    "test_all_to_all_delivers_rows_in_rank_order",
    "test_bitwise_reductions",
    "test_blocks_that_do_not_fit_are_refused_on_all_ranks_alike",
    "test_blocks_without_rows_of_strided_tensors_travel",
    "test_broadcast_reaches_ranks_that_bring_nothing",
    "test_coalesced_all_reduces_equal_single_ones",
    "test_every_verb_also_runs_async",
    "test_exchange_needs_no_order",
    "test_gather_and_scatter_are_inverse",
    "test_mean_divides_by_the_number_of_ranks",
    "test_messages_arrive_in_order_and_by_tag",
    "test_objects_travel",
    "test_reduce_gives_the_result_to_one_rank_only",
    "test_reduce_scatter_gives_each_rank_its_block",
    "test_sum64_carries_float32_in_float64",
    "test_unsigned_64_bit_order_has_no_sign",
    "test_what_a_verb_replaces_is_not_used_by_autograd_any_more",
    "test_what_was_started_in_inference_mode_may_be_waited_for_outside",
)
"""Tests of `tests/comm/test_verbs.py` that hold on every transport."""


def on_device() -> Communicator:
    """Return the world for tensors of this rank's device."""
    return world().with_device(own_device())


def run_on_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test of the CPU's verbs with tensors of the device."""
    test = getattr(on_cpu, name)
    monkeypatch.setitem(test.__globals__, "world", on_device)
    with torch.device(own_device()):
        test()


@pytest.mark.parametrize("name", AS_ON_THE_CPU)
@device_ranks(3)
def test_a_verb_gives_what_it_gives_on_the_cpu(name, schedule, monkeypatch):
    run_on_device(name, monkeypatch)
