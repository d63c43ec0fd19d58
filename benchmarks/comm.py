"""The communicator on gloo: what its choices save, and what its checks, trace and operators cost.

    python benchmarks/comm.py [--quick]

Reference is what a careful user would write with torch.distributed in the same run.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from harness import Row, interleaved, markdown, parser_for, publish

import unisono
from unisono.comm import trace, world
from unisono.comm.collectives import all_reduce_together
from unisono.operators import all_gather as gather_operator

MB = 1 << 20


def padded_all_gather(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The textbook way to gather uneven blocks: pad to the largest, gather a list, cut, join."""
    largest = max(sizes)
    padded = torch.cat([x, x.new_zeros(largest - len(x), *x.shape[1:])])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def native_reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """torch.distributed's own call."""
    out = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_single(out, x)
    return out


def two_ranks(rounds: int) -> list[Row]:
    """Cases measured on two ranks."""
    comm = world()
    rows: list[Row] = []
    sizes = [655_360 + r for r in range(comm.size)]
    x = torch.randn(sizes[comm.rank], 2)
    times = interleaved(
        comm,
        {
            "ours": lambda: comm.all_gather(x, sizes=sizes),
            "ref": lambda: padded_all_gather(x, sizes),
        },
        rounds=rounds,
    )
    rows.append(
        Row("all_gather uneven, 10 MB in all, 2 ranks", times["ours"], times["ref"],
            "pad + list all_gather + cat", 0.7)
    )  # fmt: skip
    small = [torch.randn(256) for _ in range(6)]

    times = interleaved(
        comm,
        {
            "ours": lambda: all_reduce_together(comm, small),
            "ref": lambda: [dist.all_reduce(t.clone()) for t in small],
        },
        rounds=rounds,
    )
    rows.append(
        Row("six all_reduces of 1 KB, made one, 2 ranks", times["ours"], times["ref"],
            "six calls", 0.3)
    )  # fmt: skip
    one = torch.randn(256)

    def traced() -> None:
        with trace():
            for _ in range(5):
                comm.all_reduce(one)

    def untraced() -> None:
        for _ in range(5):
            comm.all_reduce(one)

    times = interleaved(comm, {"ours": traced, "ref": untraced}, rounds=40 * rounds)
    rows.append(
        Row("all_reduce 1 KB with trace on, 2 ranks", times["ours"] / 5, times["ref"] / 5,
            "trace off", 1.02)
    )  # fmt: skip
    times = interleaved(
        comm,
        {"ours": lambda: comm.all_reduce(one), "ref": lambda: dist.all_reduce(one.clone())},
        rounds=4 * rounds,
        repeats=5,
    )
    rows.append(
        Row("verb all_reduce 1 KB, 2 ranks", times["ours"], times["ref"], "dist.all_reduce", None)
    )
    rows.append(operator_pair(rounds))
    return rows


def operator_pair(rounds: int) -> Row:
    """Forward and backward of all_gather as an operator, against its two collectives."""
    comm = world()
    sizes = [256 // comm.size] * comm.size
    x = torch.randn(sizes[0], requires_grad=True)
    grad = torch.randn(sum(sizes))

    def operator() -> None:
        gather_operator(x, 0, sizes, comm=comm).backward(grad)

    def bare() -> None:
        comm.all_gather(x, sizes=sizes)
        comm.reduce_scatter(grad, sizes=sizes)

    times = interleaved(comm, {"ours": operator, "ref": bare}, rounds=4 * rounds, repeats=5)
    extra = (times["ours"] - times["ref"]) * 1e6
    return Row(
        "operator all_gather 1 KB, forward + backward, 2 ranks",
        times["ours"],
        times["ref"],
        "the two verbs",
        None,
        f"{extra:+.0f} us",
    )


def four_ranks(rounds: int) -> list[Row]:
    """Cases measured on four ranks."""
    comm = world()
    x = torch.randn(10 * MB // 4)
    times = interleaved(
        comm,
        {"ours": lambda: comm.reduce_scatter(x), "ref": lambda: native_reduce_scatter(x)},
        rounds=rounds,
    )
    rows = [
        Row("reduce_scatter 10 MB, 4 ranks", times["ours"], times["ref"],
            "dist.reduce_scatter_single", 0.6)
    ]  # fmt: skip
    small = torch.randn(256)

    def native() -> None:
        dist.all_reduce(small.clone())

    times = interleaved(
        comm, {"ours": lambda: comm.all_reduce(small), "ref": native}, rounds=2 * rounds, repeats=3
    )
    rows.append(Row("all_reduce 1 KB, 4 ranks", times["ours"], times["ref"], "native gloo", None))
    return rows


def main() -> None:
    """Run all cases and write the table."""
    quick = parser_for(__doc__).parse_args().quick
    rounds = 3 if quick else 15
    os.environ["UNISONO_BACKEND"] = "gloo"
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = [
        *unisono.run(two_ranks, rounds, ranks=2)[0],
        *unisono.run(four_ranks, rounds, ranks=4)[0],
    ]
    publish("Communicator on gloo", markdown(rows), write=not quick)


if __name__ == "__main__":
    main()
