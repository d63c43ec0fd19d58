"""`unisono topo`: this machine, where ranks would run, and a drawing of a mesh or partition."""

from __future__ import annotations

import argparse
import math
import os
import platform
import socket
from typing import NamedTuple

from unisono.cli.outcome import OK
from unisono.errors import PlatformError


class _Grid(NamedTuple):
    """A layout of ranks that needs no world."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "topo",
        help="show cores, devices, ranks, and which rank holds what",
        description="Show this machine and where each rank would run. With --mesh, draw a grid of "
        "ranks; with --shape, the block of a tensor that each rank holds; with --image, write it "
        "as a picture.",
    )
    parser.add_argument("--on", default="auto", help="cpu, gpu, mps, mpi, slurm or a profile")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (mpi, slurm)")
    parser.add_argument("--mesh", metavar="2x2", help="draw this grid of ranks")
    parser.add_argument("--shape", metavar="64x64", help="draw a tensor split over the mesh")
    parser.add_argument("--kernel", metavar="3x3", help="also draw the halos of this convolution")
    parser.add_argument("--circular", action="store_true", help="with periodic boundaries")
    parser.add_argument("--image", metavar="FILE", help="also write a .png, .svg or .pdf")
    parser.add_argument("--graph", metavar="FILE.npz", help="compare partitions of this graph")
    parser.add_argument("--parts", type=int, default=4, metavar="N", help="parts of --graph (4)")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Draw what is asked; without --mesh, the machine and its ranks."""
    if args.graph:
        from unisono.graph_parallel.partition import graph_file_report

        print(graph_file_report(args.graph, args.parts))
    elif args.mesh:
        print(_picture(args))
    elif args.shape or args.kernel or args.image:
        found, hint = "no --mesh", "unisono topo --mesh 2x2 --shape 64x64"
        raise PlatformError.because("--shape, --kernel or --image", found, hint=hint)
    else:
        ranks = _ranks(args)  # refuses before anything is printed
        print(_machine(), ranks, sep="\n")
    return OK


def _machine() -> str:
    """Return the facts of this machine, one per line."""
    from unisono import accelerator
    from unisono.cores import usable_cores

    gpus = accelerator.count()
    devices = [f"{gpus} GPU{'s' if gpus > 1 else ''} ({accelerator.kind()})"] if gpus else []
    interfaces = ", ".join(name for _, name in socket.if_nameindex()) or "none"
    rows = [
        ("host", f"{socket.gethostname()} ({platform.machine()}, {platform.system()})"),
        ("cores", f"{usable_cores()} usable of {os.cpu_count()}"),
        ("devices", ", ".join(["CPU", *devices])),
        ("interfaces", interfaces),
    ]
    return "\n".join(f"{name:<10}  {value}" for name, value in rows)


def _ranks(args: argparse.Namespace) -> str:
    """Return the table of ranks that a launch with these options would have."""
    from unisono.launch.request import checked_request

    asked = {"on": args.on, "ranks": args.ranks, "nodes": args.nodes}
    platform = checked_request(print, (), {}, **asked).platform
    threads = platform.cpus_per_rank
    return (
        f"\n{platform.world_size} ranks on {platform.kind.value}, "
        f"{threads} thread{'' if threads == 1 else 's'} each\n"
        f"{platform.rank_table()}"
    )


def _picture(args: argparse.Namespace) -> str:
    """Return the drawing of a mesh, with a tensor and its halos if given."""
    from unisono.topology import draw

    grid = _sizes(args.mesh, "--mesh")
    shape = _sizes(args.shape, "--shape") if args.shape else None
    if args.kernel and shape is None:
        raise PlatformError.because(
            "--kernel", "no --shape: halos depend on sizes", hint="add --shape 64x64"
        )
    if shape is not None and len(shape) > len(grid):
        grid = (1,) * (len(shape) - len(grid)) + grid
    if args.circular and not args.kernel:
        raise PlatformError.because("--circular", "no --kernel", hint="add --kernel 3x3")
    halo = {"kernel_size": _sizes(args.kernel, "--kernel")} if args.kernel else None
    if halo is not None and args.circular:
        halo |= {"padding": "same", "padding_mode": "circular"}
    text = draw(_Grid(grid, tuple(range(math.prod(grid)))), shape, halo, file=args.image)
    return f"{text}\nwritten to {args.image}" if args.image else text


def _sizes(word: str, option: str) -> tuple[int, ...]:
    """Read '2x3' as (2, 3)."""
    try:
        sizes = tuple(int(part) for part in word.lower().split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PlatformError.because(
            f"{option} {word}",
            "not a list of positive sizes joined by x",
            hint=f"for example {option} 2x2",
        )
    return sizes
