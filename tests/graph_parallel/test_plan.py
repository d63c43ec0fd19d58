"""Halo plans: the rows that edges need, no others; the adjoint brings gradients home; overlap."""

from __future__ import annotations

import pytest
import torch
from tests.operators.checks import drawn

from unisono import operators
from unisono.comm import check, trace, world
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError
from unisono.graph_parallel import (
    GraphPartition,
    GraphPlan,
    graph_groups,
    sync_gradients,
    use_groups,
)
from unisono.testing import check_adjoint


def graphs(parts):
    """Graphs that are awkward: loops, doubles, isolated ranks, ranks without edges or nodes."""
    generator = torch.Generator().manual_seed(3)
    ring = torch.stack([torch.arange(12), torch.arange(1, 13) % 12])
    yield "ring", ring, GraphPartition.contiguous(12, parts)
    chaos = torch.randint(0, 11, (2, 40), generator=generator)
    yield "random", chaos, GraphPartition.from_owner(torch.arange(11) * 5 % parts, parts)
    twice = torch.cat([ring, ring.flip(0), ring[:, :3], torch.tensor([[2, 5], [2, 5]])], 1)
    yield "loops and doubles", twice, GraphPartition.balanced(twice, 12, parts)
    inside = torch.tensor([[0, 1], [1, 0]])
    yield "one rank has all edges", inside, GraphPartition.contiguous(12, parts)
    yield "fewer nodes than ranks", inside, GraphPartition.contiguous(2, parts)
    last = GraphPartition.from_owner(torch.full((12,), parts - 1), parts)
    yield "one rank has all nodes", twice, last
    yield "no edges", ring[:, :0], GraphPartition.contiguous(5, parts)
    yield "nothing", ring[:, :0], GraphPartition.contiguous(0, parts)


def message(x_src, x_dst, attr):
    return (x_src * 2 + x_dst).sin() * (1 if attr is None else attr)


def serial(x, edges, attr=None):
    source, target = edges
    sent = message(x[source], x[target], attr)
    return torch.zeros_like(x).index_add(0, target, sent)


@pytest.mark.ranks([1, 2, 3, 4], timeout=60, backend=["gloo", "shm"])
def test_message_passing_over_ranks_equals_one_process_to_the_second_derivative():
    comm = world()
    for name, edges, part, shape in [
        (*graph, shape) for shape in ((2,), ()) for graph in graphs(comm.size)
    ]:
        x, attr, w = (
            drawn(part.num_nodes, *shape),
            drawn(edges.shape[1], *shape, seed=1),
            drawn(part.num_nodes, *shape, seed=2),
        )
        whole = x.clone().requires_grad_()
        energy = (w * serial(serial(whole, edges, attr), edges)).sum()
        (force,) = torch.autograd.grad(energy, whole, create_graph=True)
        (second,) = torch.autograd.grad((force**2).sum(), whole)
        plan = GraphPlan(part, edges, comm=comm)
        own = plan.local_nodes
        assert torch.equal(plan.scatter(x), x[own])
        assert torch.equal(plan.gather(x[own], grad="slice"), x)
        assert torch.equal(plan.extend(x[own]), x[torch.cat([own, plan.halo_nodes])])
        at = x[own].clone().requires_grad_()
        y = plan.message_pass(at, message, edge_attr=attr[plan.edge_ids])
        y = plan.message_pass(y, message)
        wanted = serial(serial(x, edges, attr), edges)
        torch.testing.assert_close(y.detach(), wanted[own], msg=name)
        (mine,) = torch.autograd.grad((w[own] * y).sum(), at, create_graph=True)
        torch.testing.assert_close(mine.detach(), force.detach()[own], msg=name)
        (mine,) = torch.autograd.grad((mine**2).sum(), at)
        torch.testing.assert_close(mine, second[own], msg=name)


@pytest.mark.ranks([1, 2, 3], backend=["gloo", "shm"])
def test_exchange_is_plain_indexing_and_its_backward_adds_the_rows_at_home():
    comm = world()
    for _, edges, part in graphs(comm.size):
        plan = GraphPlan(part, edges, comm=comm)
        x = drawn(part.num_nodes, 3)
        rows = x[plan.local_nodes]
        assert torch.equal(plan.exchange(rows), x[plan.halo_nodes])
        y = drawn(plan.num_halo, 3, seed=comm.rank)

        def home(halo, rows=plan.rows):
            return operators.add_rows(halo, rows, comm=comm)

        check_adjoint(plan.exchange, home, rows, y, domain="S", range="I")


@pytest.mark.ranks([2, 3])
def test_local_edge_lists_give_the_same_plan_as_the_whole_list():
    comm = world()
    for _, edges, part in graphs(comm.size):
        whole = GraphPlan(part, edges, comm=comm)
        local = GraphPlan(part, edges[:, whole.edge_ids], edges="local", comm=comm)
        for name in ("edge_index", "halo_nodes", "local_nodes", "send_index", "inner_edges"):
            assert torch.equal(getattr(whole, name), getattr(local, name)), name
        assert whole.rows == local.rows
        assert whole.stats == local.stats == part.stats(edges)


@pytest.mark.ranks(2)
def test_several_tensors_travel_in_one_exchange():
    comm = world()
    edges = torch.tensor([[0, 3, 4, 1], [3, 1, 0, 2]])
    plan = GraphPlan(GraphPartition.contiguous(5, 2), edges, comm=comm)
    x, v, z = drawn(5, 3), drawn(5, 2, 3, seed=1), torch.arange(5)
    own = plan.local_nodes
    for value in (x, v):
        value.requires_grad_()
    with trace() as t:
        hx, hv, hz = plan.exchange(x[own], v[own], z[own])
    assert len(t.events) == 2  # one for each dtype
    assert torch.equal(hx, x[plan.halo_nodes])
    assert torch.equal(hv, v[plan.halo_nodes])
    assert torch.equal(hz, z[plan.halo_nodes])
    (hx.sum() + (2 * hv).sum()).backward()
    asked = torch.zeros(5).index_add(0, own[plan.send_index], torch.ones(plan.send_index.numel()))
    assert torch.equal(x.grad, asked[:, None].double().expand(5, 3))
    assert torch.equal(v.grad, 2 * asked[:, None, None].double().expand(5, 2, 3))


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_the_halo_travels_while_inner_edges_are_computed_forward_and_backward():
    comm = world()
    nodes = 40
    edges = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    plan = GraphPlan(GraphPartition.contiguous(nodes, 2), edges, comm=comm)
    x = drawn(nodes, 2)[plan.local_nodes].requires_grad_()
    open_at = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t, name):
            ctx.name = name
            open_at.append((name, len(t_forward.events)))
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            open_at.append((f"{ctx.name} back", len(t_forward.events)))
            return grad, None

    names = iter(["inner", "outer"])

    def watched(x_src, x_dst, attr):
        return message(Watch.apply(x_src, next(names)), x_dst, attr)

    with trace() as t_forward:
        y = plan.message_pass(x, watched)
        assert [e.is_async for e in t_forward.events] == [True]
        y.sum().backward()
    # an event is taken down when its transfer has been waited for
    assert open_at == [("inner", 0), ("outer", 1), ("outer back", 1), ("inner back", 1)]
    forward, backward = t_forward.events
    assert forward.op == backward.op == "all_to_all"
    assert [e.is_async for e in t_forward.events] == [True, True]


@pytest.mark.ranks(2)
def test_third_derivatives_and_repeated_backwards_through_the_two_halves():
    comm = world()
    edges = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]])
    plan = GraphPlan(GraphPartition.contiguous(4, 2), edges, comm=comm)
    x = drawn(4)
    whole = x.clone().requires_grad_()
    at = x[plan.local_nodes].clone().requires_grad_()
    found = []
    for leaf, halo, own in ((whole, None, slice(None)), (at, plan, plan.local_nodes)):
        other = leaf[[2, 3, 0, 1]] if halo is None else halo.start(leaf).wait()
        value = (leaf**2 * other**3).sum()
        derivatives = []
        for _ in range(3):
            (derivative,) = torch.autograd.grad(value, leaf, create_graph=True)
            derivatives.append(derivative)
            value = (derivative**2).sum()
        (again,) = torch.autograd.grad(value, leaf, retain_graph=True)
        (twice,) = torch.autograd.grad(value, leaf)
        assert torch.equal(again, twice)
        found.append([*derivatives, twice])
        del own
    for wanted, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted[plan.local_nodes])


@pytest.mark.ranks(2)
def test_forward_mode_goes_through_the_two_halves():
    comm = world()
    edges = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]])
    plan = GraphPlan(GraphPartition.contiguous(4, 2), edges, comm=comm)
    x = drawn(4)[plan.local_nodes]

    def squares(t):
        made_here = GraphPlan(plan.partition, edges, comm=comm)
        return made_here.start(t).wait() ** 2

    _, tangent = torch.func.jvp(squares, (x,), (2 * x,))
    other = drawn(4)[plan.halo_nodes]
    torch.testing.assert_close(tangent, 4 * other**2)


@pytest.mark.ranks(2)
def test_refresh_keeps_a_plan_whose_edges_did_not_change():
    comm = world()
    edges = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]])
    part = GraphPartition.contiguous(4, 2)
    plan = GraphPlan(part, edges, comm=comm)
    assert plan.refresh(edges.clone()) is plan
    other = plan.refresh(edges[:, :2])
    assert other is not plan
    assert other.partition is part
    assert other.stats.edges_total == 2
    mine = edges[:, plan.edge_ids]
    local = GraphPlan(part, mine, edges="local", comm=comm)
    assert local.refresh(mine.clone()) is local
    changed = mine if comm.rank else mine[:, :1]  # one rank's change is everybody's
    assert local.refresh(changed) is not local


@pytest.mark.ranks(2)
def test_the_current_row_is_the_default():
    with use_groups(graph_groups(2)):
        plan = GraphPlan(GraphPartition.contiguous(4, 2), torch.tensor([[0], [3]]))
    assert plan.comm.size == 2
    assert plan.reduce(torch.ones(1), grad="identity").item() == 2
    assert "2 nodes" in repr(plan)


@pytest.mark.ranks(3, backend=["gloo", "shm"])
def test_ranks_with_another_graph_are_told_in_the_first_call_on_a_plan():
    comm = world()
    edges = torch.tensor([[0, 1, 2], [2, 1, 0]])
    part = GraphPartition.contiguous(4, 3)
    GraphPlan(part, edges, comm=comm).extend(torch.ones(part.sizes[comm.rank]))

    def mine(other):
        return other if comm.rank == 1 else edges

    moved = GraphPartition.from_owner([0, 1, 2, comm.rank], 3)
    for plan, text in (
        (GraphPlan(part, mine(edges[:, :2]), comm=comm), "other edges than on rank"),
        (GraphPlan(part, mine(edges.flip(0)), comm=comm), "other edges than on rank"),
        (GraphPlan(part, edges, comm=comm).refresh(mine(edges[:, :1])), "other edges than on rank"),
        (GraphPlan(moved, edges, comm=comm), "other owners of nodes"),
        (GraphPlan(moved, edges[:, :0], edges="local", comm=comm), "other owners of nodes"),
    ):
        own = torch.ones(plan.num_local)
        calls = (
            lambda: plan.gather(own, grad="slice"),  # noqa: B023
            lambda: plan.extend(own),  # noqa: B023
            lambda: plan.exchange(own, own),  # noqa: B023
            lambda: plan.start(own),  # noqa: B023
            lambda: plan.message_pass(own, message),  # noqa: B023
        )
        for call in calls:  # the plan stays refused
            with pytest.raises(PartitionError, match=text):
                call()


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_unlike_edges_are_told_where_the_halos_have_the_same_size():
    comm = world()
    edges = torch.tensor([[0, 5], [5, 0]]) if comm.rank else torch.tensor([[1, 6], [6, 1]])
    plan = GraphPlan(GraphPartition.contiguous(10, 2), edges, comm=comm)
    with pytest.raises(PartitionError, match="other edges than on rank"):
        plan.message_pass(plan.scatter(torch.arange(10.0)), message)


@pytest.mark.ranks(2)
def test_check_mode_finds_rows_that_need_gradients_on_some_ranks_only():
    comm = world()
    edges = torch.tensor([[0, 9, 3, 4], [9, 0, 4, 3]])
    plan = GraphPlan(GraphPartition.contiguous(10, 2), edges, comm=comm)
    x = torch.ones(5, 2, requires_grad=comm.rank == 0)
    with check():
        for call in (plan.exchange, plan.start):
            with pytest.raises(CollectiveMismatch, match="requires_grad"):
                call(x)
        halo = plan.exchange(x.detach().requires_grad_())
    assert halo.shape == (1, 2)
    assert halo.requires_grad


@pytest.mark.ranks(2)
def test_a_plan_that_does_not_fit_is_refused():
    comm = world()
    part = GraphPartition.contiguous(4, 2)
    edges = torch.tensor([[0, 1], [2, 1]])
    with pytest.raises(PartitionError, match="3 != 2"):
        GraphPlan(GraphPartition.contiguous(4, 3), edges, comm=comm)
    with pytest.raises(PartitionError, match="edge 0 is 0 -> 9"):
        GraphPlan(part, torch.tensor([[0], [9]]), comm=comm)
    foreign = torch.tensor([[0], [3 - 3 * comm.rank]])
    with pytest.raises(PartitionError, match=f"owned by rank {1 - comm.rank}, not {comm.rank}"):
        GraphPlan(part, foreign, edges="local", comm=comm)
    with pytest.raises(PartitionError, match="edges="):
        GraphPlan(part, edges, edges="some", comm=comm)
    plan = GraphPlan(part, edges, comm=comm)
    for call in (plan.exchange, plan.start):
        with pytest.raises(PartitionError, match="5"):
            call(torch.ones(5, 2))
    for wrong in (torch.ones(5, 2), torch.tensor(1.0)):
        with pytest.raises(PartitionError, match="!= 2 rows"):
            plan.exchange(torch.ones(2, 2), wrong)
    with pytest.raises(PartitionError, match="edge_index is a list"):
        plan.refresh(edges.tolist())
    with pytest.raises(TypeError, match="list, expected GraphPartition"):
        GraphPlan([0, 0, 1, 1], edges, comm=comm)
    for rows in (3, 9):
        with pytest.raises(PartitionError, match=f"{rows} != 4 rows(.|\n)*each of the 4 nodes"):
            plan.scatter(torch.ones(rows, 2))
    with pytest.raises(PartitionError, match='grad="slice"'):
        plan.gather(torch.ones(2))
    handle = plan.start(torch.ones(2, 2))
    handle.wait()
    with pytest.raises(UnisonoError, match="waited for once"):
        handle.wait()


@pytest.mark.ranks([1, 2])
def test_attributes_in_the_order_of_all_edges_are_refused_and_those_of_own_edges_are_right():
    comm = world()
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [5, 4, 3, 2, 1, 0, 3, 5]])
    weight = torch.arange(1.0, 9.0)[:, None]
    plan = GraphPlan(GraphPartition.contiguous(6, comm.size), edges, comm=comm)
    own = plan.edge_index.shape[1]

    def passed(edge_attr):
        x = plan.scatter(torch.ones(6, 1))
        y = plan.message_pass(x, lambda a, _, e: a * e, edge_attr=edge_attr)
        return plan.gather(y, grad="slice")

    truth = torch.zeros(6, 1).index_add(0, edges[1], weight)
    assert torch.equal(passed(weight[plan.edge_ids]), truth)
    wrong = weight if comm.size > 1 else weight[:5]
    with pytest.raises(PartitionError, match=rf"{len(wrong)} != {own} rows(.|\n)*\[plan.edge_ids"):
        passed(wrong)
    with pytest.raises(PartitionError, match="edge_ids"):
        passed(torch.tensor(2.0))


@pytest.mark.ranks(2)
def test_a_message_function_that_cannot_work_is_told():
    comm = world()
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    plan = GraphPlan(GraphPartition.contiguous(4, 2), edges, comm=comm)
    x = plan.scatter(torch.ones(4, 2))
    for message, text in (
        (lambda a, b: a + b, "too many positional"),
        (lambda *_: None, "None"),
        (lambda a, *_: a.sum(0), r"shape \[2\]\n.*1 edges"),
    ):
        with pytest.raises(PartitionError, match=f"{text}(.|\n)*HINT: def message"):
            plan.message_pass(x, message)
    with pytest.raises(TypeError, match="unsupported operand"):  # the function's own mistake
        plan.message_pass(x, lambda a, _, e: a * e)
    for wrong in (5, ["w"], [("name", torch.ones(1))]):
        with pytest.raises(TypeError, match="HINT: sync_gradients"):
            sync_gradients(wrong, groups=graph_groups(2))
