"""How long launching takes, against `torch.multiprocessing.spawn` and the like.

    python benchmarks/launch.py [--quick] [--ranks N ...] [--agents N]

Each case and its reference run in turns; the figure is the ratio of medians. With `--ranks` a
second table is made instead: what so many ranks of this host take; with `--agents` what a launcher
of so many agents, processes that only speak the control channel, spends on them.
"""

from __future__ import annotations

import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Row, markdown, parser_for, publish

import unisono
from unisono.errors import RankFailed
from unisono.launch.attempts import rank_job
from unisono.launch.logs import Console
from unisono.launch.places.program import ProgramRanks
from unisono.launch.pool.payload import dump_call
from unisono.launch.pool.protocol import RunPlan
from unisono.launch.request import checked_request
from unisono.launch.supervisor import Supervisor

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
    return first, later, barrier, memory_mb()


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


UNDER_TORCHRUN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
UNDER_MPIEXEC = """
import numpy
from mpi4py import MPI
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, numpy.ones(1))
"""


def others_launchers(sizes: list[int], rounds: int) -> list[Row]:
    """Return ours against torchrun and against mpiexec, each with one all-reduce."""
    beside = Path(sys.executable).parent
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("torchrun", UNDER_TORCHRUN), ("mpiexec", UNDER_MPIEXEC)):
            Path(folder, f"{name}.py").write_text(text)

        def torchrun(ranks: int) -> None:
            words = ["--standalone", f"--nproc-per-node={ranks}", f"{folder}/torchrun.py"]
            subprocess.run([beside / "torchrun", *words], check=True, capture_output=True)

        def mpiexec(ranks: int) -> None:
            words = ["-n", str(ranks), sys.executable, f"{folder}/mpiexec.py"]
            subprocess.run([beside / "mpiexec", *words], check=True, capture_output=True)

        for ranks in sizes:
            case = f"launch and all-reduce: {ranks} ranks"
            ours_s, mpi_s = in_turns([partial(run_ours, ranks), partial(mpiexec, ranks)], rounds)
            rows.append(Row(case, ours_s, mpi_s, "mpiexec", 1.3 if ranks == 64 else None))
            if ranks <= 16:  # each of torchrun's ranks loads torch: minutes for 64 on two cores
                ours_s, run_s = in_turns(
                    [partial(run_ours, ranks), partial(torchrun, ranks)], rounds
                )
                rows.append(Row(case, ours_s, run_s, "torchrun", None))
    return rows


def memory_mb() -> float:
    """Return the memory of this process, its part of what it shares counted once."""
    used = Path("/proc/self/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]
    return int(used) / 1024


FORKED = """
import os, sys, time, torch, torch.distributed
sys.path.insert(0, {folder!r})
from launch import memory_mb
import gc; gc.freeze()
read, write = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        time.sleep(0.5)
        os.write(write, f"{{memory_mb()}} ".encode())
        time.sleep(0.5)
        os._exit(0)
for _ in range(2):
    os.wait()
print(os.read(read, 100).decode().split()[0])
"""


def sleep_and_weigh() -> float:
    time.sleep(0.3)
    return memory_mb()


def warm_memory() -> Row:
    """Return the memory of a warm rank against that of a fork of a process with torch."""
    rank_mb = unisono.run(sleep_and_weigh, on="cpu", ranks=2, logs=QUIET)[0]
    words = [sys.executable, "-c", FORKED.format(folder=str(Path(__file__).parent))]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    forked_mb = float(done.stdout)
    note = f"{rank_mb:.0f} MB against {forked_mb:.0f} MB"
    return Row("memory of a warm rank", rank_mb, forked_mb, "a fork with torch", 1.2, note)


AGENTS = """
import os, selectors, socket, sys, time
from unisono.launch.channel import Broken, ControlChannel, dial
from unisono.launch.places.agent import INVITATION, Invitation
from unisono.launch.pool.protocol import own_versions
from unisono.launch.pool.protocol import RankState

def be(rank, told):
    channel = ControlChannel()
    channel.attach(dial(channel, bytes.fromhex(told.key), told.addresses, told.port, 60.0))
    hello = {"host": socket.gethostname(), "node": "", "versions": own_versions()}
    channel.send({"rank": rank, **hello})
    state = RankState(rank=rank, pid=os.getpid())
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    while True:
        selector.select()
        try:
            orders = channel.receive()
        except Broken:
            os._exit(0)
        for order in orders:
            if "plan" in order:
                for line in range(100):
                    channel.send({"output": f"line {line}\\n".encode(), "stream": 0})
                for word in ("running", "ready"):
                    state.note(word)
                    channel.send({"state": state})
            elif "stop" in order:
                state.note("stopped")
                channel.send({"state": state})
                channel.send({"over": True})
                os._exit(0)

told = Invitation.read(os.environ[INVITATION])
for rank in range(int(sys.argv[1])):
    if os.fork() == 0:
        be(rank, told)
while True:
    os.wait()
"""


def many_agents(count: int = 200) -> str:
    """Return a table: what agents of an idle run cost the launcher, and how a death is named."""
    platform = unisono.Platform(device="mpi", ranks=count)
    plan = RunPlan.of(platform, timeout_s=None, max_restarts=0)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"payload-{plan.run_id}").touch(mode=0o600)
        ranks = ProgramRanks(
            rank_job(checked_request(print, (), {}, on=platform), dump_call(print, (), {}), {}),
            plan,
            0,
            console=Console([], prefix=False),
            job_dir=Path(folder),
            command=[sys.executable, "-c", AGENTS, str(count)],
            env=os.environ,
        )
        supervisor = Supervisor(ranks, plan, 0)
        thread = threading.Thread(target=supervisor.run)
        thread.start()
        while not all(state.is_ready for state in ranks.states):
            time.sleep(0.01)
        time.sleep(1.0)
        before = time.process_time()
        time.sleep(5.0)
        idle = (time.process_time() - before) / 5.0
        victim = ranks.states[count // 2]
        begin = time.perf_counter()
        os.kill(victim.pid, signal.SIGKILL)
        while victim.state != "failed":
            time.sleep(0.001)
        named_s = time.perf_counter() - begin
        thread.join()
        logs = [Path(folder, f"rank-{rank}.log").read_text() for rank in range(count)]
        lines = sum(text.count("\n") for text in logs)
    return "\n".join(
        [
            "| agents | CPU of the idle launcher | a death is named | lines of output |",
            "|---:|---:|---:|---:|",
            f"| {count} | {100 * idle:.2f} % | {named_s:.2f} s | {lines} of {100 * count} |",
        ]
    )


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--agents", type=int, help="measure a launcher of so many agents, 200 say")
    parser.add_argument("--ranks", type=int, nargs="+", help="measure so many ranks, 2 to 128 say")
    options = parser.parse_args()
    rounds = 2 if options.quick else 5
    if options.ranks:
        table = many_ranks(options.ranks, 1 if options.quick else 3)
        publish("Many ranks on one host", table, write=not options.quick)
        return
    if options.agents:
        publish("Agents of one launcher", many_agents(options.agents), write=not options.quick)
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
    rows.append(warm_memory())
    rows += others_launchers([2] if options.quick else [2, 16, 64], 2 if options.quick else 3)
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
