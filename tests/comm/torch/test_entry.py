"""Calls on a group of ours, in the forms that torch's own groups take, give what gloo gives."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from unisono.errors import CollectiveMismatch, MeshError, RankFailed, RankTimeout, UnisonoError

MAX, MIN, SUM = dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM
SOON = timedelta(seconds=30)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo, about builtins
on_shm = pytest.mark.ranks(2, backend="shm", timeout=60)


def zeros(count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(count)]


@on_shm
def test_short_and_keyword_forms_of_collectives():
    group, rank = dist.group.WORLD, dist.get_rank()
    mine = float(rank + 1)

    def filled() -> torch.Tensor:
        return torch.full((2,), mine)

    def after(call) -> float:
        x = filled()
        call(x).wait()
        return x[0].item()

    assert after(lambda x: group.allreduce(x, MAX)) == 2
    assert after(lambda x: group.allreduce([x], MIN, SOON)) == 1
    assert after(lambda x: group.allreduce(tensor=x, op=SUM, timeout=SOON)) == 3
    assert after(lambda x: group.allreduce([x])) == 3
    assert after(lambda x: group.broadcast(x, 1)) == 2
    assert after(lambda x: group.broadcast(tensor=x, root=0, timeout=SOON)) == 1
    at_root = after(lambda x: group.reduce(x, 1, MAX))
    assert at_root == 2 or rank == 0
    at_root = after(lambda x: group.reduce(tensor=x, root=0, op=MIN))
    assert at_root == 1 or rank == 1
    for outs in (zeros(), zeros()):
        group.allgather(outs, filled(), SOON).wait()
        assert [out[0].item() for out in outs] == [1, 2]
    outs = zeros() if rank == 0 else []
    group.gather(outs, filled(), 0).wait()
    assert [out[0].item() for out in outs] == ([1, 2] if rank == 0 else [])
    out = torch.zeros(2)
    group.scatter(out, [filled(), filled() + 4] if rank == 0 else [], root=0).wait()
    assert out[0] == (5 if rank else 1)
    for op, expected in ((MAX, 2), (MIN, 1), (SUM, 3)):
        group.reduce_scatter(out, [filled(), filled()], op).wait()
        assert out[0] == expected
    group.reduce_scatter(output=out, input=[filled(), filled()], op=MAX).wait()
    assert out[0] == 2
    group.alltoall_base(out, filled(), [], [], timeout=SOON).wait()
    assert out.tolist() == [1, 2]
    group.barrier(timeout=SOON).wait()
    group.barrier().wait()
    if rank == 0:
        group.send([filled()], dstRank=1, tag=3).wait()
    else:
        group.recv(tensors=[out], srcRank=0, tag=3).wait()
        assert out.tolist() == [1, 1]


@on_shm
def test_arguments_that_fit_no_form_are_refused():
    group, x = dist.group.WORLD, torch.ones(2)
    for call in (
        lambda: group.allreduce([x], MAX, SOON, 4),
        lambda: group.allreduce([x], root=1),
        lambda: group.allreduce([x], tensors=[x]),
        lambda: group.allreduce(),
        lambda: group.broadcast(x),
        lambda: group.broadcast([x], opts=dist.AllreduceOptions()),
    ):
        with pytest.raises(TypeError):
            call()
    assert x.tolist() == [1, 1]


@on_shm
def test_a_message_to_oneself_is_refused_and_touches_nobody_else():
    rank, x = dist.get_rank(), torch.ones(70_000)
    for call in (
        lambda: dist.isend(x, rank),
        lambda: dist.irecv(x, rank),
        lambda: dist.group.WORLD.send([x], rank, 0),
    ):
        with pytest.raises(MeshError, match=f"rank {rank} itself"):
            call()
    y = torch.full((70_000,), float(rank))
    requests = [dist.irecv(x, 1 - rank), dist.isend(y, 1 - rank)]
    for request in requests:
        request.wait()
    assert x.unique().tolist() == [1.0 - rank]


@on_shm
@pytest.mark.parametrize("peer", [-2, 2, 1 << 33])
def test_the_core_refuses_ranks_that_it_does_not_have(peer):
    x, rank = torch.ones(2), dist.get_rank()
    group = getattr(dist.group.WORLD.unisono_engine, "_core", None)
    if group is None:
        return  # not of shared memory
    row = (x, x.data_ptr(), x.nbytes, 0)
    for sends, recvs in (([(peer, *row)], []), ([], [(peer, *row)]), ([(rank, *row)], [])):
        with pytest.raises(ValueError, match="rank"):
            group.post(sends, recvs, 0, True)
    with pytest.raises(ValueError, match="in a group of 2"):
        group.broadcast(None, 5.0, x.data_ptr(), x.nbytes, 0, peer)
    dist.all_reduce(x)  # nothing was posted, and the group is well
    assert x.tolist() == [2, 2]


@on_shm
def test_join_divides_by_the_ranks_that_still_train():
    """DDP gives a work to C++ and drops its Python object; `wait` must still end."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + dist.get_rank()):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0] * 3]


@on_shm
def test_a_work_that_nobody_waits_for_lets_go_of_its_tensors():
    group, x = dist.new_group(), torch.ones(3)
    options = dist.AllreduceOptions()
    for _ in range(5):
        group.allreduce([x], options)
    for _ in range(2):
        dist.barrier(group)
    assert len(group._dropped) == 5
    assert [work._outputs for work in group._dropped] == [[]] * 5
    assert all(work.wait() for work in group._dropped)


@on_shm
def test_a_sparse_gradient_is_averaged():
    torch.manual_seed(0)
    rank = dist.get_rank()
    net = nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Flatten(), nn.Linear(4, 1))
    rows = [torch.tensor([[0, 3]]), torch.tensor([[3, 5]])]
    sum(net(row).sum() / 2 for row in rows).backward()
    expected = [p.grad.to_dense().clone() for p in net.parameters()]
    net.zero_grad()
    model = DistributedDataParallel(net)
    model(rows[rank]).sum().backward()
    assert net[0].weight.grad.is_sparse
    for p, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.to_dense(), grad)


@on_shm
def test_sums_of_sparse_tensors_and_what_has_no_sum():
    rank = dist.get_rank()
    x = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,), dtype=torch.float64)
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0), [], (4,)) if rank else x.float().clone()
    dist.all_reduce(x)
    assert x.to_dense().tolist() == [1, 1, 4, 0]
    dist.all_reduce(empty)
    assert empty.to_dense().tolist() == [1, 0, 2, 0]
    with pytest.raises(UnisonoError, match="sums and means"):
        dist.all_reduce(x, MAX)
    with pytest.raises(CollectiveMismatch):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (4 + rank,)))


@on_shm
def test_a_monitored_barrier_names_the_ranks_that_do_not_come():
    group, rank = dist.group.WORLD, dist.get_rank()
    group.monitored_barrier(SOON)
    group.monitored_barrier(wait_all_ranks=True)
    if rank == 0:
        with pytest.raises(RankTimeout, match="Rank 1 failed to pass monitoredBarrier") as caught:
            group.monitored_barrier(timedelta(seconds=0.1))
        assert caught.value.missing == (1,)
    x = torch.ones(1)
    dist.all_reduce(x)  # the group is as it was
    assert x.item() == 2


@pytest.mark.ranks(4, backend="shm", timeout=60)
def test_a_group_is_split_and_says_what_it_is():
    group, rank = dist.group.WORLD, dist.get_rank()
    part = group.split_group([0, 2] if rank % 2 == 0 else [1, 3])
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=part)
    assert x.item() == (2 if rank % 2 == 0 else 4)
    assert (group.split_group([3]) is None) == (rank != 3)
    before = group._get_sequence_number_for_group()
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 1
    group.get_group_store().add("seen", 1)
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=77))
    assert group.options._timeout.total_seconds() == 77
    assert not group._has_hooks()


@on_shm
def test_a_profile_shows_calls_with_their_shapes():
    with profile(record_shapes=True) as seen:
        dist.all_reduce(torch.ones(3, 4))
        dist.all_reduce(torch.ones(5), async_op=True).wait()
        dist.broadcast(torch.ones(2), 0)
        dist.barrier()
    backend = dist.get_backend()
    events = [(e.name, e.input_shapes) for e in seen.events() if e.name.startswith(backend)]
    assert sorted(events) == [
        (f"{backend}:all_reduce", [[3, 4]]),
        (f"{backend}:all_reduce", [[5]]),
        (f"{backend}:barrier", []),
        (f"{backend}:broadcast", [[2]]),
    ]


@on_shm
def test_a_compiled_ddp_step_gives_the_gradients_of_an_eager_one():
    torch.manual_seed(0)
    x = torch.full((2, 3), 1.0 + dist.get_rank())
    grads = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        step = torch.compile(model, backend="eager") if compiled else model
        for _ in range(2):
            step(x).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)


def broadcast(x):
    dist.broadcast(x, 1)
    return x


def all_reduce_async(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x


def gather(x):
    outs = [torch.zeros(2), torch.zeros(2)] if dist.get_rank() == 0 else None
    dist.gather(x, outs, 0)
    return x if outs is None else outs[1]


def scatter(x):
    out = torch.zeros(2)
    dist.scatter(out, [x, x + 1] if dist.get_rank() == 0 else None, 0)
    return out


def reduce(x):
    dist.reduce(x, 0)
    return x if dist.get_rank() == 0 else x * 0


def send_recv(x):
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x


def exchange(x):
    peer, out = 1 - dist.get_rank(), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, out, peer)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    return out


def all_to_all(x):
    outs = [torch.zeros(1), torch.zeros(1)]
    dist.all_to_all(outs, list(x.split(1)))
    return torch.cat(outs)


def reduce_scatter(x):
    out = torch.zeros(2)
    dist.reduce_scatter(out, [x, x + 1])
    return out


FUNCTIONS = (
    broadcast,
    all_reduce_async,
    gather,
    scatter,
    reduce,
    send_recv,
    exchange,
    all_to_all,
    reduce_scatter,
)


@on_shm
def test_compiled_functions_call_collectives_as_eager_ones_do():
    for function in FUNCTIONS:

        def doubled(x, function=function):
            return function(x * 2) + 1

        x = torch.tensor([1.0, 2.0]) + 10 * dist.get_rank()
        torch._dynamo.reset()
        found = torch.compile(doubled, backend="eager")(x)
        torch.testing.assert_close(
            found, doubled(x), msg=lambda m, f=function: f"{f.__name__}: {m}"
        )


@pytest.mark.parametrize("kind", [RankTimeout, RankFailed, CollectiveMismatch, UnisonoError])
def test_usual_code_catches_our_errors(kind):
    with pytest.raises(RuntimeError):
        raise kind("late")
    assert issubclass(RankTimeout, TimeoutError)
