"""The parts of the SLURM launcher that need no cluster: script, answers, refusals, rendezvous."""

from __future__ import annotations

import json
import sys
import threading

import pytest

import unisono
from unisono.environment import Environment
from unisono.errors import MissingExtra, PlatformError
from unisono.launch import Platform, dry_run
from unisono.launch.places.rendezvous import candidates, meet
from unisono.launch.places.slurm import cluster


@pytest.fixture
def no_cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def script(**fields):
    """Return the options of the batch script of a platform, and its lines."""
    text = dry_run(print, on=Platform(**{"device": "slurm", "timeout_min": 90, **fields}))
    lines = text.splitlines()
    pairs = [line.removeprefix("#SBATCH --").partition("=") for line in lines if "#SBATCH" in line]
    return {name: value for name, _, value in pairs}, lines


def test_the_script_says_what_the_platform_does(no_cluster):
    options, lines = script(
        name="wine",
        partition="gpu",
        n_nodes=3,
        n_gpus_per_node=4,
        n_cpus_per_node=8,
        mem_per_node=64,
        srun_args=["--mpi=none"],
    )
    folder = no_cluster / ".unisono" / "jobs" / "wine-XXXXXXXX"
    expected = {
        "job-name": "wine",
        "partition": "gpu",
        "nodes": "3",
        "ntasks-per-node": "4",
        "cpus-per-task": "2",
        "gpus-per-node": "4",
        "mem": "64G",
        "time": "90",
        "output": f"{folder}/%j_0_log.out",
        "open-mode": "append",
        "requeue": "",
        "signal": "USR2@90",
    }
    assert expected.items() <= options.items()
    srun = next(line for line in lines if line.startswith("srun")).split()
    assert {"--nodes=3", "--ntasks=12", "--ntasks-per-node=4", "--cpus-per-task=2"} < set(srun)
    assert {"--kill-on-bad-exit=0", "--mpi=none"} < set(srun)
    assert srun[-1] == str(folder)
    assert [line.split() for line in lines[-2:]][1] == ["11", "node", "2", "gpu:3"]
    assert list(no_cluster.iterdir()) == []  # nothing was written


def test_options_that_were_not_asked_for_are_left_to_the_cluster(no_cluster):
    options, _ = script(timeout_min=None)
    assert not {"gpus-per-node", "mem", "time", "partition"} & set(options)
    assert (options["ntasks-per-node"], options["cpus-per-task"]) == ("1", "1")


def test_own_options_win_but_not_over_what_a_requeue_needs(no_cluster):
    more = {
        "account": "physics",
        "exclusive": True,
        "cpus-per-task": 7,
        "mem": None,
        "signal": "B:USR1@1",
        "open_mode": "truncate",
        "requeue": False,
        "setup": ["module load cuda"],
    }
    options, lines = script(mem_per_node=3, slurm_additional_parameters=more)
    assert (options["account"], options["exclusive"]) == ("physics", "")
    assert options["cpus-per-task"] == "7"
    assert "mem" not in options
    assert (options["signal"], options["open-mode"], options["requeue"]) == (
        "USR2@90",
        "append",
        "",
    )
    assert "module load cuda" in lines


def test_hostile_words_are_quoted_or_refused(no_cluster):
    options, lines = script(name='a"=0" $(reboot)', console_logs="it's a dir")
    assert options["job-name"] == "'a\"=0\" $(reboot)'"
    assert any("'\"'\"'s a dir" in line for line in lines if line.startswith("srun"))
    with pytest.raises(PlatformError, match="line break"):
        script(name="a\n#SBATCH --account=other")
    with pytest.raises(PlatformError, match="percent sign"):
        script(console_logs="/a/50%j/x")


def test_without_programs_or_submitit_nothing_is_written(no_cluster, monkeypatch):
    with pytest.raises(PlatformError, match="no sbatch on PATH"):
        unisono.run(print, on="slurm", nodes=2)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingExtra, match=r'pip install "unisono\[slurm\]"'):
        unisono.submit(print, on="slurm")
    assert list(no_cluster.iterdir()) == []


def test_answers_of_the_scheduler_are_read(monkeypatch):
    answers = {
        "sinfo": "debug*|2\nlong|6\nlong|2\n",
        "squeue": "12|PENDING|Resources\n13|RUNNING|None\n",
        "scontrol": "JobId=14 JobName=a b UserId=root(0) JobState=TIMEOUT Reason=TimeLimit "
        "ExitCode=0:15 StdOut=/a b/slurm.log Power=\n",
    }
    monkeypatch.setattr(cluster, "call", lambda *words, **_: answers[words[0]])
    cluster.check_nodes(Platform(device="slurm", n_nodes=2))
    cluster.check_nodes(Platform(device="slurm", n_nodes=8, partition="debug,long"))
    for fields in ({}, {"partition": "debug"}):
        with pytest.raises(PlatformError, match="3 nodes > 2"):
            cluster.check_nodes(Platform(device="slurm", n_nodes=3, **fields))
    queue = cluster.Queue()
    assert queue.look("12") == ("PENDING", "Resources")
    answers["squeue"] = ""
    assert queue.look("13") == ("RUNNING", "None")  # as it was a moment ago
    assert queue.look("14") == ("TIMEOUT", "TimeLimit")
    fields = cluster.show_job("14")
    assert (fields["JobName"], fields["ExitCode"], fields["StdOut"]) == (
        "a b",
        "0:15",
        "/a b/slurm.log",
    )


def test_doctor_says_why_there_is_no_cluster(no_cluster):
    from unisono.cli import doctor

    assert doctor.check_slurm().status == "skip"
    for name in cluster.PROGRAMS:
        (no_cluster / name).write_text("#!/bin/sh\necho 'fatal: no controller' >&2\nexit 1\n")
        (no_cluster / name).chmod(0o755)
    check = doctor.check_slurm()
    assert check.status == "warn"
    assert "fatal: no controller" in check.found
    assert "scontrol ping" in check.fix
    (no_cluster / "scancel").unlink()
    check = doctor.check_slurm()
    assert (check.status, "scancel" in check.found) == ("FAIL", True)


def place(rank, **fields):
    values = {"size": 2, "local_size": 1, "node": rank, "nodes": 2} | fields
    return Environment(kind="slurm", rank=rank, local_rank=0, **values)


@pytest.mark.leaks("files")  # torch keeps a pipe from its first store on
def test_ranks_meet_through_a_file_at_the_address_that_answers(tmp_path, monkeypatch):
    from unisono.launch.places import rendezvous

    assert candidates()[-1] == "127.0.0.1"
    monkeypatch.setattr(rendezvous, "candidates", lambda: ["127.0.0.9", "127.0.0.1"])
    monkeypatch.setattr(rendezvous, "FIRST_TRY_S", 0.5)
    found = {}

    def host():
        found[0] = meet(place(0), tmp_path / "r.json", nonce="word", timeout_s=60)

    thread = threading.Thread(target=host)
    thread.start()
    found[1] = meet(place(1), tmp_path / "r.json", nonce="word", timeout_s=60)
    thread.join()
    entry = json.loads((tmp_path / "r.json").read_text())
    assert entry["nonce"] == "word"
    assert found[0][1] == found[1][1]
    assert found[0][1][1] == entry["port"]
    found.clear()


def test_a_rank_whose_master_never_comes_names_the_directory(tmp_path):
    with pytest.raises(PlatformError, match=r"no .*r\.json on") as caught:
        meet(place(1), tmp_path / "r.json", nonce="", timeout_s=0.2)
    assert "UNISONO_JOB_DIR" in str(caught.value)


def test_an_array_needs_a_queue_and_values(monkeypatch):
    monkeypatch.setenv("UNISONO_FORCE_ON", "cpu")
    with pytest.raises(PlatformError, match="job arrays are SLURM's"):
        unisono.launch.submit_array(abs, [1, -2], on="slurm")
    with pytest.raises(PlatformError, match="no value"):
        unisono.launch.submit_array(abs, [], on="slurm")
