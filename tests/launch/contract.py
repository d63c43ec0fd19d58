"""What every place promises: the same values, errors and clean ends, wherever the ranks are.

Each case is a function of a `Place` and a directory, and `CASES` names them all; those of elastic
trainings belong to it. A case that a place does not promise is skipped there.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import is_running, scaled_by_load, wait_until

import unisono
from unisono.errors import JobCancelled, RankFailed, RankTimeout, RemoteError

AT_ONCE_S = 10.0
"""Two seconds are promised; a loaded machine may take longer."""
HOSTILE = "a b 'c' \"d\"\n$HOME;e"
"""Name of a directory that a careless shell command falls over."""
OUTPUT_MB = 100


@dataclass(frozen=True)
class Place:
    """Where the contract is checked."""

    on: str
    has_agents: bool = True
    is_elastic: bool = True
    """Whether ranks may die and join."""
    hostile: str = HOSTILE
    """Name of a directory for its logs."""
    has_job: bool = False
    """Whether a scheduler keeps the run, whose outcome is on the disk of its logs."""
    result_mb: int = 100
    """Size of a large result there; `mpiexec` stands for all places with agents with 800."""
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, fn, *args, start=unisono.run, timeout_s=90.0, logs=None, **options):
        """Run, or submit, a function on two ranks there, in silence."""
        if options.get("elastic") and not self.is_elastic:
            pytest.skip("ranks that end together")
        platform = unisono.Platform(device=self.on, ranks=2, **self.options)
        logs = unisono.Logs(dir=logs, console="none")
        return start(fn, *args, on=platform, timeout_s=timeout_s, logs=logs, **options)


def returns_values_and_logs_whatever_its_directory_is_called(place, tmp_path):
    def work(start):
        comm = unisono.world()
        print("hello from", comm.rank)
        return comm.rank, comm.all_reduce(torch.tensor([start + comm.rank])).item()

    results = place.run(work, 10.0, logs=tmp_path / place.hostile)
    assert list(results) == [(rank, 21.0) for rank in range(2)]
    assert results.platform == place.on
    assert [results.log(rank) for rank in range(2)] == ["hello from 0\n", "hello from 1\n"]
    assert results.dir.parent.name == place.hostile


class Stubborn(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def end_badly(how):
    match how:
        case "raises":
            raise Stubborn("one", "two")
        case "exits":
            os._exit(3)
        case "hangs":
            time.sleep(600)
        case "has its agent killed":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        case name if name.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[name])


def misbehave(how, folder):
    comm = unisono.world()
    Path(folder, str(comm.rank)).write_text(f"{os.getpid()} {os.getppid()}")
    comm.barrier()
    if comm.rank == 1:
        Path(folder, "mark").touch()
        end_badly(how)
    if how == "returns a lock":
        return {"state": [0, threading.Lock()]} if comm.rank else 0
    comm.barrier()
    return None


def names_a_rank_that(how):
    """Return the case of a rank 1 that ends badly, while the other waits for it."""

    def case(place, tmp_path):
        if how == "has its agent killed" and not place.has_agents:
            pytest.skip("ranks without agents")
        timeout_s = 3.0 if how == "hangs" else 90.0
        with pytest.raises((RankFailed, RankTimeout)) as caught:
            place.run(misbehave, how, tmp_path, timeout_s=timeout_s)
        error = caught.value
        if how != "hangs":
            assert time.time() - (tmp_path / "mark").stat().st_mtime < scaled_by_load(AT_ONCE_S)
        for rank in range(2):
            pid, _ = map(int, (tmp_path / str(rank)).read_text().split())
            wait_until(lambda pid=pid: not is_running(pid), 10)
        assert error.rank == 1
        assert "rank 1 of 2" in str(error).splitlines()[0]
        if how == "hangs":
            assert sorted(error.stacks) == [0, 1]
            assert all("in misbehave" in text for text in error.stacks.values())
            return
        expected = {"exits": (3, None), "SIGKILL": (None, "SIGKILL"), "SIGSEGV": (None, "SIGSEGV")}
        assert (error.exit_code, error.signal) == expected.get(how, (None, None))
        words = {
            "raises": "Stubborn: one and two",
            "returns a lock": "result['state'][1] is a lock",
            "has its agent killed": "was lost",
        }
        assert words.get(how, "") in str(error)
        if how == "raises":
            assert (error.exception, type(error.__cause__)) == (None, RemoteError)
        assert "unisono/launch/" not in str(error)

    return case


def carries_much_output_and_a_large_result(place, tmp_path):
    def work(output_mb, result_mb):
        line = "x" * 1023 + "\n"
        comm = unisono.world()
        if comm.rank == 0:
            for _ in range(output_mb):
                sys.stdout.write(line * 1024)
            print("the end")
            return None
        return torch.full((result_mb << 17,), 3.0, dtype=torch.float64)

    results = place.run(work, OUTPUT_MB, place.result_mb, logs=tmp_path)
    assert results[1].numel() == place.result_mb << 17
    assert results[1][-1] == 3.0
    log = results.dir / "rank-0.log"
    assert log.stat().st_size == (OUTPUT_MB << 20) + len("the end\n")
    assert results.log(0).endswith("x\nthe end\n")


def runs_twice_at_once(place, tmp_path):
    def work(number):
        comm = unisono.world()
        return comm.all_reduce(torch.tensor([number])).item()

    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(place.run, work, number) for number in (1, 2)]
        assert [list(run.result()) for run in runs] == [[2, 2], [4, 4]]


def goes_on_when_the_disk_of_its_logs_is_full(place, tmp_path):
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("a small disk needs root on Linux")
    if place.has_job:
        pytest.skip("results are on the same disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "unisono-test", str(disk)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")

    def work():
        for _ in range(3):
            print("x" * (1 << 20), flush=True)
        return unisono.world().all_reduce(torch.ones(1)).item()

    try:
        with pytest.warns(RuntimeWarning, match="takes no more output"):
            assert list(place.run(work, logs=disk)) == [2.0, 2.0]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def tries_a_failed_attempt_again(place, tmp_path):
    def work():
        comm = unisono.world()
        comm.barrier()  # what fails before all are ready would fail again
        if unisono.restart_count() == 0 and comm.rank == 1:
            raise OSError("first attempt")
        comm.barrier()
        return unisono.restart_count()

    results = place.run(work, logs=tmp_path, max_restarts=1)
    assert (list(results), results.restarts) == ([1, 1], 1)
    # Inside of a private directory, files of a scheduler are as it makes them.
    paths = [results.dir] if place.has_job else [results.dir, *results.dir.iterdir()]
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in paths)


def shows_the_stacks_of_a_job_and_cancels_it(place, tmp_path):
    def sleepy():
        print("here", flush=True)
        time.sleep(600)

    job = place.run(sleepy, start=unisono.submit, logs=tmp_path)
    wait_until(lambda: all("here" in job.logs(rank) for rank in range(2)))
    stacks = job.stacks()
    assert sorted(stacks) == [0, 1]
    assert all("in sleepy" in text for text in stacks.values())
    job.cancel()
    assert job.status() == "cancelled"
    with pytest.raises(JobCancelled):
        job.result()


LAUNCHER = """
import os, sys, time
from pathlib import Path
import unisono

def work(folder):
    rank = os.environ["RANK"]  # in an elastic run each rank is a world of one
    Path(folder, f"{rank}.part").write_text(f"{os.getpid()} {os.getppid()}")
    Path(folder, f"{rank}.part").rename(Path(folder, str(rank)))
    while True:
        unisono.world().barrier()
        time.sleep(0.05)

if __name__ == "__main__":
    options = eval(sys.argv[1])
    elastic = sys.argv[3] == "True" or None
    unisono.run(work, sys.argv[2], on=unisono.Platform(ranks=2, **options), elastic=elastic)
"""


def leaves_nothing_when_its_launcher_is_killed(place, tmp_path, *, elastic=False):
    if place.has_job or (elastic and not place.is_elastic):
        pytest.skip("the job goes on, or ranks end together")
    script = tmp_path / "launcher.py"
    script.write_text(textwrap.dedent(LAUNCHER))
    options = {"device": place.on, **place.options}
    words = [sys.executable, str(script), repr(options), str(tmp_path), str(elastic)]
    with subprocess.Popen(words, cwd=tmp_path, start_new_session=True) as launcher:
        try:
            paths = [tmp_path / str(rank) for rank in range(2)]
            wait_until(lambda: all(path.exists() for path in paths) or launcher.poll() is not None)
            pids = [int(pid) for path in paths for pid in path.read_text().split()]
        finally:
            launcher.kill()  # the block waits for its end
    wait_until(lambda: not any(map(is_running, pids)), 30)


def leaves_nothing_of_an_elastic_run_when_its_launcher_is_killed(place, tmp_path):
    leaves_nothing_when_its_launcher_is_killed(place, tmp_path, elastic=True)


def train(ends=(), folder="", members=1):
    """Train elastically; rank 1 ends badly in the midst of a step, once in each of these ways.

    Return the rank and the weights. Steps are slow until all of that has happened, and while there
    are fewer members.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(128.0).reshape(32, 4) / 128

    def next_end():
        return next((how for how in ends if not Path(folder, how).exists()), None)

    def loss(batch):
        if os.environ.get("RANK") == "1" and step.number >= 3 and (how := next_end()):
            Path(folder, how).touch()
            end_badly(how)
        return model(batch[0]).square().mean()

    run = unisono.train.elastic(model, optimizer, data, batch_size=8, shards=4, steps=400)
    for step in run:
        step(loss)
        time.sleep(0.3 if next_end() or run.members < members else 0.0)
    return os.environ.get("RANK"), [tensor.tolist() for tensor in model.state_dict().values()]


def trains_elastically_whatever_happens_to_a_rank(place, tmp_path):
    ends = [how for how in DEATHS if place.has_agents or how != "has its agent killed"]
    # A scheduler starts the agents of a job once: none comes in the place of one that was killed.
    ranks = ["0"] if place.has_job else ["0", "1"]
    results = place.run(train, ends, tmp_path, len(ranks), elastic=True, timeout_s=200.0)
    assert all((tmp_path / how).exists() for how in ends)  # each time there was a new rank 1
    _, alone = train()
    assert list(results) == [(rank, alone) for rank in ranks]


def names_the_rank_of_an_elastic_training_that_raises(place, tmp_path):
    with pytest.raises(RankFailed, match="Stubborn: one and two") as caught:
        place.run(train, ["raises"], tmp_path, elastic=True)
    assert caught.value.rank == 1
    assert time.time() - (tmp_path / "raises").stat().st_mtime < scaled_by_load(AT_ONCE_S)


DEATHS = ("exits", "SIGKILL", "SIGSEGV", "has its agent killed")
ENDS = (*DEATHS, "raises", "hangs", "returns a lock")
CASES = {
    case.__name__: case
    for case in (
        returns_values_and_logs_whatever_its_directory_is_called,
        carries_much_output_and_a_large_result,
        runs_twice_at_once,
        goes_on_when_the_disk_of_its_logs_is_full,
        leaves_nothing_when_its_launcher_is_killed,
        leaves_nothing_of_an_elastic_run_when_its_launcher_is_killed,
        tries_a_failed_attempt_again,
        shows_the_stacks_of_a_job_and_cancels_it,
        trains_elastically_whatever_happens_to_a_rank,
        names_the_rank_of_an_elastic_training_that_raises,
    )
}
CASES |= {f"names_a_rank_that_{how.replace(' ', '_')}": names_a_rank_that(how) for how in ENDS}
OF_ALL_PLACES = pytest.mark.parametrize("case", CASES)


def shows_stacks(case):
    """Whether a case shows stacks: those of a fork begin with frames of the forked interpreter."""
    return case.endswith(("_exits", "_hangs", "_SIGSEGV")) or "stacks" in case
