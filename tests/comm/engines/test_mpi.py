"""The MPI transport, on ranks that `mpiexec` starts.

A start costs seconds, so one job of 2 and one of 4 ranks run all checks (`mpi_ranks/`), and each
test here looks at what they reported about one of them. The ranks are forks of the warm interpreter
(`tests/conftest.py`), which has not loaded MPI.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.comm.engines.mpi_ranks import programs
from tests.waiting import scaled_by_load

from unisono.comm import Communicator, transports
from unisono.comm.engines.mpi import library
from unisono.comm.engines.mpi.channel import MpiWatch
from unisono.comm.engines.rendezvous import Member
from unisono.errors import MissingExtra, RankFailed, RankTimeout, UnisonoError
from unisono.processes import process_start

HERE = Path(__file__).parent / "mpi_ranks"
CHECKS = sorted({name.partition("[")[0] for n in (2, 4) for name, _ in programs.borrowed(n)}) + [
    name
    for stem in programs.OWN
    for name in re.findall(r"^def check_(\w+)", (HERE / f"{stem}.py").read_text(), re.MULTILINE)
]
JOB_S = 240
"""Longest time for a job, on a machine that does other things too."""
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@dataclass
class Job:
    """What an MPI job printed."""

    code: int
    output: str
    seconds: float

    @property
    def seen(self):
        """Words of each rank in lines `SEEN <rank> <words>`."""
        words = defaultdict(list)
        for rank, text in re.findall(r"^SEEN (\d+) (.*)$", self.output, re.MULTILINE):
            words[int(rank)].append(text)
        return dict(words)


@pytest.fixture(scope="module")
def run_job(interpreter, mpiexec):
    """Return a function that runs a script on some ranks to its end."""

    def run(ranks, script, *arguments, threads="multiple", core="0"):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MPI4PY_RC_THREAD_LEVEL": threads}
        env["UNISONO_CORE"] = core  # without it ranks of one host talk over MPI as those of several
        began = time.monotonic()
        words = [mpiexec, "-n", str(ranks), interpreter.python, "-W", "ignore", str(HERE / script)]
        process = subprocess.Popen(
            [*words, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
        )
        with process:
            try:
                output, _ = process.communicate(timeout=JOB_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # which ends the ranks too
                output, _ = process.communicate()
                end = output[-5000:]
                pytest.fail(f"{script} on {ranks} ranks did not end in {JOB_S} s:\n{end}")
        return Job(process.returncode, output, time.monotonic() - began)

    return run


@pytest.fixture(scope="module")
def jobs(run_job):
    """The jobs that run all checks, by their number of ranks."""
    return {ranks: run_job(ranks, "main.py") for ranks in (2, 4)}


@pytest.fixture(scope="module")
def reports(jobs):
    """What the jobs report about each check: (ranks, line)."""
    found = defaultdict(list)
    for ranks, job in jobs.items():
        for text in re.findall(r"^CHECK (.*)$", job.output, re.MULTILINE):
            line = json.loads(text)
            found[line["name"].partition("[")[0]].append((ranks, line))
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_over_mpi(reports, jobs, check):
    lines = reports[check]
    tails = {ranks: job.output[-3000:] for ranks, job in jobs.items()}
    assert lines, f"{check} was not run:\n{tails}"
    broken = [
        f"{line['name']} on {ranks} ranks, rank {rank}:\n{text}"
        for ranks, line in lines
        for rank, text in line["errors"].items()
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_job_ends_well_without_clean_up_and_ran_no_check_that_is_not_listed(
    jobs, reports, ranks
):
    assert jobs[ranks].code == 0, jobs[ranks].output[-3000:]
    assert set(reports) == set(CHECKS)


def test_an_exception_on_one_rank_ends_the_job_and_is_known_to_the_others(run_job):
    job = run_job(2, "endings.py", "by_an_exception")
    assert job.code != 0
    assert job.seen[0] == ["failed 1 True True"]
    assert "ValueError: raised on purpose" in job.output
    assert "aborted" not in job.output


def test_a_rank_that_destroys_its_groups_while_others_wait_is_named(run_job):
    job = run_job(2, "endings.py", "by_an_exception_and_clean_up")
    assert job.code != 0
    assert job.seen[0] == ["left 1 True"]
    assert "aborted" not in job.output


def test_groups_over_mpi_need_threads(run_job):
    job = run_job(2, "endings.py", "by_an_exception", threads="serialized")
    assert job.code != 0
    assert "MPI was initialised for one thread at a time" in job.output


@pytest.mark.parametrize("core", ["0", "1"])
def test_a_job_with_a_rank_that_never_comes_is_aborted_after_the_report(run_job, core):
    job = run_job(2, "endings.py", "beside_a_hung_rank", core=core)
    assert job.code != 0
    assert "rank 1 has not arrived" in job.output
    assert "time.sleep(300)" in job.output  # where rank 1 was
    assert ("the MPI job is aborted" if core == "0" else "have 1 s to end") in job.output
    assert job.seconds < scaled_by_load(60)


@pytest.mark.parametrize("core", ["0", "1"])
def test_communicators_of_mpi4py_stand_on_their_own(run_job, core):
    """Over MPI, and in the memory that ranks of one host share."""
    cases = ["any_order", "a_world_that_comes_later", "beside_a_world", "everything_works"]
    job = run_job(4, "standalone.py", *cases, core=core)
    assert job.code == 0, job.output[-5000:]
    assert job.seen == {rank: [f"{case} done" for case in cases] for rank in range(4)}


@pytest.mark.parametrize("core", ["0", "1"])
def test_without_a_world_ranks_that_stall_or_make_other_calls_are_named(run_job, core):
    job = run_job(4, "standalone.py", "a_stalled_rank", "different_calls", core=core)
    said = {
        rank: [line for line in lines if "done" not in line] for rank, lines in job.seen.items()
    }
    mismatch = {rank: ["mismatch True"] for rank in (0, 2, 3)} | {1: []}
    missing = {rank: ["missing [3] stack True"] for rank in range(3)} | {3: []}
    assert said == {rank: missing[rank] + mismatch[rank] for rank in range(4)}, job.output[-5000:]


@pytest.mark.parametrize("core", ["0", "1"])
def test_without_a_world_an_exception_reaches_the_ranks_of_its_group_and_ends_the_job(
    run_job, core
):
    job = run_job(4, "standalone.py", "a_failing_rank", core=core)
    assert job.code != 0
    assert [job.seen[rank][0] for rank in (2, 3)] == ["failed 1 True"] * 2
    assert "ValueError: raised on purpose" in job.output
    assert job.seconds < scaled_by_load(60)


# -- without ranks ----------------------------------------------------------------------------


WITHOUT_MPI = """
import os, sys
import torch.distributed as dist
from unisono.comm import transports
from unisono.errors import MissingExtra

def start():
    try:
        dist.init_process_group("mpi4py", store=dist.HashStore(), rank=0, world_size=1)
    except MissingExtra as error:
        return str(error)

print(any(name.startswith("mpi4py") for name in sys.modules))
transports.register()
print("MPI4PY" in dist.Backend._plugins)
os.environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
print(repr(transports.available()["mpi"]), repr(start()))
package = sys.modules["mpi4py"]
sys.modules["mpi4py"] = None
print(repr(transports.available()["mpi"]), repr(start()))
sys.modules["mpi4py"] = package
del os.environ["MPI4PY_LIBMPI"]
print(repr(transports.available()["mpi"]), "mpi4py.MPI" in sys.modules)
"""


@pytest.mark.usefixtures("mpiexec")
def test_mpi_is_loaded_only_when_it_is_used_and_what_is_missing_is_named_with_its_cure(
    interpreter,
):
    done = subprocess.run(
        [interpreter.python, "-c", WITHOUT_MPI], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported, registered, without_library, without_package, state = done.stdout.splitlines()
    assert imported == "False"
    assert state == "'ok' False"
    assert registered == "True"
    cure = 'pip install "unisono[mpi]"'
    assert without_package.count(cure) == 2
    if not without_library.startswith("'ok'"):  # an mpi4py linked with its library has it
        assert without_library.count(cure) == 2
        assert "cannot load MPI library" in without_library


def test_our_source_check_needs_no_mpi():
    assert not library.is_communicator(object())
    with pytest.raises(UnisonoError, match="names no group"):
        Communicator.of(object())
    assert issubclass(MissingExtra, ImportError)
    assert set(transports.available()) == {"shm", "mpi"}


def watch_of(*cards):
    """Return the watch of rank 0 of two, world ranks 4 and 7, with no store to ask."""
    members = [Member(list(card), "this host", "token", "memory", [0, 2]) for card in cards]
    return MpiWatch((4, 7), 0, members, "a group")


ME = ("here", os.getpid(), process_start(os.getpid()))


def test_a_dead_neighbour_is_named_during_a_wait():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    watch = watch_of(ME, ("here", process.pid, 0))
    with pytest.raises(RankFailed, match=r"rank 7 \(process \d+ on \S+\) died") as caught:
        watch.judge("barrier", None)
    assert caught.value.rank == 7
    watch.judge("recv", [0])  # nobody waits for the dead one


def test_a_deadline_names_the_rank_that_is_missing_also_without_a_store(monkeypatch):
    def gone(key):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr("unisono.comm.health.watchdog.serving", gone)
    watch = watch_of(ME, ME)
    watch.tell(ValueError("the cause"), 4)
    with pytest.raises(RankTimeout, match="not arrived: rank 7"):
        watch.look("recv", [1], 0.02, 0.01)
    with pytest.raises(RankTimeout, match="not arrived: not known"):
        watch.look("barrier", None, 0.02, 0.01)
    watch.cancelled = "the group was closed"
    with pytest.raises(UnisonoError, match="the group was closed"):
        watch.look("barrier", None, 0.0, 60.0)


def test_a_rank_that_left_after_it_made_the_collective_is_not_missed():
    watch = watch_of(ME, ME)
    watch.number, watch.gone = 5, {1: 5}
    assert watch.departed(None) == []
    watch.number = 6
    assert watch.departed(None) == [7]
    assert watch.departed([1]) == [7]  # it sends no messages any more
    assert watch.departed([0]) == []
