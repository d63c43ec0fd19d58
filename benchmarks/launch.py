"""How long launching takes, against `torch.multiprocessing.spawn` and the like.

    python benchmarks/launch.py [--quick] [--ranks N ...]

Each case and its reference run in turns; the figure is the ratio of medians. With `--ranks` a
second table is made instead: what so many ranks of this host take.
"""

from __future__ import annotations

import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Row, markdown, parser_for, publish

import unisono
from unisono.errors import RankFailed

QUIET = unisono.Logs(console="none")
LARGE_ROUNDS = 3
FIRST = {
    "ours": "import torch, unisono\n"
    "from launch import ours\n"
    "unisono.run(ours, on='cpu', ranks=2, logs=unisono.Logs(console='none'))\n",
    "reference": "import torch\n"
    "from launch import spawned\n"
    "if __name__ == '__main__': spawned(2)\n",
}


def ours() -> None:
    unisono.world().all_reduce(torch.ones(1))


def reference(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def spawned(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(reference, (size, str(Path(folder, "store"))), nprocs=size)


def run_ours(ranks: int) -> None:
    unisono.run(ours, on="cpu", ranks=ranks, logs=QUIET)


def python(*words: str, cwd: str | Path = ".") -> None:
    subprocess.run([sys.executable, *words], check=True, cwd=cwd, capture_output=True)


def fresh(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        search = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        script.write_text(search + FIRST[kind])
        python(str(script))


def in_turns(candidates: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median time of each candidate, all run in turns."""
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds):
        for candidate, taken in zip(candidates, times, strict=True):
            begin = time.perf_counter()
            candidate()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


def steps(every: int | None, count: int = 300) -> float:
    """Return the seconds of a loop of 1 ms steps, with or without a look at `should_stop`."""
    begin = time.perf_counter()
    for _ in range(count):
        end = time.perf_counter() + 1e-3
        while time.perf_counter() < end:
            pass
        if every is not None:
            unisono.should_stop(every=every)
    return time.perf_counter() - begin


def both_loops() -> tuple[float, float]:
    steps(10, 20)
    return steps(10), steps(None)


def big() -> torch.Tensor:
    return torch.zeros(64 << 20)


def travel() -> None:
    pickle.loads(pickle.dumps(big(), protocol=pickle.HIGHEST_PROTOCOL))


def larger() -> torch.Tensor:
    return torch.ones(200 << 20)


def weigh(x: torch.Tensor) -> float:
    return float(x[-1])


def pickled_and_copied(values: int) -> None:
    """Pickle `values` results of 800 MB and copy each, all in this process."""
    for _ in range(values):
        bytearray(pickle.dumps(larger(), protocol=pickle.HIGHEST_PROTOCOL))


def chatter(megabytes: int) -> None:
    line = b"x" * 99 + b"\n"
    for _ in range(megabytes * 100):
        os.write(1, line * 100)


def chatter_to_files(megabytes: int) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import os\n"
    code += f"line = b'x' * 99 + b'\\n'\nfor _ in range({megabytes * 100}): os.write(1, line * 100)"
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for i in range(2):
            with Path(folder, str(i)).open("wb") as file:
                processes.append(subprocess.Popen([sys.executable, "-c", code], stdout=file))
        for process in processes:
            process.wait()


def empty() -> None:
    """Do nothing: what is left is the launch."""


def look_around(repeats: int = 20) -> tuple[float, float, float, float]:
    """Return the seconds of the first all-reduce, of a later one and of a barrier; MB used."""
    comm, x = unisono.world(), torch.ones(1)

    def timed(call: Callable[[], object], count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count

    first = timed(lambda: comm.all_reduce(x), 1)
    later, barrier = timed(lambda: comm.all_reduce(x), repeats), timed(comm.barrier, repeats)
    used = Path("/proc/self/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]
    return first, later, barrier, int(used) / 1024


def die_last(path: str) -> None:
    """Have the last rank killed while the others wait for it."""
    comm = unisono.world()
    comm.barrier()
    if comm.rank == comm.size - 1:
        Path(path).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def seconds_to_name_a_death(ranks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "died")
        try:
            unisono.run(die_last, str(path), on="cpu", ranks=ranks, logs=QUIET)
        except RankFailed as error:
            if error.rank == ranks - 1:
                return time.time() - float(path.read_text())
    raise RuntimeError(f"the death of rank {ranks - 1} was not named")


def many_ranks(sizes: list[int], rounds: int) -> str:
    """Return a table of what so many ranks of one host take; medians over rounds."""
    lines = [
        "| ranks | start and end | first all-reduce | later | barrier | MB a rank | death named |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    unisono.run(empty, on="cpu", ranks=2, logs=QUIET)
    for ranks in sizes:
        rows: list[list[float]] = []
        for _ in range(rounds):
            begin = time.perf_counter()
            unisono.run(empty, on="cpu", ranks=ranks, logs=QUIET)
            whole = time.perf_counter() - begin
            seen = unisono.run(look_around, on="cpu", ranks=ranks, logs=QUIET)
            slowest = [max(column) for column in zip(*seen, strict=True)]
            rows.append([whole, *slowest, seconds_to_name_a_death(ranks)])
        whole, first, later, barrier, used, named = map(statistics.median, zip(*rows, strict=True))
        times = [f"{t:.2f} s" for t in (whole, named)]
        short = [f"{1e3 * t:.2f} ms" for t in (first, later, barrier)]
        lines.append(
            "| " + " | ".join([str(ranks), times[0], *short, f"{used:.0f}", times[1]]) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="measure so many ranks, 2 to 128 say")
    options = parser.parse_args()
    rounds = 2 if options.quick else 5
    if options.ranks:
        table = many_ranks(options.ranks, 1 if options.quick else 3)
        publish("Many ranks on one host", table, write=not options.quick)
        return
    rows: list[Row] = []

    first, spawn_first = in_turns([lambda: fresh("ours"), lambda: fresh("reference")], rounds)
    rows.append(Row("launch_first: 2 ranks", first, spawn_first, "mp.spawn", 0.9))
    run_ours(2)
    warm, spawn = in_turns([lambda: run_ours(2), lambda: spawned(2)], rounds)
    rows.append(Row("launch_warm: 2 ranks", warm, spawn, "mp.spawn", 0.15))
    eight, two = in_turns([lambda: run_ours(8), lambda: run_ours(2)], rounds)
    rows.append(Row("launch_ranks8", eight, two, "2 ranks", 6.0))
    help_s, import_s = in_turns(
        [lambda: python("-m", "unisono", "--help"), lambda: python("-c", "import torch")], rounds
    )
    rows.append(Row("launch_help", help_s, import_s, "import torch", 0.3))
    loops = [unisono.run(both_loops, on="cpu", ranks=2, logs=QUIET)[0] for _ in range(rounds)]
    with_it, without = (statistics.median(side) for side in zip(*loops, strict=True))
    rows.append(Row("should_stop: every=10", with_it, without, "without", 1.1))
    if not options.quick:
        result, copied = in_turns(
            [lambda: unisono.run(big, on="cpu", ranks=1, logs=QUIET), travel], rounds
        )
        rows.append(Row("launch_result: 256 MB", result, copied, "pickle there and back", 4.0))
        results, copies = in_turns(
            [
                lambda: unisono.run(larger, on="cpu", ranks=2, logs=QUIET),
                lambda: pickled_and_copied(2),
            ],
            LARGE_ROUNDS,
        )
        rows.append(
            Row("launch_results: 2 x 800 MB", results, copies, "pickle and copy of both", 1.5)
        )
        warnings.filterwarnings("ignore", message="each rank is sent")
        arguments, copies = in_turns(
            [
                lambda: unisono.run(weigh, larger(), on="cpu", ranks=2, logs=QUIET),
                lambda: pickled_and_copied(2),
            ],
            LARGE_ROUNDS,
        )
        rows.append(
            Row("launch_arguments: 800 MB to 2", arguments, copies, "pickle and copy, twice", 1.5)
        )
        logs, files = in_turns(
            [
                lambda: unisono.run(chatter, 100, on="cpu", ranks=2, logs=QUIET),
                lambda: chatter_to_files(100),
            ],
            rounds,
        )
        rows.append(Row("launch_logs: 2 x 100 MB", logs, files, "files", 2.0))
    publish("Launching", markdown(rows), write=not options.quick)


if __name__ == "__main__":
    main()
