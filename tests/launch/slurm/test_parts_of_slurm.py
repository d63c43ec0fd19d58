"""The parts of the SLURM launcher that need no cluster: script, files, orders, answers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

import unisono
from unisono.compat import ddpw
from unisono.environment import Environment
from unisono.errors import MissingExtra, PlatformError, RankFailed
from unisono.launch import Platform, dry_run, job_files
from unisono.launch.attempts import Progress
from unisono.launch.places import mailbox as files
from unisono.launch.places.mailbox import Mailbox, Plan
from unisono.launch.places.program import ProgramRanks
from unisono.launch.places.rendezvous import candidates, meet
from unisono.launch.places.slurm import cluster, submit
from unisono.launch.places.slurm.cluster import Partition
from unisono.launch.places.slurm.script import batch_script, directives, srun_command, warning_s
from unisono.launch.pool.protocol import Failed, RankState
from unisono.launch.pool.verdict import Ending, headline, judge
from unisono.launch.supervisor import COLLECT_S, Supervisor


def options(**fields):
    platform = Platform(device="slurm", **fields)
    return directives(platform, "out.log", partition=platform.partition)


def test_the_script_says_what_the_platform_does():
    found = options(
        name="wine",
        partition="gpu",
        n_nodes=3,
        n_gpus_per_node=4,
        n_cpus_per_node=8,
        mem_per_node=64,
        timeout_min=90,
    )
    assert found == {
        "job-name": "wine",
        "partition": "gpu",
        "nodes": "3",
        "ntasks-per-node": "4",
        "cpus-per-task": "2",
        "gpus-per-node": "4",
        "mem": "64G",
        "time": "90",
        "output": "out.log",
        "open-mode": "append",
        "requeue": "",
        "signal": "USR2@90",
    }


def test_a_job_without_gpus_asks_for_none():
    found = options(n_gpus_per_node=0, mem_per_node=None, timeout_min=None, partition=None)
    assert not {"gpus-per-node", "mem", "time", "partition"} & set(found)
    assert (found["ntasks-per-node"], found["cpus-per-task"]) == ("1", "1")


def test_own_options_win_but_not_over_what_a_requeue_needs():
    more = {
        "account": "physics",
        "exclusive": True,
        "cpus_per_task": 7,
        "mem": None,
        "signal": "B:USR1@1",
        "open_mode": "truncate",
        "requeue": False,
    }
    found = options(slurm_additional_parameters=more)
    assert (found["account"], found["exclusive"], found["cpus-per-task"]) == ("physics", "", "7")
    assert "mem" not in found
    assert (found["signal"], found["open-mode"], found["requeue"]) == ("USR2@90", "append", "")


@pytest.mark.parametrize(
    ("minutes", "seconds"), [(None, 90), (1, 12), (0, 10), (2, 24), (60, 90), (2880, 90)]
)
def test_short_jobs_are_warned_late_enough_to_do_something(minutes, seconds):
    assert warning_s(minutes) == seconds


def test_hostile_words_are_quoted_in_the_script():
    text = batch_script({"job-name": 'a"=0" $(reboot)', "requeue": ""}, "exec true")
    assert text.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name='a\"=0\" $(reboot)'",
        "#SBATCH --requeue",
        "",
        "exec true",
    ]
    with pytest.raises(PlatformError, match="line break"):
        batch_script({"job-name": "a\n#SBATCH --account=other"}, "true")


def test_percent_signs_of_a_path_are_not_taken_for_patterns():
    platform = Platform(device="slurm")
    assert directives(platform, "/a/50%j/x", partition=None)["output"] == "/a/50%%j/x"


def plan_of(**fields):
    platform = Platform(
        device="slurm", n_nodes=2, ranks=4, n_cpus_per_node=6, srun_args=["--mpi=none"]
    )
    return replace(Plan.of(platform, timeout_s=None, max_restarts=0), **fields)


def test_the_srun_line_repeats_the_sizes_and_ends_all_ranks_after_a_failure():
    words = srun_command(plan_of())
    assert words[0] == "srun"
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3"} < set(words)
    assert {"--kill-on-bad-exit=1", "--mpi=none"} < set(words)
    assert words[-1] == "unisono.launch.places.agent"


def test_a_plan_survives_its_file_and_knows_a_foreign_interpreter(tmp_path):
    plan = plan_of(launcher=["host", 1, 2])
    job_files.write_state(tmp_path, {"plan": asdict(plan)})
    assert Plan.read(tmp_path) == plan
    plan.check_versions()
    other = replace(plan, versions=["2.7", "0.0.1"])
    with pytest.raises(PlatformError, match=r"Python 2\.7 with unisono 0\.0\.1"):
        other.check_versions()


def test_a_dry_run_shows_script_and_ranks_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    platform = Platform(
        name="wine", device="slurm", partition="gpu", n_nodes=2, n_gpus_per_node=2, timeout_min=5
    )
    text = dry_run(print, on=platform)
    assert "#SBATCH --partition=gpu\n#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=2\n" in text
    assert "#SBATCH --signal=USR2@60\n" in text
    assert f"-m unisono.launch.places.slurm.driver {tmp_path}" in text
    rows = [line.split() for line in text.splitlines()[-4:]]
    assert rows[0] == ["0", "node", "0", "gpu:0"]
    assert rows[3] == ["3", "node", "1", "gpu:1"]
    assert list(tmp_path.iterdir()) == []
    assert "#SBATCH --partition" not in dry_run(print, on="slurm")


def test_without_the_programs_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlatformError, match="no sbatch on PATH"):
        unisono.run(print, on="slurm", nodes=2)
    assert list(tmp_path.iterdir()) == []


def test_submitit_can_be_asked_for_or_avoided(monkeypatch):
    assert submit.submitter(Platform(device="slurm", submitter="sbatch")) == "sbatch"
    monkeypatch.setattr(submit.importlib.util, "find_spec", lambda _: None)
    assert submit.submitter(Platform(device="slurm")) == "sbatch"
    with pytest.raises(MissingExtra, match=r'pip install "unisono\[slurm\]"'):
        submit.submitter(Platform(device="slurm", submitter="submitit"))


KNOWN = [Partition("debug", True, 2, 4, "1:00:00"), Partition("long", False, 8, 4, "infinite")]


@pytest.fixture
def two_partitions(monkeypatch):
    monkeypatch.setattr(cluster, "check_programs", lambda: None)
    monkeypatch.setattr(cluster, "partitions", lambda: KNOWN)


def test_what_the_cluster_does_not_have_is_refused(two_partitions, capsys):
    with pytest.raises(PlatformError, match="debug, long") as caught:
        cluster.check_cluster(Platform(device="slurm", partition="lomg"))
    assert "HINT: partition='long'" in str(caught.value)
    with pytest.raises(PlatformError, match="3 nodes > 2"):
        cluster.check_cluster(Platform(device="slurm", partition="debug", n_nodes=3))
    assert cluster.check_cluster(Platform(device="slurm", partition="long")) == "long"
    assert cluster.check_cluster(ddpw.Platform(device="slurm")) is None  # it asks for "general"
    assert "no partition 'general'; the default one is debug" in capsys.readouterr().err


def test_answers_of_the_scheduler_are_read(monkeypatch):
    answers = {
        "sinfo": "debug*|2|4|1:00:00\nlong|6|8+|infinite\nlong|2|4|infinite\n",
        "squeue": "12|PENDING|Resources\n13|RUNNING|None\n",
        "scontrol": "JobId=12 JobName=a b UserId=root(0) JobState=TIMEOUT Reason=TimeLimit "
        "ExitCode=0:15 StdOut=/a b/slurm.log Power=\n",
    }
    monkeypatch.setattr(cluster, "call", lambda *words, **_: answers[words[0]])
    assert cluster.partitions() == KNOWN
    assert cluster.queue_of_user() == {"12": ("PENDING", "Resources"), "13": ("RUNNING", "None")}
    fields = cluster.show_job("12")
    assert (fields["JobState"], fields["JobName"], fields["ExitCode"]) == ("TIMEOUT", "a b", "0:15")
    assert fields["StdOut"] == "/a b/slurm.log"


def test_doctor_says_why_there_is_no_cluster(tmp_path, monkeypatch):
    from unisono.cli import doctor

    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_slurm().status == "skip"
    for name in ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'fatal: no controller' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    check = doctor.check_slurm()
    assert check.status == "warn"
    assert "fatal: no controller" in check.found
    assert "scontrol ping" in check.fix
    (tmp_path / "scancel").unlink()
    check = doctor.check_slurm()
    assert (check.status, "scancel" in check.found) == ("FAIL", True)


def test_a_job_that_was_done_is_not_done_again(tmp_path):
    tmp_path.chmod(0o700)
    job_files.write_state(tmp_path, {"plan": asdict(plan_of())})
    done = Ending(state="done", attempt=0, was_ready=True, start_s=0.1, wall_s=0.1, exit_code=0)
    Progress(attempt=0, state="running", ending=done).write(tmp_path)
    words = [sys.executable, "-m", "unisono.launch.places.slurm.driver", str(tmp_path)]
    assert subprocess.run(words, timeout=60, check=False).returncode == 0
    found = Progress.read(tmp_path)
    assert (found.attempt, found.ending) == (0, done)


def test_orders_are_read_once_and_only_whole(tmp_path):
    giver, reader = Mailbox(tmp_path, 0), Mailbox(tmp_path, 0)
    assert list(reader.new_orders()) == []
    giver.open()
    giver.order(preempt=1)
    path = tmp_path / "orders-0"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("ab") as file:
        file.write(b'{"stop": ')
    assert list(reader.new_orders()) == [{"preempt": 1}]
    with path.open("ab") as file:
        file.write(b'"late"}\n')
    assert list(reader.new_orders()) == [{"stop": "late"}]
    assert list(reader.new_orders()) == []


def test_torn_orders_are_left_out_and_given_again(tmp_path, monkeypatch):
    giver, reader = Mailbox(tmp_path, 0), Mailbox(tmp_path, 0)
    giver.open()
    path = tmp_path / "orders-0"
    path.write_bytes(b'{"preempt": 1}\n{"pree')  # another host was interrupted here
    giver.order(finish=True)
    with path.open("ab") as file:
        file.write(b'"stop"\n[1]\n')
    assert list(reader.new_orders()) == [{"preempt": 1}, {"finish": True}]
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 16)  # longer already, but the bytes have not come
    assert list(reader.new_orders()) == []
    path.write_bytes(whole + b'{"stop": "a bc"}'.ljust(16) + b"\n")
    assert list(reader.new_orders()) == [{"stop": "a bc"}]

    write, lost = os.write, []

    def lose_first(fd, data):
        if not lost:
            lost.append(data)
            return write(fd, b"x" * len(data))  # somebody else's bytes are at this place
        return write(fd, data)

    monkeypatch.setattr(os, "write", lose_first)
    giver.order(stop="now")
    monkeypatch.undo()
    assert list(reader.new_orders()) == [{"stop": "now"}]


def test_zeros_that_stay_do_not_hide_later_orders(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_HOLE_S", 0.05)
    giver, reader = Mailbox(tmp_path, 0), Mailbox(tmp_path, 0)
    giver.open()
    (tmp_path / "orders-0").write_bytes(b"\0" * 8)
    giver.order(stop="now")
    assert list(reader.new_orders()) == []
    time.sleep(0.1)
    assert list(reader.new_orders()) == [{"stop": "now"}]


def test_a_state_that_is_not_yet_whole_counts_as_not_said(tmp_path):
    path = tmp_path / "rank-0.state.json"
    path.write_text('{"rank": 0, "att')
    path.chmod(0o600)
    assert Mailbox(tmp_path, 1).read_state(0) is None


def test_the_clock_of_another_host_does_not_delay_the_stop(tmp_path):
    """Rank 0 of 4 failed "in five minutes"; the others get a moment to report, and no more."""
    ahead = RankState(rank=0, attempt=1, host="h", state="failed", at={"failed": time.time() + 300})
    Mailbox(tmp_path, 1).write_state(ahead)
    orders, told = Mailbox(tmp_path, 1), []
    # Ends when it is told to, as agents do.
    words = [sys.executable, "-c", END_AT_STOP, str(tmp_path / "orders-1")]
    ranks = ProgramRanks(
        tmp_path,
        plan_of(),
        1,
        words,
        on_look=lambda: told.extend((order, time.monotonic()) for order in orders.new_orders()),
    )
    begin = time.monotonic()
    found = Supervisor(ranks, plan_of(), 1).run()
    assert (found.state, found.was_ready, found.exit_code) == ("failed", False, 3)
    assert [order for order, _ in told] == [{"stop": "another rank failed"}]
    assert COLLECT_S <= told[0][1] - begin < COLLECT_S + 2.0


END_AT_STOP = """
import pathlib, sys, time
end = time.monotonic() + 30
while "stop" not in pathlib.Path(sys.argv[1]).read_text() and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.1)
sys.exit(3)
"""


def state(rank, word, **fields):
    at = {word: float(rank)}
    return RankState(rank=rank, attempt=1, host="h", node=f"n{rank}", state=word, at=at, **fields)


def ending(word):
    return Ending(state=word, attempt=1, was_ready=True, start_s=1.0, wall_s=2.0, exit_code=1)


def test_files_of_another_user_or_for_others_or_links_are_not_read(tmp_path):
    Mailbox(tmp_path, 1).write_state(state(0, "ready"))
    path = tmp_path / "rank-0.state.json"
    assert Mailbox(tmp_path, 1).read_state(0) == state(0, "ready")
    assert Mailbox(tmp_path, 2).read_state(0) is None
    path.chmod(0o640)
    with pytest.raises(PlatformError, match="mode 0640"):
        Mailbox(tmp_path, 1).read_state(0)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlatformError, match="a link"):
        Mailbox(tmp_path, 1).read_state(0)
    path.unlink()
    if os.getuid() == 0:
        result = tmp_path / "rank-0.result"
        result.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        result.chmod(0o600)
        os.chown(result, 12345, -1)
        with pytest.raises(PlatformError, match="owner 12345"):
            Mailbox(tmp_path, 1).read_value(0)


def told(tmp_path, how):
    """Return the error of an attempt of two ranks, by their files."""
    return judge(Mailbox(tmp_path, 1).read_states(2), how, tmp_path)


def test_the_error_of_a_rank_that_raised_survives_its_file(tmp_path):
    failed = Failed(
        summary="ValueError: no",
        traceback="Traceback ...\nValueError: no\n",
        pickled=b"\x80\x04N.",
        is_consequence=False,
        site="a.py:3 in f",
    )
    lost = Failed(summary="gone", traceback="", pickled=None, is_consequence=True)
    Mailbox(tmp_path, 1).write_state(state(0, "failed", failed=lost))
    Mailbox(tmp_path, 1).write_state(state(1, "failed", failed=failed))
    assert Mailbox(tmp_path, 1).read_state(1) == state(1, "failed", failed=failed)
    error = told(tmp_path, ending("failed"))
    assert isinstance(error, RankFailed)
    assert (error.rank, error.host, error.attempt) == (1, "n1", 1)
    line = headline(Mailbox(tmp_path, 1).read_states(2), ending("failed"))
    assert line == str(error).splitlines()[0]


def test_ranks_without_a_word_are_named_with_the_words_of_the_starter(tmp_path):
    (tmp_path / "starter.log").write_text("srun: error: node n1 failed\n")
    Mailbox(tmp_path, 1).write_state(state(0, "running"))
    error = told(tmp_path, ending("lost"))
    assert "ranks 0-1 of 2 ended without a word (code 1)" in str(error)
    assert "node n1 failed" in str(error)
    assert (error.rank, error.exit_code) == (0, 1)


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
