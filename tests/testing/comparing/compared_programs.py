"""Small trainings: 20 with one planted cause of another result on two ranks, 5 without any.

Each cuts its batches by the number of ranks, so that one process and several see the same rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono
from unisono import DataParallel, Partition
from unisono.testing.comparing import causes

STEPS = 4
PROGRAMS: dict[str, tuple[Callable[[], None], str]] = {}


def program(cause: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a program and the cause that must be named."""

    def register(fn: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[fn.__name__] = fn, cause
        return fn

    return register


def net(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *(middle or (nn.Tanh(),)), nn.Linear(8, 1))


def table(rows: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)


def share(x: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Return the rows of a batch that belong to this rank."""
    world = unisono.world()
    if sizes is None or world.size == 1:
        return x.tensor_split(world.size)[world.rank]
    return x.split(sizes)[world.rank]


def batches(rows: int = 12, sizes: list[int] | None = None) -> list[tuple[Tensor, Tensor]]:
    x, y = table()
    parts = zip(x.split(rows), y.split(rows), strict=True)
    return [(share(a, sizes), share(b, sizes)) for a, b in parts][:STEPS]


def train(
    model: nn.Module,
    data: object = None,
    *,
    lr: float = 0.1,
    scale: float = 1.0,
    between: Callable[[int], None] = lambda _: None,
    after: Callable[[nn.Module], None] = lambda _: None,
    **settings: float,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **settings)
    for step, (x, y) in enumerate(batches() if data is None else data):
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * scale).backward()
        after(model)
        optimizer.step()
        between(step)


def rank() -> int:
    return unisono.world().rank


def size() -> int:
    return unisono.world().size


# -- rows -----------------------------------------------------------------------------------------


@program(causes.BATCH)
def no_sampler():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*table()), batch_size=12 // size(), shuffle=False)
    train(DataParallel(net(), equal_batches=True), list(loader)[:STEPS])


@program(causes.BATCH)
def padded_sampler():
    data = TensorDataset(*table(23))
    sampler = DistributedSampler(data, size(), rank(), shuffle=False)
    train(DataParallel(net()), DataLoader(data, batch_size=12 // size(), sampler=sampler))


@program(causes.BATCH)
def rows_dropped_on_two_ranks():
    data = TensorDataset(*table(23))
    last = size() > 1
    sampler = DistributedSampler(data, size(), rank(), shuffle=False, drop_last=last)
    train(DataParallel(net()), DataLoader(data, batch_size=12 // size(), sampler=sampler))


@program(causes.BATCH)
def a_shuffle_seeded_by_rank():
    x, y = table()
    order = torch.randperm(48, generator=torch.Generator().manual_seed(rank()))
    cut = 12 // size()
    train(DataParallel(net()), zip(x[order].split(cut), y[order].split(cut), strict=True))


@program(causes.BATCH_SIZE)
def a_batch_size_for_each_rank():
    data = TensorDataset(*table())
    sampler = DistributedSampler(data, size(), rank(), shuffle=False)
    train(DataParallel(net()), DataLoader(data, batch_size=6, sampler=sampler))


@program(causes.BATCH)
def augmentation_seeded_by_rank():
    generator = torch.Generator().manual_seed(rank() + 1)
    noise = [torch.randn(12, 4, generator=generator)[: len(x)] for x, _ in batches()]
    train(DataParallel(net()), [(x + n, y) for (x, y), n in zip(batches(), noise, strict=True)])


# -- modules --------------------------------------------------------------------------------------


@program(causes.BATCH_NORM)
def batch_norm_of_each_rank():
    train(DataParallel(net(nn.BatchNorm1d(8), nn.Tanh())))


@program(causes.BATCH_NORM)
def batch_norm_in_ddp():
    train(DistributedDataParallel(net(nn.Tanh(), nn.BatchNorm1d(8))))


@program(causes.DROPOUT)
def dropout():
    model = DataParallel(net(nn.Dropout(0.3)))
    torch.manual_seed(rank())
    train(model)


@program(causes.DROPOUT)
def dropout_without_a_layer():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.2)

    train(DataParallel(net(Noisy())))


# -- losses and gradients -------------------------------------------------------------------------


@program(causes.MEANS)
def uneven_batches():
    train(DataParallel(net()), batches(sizes=[8, 4]))


@program(causes.LOSS)
def targets_of_other_rows():
    data = batches()
    train(DataParallel(net()), [(x, y.flip(0) if rank() else y) for x, y in data])


@program(causes.SCALED)
def a_loss_divided_by_ranks():
    train(DataParallel(net()), scale=1 / size())


@program(causes.SCALED)
def gradients_that_are_summed():
    def add_up(model: nn.Module) -> None:
        for p in model.parameters():
            unisono.world().all_reduce_(p.grad)

    train(net(), after=add_up)


@program(causes.UNSYNCED)
def no_wrapper():
    train(net())


@program(causes.CUT)
def a_collective_without_derivative():
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x.sum(0)
            shared = total.clone()
            dist.all_reduce(shared)
            return x - shared / 12

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "c10d::allreduce_")  # torch says so, too, from 2.15 on
        train(DataParallel(net(Centred(), nn.Tanh())))


# -- parameters and settings ----------------------------------------------------------------------


@program(causes.SETTING)
def a_learning_rate_for_each_rank():
    train(DistributedDataParallel(net()), lr=0.1 * (1 + rank()))


@program(causes.SETTING)
def a_learning_rate_that_grows_with_ranks():
    train(DataParallel(net()), lr=0.05 * size())


@program(causes.START)
def a_model_seeded_by_rank():
    torch.manual_seed(rank() + size())
    train(DataParallel(nn.Linear(4, 1)))


@program(causes.RANDOM)
def a_program_without_seed():
    torch.seed()
    train(DataParallel(nn.Linear(4, 1)))


# -- none -----------------------------------------------------------------------------------------


@program(causes.EQUAL)
def data_parallel():
    train(DataParallel(net()))


@program(causes.EQUAL)
def ddp():
    model = net(nn.LayerNorm(8), nn.GELU())
    train(DistributedDataParallel(model) if size() > 1 else model)


@program(causes.EQUAL)
def fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    unisono.world()
    train(fully_shard(net(), mesh=init_device_mesh("cpu", (size(),))))


@program(causes.EQUAL)
def synchronised_batch_norm():
    train(DataParallel(net(nn.BatchNorm1d(8), nn.Tanh()).double(), sync_batch_norm=True),
          [(x.double(), y.double()) for x, y in batches()])  # fmt: skip


@program(causes.EQUAL)
def a_split_network():
    partition = Partition([1, 1, size(), 1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1))
    whole = unisono.nn.split(model, partition)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    x = torch.randn(2, 1, 8, 6, generator=torch.Generator().manual_seed(2))
    own = x.tensor_split(size(), 2)[rank()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        whole(own).square().mean().backward()
        optimizer.step()
