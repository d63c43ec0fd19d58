"""Distributed layers on two ranks with one thread each, against torch's layers on the same shard.

    python benchmarks/distributed_layers.py [--quick]

Inputs are 1 x 16 x 512 x 512 float32, split on H, unless a case says otherwise.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle

import torch
import torch.distributed as dist
from harness import Row, markdown, parser_for, publish, take_turns
from torch import nn

import unisono
from unisono import nn as split
from unisono.comm import Communicator, trace
from unisono.topology import Partition, halo
from unisono.topology.decompose import split_cuts

SHAPE = (1, 16, 512, 512)
STRIP = (1, 1, 2, 1)
BACKENDS = ("gloo", "shm")


@dataclass(frozen=True)
class Pair:
    """A case and its reference, timed in turns."""

    comm: Communicator
    rounds: int

    def row(
        self,
        case: str,
        ours: Callable[[], object],
        reference: Callable[[], object],
        name: str,
        target: float | None,
        repeats: int = 1,
    ) -> Row:
        """Return the row of a case: the median over rounds of the ratio of the slowest ranks."""
        candidates = {"ours": ours, "reference": reference}
        found = take_turns(self.comm, candidates, rounds=self.rounds, repeats=repeats)
        return found["ours"].row(case, found["reference"], name, target)


def comm_of(backend: str) -> Communicator:
    return Communicator.of(dist.new_group(backend=backend))


def trained(layer: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a run of forward and backward, with gradients of input and parameters."""
    own = x.clone().requires_grad_()
    with torch.no_grad():
        up = torch.randn_like(layer(own))

    def run() -> None:
        own.grad = None
        layer.zero_grad()
        layer(own).backward(up)

    return run


def called(layer: Callable[[torch.Tensor], object], x: torch.Tensor) -> Callable[[], None]:
    """Return a run of forward alone."""

    @torch.no_grad()
    def run() -> None:
        layer(x)

    return run


def own_block(P: Partition, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(P.local_shape(shape))


def layers(backend: str, rounds: int) -> list[Row]:
    """Convolutions, norms, movements and linear layers."""
    comm = comm_of(backend)
    pair, on = Pair(comm, rounds), f", {backend}"
    shm = backend == "shm"
    P = Partition(STRIP, comm=comm)
    x = own_block(P)
    conv = split.DistributedFeatureConv2d(P, 16, 16, 3, padding=1)
    general = split.DistributedGeneralConv2d(P, P, P, 16, 16, 3, padding=1)
    plain = nn.Conv2d(16, 16, 3, padding=1)
    rows = [
        pair.row(f"FeatureConv2d k3, fwd+bwd{on}", trained(conv, x), trained(plain, x),
                 "Conv2d of the shard", 1.15),
        pair.row(f"GeneralConv2d k3 in space, fwd+bwd{on}", trained(general, x),
                 trained(conv, x), "FeatureConv2d", 1.05),
    ]  # fmt: skip
    plan = halo.plan(P.cuts(SHAPE), P.index or (0,) * 4, (3, 3), 1, 1)
    inside = tuple(slice(start, stop) for start, stop in plan.local[0].dest)

    window = torch.randn(plan.window_shape)

    def placed() -> None:
        torch.empty(plan.window_shape)[inside] = x

    exchange = called(split.HaloExchange(P, (3, 3), padding=1), x)
    rows += [
        pair.row(f"HaloExchange k3, fwd{on}", exchange, window.clone,
                 "allocate and copy the window", 1.3 if shm else None, 5),
        pair.row(f"HaloExchange k3, fwd{on}, against its one copy", exchange, placed,
                 "allocate the window, place the shard in it", None, 5),
    ]  # fmt: skip
    columns = Partition((1, 1, 1, 2), comm=comm)
    copy = torch.empty_like(x)
    rows.append(
        pair.row(f"Repartition H -> W, fwd{on}", called(split.Repartition(P, columns), x),
                 lambda: copy.copy_(x), "memcpy of the shard", 2 if shm else 8, 5)
    )  # fmt: skip
    norm, plain_norm = split.DistributedBatchNorm(P, 16), nn.BatchNorm2d(16)
    rows.append(
        pair.row(f"BatchNorm, fwd+bwd{on}", trained(norm, x), trained(plain_norm, x),
                 "BatchNorm2d of the shard", 1.2 if shm else 1.4)
    )  # fmt: skip
    features = Partition((1, 2), comm=comm)
    whole = nn.Linear(1024, 1024)
    for kind in (split.DistributedLinearAllGather, split.DistributedLinearReduceScatter):
        rows.append(
            pair.row(f"{kind.__name__} 1024, batch 256, fwd+bwd{on}",
                     trained(kind(features, 1024, 1024), own_block(features, (256, 1024))),
                     trained(whole, torch.randn(256, 1024)), "Linear on one rank", 0.75)
        )  # fmt: skip
    return rows


def set_up(backend: str, rounds: int) -> list[Row]:
    """Calls with changed inputs, and what the check costs when nothing changes."""
    comm = comm_of(backend)
    pair, on = Pair(comm, rounds), f", {backend}"
    P = Partition(STRIP, comm=comm)
    conv, cached = (split.DistributedFeatureConv2d(P, 16, 16, 3, padding=1) for _ in range(2))
    blocks = [torch.randn(1, 16, 32, 64), torch.randn(1, 16, 33, 64)]
    widths, known = count(65), cycle(blocks)
    rows = [
        pair.row(f"call with an input never seen{on}",
                 called(lambda _: conv(torch.randn(1, 16, 32, next(widths))), blocks[0]),
                 called(lambda _: cached(torch.randn(1, 16, 32, 64)), blocks[0]),
                 "cached call", 5, 5),
        pair.row(f"return to a known shape{on}", called(lambda _: conv(next(known)), blocks[0]),
                 called(cached, blocks[0]), "cached call", 2, 6),
    ]  # fmt: skip
    x = own_block(P)
    always = trained(cached, x)

    def off() -> None:
        with split.structure_check("off"):
            always()

    rows.append(
        pair.row(f'structure check "always", k3, fwd+bwd{on}', always, off, '"off"',
                 1.02 if backend == "shm" else 1.05)
    )  # fmt: skip
    return rows


def halo_bytes() -> list[int]:
    """Return the bytes that one rank sends for the halo, at three sizes."""
    P = Partition(STRIP)
    found = []
    for side in (128, 256, 512):
        conv = split.DistributedFeatureConv2d(P, 16, 16, 3, padding=1)
        x = torch.randn(1, 16, side // 2, side)
        conv(x)
        with trace() as seen, torch.no_grad():
            conv(x)
        found.append(sum(event.sent for event in seen.events if event.op == "exchange"))
    return found


def planning(rounds: int) -> tuple[float, float]:
    """Return the time of one rank's plan on 8 x 8 and on 64 x 64 ranks."""
    times: dict[int, list[float]] = {8: [], 64: []}
    for _ in range(rounds * 5):
        for side, seen in times.items():
            cuts = [(0, 1), (0, 16), split_cuts(4096, side), split_cuts(4096, side)]
            start = time.perf_counter()
            halo.plan(cuts, (0, 0, side // 2, side // 2), (3, 3), 1, 1)
            seen.append(time.perf_counter() - start)
    small, large = (statistics.median(seen) for seen in times.values())
    return small, large


def main() -> None:
    """Run all cases and write the tables."""
    quick = parser_for(__doc__).parse_args().quick
    rounds = 3 if quick else 21
    os.environ["UNISONO_BACKEND"] = "gloo"
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    rows = [row for name in BACKENDS for row in unisono.run(layers, name, rounds, ranks=2)[0]]
    rows += [row for name in BACKENDS for row in unisono.run(set_up, name, rounds, ranks=2)[0]]
    small, large = planning(rounds)
    rows.append(Row("plan of one rank of 64 x 64", large, small, "of 8 x 8", 10))
    sent = unisono.run(halo_bytes, ranks=2)[0]
    exact = "ok" if sent == [sent[0], 2 * sent[0], 4 * sent[0]] else "MISSED"
    text = (
        f"{markdown(rows)}\n\nHalo bytes a rank sends at H = W = 128, 256, 512: "
        f"{', '.join(map(str, sent))} (must be 1 : 2 : 4: {exact})."
    )
    publish("Distributed layers", text, write=not quick)


if __name__ == "__main__":
    main()
