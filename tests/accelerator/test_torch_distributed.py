"""torch's own distributed training gives the numbers of the CPU under every schedule."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.accelerator.ranks import BOTH, device_ranks, own_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unisono import torch_private as private
from unisono.errors import UnisonoError

pytestmark = device_ranks(2, backend=BOTH, timeout=60)


def trained(model, batches):
    """Train for as many steps as there are batches; return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.1), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def test_ddp_equals_ddp_on_the_cpu(schedule):
    device = own_device()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    plain = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    ours = nn.parallel.DistributedDataParallel(net.to(device), device_ids=[device.index])
    torch.manual_seed(dist.get_rank())
    batches = torch.randn(3, 4, 3, 8, 8)
    torch.testing.assert_close(trained(ours, batches.to(device)), trained(plain, batches))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_ddp_with_a_communication_hook_equals_ddp_without(schedule):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    device = own_device()
    ours = nn.parallel.DistributedDataParallel(mlp().to(device), device_ids=[device.index])
    ours.register_comm_hook(None, default_hooks.allreduce_hook)
    plain = nn.parallel.DistributedDataParallel(mlp())
    torch.manual_seed(dist.get_rank())
    batches = torch.randn(3, 4, 8)
    torch.testing.assert_close(trained(ours, batches.to(device)), trained(plain, batches))


def test_fsdp_equals_one_process(schedule):
    from torch.distributed.fsdp import fully_shard

    device = own_device()
    mesh = init_device_mesh("sim", (2,))
    net, plain = mlp().to(device), mlp()
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh)
    torch.manual_seed(1)
    batches = torch.randn(3, 4, 8)
    torch.testing.assert_close(trained(net, batches.to(device)), trained(plain, batches))


def test_tensor_parallel_layers_equal_one_process(schedule):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    device = own_device()
    mesh = init_device_mesh("sim", (2,))
    net, plain = mlp().to(device), mlp()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(1)
    batches = torch.randn(2, 4, 8)
    torch.testing.assert_close(trained(net, batches.to(device)), trained(plain, batches))


def test_dtensors_are_redistributed(schedule):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    own_device()
    mesh = init_device_mesh("sim", (2,))
    torch.manual_seed(0)
    whole = torch.randn(5, 6)
    rows = distribute_tensor(whole.to("sim"), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(columns.full_tensor().cpu(), whole)
    product = (rows @ rows.t().redistribute(mesh, [Replicate()])).full_tensor()
    torch.testing.assert_close(product.cpu(), whole @ whole.t())


def test_checkpoints_of_torch_keep_the_numbers(schedule, tmp_path):
    import torch.distributed.checkpoint as dcp

    net = nn.Linear(3, 3).to(own_device())
    state, before = {"net": net.state_dict()}, net.weight.detach().clone()
    dcp.save(state, checkpoint_id=tmp_path)
    net.weight.data.zero_()
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(before, net.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loop_with_autocast_and_pinned_batches_equals_itself_without_streams(schedule, dtype):
    """What a training script does: batches copied ahead on a stream of their own."""
    device = own_device()
    torch.manual_seed(0)
    net = mlp()
    twin = copy.deepcopy(net)
    net = nn.parallel.DistributedDataParallel(net.to(device), device_ids=[device.index])
    twin = nn.parallel.DistributedDataParallel(twin.to(device), device_ids=[device.index])
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(4, 8).pin_memory() for _ in range(4)]
    copies = torch.Stream(device)

    def ahead():
        for batch in batches:
            with copies:
                there = batch.to(device, non_blocking=True)
            torch.accelerator.current_stream().wait_stream(copies)
            there.record_stream(torch.accelerator.current_stream())
            yield there

    def plainly():
        for batch in batches:
            yield batch.to(device)

    losses = []
    for model, source in ((net, ahead()), (twin, plainly())):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in source:
            with torch.autocast("sim", dtype=dtype):
                loss = F.mse_loss(model(batch), torch.zeros(4, 4, device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@device_ranks(3, backend=["cpu:shm,sim:simccl", "sim:simccl,cpu:shm", "shm"])
def test_a_group_of_ours_has_torchs_groups_for_devices_and_ends_them():
    device, rank = own_device(), dist.get_rank()
    group = dist.new_group([2, 0])
    if rank != 1:
        x = torch.full((2,), rank + 1.0, device=device)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [4.0, 4.0]
        twin = torch.full((2,), rank + 1.0)
        dist.all_reduce(twin, group=group)
        assert twin.tolist() == [4.0, 4.0]
        assert group._get_backend(device).name() == "simccl"
        with pytest.raises(UnisonoError, match="on cpu and sim"):
            private.all_gather_single(torch.empty(4), x, group=group)
        assert group._inner
        dist.destroy_process_group(group)
        assert not group._inner
    told = [None] * 3
    dist.all_gather_object(told, rank)
    assert told == [0, 1, 2]
