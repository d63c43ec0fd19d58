"""Split networks beside other ways to spread work: each equals one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import unisono
from unisono import DataParallel, Mesh, Partition
from unisono.nn import split
from unisono.train import Checkpoint


class Net(nn.Module):
    """Convolutions, norms over space and over the batch, attention, a head."""

    def __init__(self, saves_memory: bool = False) -> None:
        super().__init__()
        self.saves_memory = saves_memory
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.batch = nn.BatchNorm2d(4)
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, 2)

    def block(self, x: Tensor) -> Tensor:
        x = F.gelu(self.batch(self.norm(self.stem(x))))
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unflatten(2, (2, 6)).transpose(1, 2).chunk(3, -1)
        return tokens + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.saves_memory else self.block(x)
        return self.head(y.mean(1))


IMAGES = torch.randn(4, 3, 7, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1, 0])


def made(**options) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def steps(model: nn.Module, x: Tensor, labels: Tensor, parameters) -> None:
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()


def wrapped(kind: str, net: nn.Module, mesh: Mesh) -> nn.Module:
    if kind == "DataParallel":
        return DataParallel(net, comm=mesh.comm("data"))
    if kind == "DDP":
        return DistributedDataParallel(net, process_group=mesh.device_mesh["data"].get_group())
    return fully_shard(net, mesh=mesh.device_mesh["data"])


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("kind", ["DataParallel", "DDP", "FSDP2"])
def test_batches_along_another_axis_of_the_mesh(kind):
    mesh = Mesh(data=2, rows=2)
    partition = Partition.from_mesh(mesh, {"rows": 2}, ndim=4)
    alone = made().eval()  # a batch norm in training would see the batch of its own replica
    steps(alone, IMAGES, LABELS, alone.parameters())
    mine = mesh.coordinate("data")
    x = IMAGES.chunk(2)[mine]
    net = made().eval()
    model = wrapped(kind, split(net, partition), mesh)
    steps(model, x[partition.local_slices(x.shape)], LABELS.chunk(2)[mine], model.parameters())
    state = {key: getattr(p, "full_tensor", lambda p=p: p)() for key, p in net.state_dict().items()}
    assert list(state) == list(alone.state_dict())
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.ranks(2)
def test_a_checkpoint_holds_the_state_of_the_plain_module(tmp_path):
    comm = unisono.world()
    partition = Partition([1, 1, 2, 1])
    own = IMAGES[partition.local_slices(IMAGES.shape)]
    net = made()
    parts = split(net, partition)
    optimizer = torch.optim.Adam(parts.parameters())
    F.cross_entropy(parts(own), LABELS).backward()
    optimizer.step()
    with Checkpoint(tmp_path / "saved") as saved:
        saved.save(1, model=parts, optimizer=optimizer)
        plain, again = made(), split(made(), partition)
        saved.restore(model=plain, partial=True)
        other = torch.optim.Adam(again.parameters())
        saved.restore(model=again, optimizer=other)
    for restored in (plain, again.module):
        for key, value in net.state_dict().items():
            assert torch.equal(restored.state_dict()[key], value), key
    for model, optim in ((parts, optimizer), (again, other)):  # and training goes on alike
        optim.zero_grad()
        F.cross_entropy(model(own), LABELS).backward()
        optim.step()
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    assert comm.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("train", [True, False])
def test_activations_that_are_computed_again(train):
    comm = unisono.world()
    partition = Partition([1, 1, comm.size, 1])
    x = IMAGES.clone().requires_grad_()
    alone, net = made().train(train), made(saves_memory=True).train(train)
    F.cross_entropy(alone(x), LABELS).backward()
    block = IMAGES[partition.local_slices(IMAGES.shape)].clone().requires_grad_()
    F.cross_entropy(split(net, partition)(block), LABELS).backward()
    torch.testing.assert_close(block.grad, x.grad[partition.local_slices(IMAGES.shape)])
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mode", ["autocast", "inference_mode", "no_grad"])
def test_modes_and_precisions(mode, train):
    partition = Partition([1, 1, 2, 1])
    alone = made().float().train(train)
    net, x = copy.deepcopy(alone), IMAGES.float()
    parts = split(net, partition)
    context = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "inference_mode": torch.inference_mode(),
        "no_grad": torch.no_grad(),
    }[mode]
    with context:
        wanted, found = alone(x), parts(x[partition.local_slices(x.shape)])
    assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if mode == "autocast" else {}
    torch.testing.assert_close(found, wanted, **tolerance)
    for p, q in zip(net.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)
    if mode == "autocast":
        wanted.float().square().sum().backward()
        found.float().square().sum().backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            scale = max(q.grad.abs().max().item(), 0.1)
            torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.1 * scale)


@pytest.mark.ranks(2)
def test_hooks_see_split_gradients():
    partition = Partition([1, 1, 2, 1])
    seen = []

    class Hooked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 3
            y.register_hook(lambda grad: seen.append(grad) or grad * 2)
            return y * x

    x = IMAGES.clone().requires_grad_()
    Hooked()(x).sum().backward()
    block = IMAGES[partition.local_slices(IMAGES.shape)].clone().requires_grad_()
    split(Hooked(), partition)(block).sum().backward()
    whole, part = seen
    torch.testing.assert_close(part.whole(), whole)
    torch.testing.assert_close(block.grad, x.grad[partition.local_slices(IMAGES.shape)])
