"""The list of checks that the ranks of an MPI job run, the same for the job and for pytest.

Most are test functions of the shared-memory transport, run here on MPI: what torch builds on a
group, every kernel, and the verbs of MPI's style must do the same on both. The rest, `check_*` of
the files beside this one, is about MPI itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
from pathlib import Path

import torch.distributed as dist

HERE = Path(__file__).parent
OWN = ("kernels", "verbs", "trouble", "worlds")
"""Files with checks of MPI alone, in the order in which they run; `worlds` ends the world."""
TORCH_CASES = (
    "test_ddp_trains_as_one_process_does",
    "test_ddp_with_no_sync_accumulates_locally",
    "test_ddp_with_unused_parameters_and_join_of_uneven_inputs",
    "test_ddp_compression_hooks_keep_ranks_together",
    "test_ddp_with_a_hook_that_issues_a_collective_in_its_callback",
    "test_ddp_forces_by_double_backward",
    "test_fully_shard_trains_as_one_process_does",
    "test_fully_shard_on_a_two_dimensional_mesh_in_bfloat16",
    "test_fsdp1_trains_as_one_process_does",
    "test_dtensor_matmul_redistribute_uneven_and_second_derivative",
    "test_tensor_parallel_column_row_and_sequence",
    "test_distributed_checkpoint_saves_loads_and_saves_in_the_background",
    "test_zero_redundancy_optimizer_steps_and_consolidates",
    "test_functional_collectives_eager_with_first_and_second_derivative",
    "test_functional_collectives_compiled_by_aot_eager",
    "test_object_collectives_and_batched_messages",
    "test_coalescing_manager_joins_reductions_gathers_and_scatters",
    "test_device_mesh_of_two_axes_and_subgroups",
    "test_one_forward_one_backward_pipeline",
)
KERNEL_CASES = (
    "test_all_reduce_of_every_dtype_and_size",
    "test_all_reduce_and_reduce_with_every_operation",
    "test_broadcast_from_each_rank",
    "test_all_gather_and_gather_of_uneven_blocks",
    "test_scatter_of_uneven_blocks_from_each_rank",
    "test_reduce_scatter_of_uneven_blocks_also_in_place",
    "test_all_to_all_of_uneven_blocks",
    "test_ints_and_barrier",
    "test_calls_without_waiting_end_in_the_order_in_which_they_were_issued",
    "test_half_precision_sums_are_rounded_once",
    "test_sum64_carries_float32_in_float64",
    "test_all_ranks_get_the_same_bits_and_the_sum_in_rank_order",
    "test_an_undefined_reduction_is_refused_and_leaves_the_group_intact",
)
STYLE_CASES = (
    "test_reductions_and_scans_of_every_op_and_dtype_equal_numpy",
    "test_half_precision_sums_are_sums_and_in_place_numpy_and_shapes_of_one_size_work",
    "test_bcast_gathers_and_scatters_along_every_axis_equal_numpy",
    "test_blocks_of_different_lengths_go_to_their_displacements",
    "test_gathers_in_place_take_the_own_block_from_the_receive_buffer",
    "test_alltoall_turns_an_array_split_along_one_axis_into_one_split_along_another",
    "test_alltoall_along_one_axis_exchanges_blocks_also_uneven_ones",
    "test_messages_match_by_source_and_tag_in_the_order_of_sending",
    "test_messages_into_strided_buffers_of_other_dtypes_and_without_elements",
    "test_receives_posted_early_complete_inside_other_waits",
    "test_a_synchronous_send_waits_for_its_receive_and_a_plain_one_does_not",
    "test_sends_beyond_the_buffer_wait_for_receivers_and_serve_own_receives_meanwhile",
    "test_messages_that_do_not_fit_are_refused_and_the_next_one_arrives",
    "test_a_receive_that_nobody_serves_ends_with_a_report",
    "test_split_orders_by_key_and_contexts_keep_messages_apart",
    "test_objects_travel_and_wrong_counts_are_refused_alike_on_all_ranks",
    "test_several_collectives_under_way_may_be_completed_in_any_order",
)
_WAYS = ("plain", "in_pieces", "native")
"""Ways to do a kernel over MPI, where the tests of shared memory have large and small slots."""


def load(path):
    """Import a file by its path; it belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"mpi_ranks_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def engine_made(way):
    """Yield the engine of a new MPI group of all ranks: as it is, cut in pieces, or native."""
    group = dist.new_group(backend="mpi4py")
    engine = group.unisono_engine
    if way in ("in_pieces", "small_slots"):
        engine.channel.chunk_bytes = 4096
    if way == "native":
        os.environ["UNISONO_ALGO"] = "all_reduce:native"
    try:
        yield engine
        dist.destroy_process_group(group)
    finally:
        os.environ.pop("UNISONO_ALGO", None)


def cases(size):
    """Return name and function of each check for a world of `size` ranks, in order."""
    torch_tests = load(HERE.parent / "test_torch_on_shm.py")
    kernel_tests = load(HERE.parent / "test_shm_kernels.py")
    kernel_tests.engine_made = engine_made
    found = []
    style_tests = load(HERE.parents[1] / "test_mpi_style.py")
    for module, names in (
        (kernel_tests, KERNEL_CASES),
        (torch_tests, TORCH_CASES),
        (style_tests, STYLE_CASES),
    ):
        for name in names:
            found += _borrowed(getattr(module, name), size)
    for stem in OWN:
        for name, function in vars(load(HERE / f"{stem}.py")).items():
            if name.startswith("check_") and size in getattr(function, "sizes", (size,)):
                found.append((name.removeprefix("check_"), function))
    return found


def _borrowed(test, size):
    """Return the calls of a pytest function that its marks ask for on `size` ranks."""
    marks = {mark.name: mark for mark in test.pytestmark}
    ranks = marks["ranks"].args[0]
    if size != ranks and (isinstance(ranks, int) or size not in ranks):
        return []
    choices = []
    for mark in test.pytestmark:
        if mark.name == "parametrize":
            argument, values = mark.args[:2]
            values = _WAYS if argument == "way" else values
            choices.append([(argument, value) for value in values])
    found = []
    for chosen in itertools.product(*choices):
        words = "-".join(str(value) for _, value in chosen)
        name = test.__name__.removeprefix("test_") + (f"[{words}]" if words else "")
        found.append((name, lambda chosen=chosen: test(**dict(chosen))))
    return found
