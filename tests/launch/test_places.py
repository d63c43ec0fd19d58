"""Places on other hosts, as far as they need none: requests, copies of files, batch scripts."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest

import unisono
from unisono.errors import MissingExtra, PlatformError, RankFailed
from unisono.launch import Platform, dry_run
from unisono.launch.places.mailbox import Mailbox
from unisono.launch.places.mirror import CHUNK, Change, Lost, Mirror, forwarded
from unisono.launch.places.ssh import ssh_command

QUIET = unisono.Logs(console="none")


def nothing():
    return None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, ["no hosts", "--hosts a,b"]),
        ({"hosts": []}, ["no hosts"]),
        ({"hosts": ["a", "b", "a"]}, ["'a' more than once", "ranks=3"]),
        ({"hosts": ["a", "-oProxyCommand=x"]}, ["'-oProxyCommand=x' is not the name of a host"]),
        ({"hosts": ["a b"]}, ["'a b' is not the name of a host"]),
        ({"hosts": "a"}, ["str, not a list of strings", "hosts=['a']"]),
        ({"hosts": ["a", "b"], "nodes": 3}, ["3 nodes != 2 hosts"]),
        ({"hosts": ["a", "b"], "ranks": 3}, ["3 ranks / 2 nodes = 1.5", "ranks=2 or ranks=4"]),
    ],
)
def test_hosts_that_make_no_sense_are_refused(asked, words):
    with pytest.raises(PlatformError) as caught:
        unisono.run(nothing, on="ssh", **asked)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_hosts_elsewhere_than_on_ssh_are_refused(monkeypatch):
    with pytest.raises(PlatformError, match="hosts are used on ssh only"):
        unisono.run(nothing, on="cpu", hosts=["a"])
    with pytest.raises(PlatformError, match='on="ssh", hosts='):
        unisono.run(nothing, on="cpu", nodes=2)
    monkeypatch.setenv("UNISONO_FORCE_ON", "cpu")  # a rehearsal of the same call
    table = dry_run(nothing, on="ssh", hosts=["a", "b"], ranks=4)
    assert len(table.splitlines()) == 5
    assert " a " not in table


def test_a_dry_run_names_the_hosts_in_blocks():
    table = dry_run(nothing, on="ssh", hosts=["a", "user@b"], ranks=4)
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["0", "a"],
        ["1", "a"],
        ["2", "user@b"],
        ["3", "user@b"],
    ]
    assert Platform(device="ssh", hosts=["a", "b", "c"], n_gpus_per_node=2).world_size == 6
    assert Platform(device="ssh", hosts=["a", "b"], ranks=2).but(hosts=["a"]).n_nodes == 1


def test_the_command_line_of_ssh_has_no_path_and_no_secret_of_the_job():
    words = ssh_command("user@b", "/opt/my env/python", ["-p", "2222"])
    assert words[:4] == ["ssh", "-T", "-p", "2222"]
    assert words[-3:-1] == ["--", "user@b"]
    assert words[-1] == "exec '/opt/my env/python' -P -m unisono.launch.places.ssh"
    assert "-oBatchMode=yes" in words


def test_variables_travel_that_are_meant_for_ranks():
    env = {"UNISONO_CHECK": "1", "OMP_NUM_THREADS": "2", "AWS_SECRET": "x", "PYTHONPATH": "/x"}
    assert forwarded(env) == {"UNISONO_CHECK": "1", "OMP_NUM_THREADS": "2"}


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "ray" else find(name, *rest),
    )
    with pytest.raises(MissingExtra, match=r'pip install "unisono\[ray\]"'):
        unisono.run(nothing, on="ray", ranks=2)


def test_gpus_of_ray_are_shared_evenly():
    with pytest.raises(PlatformError, match="3 GPUs / 2 ranks"):
        Platform(device="ray", ranks=2, n_gpus_per_node=3).check()
    assert Platform(device="ray", ranks=4, n_cpus_per_node=8).cpus_per_rank == 2
    assert Platform(device="ray", ranks=4, n_cpus_per_node=None).cpus_per_rank == 1


FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
case $2 in
  down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255 ;;
  bare) exec sh -c "exec /no/python" ;;
  *) echo "Welcome to $2"; exec sh -c "$3" ;;
esac
"""


@pytest.fixture
def hosts_by_fake_ssh(tmp_path, monkeypatch, warm_python):
    """An `ssh` for which all hosts are this one; real ones are in tests/hosts."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WARM_PYTHON", warm_python)
    monkeypatch.setattr(sys, "executable", warm_python)


def test_ranks_by_ssh_return_values_logs_and_large_arrays(hosts_by_fake_ssh, capfd, tmp_path):
    import torch

    def work(x):
        comm = unisono.world()
        print("hello from", comm.rank)
        total = comm.all_reduce(torch.tensor([1.0 + comm.rank])).item()
        return comm.rank, total, unisono.job_dir(), x.new_full((3 * CHUNK // 8,), comm.rank)

    x = torch.zeros(2 * CHUNK // 8, dtype=torch.float64)
    results = unisono.run(work, x, on="ssh", hosts=["a", "b"], ranks=4, timeout_s=60)
    assert [(rank, total) for rank, total, _, _ in results] == [(rank, 10.0) for rank in range(4)]
    assert all(bool((value == rank).all()) for rank, _, _, value in results)
    assert list(results.hosts) == ["a", "a", "b", "b"]
    assert {len(value) for *_, value in results} == {3 * CHUNK // 8}
    assert not any(path.exists() for _, _, path, _ in results)
    shown = sorted(capfd.readouterr().out.splitlines())
    assert shown == [f"[{rank}] hello from {rank}" for rank in range(4)]


def test_a_failure_by_ssh_has_the_traceback_and_where_others_waited(hosts_by_fake_ssh):
    def work():
        comm = unisono.world()
        if comm.rank == 1:
            raise ValueError("no luck")
        comm.barrier()

    with pytest.raises(RankFailed) as caught:
        unisono.run(work, on="ssh", hosts=["a", "b"], logs=QUIET, timeout_s=60)
    error = caught.value
    assert (error.rank, error.host) == (1, "b")
    assert isinstance(error.exception, ValueError)
    assert "test_places.py" in error.waiting[0]


def test_a_second_attempt_by_ssh_has_its_own_results_and_shows_nothing_twice(
    hosts_by_fake_ssh, capfd
):
    def work():
        comm = unisono.world()
        print("attempt", unisono.restart_count(), flush=True)
        comm.barrier()
        if unisono.restart_count() == 0 and comm.rank == 1:
            raise OSError("once")
        comm.barrier()
        return comm.rank, unisono.restart_count()

    results = unisono.run(work, on="ssh", hosts=["a", "b"], max_restarts=1, timeout_s=60)
    assert (list(results), results.restarts) == ([(0, 1), (1, 1)], 1)
    shown = [line for line in capfd.readouterr().out.splitlines() if "--- attempt" not in line]
    assert sorted(shown) == [f"[{rank}] attempt {n}" for rank in range(2) for n in range(2)]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("down", "rank 1 of 2 on down could not be started: ssh: connect to host down port 22"),
        ("bare", "rank 1 of 2 on bare could not be started: sh: 1: exec: /no/python: not found"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_in_the_words_of_ssh(hosts_by_fake_ssh, host, words):
    with pytest.raises(RankFailed) as caught:
        unisono.run(nothing, on="ssh", hosts=["a", host], logs=QUIET)
    assert str(caught.value).startswith(words), str(caught.value)
    assert f"HINT: ssh {host} " in str(caught.value)
    assert (caught.value.rank, caught.value.host) == (1, host)


@pytest.fixture
def pair(tmp_path):
    """Both sides of a directory: the launcher's and a host's."""
    sides = [tmp_path / "launcher", tmp_path / "host"]
    for side in sides:
        side.mkdir(mode=0o700)
        Mailbox(side, 0).open()
    mirrors = [Mirror(side, 0, is_host=side.name == "host") for side in sides]
    yield *sides, *mirrors
    for mirror in mirrors:
        mirror.close()


def write(path, data):
    path.write_bytes(data)
    path.chmod(0o600)


def test_a_state_arrives_after_the_result_that_it_tells_of(pair):
    launcher, host, here, there = pair
    data = os.urandom(2 * CHUNK + 10)
    write(host / "rank-0.result", data)
    write(host / "rank-0.state.json", b"{}")
    rounds = 0
    while not (launcher / "rank-0.state.json").exists():
        here.apply(there.changes())
        rounds += 1
    assert rounds == 3
    assert (launcher / "rank-0.result").read_bytes() == data
    assert (launcher / "rank-0.result").stat().st_mode & 0o077 == 0
    assert there.changes() == []


def test_what_came_from_the_other_side_is_not_sent_back(pair):
    launcher, host, here, there = pair
    write(host / "rendezvous-0.json", b'{"port": 1}')
    Mailbox(host, 0).order(preempt=1)
    Mailbox(launcher, 0).order(stack=True)
    here.apply(there.changes())
    sent = here.changes()
    assert [json.loads(change.data) for change in sent] == [{"stack": True}]
    there.apply(sent)
    assert there.changes() == []
    assert list(Mailbox(launcher, 0).new_orders()) == [{"stack": True}, {"preempt": 1}]
    assert list(Mailbox(host, 0).new_orders()) == [{"preempt": 1}, {"stack": True}]


def test_a_log_goes_on_where_a_new_one_begins(pair):
    launcher, host, here, there = pair
    log = host / "rank-0.log"
    log.write_bytes(b"one\n")
    here.apply(there.changes())
    with log.open("ab") as file:
        file.write(b"two\n")
    log.rename(host / "rank-0.log.old")
    log.write_bytes(b"three\n")
    here.apply(there.changes())
    assert (launcher / "rank-0.log").read_bytes() == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("name", ["../evil.json", "rank-../x.log", "job.json", "payload.pkl"])
def test_a_host_cannot_write_other_files_than_its_ranks(pair, name):
    _, _, here, _ = pair
    with pytest.raises(Lost, match="not a file of a job"):
        here.apply([Change(name, b"x")])


PBS = """#!/bin/bash
#PBS -N unisono
#PBS -q long
#PBS -l select=2:ncpus=8:mpiprocs=4:ngpus=4:mem=32gb
#PBS -l place=scatter
#PBS -l walltime=01:30:00
#PBS -j oe

cd "$PBS_O_WORKDIR"
exec PYTHON -m unisono run --on mpi -n 8 --nodes 2 --gpus 4 --set n_cpus_per_node=8 SCRIPT -- 2
"""
LSF = """#!/bin/bash
#BSUB -J unisono
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -W 90
#BSUB -o unisono.%J.log

hosts=$(sort -u "$LSB_DJOB_HOSTFILE" | paste -sd, -)
exec PYTHON -m unisono run --hosts "$hosts" --on ssh -n 8 --nodes 2 SCRIPT
"""


def test_batch_scripts_ask_for_what_the_command_needs(tmp_path, capsys):
    from unisono.cli import main

    script = tmp_path / "train.py"
    script.write_text("")

    def text(*words):
        assert main(["run", *words]) == 0
        found = capsys.readouterr().out
        return found.replace(sys.executable, "PYTHON").replace(str(script), "SCRIPT")

    sizes = ["-n", "8", "--nodes", "2"]
    more = ["--gpus", "4", "--partition", "long", "--set", "timeout_min=90"]
    more += ["--set", "mem_per_node=32", "--set", "n_cpus_per_node=8", str(script), "--", "2"]
    assert text("--script", "pbs", *sizes, *more) == PBS
    timed = ["--set", "timeout_min=90", str(script)]
    assert text("--script=lsf", "--on", "ssh", *sizes, *timed) == LSF


def test_a_scheduler_is_no_place_and_some_places_are_not_in_a_job(tmp_path, capsys):
    from unisono.cli import main

    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--on", "pbs", str(script)]) != 0
    assert "--script pbs" in capsys.readouterr().err
    assert main(["run", "--script", "lsf", "--on", "slurm", str(script)]) != 0
    assert "--on mpi" in capsys.readouterr().err
