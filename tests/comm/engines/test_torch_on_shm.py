"""What torch builds on process groups runs on `shm` unchanged, and gives what gloo gives."""

from __future__ import annotations

import copy
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

# Old corners of torch warn about themselves while they are imported or used.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
on_shm = pytest.mark.ranks(2, backend="shm", timeout=60)
HAS_SECOND = torch.__version__ >= "2.13"
"""Whether torch itself differentiates its collectives twice."""


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)
    )


def batch(rank: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return (
        torch.randn(rows, 12, generator=generator),
        torch.randn(rows, 3, generator=generator),
    )


def train(model: nn.Module, steps: int = 3, optimizer=None) -> list[torch.Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        x, y = batch(dist.get_rank())
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def serial(steps: int = 3) -> nn.Module:
    """The same training in one process, on the batches of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [batch(r) for r in range(dist.get_world_size())]
    for _ in range(steps):
        optimizer.zero_grad()
        for x, y in batches:
            ((model(x) - y).pow(2).mean() / len(batches)).backward()
        optimizer.step()
    return model


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        full = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(
            full, q, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@on_shm
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"find_unused_parameters": True},
        {"init_sync": False},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_ddp_trains_as_one_process_does(options):
    model = DistributedDataParallel(net(), **options)
    train(model)
    assert_same(model.module, serial())


@on_shm
def test_ddp_with_no_sync_accumulates_locally():
    model = DistributedDataParallel(net())
    x, y = batch(dist.get_rank())
    with model.no_sync():
        (model(x) - y).pow(2).mean().backward()
    local = [p.grad.clone() for p in model.parameters()]
    gathered = [torch.empty_like(local[0]) for _ in range(2)]
    dist.all_gather(gathered, local[0])
    assert not torch.equal(*gathered)
    (model(x) - y).pow(2).mean().backward()
    dist.all_gather(gathered, next(model.parameters()).grad)
    assert torch.equal(*gathered)


@on_shm
def test_ddp_with_unused_parameters_and_join_of_uneven_inputs():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x, use_b):
            return self.b(x) if use_b else self.a(x)

    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(3):
        model(torch.ones(2, 4), step == 1).sum().backward()
    plain = DistributedDataParallel(nn.Linear(4, 1))
    with Join([plain]):
        for _ in range(2 + dist.get_rank()):
            plain(torch.ones(1, 4)).sum().backward()


@on_shm
@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_ddp_compression_hooks_keep_ranks_together(hook):
    model = DistributedDataParallel(net())
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = train(model, steps=6)
    assert losses[-1] < losses[0]
    for p in model.parameters():
        both = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(both, p.detach())
        assert torch.equal(*both)


@on_shm
def test_ddp_with_a_hook_that_issues_a_collective_in_its_callback():
    model = DistributedDataParallel(net())

    def hook(state, bucket):
        flat = bucket.buffer()
        first = dist.all_reduce(flat, async_op=True).get_future()

        def again(future):
            total = future.value()[0]
            extra = torch.ones(1)
            dist.all_reduce(extra)
            return total.div_(extra)

        return first.then(again)

    model.register_comm_hook(None, hook)
    train(model)
    assert_same(model.module, serial())


@on_shm
@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("is_late", [False, True], ids=["between the calls", "after the calls"])
def test_calls_of_a_callback_have_the_same_place_on_all_ranks(slow_rank, is_late):
    """Also where the call before has ended on one rank and not on the other."""
    is_slow = dist.get_rank() == slow_rank
    x, y, z = torch.ones(4), torch.ones(8), torch.ones(16)
    time.sleep(0.1 * is_slow)
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_reduce(y, async_op=True) if is_late else None
    if is_slow:
        (second or first).wait()
    future = first.get_future().then(lambda _: dist.all_reduce(z))
    second = second or dist.all_reduce(y, async_op=True)
    future.wait()
    second.wait()
    assert [t.unique().tolist() for t in (x, y, z)] == [[2.0]] * 3


@on_shm
def test_ddp_forces_by_double_backward():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    x = torch.randn(
        4, 3, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True
    )
    energy = model(x).sum()
    force = torch.autograd.grad(energy, x, create_graph=True)[0]
    (energy + force.pow(2).sum()).backward()
    grads = next(model.parameters()).grad
    both = [torch.empty_like(grads) for _ in range(2)]
    dist.all_gather(both, grads)
    assert torch.equal(*both)


@on_shm
@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard_trains_as_one_process_does(reshard):
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    train(model)
    assert_same(model, serial())


@pytest.mark.ranks(4, backend="shm", timeout=60)
def test_fully_shard_on_a_two_dimensional_mesh_in_bfloat16():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(net(), mesh=mesh, mp_policy=policy)
    losses = torch.stack(train(model, steps=5))
    dist.all_reduce(losses)
    assert losses[-1] < losses[0]


@on_shm
def test_fsdp1_trains_as_one_process_does():
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    train(model)
    expected = torch.cat([p.detach().reshape(-1) for p in serial().parameters()])
    with FullyShardedDataParallel.summon_full_params(model):
        found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(found[: len(expected)], expected)


@on_shm
def test_dtensor_matmul_redistribute_uneven_and_second_derivative():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    da = distribute_tensor(a, mesh, [Shard(0)])
    db = distribute_tensor(b, mesh, [Replicate()])
    torch.testing.assert_close((da @ db).full_tensor(), a @ b)
    columns = da.redistribute(placements=[Shard(1)])
    rows = distribute_tensor(b, mesh, [Shard(0)])
    product = columns @ rows
    assert product.placements == (Partial(),)
    torch.testing.assert_close(product.full_tensor(), a @ b)
    torch.testing.assert_close(product.redistribute(placements=[Shard(1)]).full_tensor(), a @ b)
    leaf = distribute_tensor(a, mesh, [Shard(0)]).requires_grad_()
    y = leaf.redistribute(placements=[Replicate()]).pow(3).sum()
    (g,) = torch.autograd.grad(y, leaf, create_graph=True)
    if HAS_SECOND:
        (h,) = torch.autograd.grad(g.sum(), leaf)
        torch.testing.assert_close(h.full_tensor(), 6 * a)


@on_shm
def test_tensor_parallel_column_row_and_sequence():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.down(torch.relu(self.up(self.norm(x))))

    torch.manual_seed(0)
    plain = Block()
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(
        sharded,
        mesh,
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        },
    )
    x = torch.randn(2, 4, 8)
    local = x.chunk(2, dim=1)[dist.get_rank()]
    out = sharded(DTensor.from_local(local, mesh, [Shard(1)]))
    torch.testing.assert_close(out.full_tensor() if isinstance(out, DTensor) else out, plain(x))
    out.sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(sharded.up.weight.grad.full_tensor(), plain.up.weight.grad)


@on_shm
def test_distributed_checkpoint_saves_loads_and_saves_in_the_background():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = fully_shard(net(dist.get_rank()))
    state = {"model": model.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=f"{folder[0]}/a")
    future = dcp.async_save(state, checkpoint_id=f"{folder[0]}/b")
    future.result()
    expected = [p.full_tensor().clone() for p in model.parameters()]
    for name in ("a", "b"):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        loaded = {"model": model.state_dict(), "step": 0}
        dcp.load(loaded, checkpoint_id=f"{folder[0]}/{name}")
        assert loaded["step"] == 3
        for p, q in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.full_tensor(), q)


@on_shm
def test_zero_redundancy_optimizer_steps_and_consolidates():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(model, steps=4, optimizer=optimizer)
    assert losses[-1] < losses[0]
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == 6


@on_shm
def test_functional_collectives_eager_with_first_and_second_derivative():
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.full((4,), float(rank + 1), requires_grad=True)
    total = funcol.all_reduce(x, "sum", group)
    assert total.tolist() == [3.0] * 4
    for _ in range(20):
        assert (
            funcol.all_reduce(torch.ones(3, requires_grad=True), "sum", group).tolist() == [2.0] * 3
        )
    y = funcol.all_gather_tensor_autograd(x.pow(3), 0, group)
    if HAS_SECOND:
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.allclose(g, 2 * 3 * x.pow(2))
    scattered = funcol.reduce_scatter_tensor_autograd(torch.cat([x, x]).pow(2), "sum", 0, group)
    assert torch.allclose(scattered.detach(), torch.full((4,), 5.0))
    swapped = funcol.all_to_all_single_autograd(x * 2, [2, 2], [2, 2], group)
    assert swapped.tolist() == [2.0, 2.0, 4.0, 4.0]
    parts = funcol.all_gather_into_tensor_coalesced([x.detach(), x.detach() * 2], group)
    assert parts[1].tolist() == [2.0] * 4 + [4.0] * 4


@on_shm
def test_functional_collectives_compiled_by_aot_eager():
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x):
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y, 0, group)
        return funcol.reduce_scatter_tensor(z, "sum", 0, group).sum()

    x = torch.full((4,), 1.0 + dist.get_rank())
    assert float(f(x)) == 4 * 6.0 * 2


@on_shm
def test_object_collectives_and_batched_messages():
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    everybody = [None, None]
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": 0}, {"rank": 1}]
    gathered = [None, None] if rank == 0 else None
    dist.gather_object(("r", rank), gathered)
    assert gathered == ([("r", 0), ("r", 1)] if rank == 0 else None)
    mine = [None]
    dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None)
    assert mine == ["ab"[rank]]
    received = torch.zeros(70_000)
    ops = [
        dist.P2POp(dist.irecv, received, peer),
        dist.P2POp(dist.isend, torch.full((70_000,), float(rank)), peer),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    assert received.unique().tolist() == [float(peer)]


@on_shm
def test_coalescing_manager_joins_reductions_gathers_and_scatters():
    rank = dist.get_rank()
    xs = [torch.full((n,), float(rank + 1)) for n in (3, 5)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    assert [x.tolist() for x in xs] == [[3.0] * 3, [3.0] * 5]
    outs = [torch.empty(2 * n) for n in (3, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x, out in zip(xs, outs, strict=True):
            dist.all_gather_into_tensor(out, x)
    manager.wait()
    assert outs[1].tolist() == [3.0] * 10
    pieces = [torch.empty(3), torch.empty(5)]
    with dist._coalescing_manager():
        for piece, out in zip(pieces, outs, strict=True):
            dist.reduce_scatter_tensor(piece, out)
    assert pieces[0].tolist() == [6.0] * 3


@pytest.mark.ranks(4, backend="shm", timeout=60)
def test_device_mesh_of_two_axes_and_subgroups():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name, expected in (
        ("a", [rank % 2, rank % 2 + 2]),
        ("b", [rank // 2 * 2, rank // 2 * 2 + 1]),
    ):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh.get_group(name))
        assert x.item() == sum(expected)
    mine, _ = dist.new_subgroups(group_size=2)
    x = torch.ones(1)
    dist.all_reduce(x, group=mine)
    assert x.item() == 2
    assert dist.get_backend(mine) == dist.get_backend()


@on_shm
def test_one_forward_one_backward_pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    stage = PipelineStage(copy.deepcopy(whole[rank]), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        out = schedule.step(target=y, losses=losses)
        torch.testing.assert_close(out, whole(x))
        assert len(losses) == 4
