"""Graph parallelism on two ranks: regions against the textbook version, halo plans, partitions.

    python benchmarks/graph_parallel.py [--quick]

The textbook version is written here over gloo: sizes by a list all_gather, zero padding, a list
all_gather, cut, cat; backward an all_reduce of everything and a slice (P), or a slice (R).
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from harness import Figure, Row, figure_table, interleaved, markdown, parser_for, publish

import unisono
from unisono import graph_parallel as gp
from unisono.comm import Communicator

SIZES = {"1 KB": (64, 4, 20), "10 MB": (163_840, 16, 1)}
"""Rows in all, columns, and calls in a measurement."""
SIDE = 316
"""Of the grid."""


def textbook_gather(x: torch.Tensor) -> torch.Tensor:
    own = torch.tensor([len(x)])
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    sizes = [int(n) for n in told]
    padded = torch.cat([x, x.new_zeros(max(sizes) - len(x), *x.shape[1:])])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def own_rows(x: torch.Tensor, own: int) -> torch.Tensor:
    return x[:own] if dist.get_rank() == 0 else x[len(x) - own :]


class TextbookP(torch.autograd.Function):
    """Gather whose gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        """Return all rows."""
        ctx.own = len(x)
        return textbook_gather(x)

    @staticmethod
    def backward(ctx, grad):
        """Return the own rows of the sum."""
        total = grad.clone()
        dist.all_reduce(total)
        return own_rows(total, ctx.own).contiguous()


class TextbookR(TextbookP):
    """Gather whose gradient is sliced."""

    @staticmethod
    def backward(ctx, grad):
        """Return the own rows."""
        return own_rows(grad, ctx.own).contiguous()


class TextbookScatter(torch.autograd.Function):
    """Own rows; the gradient is gathered."""

    @staticmethod
    def forward(_, x, own):
        """Return the own rows."""
        return own_rows(x, own).contiguous()

    @staticmethod
    def backward(_, grad):
        """Return all rows."""
        return textbook_gather(grad), None


TARGETS = {
    "gather sum, sizes known": ("P", {"gloo": (0.5, 0.7), "shm": (0.15, 0.4)}),
    "scatter, gather slice": ("R", {"gloo": (0.6, 0.7), "shm": (0.15, 0.4)}),
    "gather sum, sizes unknown": ("P", {"gloo": (0.85, 0.8), "shm": (0.2, 0.5)}),
}


def regions(rounds: int) -> list[Row]:
    """Forward and backward of the regions on gloo and on shm, against the textbook on gloo."""
    comms = {name: gp.graph_groups(2, backend=name).gp for name in ("gloo", "shm")}
    rows: list[Row] = []
    for place, (size, (total, columns, repeats)) in enumerate(SIZES.items()):
        blocks = [total // 2 + 1, total // 2 - 1]
        own = blocks[unisono.world().rank]
        mine = torch.randn(own, columns, requires_grad=True)
        whole = torch.randn(total, columns, requires_grad=True)
        grad = torch.randn(total, columns)
        runs = {
            "P": lambda x=mine, g=grad: TextbookP.apply(x).backward(g),
            "R": lambda x=whole, n=own, g=grad: TextbookR.apply(
                TextbookScatter.apply(x, n)
            ).backward(g),
        }
        for name, comm in comms.items():
            runs |= {
                f"gather sum, sizes known {name}": lambda c=comm, b=blocks, x=mine, g=grad: (
                    gp.gather(x, grad="sum", sizes=b, comm=c).backward(g)
                ),
                f"scatter, gather slice {name}": lambda c=comm, b=blocks, x=whole, g=grad: (
                    gp.gather(
                        gp.scatter(x, sizes=b, comm=c), grad="slice", sizes=b, comm=c
                    ).backward(g)
                ),
                f"gather sum, sizes unknown {name}": lambda c=comm, x=mine, g=grad: gp.gather(
                    x, grad="sum", comm=c
                ).backward(g),
            }
        runs |= reduce_scatter_runs(comms["gloo"], whole, blocks)
        times = interleaved(comms["gloo"], runs, rounds=rounds, repeats=repeats)
        for case, (reference, targets) in TARGETS.items():
            for name in comms:
                rows.append(
                    Row(f"{case}, {size}, {name}", times[f"{case} {name}"], times[reference],
                        f"textbook {reference}", targets[name][place])
                )  # fmt: skip
        rows.append(
            Row(f"reduce_scatter region, {size}, gloo", times["reduce_scatter"], times["two"],
                "reduce + scatter", 0.8)
        )  # fmt: skip
    return rows


def reduce_scatter_runs(comm: Communicator, x: torch.Tensor, blocks: list[int]) -> dict:
    up = torch.randn(blocks[comm.rank], x.shape[1])

    def two() -> None:
        total = gp.reduce(x, grad="sum", comm=comm)
        gp.scatter(total, sizes=blocks, comm=comm).backward(up)

    def one() -> None:
        gp.reduce_scatter(x, sizes=blocks, comm=comm).backward(up)

    return {"reduce_scatter": one, "two": two}


def grid() -> torch.Tensor:
    """Edges of a square grid, both ways."""
    nodes = torch.arange(SIDE**2).view(SIDE, SIDE)
    pairs = [(nodes[1:], nodes[:-1]), (nodes[:, 1:], nodes[:, :-1])]
    one_way = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    return torch.cat([one_way, one_way.flip(0)], 1)


def halo(rounds: int) -> list[Row]:
    """A grid with four neighbours: the halo against a gather of everything."""
    edges, rows = grid(), []
    part = gp.GraphPartition.contiguous(SIDE**2, 2)
    for name in ("gloo", "shm"):
        comm = gp.graph_groups(2, backend=name).gp
        plan = gp.GraphPlan(part, edges, comm=comm)
        x = torch.randn(plan.num_local, 16, requires_grad=True)
        up = torch.randn(plan.num_halo, 16)
        everything = torch.randn(SIDE**2, 16)
        times = interleaved(
            comm,
            {
                "ours": lambda p=plan, x=x, g=up: p.exchange(x).backward(g),
                "ref": lambda p=plan, x=x, g=everything: p.gather(x, grad="sum").backward(g),
            },
            rounds=rounds,
        )
        rows.append(
            Row(f"halo exchange, grid 316 x 316, {name}", times["ours"], times["ref"],
                "plan.gather", 0.3)
        )  # fmt: skip
        rows.append(overlap(comm, part, edges, name, rounds))
    return rows


def overlap(
    comm: Communicator, part: gp.GraphPartition, edges: torch.Tensor, name: str, rounds: int
) -> Row:
    """Inner edges computed while a large halo travels, against one after the other."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.randint(0, part.num_nodes, (2, 20_000), generator=draw)  # a halo worth hiding
    plan = gp.GraphPlan(part, torch.cat([edges[:, ::4], wide], 1), comm=comm)
    x = torch.randn(plan.num_local, 64, requires_grad=True)
    source, target = plan.edge_index

    def message(a: torch.Tensor, b: torch.Tensor, _: object) -> torch.Tensor:
        return (a * b).tanh()

    def together() -> None:
        plan.message_pass(x, message).sum().backward()

    def in_turn() -> None:
        rows = plan.extend(x)
        sent = message(rows.index_select(0, source), rows.index_select(0, target), None)
        sent.new_zeros(plan.num_local, 64).index_add(0, target, sent).sum().backward()

    times = interleaved(comm, {"ours": together, "ref": in_turn}, rounds=rounds)
    return Row(
        f"message_pass with overlap, {name}", times["ours"], times["ref"],
        "exchange, then compute", 0.9,
    )  # fmt: skip


def figures() -> list[Figure]:
    """Partitions; no ranks."""
    stats = gp.GraphPartition.contiguous(SIDE**2, 2).stats(grid())
    share = stats.halo_bytes(64) / stats.gather_bytes(64)
    out = [Figure("halo / gather bytes, grid 316 x 316, 2 parts", share, 0.05, "arithmetic")]

    draw = torch.Generator().manual_seed(0)
    pos = torch.rand(20_000, 3, generator=draw)
    cloud = gp.radius_graph(pos, (11 / 20_000 / (4 / 3 * math.pi)) ** (1 / 3)).edge_index
    morton = gp.GraphPartition.morton(pos, 4).stats(cloud).edge_cut
    index = gp.GraphPartition.contiguous(20_000, 4).stats(cloud).edge_cut
    out.append(Figure("edge cut, Morton / index, 20k points, 4 parts", morton / index, 0.15,
                      f"{morton:.1%} and {index:.1%}"))  # fmt: skip

    rank = torch.arange(1, 20_001, dtype=torch.float64)
    degree = (4000 / rank**0.8).ceil().long()
    target = torch.arange(20_000).repeat_interleave(degree)
    power = torch.stack([torch.randint(0, 20_000, target.shape, generator=draw), target])
    plain = gp.GraphPartition.contiguous(20_000, 4).stats(power).edge_imbalance
    even = gp.GraphPartition.balanced(power, 20_000, 4, node_cost=0.0).stats(power).edge_imbalance
    out.append(Figure("edges max / mean, balanced, power-law degrees", even, 1.1,
                      f"contiguous {plain:.2f}"))  # fmt: skip
    stats = gp.GraphPartition.balanced(power, 20_000, 4).stats(power)
    cost = [n + e for n, e in zip(stats.nodes_per_rank, stats.edges_per_rank, strict=True)]
    out.append(Figure("cost max / mean, balanced, default costs", max(cost) * 4 / sum(cost), 1.05,
                      f"edges alone {stats.edge_imbalance:.2f}"))  # fmt: skip
    return out


def main() -> None:
    """Run all cases and write the tables."""
    quick = parser_for(__doc__).parse_args().quick
    rounds = 2 if quick else 15
    os.environ["UNISONO_BACKEND"] = "gloo"
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    rows = [
        *unisono.run(regions, rounds, ranks=2)[0],
        *unisono.run(halo, rounds, ranks=2)[0],
    ]
    text = markdown(rows) + "\n\n" + figure_table(figures())
    publish("Graph parallelism", text, write=not quick)


if __name__ == "__main__":
    main()
