"""The matrix of ranks: set-up, clean-up, queries, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from unisono import Mesh
from unisono import graph_parallel as gp
from unisono.comm import groups as cache
from unisono.comm import world
from unisono.compat import gp_utils
from unisono.errors import MeshError, PartitionError, PlatformError


def setup(size):
    gp.setup_gp({"gp_gpus": size, "distributed_backend": None})


@pytest.mark.ranks(4)
def test_rows_are_consecutive_ranks_and_columns_go_across():
    rank = world().rank
    for size in (1, 2, 4):
        setup(size)
        assert gp.initialized()
        assert (gp.get_gp_world_size(), gp.get_dp_world_size()) == (size, 4 // size)
        assert (gp.get_gp_rank(), gp.get_dp_rank()) == (rank % size, rank // size)
        row = list(range(rank // size * size, rank // size * size + size))
        assert dist.get_process_group_ranks(gp.get_gp_group()) == row
        assert dist.get_process_group_ranks(gp.get_dp_group()) == list(range(rank % size, 4, size))
        gp.cleanup_gp()
        assert not gp.initialized()


@pytest.mark.ranks([1, 2, 4])
def test_set_up_after_clean_up_works_any_number_of_times_and_leaves_no_group():
    before = cache.count()
    size = min(2, world().size)
    for _ in range(3):
        setup(size)
        x = torch.ones(3)
        assert torch.equal(gp.reduce(x, grad="identity"), size * x)
        gp.cleanup_gp()
        gp.cleanup_gp()
        assert cache.count() == before


@pytest.mark.ranks(4)
def test_clean_up_also_ends_groups_that_others_were_laid_over():
    before = cache.count()
    setup(2)
    gp.use_groups(gp.graph_groups(4))
    assert gp.get_gp_world_size() == 4
    gp.cleanup_gp()
    assert not gp.initialized()
    assert cache.count() == before


@pytest.mark.ranks(2)
def test_a_row_equal_to_the_world_is_the_world():
    before = cache.count()
    setup(2)
    assert gp.get_gp_group() is dist.group.WORLD
    assert cache.count() == before
    gp.cleanup_gp()
    assert world().all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks(2)
def test_another_backend_than_that_of_the_world():
    other = "gloo" if world().backend == "shm" else "shm"
    gp.setup_graph_parallel_groups(2, other)
    assert gp.graph_groups(2, backend=other).gp.backend == other
    assert gp.reduce(torch.ones(1), grad="identity").item() == 2
    gp.cleanup_gp()


@pytest.mark.ranks([1, 3])
def test_queries_before_set_up():
    assert not gp.initialized()
    assert (gp.get_gp_world_size(), gp.get_gp_rank()) == (1, 0)
    assert (gp.get_dp_world_size(), gp.get_dp_rank()) == (world().size, world().rank)
    assert gp.get_gp_group() is None
    assert gp.get_dp_group() is None
    assert gp.get_gp_group() is None


def test_a_plain_process_is_a_row_of_one():
    assert (gp.get_dp_world_size(), gp.get_dp_rank()) == (1, 0)
    x = torch.arange(3.0)
    assert torch.equal(gp.scatter_to_model_parallel_region(x), x)
    gp.setup_gp({"gp_gpus": 4})
    try:
        assert gp.initialized()
        assert gp.get_gp_world_size() == 1
        assert gp.get_gp_group() is None
        assert torch.equal(gp.gather(x, grad="slice"), x)
    finally:
        gp.cleanup_gp()


@pytest.mark.ranks(4)
def test_a_clean_up_inside_a_block_is_not_undone_at_its_end():
    gp.setup_gp({"gp_gpus": 1, "distributed_backend": None})
    with gp.use_groups(gp.graph_groups(world().size)):
        gp.cleanup_gp()
        assert not gp.initialized()
    assert not gp.initialized()
    with pytest.raises(MeshError, match="before set-up"):
        gp.reduce(torch.ones(1), grad="identity")
    with gp.use_groups(gp.graph_groups(world().size)):
        gp.cleanup_gp()
        gp.setup_gp({"gp_gpus": 1, "distributed_backend": None})  # lives on after the block
    assert gp.get_gp_world_size() == 1
    assert gp.initialized()
    gp.cleanup_gp()


@pytest.mark.ranks(4)
def test_a_mesh_brings_the_groups_without_making_any_twice():
    mesh = Mesh(dp=2, gp=2)
    before = (mesh.comm("gp"), mesh.comm("dp"), cache.count())
    with gp.use_groups(mesh) as groups:
        assert groups.matrix == ((0, 1), (2, 3))
        assert (groups.gp, groups.dp, cache.count()) == before
        assert gp.reduce(torch.ones(1), grad="identity").item() == 2
        with gp.use_groups(gp.graph_groups(4)):
            assert gp.get_gp_world_size() == 4
        assert gp.get_gp_world_size() == 2
    assert not gp.initialized()
    assert gp.graph_groups(2) == groups
    other = Mesh(gp=2, rest=1, dp=2)
    with gp.use_groups(other) as groups:
        assert groups.matrix == ((0, 2), (1, 3))


@pytest.mark.ranks(4)
def test_what_does_not_fit_the_world_is_refused_on_all_ranks():
    with pytest.raises(MeshError, match=r"4 % 3 = 1.*\n.*HINT: one of \[1, 2, 4\]"):
        setup(3)
    with pytest.raises(MeshError, match="8 > 4"):
        gp.setup_graph_parallel_groups(8, "gloo")
    for bad in (0, -1, 1.5, "2", None, True):
        with pytest.raises(MeshError, match="gp_gpus"):
            setup(bad)
    with pytest.raises(MeshError, match="gp_gpus"):
        gp.setup_gp({"gpus": 2})
    with pytest.raises(AssertionError, match="gp_gpus"):
        gp.setup_gp({})
    with pytest.raises(PlatformError, match="backends are gloo, shm, mpi, nccl"):
        gp.setup_gp({"gp_gpus": 2, "distributed_backend": "glue"})
    assert not gp.initialized()
    setup(2)
    with pytest.raises(MeshError, match=r"dp\(2\) x gp\(2\)") as caught:
        setup(2)
    assert "HINT: call cleanup_gp() first" in str(caught.value)
    assert isinstance(caught.value, AssertionError)
    gp.cleanup_gp()
    setup(8)
    assert gp.get_gp_world_size() == 4
    gp.cleanup_gp()


def test_rows_of_several_ranks_need_a_process_group():
    with pytest.raises(MeshError, match=r"unisono\.run"):
        gp.setup_graph_parallel_groups(2)


@pytest.mark.ranks(2)
def test_a_region_before_set_up_names_it():
    for region in (
        gp.copy_to_model_parallel_region,
        gp.reduce_from_model_parallel_region,
        gp.scatter_to_model_parallel_region,
        gp.gather_from_model_parallel_region,
        gp_utils.CopyToModelParallelRegion.apply,
        gp_utils.own_block,
    ):
        with pytest.raises(MeshError, match="setup_gp"):
            region(torch.ones(4))


def test_only_groups_and_sizes_that_mean_something_are_taken():
    for wrong in (5, None, (0, 1)):
        with pytest.raises(TypeError, match=r"expected GraphGroups or Mesh(.|\n)*graph_groups\("):
            gp.use_groups(wrong)
    assert not gp.initialized()
    weight = torch.nn.Parameter(torch.ones(2))
    for size in (-1, float("nan"), float("inf"), True, "25"):
        with pytest.raises((PartitionError, TypeError), match=r"bucket_mb=(.|\n)*HINT"):
            gp.sync_gradients([weight], bucket_mb=size)
    gp.sync_gradients([weight], bucket_mb=0)


def test_division_is_checked():
    gp.ensure_div(6, 3)
    assert gp.divide_and_check_no_remainder(6, 3) == 2
    with pytest.raises(PartitionError, match=r"7 is not divisible by 2 \(remainder 1\)"):
        gp.ensure_div(7, 2)
    with pytest.raises(AssertionError):
        gp.divide_and_check_no_remainder(1, 0)
