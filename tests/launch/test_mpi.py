"""Ranks under `mpiexec`: one that we start, and one that the user started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.waiting import scaled_by_load

import unisono
from unisono.errors import PlatformError, RankFailed
from unisono.launch.places import mpi
from unisono.launch.places.mpi import find_mpiexec

QUIET = unisono.Logs(console="none")


@pytest.fixture
def forked_ranks(mpiexec, warm_python, monkeypatch):
    """Let agents and ranks be forks of the warm interpreter: loading torch is no part of a test."""
    monkeypatch.setenv("MPIEXEC", mpiexec)
    monkeypatch.setenv("WARM_PYTHON", warm_python)
    monkeypatch.setattr(sys, "executable", warm_python)


@pytest.mark.mpi
def test_ranks_of_our_own_mpiexec_on_one_host_share_memory_where_mpi_is_asked_for(mpiexec):
    def work(start):
        comm = unisono.world()
        total = comm.all_reduce(torch.tensor([start + comm.rank])).item()
        return comm.rank, total, comm.backend, os.environ["LOCAL_WORLD_SIZE"]

    pytest.importorskip("mpi4py")
    platform = unisono.Platform(device="mpi", ranks=2, backend="mpi", env={"X": "1"})
    results = unisono.run(work, 10.0, on=platform, timeout_s=60, logs=QUIET)
    assert list(results) == [(rank, 21.0, "shm", "2") for rank in range(2)]
    assert (results.platform, results.ranks, results.dir) == ("mpi", 2, None)
    assert 0 < results.wall_s < results.start_s + 30


KILL_AFTER_A_FAILURE = """
until grep -q 'ValueError: no' "$1"; do sleep 0.01; done; kill -9 "$2"
"""


@pytest.mark.mpi
def test_a_rank_that_its_starter_kills_after_another_has_failed_is_not_the_cause(forked_ranks):
    def work():
        comm = unisono.world()
        comm.barrier()
        if comm.rank == 1:
            raise ValueError("no")
        state = str(unisono.job_dir() / "rank-1.log")
        words = ["sh", "-c", KILL_AFTER_A_FAILURE, "sh", state, str(os.getpid())]
        with subprocess.Popen(words, start_new_session=True):
            time.sleep(600)

    with pytest.raises(RankFailed, match="ValueError: no") as caught:
        unisono.run(work, on="mpi", timeout_s=60.0, logs=QUIET)
    assert caught.value.rank == 1


@pytest.mark.mpi
def test_a_rank_that_dies_in_mpi_leaves_none_of_its_memory(forked_ranks):  # a fixture looks
    def work():
        comm = unisono.world()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        comm.barrier()

    pytest.importorskip("mpi4py")
    platform = unisono.Platform(device="mpi", ranks=2, backend="mpi")
    with pytest.raises(RankFailed) as caught:
        unisono.run(work, on=platform, timeout_s=60.0, logs=QUIET)
    assert (caught.value.rank, caught.value.signal) == (1, "SIGSEGV")


@pytest.mark.mpi
def test_one_rank_of_a_wrapper_runs_under_mpiexec_where_its_platform_says(mpiexec):
    def look():
        names = {"PMI_RANK", "OMPI_COMM_WORLD_RANK"}
        return os.getpid(), unisono.world().size, bool(names & os.environ.keys())

    platform = unisono.Platform(device="mpi", ranks=1, verbose=False)
    (found,) = unisono.Wrapper(platform, convention="plain").start(look)
    pid, size, is_of_mpi = found
    assert (pid != os.getpid(), size, is_of_mpi) == (True, 1, True)


def test_a_rank_under_mpiexec_cannot_have_the_terminal(mpiexec, monkeypatch):
    monkeypatch.setenv("UNISONO_STDIN_RANK", "0")
    with pytest.raises(PlatformError, match="have no terminal"):
        unisono.run(print, on="mpi", logs=QUIET)


JOINING = """
import sys, unisono, torch
def work():
    comm = unisono.world()
    if "--fail" in sys.argv and comm.rank == 1:
        raise KeyError("missing")
    return comm.rank, comm.all_reduce(torch.ones(1)).item()
results = unisono.run(work, on="cpu", ranks=3)
if unisono.world().rank == 0:
    print("RESULTS", list(results), flush=True)
"""


@pytest.mark.mpi
def test_a_script_under_the_users_mpiexec_joins_its_world(mpiexec, warm_python, tmp_path):
    ranks = 2
    pytest.importorskip("mpi4py")
    (tmp_path / "script.py").write_text(JOINING)
    words = [mpiexec, "-n", str(ranks), warm_python, "script.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"RESULTS {[(rank, float(ranks)) for rank in range(ranks)]}" in done.stdout
    assert f"already in a world of {ranks} ranks on cpu; ranks=3 is not used" in done.stderr


@pytest.mark.mpi
def test_a_failing_rank_under_the_users_mpiexec_takes_the_world_down(
    mpiexec, warm_python, tmp_path
):
    pytest.importorskip("mpi4py")
    (tmp_path / "script.py").write_text(JOINING)
    begin = time.monotonic()
    words = [mpiexec, "-n", "2", warm_python, "script.py", "--fail"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode != 0
    assert "KeyError: 'missing'" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "unisono: rank 0 stopped at script.py:7 in work: rank 1 of 2" in done.stderr
    assert time.monotonic() - begin < scaled_by_load(60)


def fake_mpiexec(tmp_path, version):
    path = tmp_path / "mpiexec"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_words_for_open_mpi_and_for_mpich(tmp_path, monkeypatch):
    monkeypatch.setattr(mpi.os, "getuid", lambda: 0)
    path = fake_mpiexec(tmp_path, "mpiexec (Open MPI) 5.0.8")
    platform = unisono.Platform(device="mpi", ranks=4, mpiexec=path, mpiexec_args=("-v",))
    found = find_mpiexec(platform)
    assert (found.flavour, found.version) == ("openmpi", "mpiexec (Open MPI) 5.0.8")
    start = [path, "-n", "4", "--allow-run-as-root", "--bind-to", "none"]
    assert mpi.command(found, platform, {}) == [*start, "--oversubscribe", "-v"]
    platform = platform.but(n_nodes=2, env={"MINE": "1"})
    variables = {"UNISONO_TRACE": "t", "MINE": "1", "HOME": "/root"}
    words = mpi.command(found, platform, variables)
    names = ("UNISONO_AGENT", "MINE", "UNISONO_TRACE")
    spread = ["--map-by", "ppr:2:node", *(word for name in names for word in ("-x", name)), "-v"]
    assert words == [*start, *spread]
    platform = platform.but(hosts=["a", "me@b"])
    words = mpi.command(found, platform, variables)
    assert words == [*start, "--host", "a:2,me@b:2", "--wdir", "/", *spread]

    other = fake_mpiexec(tmp_path, "HYDRA build details:\n    Version:  4.2")
    platform = platform.but(mpiexec=other)
    found = find_mpiexec(platform)
    assert found.flavour == "mpich"
    hosts = ["-bootstrap", "ssh", "-hosts", "a,me@b", "-wdir", "/"]
    assert mpi.command(found, platform, {}) == [path, "-n", "4", *hosts, "-ppn", "2", "-v"]


def test_mpiexec_is_sought_in_order_and_named_when_it_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.delenv("MPIEXEC", raising=False)
    platform = unisono.Platform(device="mpi", ranks=2)
    sought = r"looked at Platform\(mpiexec='...'\), MPIEXEC, beside Python"
    with pytest.raises(PlatformError, match=sought):
        unisono.run(print, on=platform)
    beside = fake_mpiexec(tmp_path, "HYDRA")
    assert find_mpiexec(platform).path == beside
    monkeypatch.setenv("MPIEXEC", "/nowhere/mpiexec")
    with pytest.raises(PlatformError, match="MPIEXEC names /nowhere/mpiexec"):
        find_mpiexec(platform)
    platform = platform.but(mpiexec=beside)
    assert find_mpiexec(platform).path == beside
    Path(beside).write_text("#!/bin/sh\necho libpmix.so is missing >&2; exit 127\n")
    with pytest.raises(PlatformError, match=r"libpmix\.so is missing"):
        find_mpiexec(platform)
    words = " ".join(f"word{number}" for number in range(200))
    for answer in (words, ""):  # any program, such as /bin/true
        fake_mpiexec(tmp_path, answer)
        with pytest.raises(PlatformError, match=r"no mpiexec that is known|no word") as caught:
            unisono.run(print, on=platform, logs=QUIET)
        assert answer in str(caught.value)
        assert "HINT: MPIEXEC=" in str(caught.value)


def test_what_another_mpiexec_said_does_not_reach_ours():
    kept = mpi.clean_environment({"PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "HOME": "/"})
    assert kept == {"HOME": "/"}


def test_an_mpiexec_that_starts_nothing_is_reported_with_its_own_words(tmp_path):
    path = tmp_path / "mpiexec"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo HYDRA\necho no slots; exit 5\n')
    path.chmod(0o755)
    platform = unisono.Platform(device="mpi", ranks=2, mpiexec=str(path))
    with contextlib.chdir(tmp_path), pytest.raises(RankFailed, match="no slots") as caught:
        unisono.run(print, on=platform, logs=QUIET)
    assert caught.value.exit_code == 5
