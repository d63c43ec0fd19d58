"""What `unisono doctor --on gpu` has ranks do: small programs on the device and on the CPU.

Each returns tensors. They must be those of the CPU, whatever the order in which kernels,
collectives and late ranks come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import unisono
from unisono import accelerator
from unisono.comm import Communicator
from unisono.data_parallel import DataParallel, DataParallelOptimizer
from unisono.nn import split
from unisono.topology import Partition

Program = Callable[[Communicator], list[Tensor]]
LATE_S = 1.0
"""How late a rank comes; the others must not time out, and their hosts must not wait for it."""


def reductions(comm: Communicator) -> list[Tensor]:
    """all_reduce, reduce, reduce_scatter; several dtypes."""
    values = torch.arange(1.0, 7.0, device=comm.device) * (comm.rank + 1)
    whole = comm.reduce(values, 0)
    return [
        *(comm.all_reduce(values, op) for op in ("sum", "mean", "max", "min", "product")),
        comm.all_reduce(values.long()),
        comm.all_reduce(values.bfloat16()),
        comm.all_reduce(values.double().view(2, 3).t()),
        values if whole is None else whole,
        comm.reduce_scatter(values.repeat(comm.size)),
    ]


def movements(comm: Communicator) -> list[Tensor]:
    """broadcast, all_gather, gather, scatter, all_to_all, exchange, barrier; uneven blocks."""
    size, rank, last = comm.size, comm.rank, comm.size - 1
    block = torch.arange(3.0 * (rank + 1), device=comm.device).view(-1, 3)
    gathered = comm.gather(block, 0)
    after, before = (rank + 1) % size, (rank - 1) % size
    expected = {before: torch.empty(before + 1, 3, device=comm.device)}
    results = [
        comm.broadcast(block if rank == last else None, last, like=((size, 3), block.dtype)),
        comm.all_gather(block),
        block if gathered is None else gathered,
        comm.scatter(torch.arange(4.0 * size, device=comm.device) if rank == 0 else None, 0),
        comm.all_to_all(torch.arange(float(size), device=comm.device) + 10 * rank),
    ]
    if size > 1:
        results += comm.exchange({after: block}, expected).values()
    comm.barrier()
    return results


def data_parallel_steps(comm: Communicator) -> list[Tensor]:
    """Steps with blocking and with deferred updates."""
    results: list[Tensor] = []
    for is_deferred in (False, True):
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        _fill(net.to(comm.device))
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        deferred = DataParallelOptimizer(optimizer) if is_deferred else None
        model = DataParallel(net, comm, optimizer=deferred)
        for step in range(3):
            (deferred or optimizer).zero_grad()
            x = _values(8, 6, device=comm.device) * (step + comm.rank + 1)
            model(x).square().mean().backward()
            (deferred or optimizer).step()
        if deferred is not None:
            deferred.finalize()
        results += [p.detach() for p in net.parameters()]
    return results


def split_step(comm: Communicator) -> list[Tensor]:
    """Forward and backward of a network whose picture is cut over ranks."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    )
    _fill(net.to(comm.device))
    strip = Partition([1, 1, comm.size, 1], comm=comm)
    images = _values(2, 2, 4 * comm.size, 8, device=comm.device)
    y = split(net, strip)(images[strip.local_slices(images.shape)])
    y.square().mean().backward()
    return [y.whole(), *(p.grad for p in net.parameters() if p.grad is not None)]


def late_rank(comm: Communicator) -> list[Tensor]:
    """A sum for which the last rank comes late."""
    for _ in range(2):  # ranks compare a call on their hosts until it has followed itself once
        comm.all_reduce(torch.ones(4, device=comm.device))
    if comm.size > 1 and comm.rank == comm.size - 1:
        time.sleep(LATE_S)
    return [comm.all_reduce(torch.ones(4, device=comm.device))]


PROGRAMS: dict[str, Program] = {
    "reductions": reductions,
    "movements": movements,
    "training": data_parallel_steps,
    "split": split_step,
    "late rank": late_rank,
}


class CheckOutcome(NamedTuple):
    """How a program went on one rank."""

    wrong: str
    """Which result is not that of the CPU; empty if all are."""
    host_s: float
    """When the host had queued all its work."""
    total_s: float


def on_rank() -> tuple[str, dict[str, CheckOutcome]]:
    """Return what this rank's device is, and how each program went."""
    comm = unisono.world()
    bytes_of = accelerator.memory(comm.device)
    room = (
        "" if bytes_of is None else f", {bytes_of[0] / 2**30:.1f} of {bytes_of[1] / 2**30:.1f} GiB"
    )
    device = f"{comm.device} ({accelerator.name(comm.device)}{room} free), {comm.backend}"
    outcomes: dict[str, CheckOutcome] = {}
    for name, program in PROGRAMS.items():
        began = time.perf_counter()
        results = program(comm)
        host_s = time.perf_counter() - began
        there = [x.cpu() for x in results]
        total_s = time.perf_counter() - began
        here = program(comm.with_device("cpu"))
        outcomes[name] = CheckOutcome(difference(here, there), host_s, total_s)
    return device, outcomes


def difference(here: list[Tensor], there: list[Tensor]) -> str:
    """Say where results of the device are not those of the CPU; nothing if they are."""
    for i, (requested, got) in enumerate(zip(here, there, strict=True)):
        try:  # a GPU may multiply with fewer digits
            torch.testing.assert_close(got, requested, rtol=1e-2, atol=1e-3)
        except AssertionError as error:
            return f"result {i}: {' '.join(str(error).split())}"
    return ""


def _fill(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(_values(*p.shape, device=p.device))


def _values(*shape: int, device: torch.device) -> Tensor:
    """Return numbers between -1 and 1 without a generator."""
    count = torch.Size(shape).numel()
    return (torch.arange(1.0, count + 1) * 0.7).sin().view(shape).to(device)
