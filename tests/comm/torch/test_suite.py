"""A sample of torch's own tests of torch.distributed, on shm; `suite.py` runs all of them."""

from __future__ import annotations

import pytest
from tests.comm.torch.suite import lost, outcomes

pytest.importorskip("expecttest", reason="torch's own tests import it")

SAMPLE = (
    "test_3_level_hierarchical_model_averager",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_group_max",
    "test_all_reduce_sum_cuda_async",
    "test_all_to_all_single_unequal_split_full_group",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_broadcast_group",
    "test_coalescing_manager_async",
    "test_ddp_comm_hook_logging",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_logging_data_cpu",
    "test_ddp_uneven_input_exception",
    "test_gather_object",
    "test_get_future",
    "test_irecv",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo",
    "test_new_subgroups_group_size_exceeds_world_size",
    "test_reduce_group_product",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_verify_model_across_rank_without_logger",
)
"""Parts of names, one or two of each family."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sample_of_torchs_own_tests_holds_on_shm(tmp_path):
    found = outcomes("shm", SAMPLE, tmp_path / "log.txt")
    assert {name: text for name, text in found.items() if text != "holds"} == {}
    assert len(found) >= len(SAMPLE)


def test_what_holds_on_the_reference_alone_is_lost():
    gloo = {"a": "holds", "b": "holds", "c": "ValueError: no"}
    assert lost(gloo, {"a": "holds", "b": "ValueError: no", "c": "holds"}) == ["b"]
