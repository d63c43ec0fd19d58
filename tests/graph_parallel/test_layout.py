"""Debug tags: each misuse is found where it happens, and right programs pass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono import graph_parallel as gp
from unisono import operators
from unisono.comm import world
from unisono.compat import gp_utils
from unisono.errors import LayoutError
from unisono.graph_parallel import layout
from unisono.graph_parallel.layout import difference_over_ranks


@pytest.mark.ranks(2)
def test_tags_follow_values_through_torch_functions():
    comm = world()
    with gp.layout_check():
        x = gp.mark(torch.ones(4, 3), "replicated")
        part = gp.scatter(x, comm=comm)
        weight = nn.Linear(3, 2)
        assert gp.layout_of(part) == "sharded"
        assert gp.layout_of(x * x + x) == "replicated"
        assert gp.layout_of(weight(part).tanh() * 3) == "sharded"
        assert gp.layout_of((part * 2).sum(1)) == "sharded"
        assert gp.layout_of((part * 2).sum(0)) == "partial"
        assert gp.layout_of(part.sum()) == "partial"
        assert gp.layout_of(part.sum(1).sum()) == "partial"
        assert gp.layout_of(-part.sum() / 3 + part.sum()) == "partial"
        assert gp.layout_of(part.sum().exp()) is None
        assert gp.layout_of(part.mean(0)) != "partial"
        assert gp.layout_of(torch.ones(2)) is None
        assert gp.layout_of(torch.zeros(4, 3).index_add(0, torch.arange(2), part)) == "partial"
        assert gp.layout_of(gp.reduce(part.sum(), grad="identity", comm=comm)) == "replicated"
        assert gp.layout_of(gp.gather(part, grad="slice", comm=comm)) == "replicated"
        assert gp.layout_of(gp.copy(x, comm=comm)) == "replicated"
        own = gp.gather(part, grad="sum", comm=comm)[comm.rank :]  # other rows on each rank
        assert gp.layout_of(own) is None
        gp.reduce((own**2).sum(), grad="identity", comm=comm)
        plan = gp.GraphPlan(
            gp.GraphPartition.contiguous(4, 2), torch.tensor([[0, 3], [3, 0]]), comm=comm
        )
        assert gp.layout_of(plan.exchange(part)) == "sharded"
        assert gp.layout_of(plan.message_pass(part, lambda a, b, _: a + b)) == "sharded"
    assert gp.layout_of(part) is None


@pytest.mark.ranks(2)
def test_each_misuse_raises_and_says_where_the_tensor_became_what_it_is():
    comm = world()
    with gp.layout_check():
        x = gp.mark(torch.ones(4, 3), "replicated")
        part = gp.scatter(x, comm=comm)
        energy = gp.reduce(part.sum(), grad="identity", comm=comm)
        with pytest.raises(LayoutError, match=r"reduced twice(.|\n)*test_layout\.py:\d+"):
            gp.reduce(energy, grad="identity", comm=comm)
        with pytest.raises(LayoutError, match="reduced twice"):
            gp.reduce(energy * energy, grad="identity", comm=comm)
        with pytest.raises(LayoutError, match="reduce of a sharded tensor"):
            gp.reduce(part, grad="identity", comm=comm)
        with pytest.raises(LayoutError, match="gather of a replicated tensor"):
            gp.gather(x, grad="slice", comm=comm)
        with pytest.raises(LayoutError, match="scatter of a sharded tensor"):
            gp.scatter(part, comm=comm)
        with pytest.raises(LayoutError, match="partial and a replicated"):
            part.sum() + energy
        with pytest.raises(LayoutError, match="one of 'replicated'"):
            gp.mark(x, "split")
        gp.reduce(gp.mark(energy * 1, "partial"), grad="identity", comm=comm)
    gp.reduce(energy, grad="identity", comm=comm)  # outside nobody looks


@pytest.mark.ranks(2)
def test_a_sum_made_by_other_means_is_no_longer_partial():
    comm = world()

    def in_place_of_a_view(e):
        total = e.clone()
        comm.all_reduce_(total.detach())
        return total

    def by_torch(e):
        total = e.clone()
        dist.all_reduce(total)
        return total.clone()

    gp.setup_gp({"gp_gpus": comm.size, "distributed_backend": None})
    with gp.layout_check():
        e = gp.mark(torch.ones(2) + comm.rank, "partial")
        reduced = gp.reduce(e, grad="identity")
        for total in (
            comm.all_reduce,
            lambda x: comm.start.all_reduce(x).wait(),
            lambda x: comm.all_reduce_(x.clone()),
            lambda x: operators.sum_to_replicated(x, comm=comm),
            lambda x: operators.all_sum_reduce(x, comm=comm),
            gp_utils.ReduceFromModelParallelRegion.apply,
            in_place_of_a_view,
            by_torch,
        ):
            summed = total(e)
            assert gp.layout_of(summed) != "partial"
            assert torch.equal(summed + reduced, 2 * reduced)  # no clash
        assert gp.layout_of(e) == "partial"
        part = gp.scatter(torch.ones(2))
        for total in (comm.all_reduce, lambda x: operators.all_sum_reduce(x, comm=comm)):
            assert gp.layout_of(total(part)) != "sharded"  # all of it on every rank
    gp.cleanup_gp()


@pytest.mark.ranks(2)
def test_what_each_rank_made_of_a_replicated_tensor_may_be_reduced():
    comm = world()
    r = comm.rank
    with gp.layout_check():
        x = gp.mark(torch.arange(2.0, 10.0).view(2, 2, 2).requires_grad_(), "replicated")
        e = (gp.copy(x, comm=comm)[r] ** 2).sum()
        masked, set_by_place = x.detach() * x.detach(), x.detach() * x.detach()
        for own in (masked, set_by_place):
            assert gp.layout_of(own) == "replicated"
        masked.mul_(1.0 if r == 0 else 0.0)
        set_by_place[r] = 0
        for made in (
            e,
            torch.vsplit(x, 2)[r],
            torch.hsplit(x, 2)[r],
            torch.dsplit(x, 2)[r],
            x.diagonal(0, r, r + 1),
            x.tril(r),
            x.triu(r),
            torch.nn.functional.pad(x, (r, 1 - r)),
            x * (1.0 if r == 0 else 0.0),
            (1.0 if r == 0 else 0.0) * x,
            x + r,
            torch.sub(x, other=r),
            x**r,
            masked,
            set_by_place,
        ):
            assert gp.layout_of(made) is None
            gp.reduce(made.detach().contiguous(), grad="identity", comm=comm)
        plan = gp.GraphPlan(
            gp.GraphPartition.contiguous(2, 2), torch.tensor([[0, 1], [1, 0]]), comm=comm
        )
        own = plan.scatter(x)
        for kind in ("slice", "sum"):
            assert gp.layout_of(plan.gather(own, grad=kind)) == "replicated"
        with pytest.raises(LayoutError, match="every rank holds all of it"):
            plan.gather(plan.gather(own, grad="slice"), grad="slice")
        with pytest.raises(LayoutError, match="too large by their number"):
            torch.autograd.grad(plan.gather(own, grad="sum").sum(), x)
        energy = gp.reduce((x * comm.rank).sum(), grad="sum", comm=comm)
        for differentiate in (Tensor.backward, torch.autograd.backward):
            with pytest.raises(LayoutError, match="too large by their number"):
                differentiate(energy)


@pytest.mark.ranks(2)
def test_function_classes_are_watched_as_the_functions_are():
    comm = world()
    gp.setup_gp({"gp_gpus": comm.size, "distributed_backend": None})
    with gp.layout_check():
        e = gp.mark(torch.ones(4, requires_grad=True) * 3, "partial")
        total = gp_utils.ReduceFromModelParallelRegion.apply(e)
        assert gp.layout_of(total) == "replicated"
        with pytest.raises(LayoutError, match="reduced twice"):
            gp_utils.ReduceFromModelParallelRegion.apply(total)
        with pytest.raises(LayoutError, match="gather of a replicated tensor"):
            gp_utils.GatherFromModelParallelRegion.apply(total, 0)
        part = gp_utils.ScatterToModelParallelRegion.apply(total, 0)
        assert gp.layout_of(part) == "sharded"
        assert (
            gp.layout_of(gp_utils.GatherFromModelParallelRegionSumGrad.apply(part)) == "replicated"
        )
        assert gp.layout_of(gp_utils.ReduceScatterToModelParallelRegion.apply(e)) == "sharded"
        with pytest.raises(LayoutError, match="values differ"):
            gp_utils.CopyToModelParallelRegion.apply(torch.ones(1) * comm.rank)
    gp.cleanup_gp()


@pytest.mark.ranks(2)
def test_values_that_must_be_equal_on_all_ranks_are_compared():
    comm = world()
    mine = torch.full((2, 2), 1.0 + comm.rank)
    with gp.layout_check():
        for region in (gp.copy, gp.scatter):
            with pytest.raises(LayoutError, match="values differ by 1, the largest is 2"):
                region(mine, comm=comm)
        x = torch.ones(2, requires_grad=True)
        y = gp.gather(x, grad="slice", comm=comm)
        with pytest.raises(LayoutError, match=r'must be equal(.|\n)*HINT: grad="sum"'):
            (y * (1 + comm.rank)).sum().backward()  # each rank uses it in its own way
        gp.gather(x, grad="slice", comm=comm).sum().backward()


@pytest.mark.ranks(2)
def test_infinite_and_missing_values_are_equal_where_all_ranks_have_them():
    comm = world()
    inf, nan = float("inf"), float("nan")
    for values in ([0.0, -inf], [inf, -inf, nan, 1.0], [nan], [1e308, -1e308]):
        x = torch.tensor(values, dtype=torch.float64)
        assert difference_over_ranks(x, comm) is None
        assert difference_over_ranks(torch.complex(x, x), comm) is None
    with gp.layout_check():
        gp.copy(torch.tensor([0.0, -inf]), comm=comm)
        for odd in (inf, -inf, nan):
            mine = torch.tensor([1.0, odd if comm.rank else 0.0, nan, -inf])
            with pytest.raises(LayoutError, match="1 of 4 values are nan or infinite on some"):
                gp.scatter(mine, comm=comm)
        signs = torch.tensor([inf if comm.rank else -inf])
        with pytest.raises(LayoutError, match="1 of 1 values"):
            gp.copy(signs, comm=comm)
        with pytest.raises(LayoutError, match="values differ by 1, the largest is 1"):
            gp.copy(torch.tensor([inf, float(comm.rank)]), comm=comm)


@pytest.mark.ranks(2)
def test_the_mode_can_be_nested_and_leaves_nothing():
    x = torch.ones(2)
    with gp.layout_check():
        gp.mark(x, "partial")
        with gp.layout_check():
            assert gp.layout_of(x) is None
        assert gp.layout_of(x) == "partial"
    assert gp.layout_of(x) is None


def test_a_variable_turns_it_on_for_the_whole_run(monkeypatch):
    monkeypatch.setenv("UNISONO_CHECK", "0")
    layout.start_from_environment()
    assert gp.layout_of(gp.mark(torch.ones(1), "partial")) is None
    monkeypatch.setenv("UNISONO_CHECK", "1")
    layout.start_from_environment()
    try:
        x = gp.mark(torch.ones(1), "partial")
        assert gp.layout_of(-x * 2) == "partial"
        assert gp.layout_of(x + 1) is None  # which would be added once on each rank
    finally:
        layout.follower.__exit__(None, None, None)
        layout._follow_with(None)


def stress_of(plan, pos, mistake):
    """The stress of springs between all pairs, as the documentation has it, or with a mistake."""
    own = plan.scatter(pos).requires_grad_()
    strain = torch.zeros(3, 3, dtype=pos.dtype, requires_grad=True)
    bent = gp.copy(strain, comm=plan.comm)
    source, target = plan.edge_index
    apart = own[target] - plan.extend(own)[source]
    mine = (apart + apart @ bent).square().sum() / 4
    energy = plan.reduce(mine, grad="sum" if mistake == "scale" else "identity")
    of = energy if mistake == "scale" else mine
    slope, force = torch.autograd.grad(of, (strain, own))
    if mistake == "forces":
        plan.reduce(force, grad="identity")
    stress = slope / 8.0
    return plan.reduce(stress, grad="identity") if mistake == "twice" else stress


@pytest.mark.ranks([2, 3])
def test_a_stress_reduced_twice_or_scaled_by_the_ranks_is_named():
    comm = world()
    pos = torch.rand(9, 3, dtype=torch.float64)
    edges = torch.cartesian_prod(torch.arange(9), torch.arange(9)).T
    plan = gp.GraphPlan(gp.GraphPartition.contiguous(9, comm.size), edges, comm=comm)
    apart = pos[edges[0]] - pos[edges[1]]
    wanted = apart.T @ apart / 2 / 8.0
    for mistake, factor in ((None, 1), ("twice", comm.size), ("scale", comm.size)):
        torch.testing.assert_close(stress_of(plan, pos, mistake), factor * wanted)
    with gp.layout_check():
        torch.testing.assert_close(stress_of(plan, pos, None), wanted)
        with pytest.raises(LayoutError, match=r"reduced twice(.|\n)*test_layout\.py:\d+"):
            stress_of(plan, pos, "twice")
        with pytest.raises(LayoutError, match=r"too large by their number(.|\n)*identity"):
            stress_of(plan, pos, "scale")
        with pytest.raises(LayoutError, match="reduce of a sharded tensor"):
            stress_of(plan, pos, "forces")
