"""The list of checks that the ranks of an MPI job run, the same for the job and for pytest.

Most are test functions of the shared-memory transport, run here on MPI: what torch builds on a
group, and every kernel, must do the same on both. The rest, `check_*` of the files beside this one,
is about MPI itself.
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
        os.environ["UNISONO_ALGO"] = "all_reduce:native,reduce_scatter:native"
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
    for module, names in ((kernel_tests, KERNEL_CASES), (torch_tests, TORCH_CASES)):
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
