"""Ranks on two hosts by `mpiexec` and a real sshd; the launcher is on the first host.

The second host does not see the directories of the launcher.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.waiting import is_running, wait_until

pytestmark = pytest.mark.mpi
SERVER = """
Port 2222
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
"""
CLIENT = """
Port 2222
IdentityFile {folder}/user_key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
"""
WITH_OWN_FOLDER = 'mount -t tmpfs unisono-test "$1" && shift && exec "$@"'
WITH_KEYS = 'mount --bind "$1" /etc/ssh/ssh_config && cd "$2" && shift 2 && exec "$@"'
LOST_AFTER_S = 3
SCRIPT = """
import json, os, socket, sys, time
from pathlib import Path
import torch, unisono

def work(how, folder, secret):
    comm = unisono.world()
    print("hello from", socket.gethostname(), flush=True)
    total = comm.all_reduce(torch.full((1000,), comm.rank + 1.0))
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    if how == "fail" and comm.rank == 3:
        raise ValueError("no luck")
    if how == "fail":
        comm.barrier()
    if how == "wait":
        Path(folder, f"{comm.rank}.part").write_text(str(os.getpid()))
        Path(folder, f"{comm.rank}.part").rename(Path(folder, str(comm.rank)))
        while not Path(folder, "go").exists():
            time.sleep(0.05)
        comm.barrier()
    return {
        "host": socket.gethostname(),
        "sums": sorted(set(total.tolist())),
        "variable": os.environ.get("MINE"),
        "cwd": os.getcwd(),
        "is_secret_seen": any(secret.encode() in line for line in lines),
        "nodes": os.environ["GROUP_WORLD_SIZE"],
        "sees_job": unisono.job_dir().parent.name == "jobs",
    }

if __name__ == "__main__":
    how, hosts, folder, lost_after_s = sys.argv[1:]
    secret = "sword" + "fish-4711"
    try:
        results = unisono.run(
            work,
            how,
            folder,
            secret,
            on=unisono.Platform(
                device="mpi",
                hosts=hosts.split(","),
                ranks=4,
                env={"MINE": secret},
                lost_after_s=float(lost_after_s),
            ),
            timeout_s=60,
        )
        print("RESULTS " + json.dumps([list(results), results.hosts]), flush=True)
    except unisono.errors.RankFailed as error:
        told = {"rank": error.rank, "host": error.host, "text": str(error)}
        told["notes"] = getattr(error, "__notes__", [])
        print("FAILED " + json.dumps({**told, "waiting": error.waiting}), flush=True)
"""


class Launch:
    """Runs the script on host a; what it makes is below `folder`."""

    def __init__(self, lab, folder, python, mpiexec) -> None:
        self.lab, self.folder = lab, folder
        self.marks = folder / "marks"
        self.temporary = folder / "temporary"
        self._python, self._mpiexec = python, mpiexec

    def start(self, how, *, hosts="host-a,host-b", python=None):
        for path in (self.marks, self.temporary):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        words = [python or self._python, "train.py", how, hosts, self.marks, LOST_AFTER_S]
        env = {"TMPDIR": self.temporary, "WARM_PYTHON": self._python, "MPIEXEC": self._mpiexec}
        place = [self.folder / "client", self.folder / "launcher" / "work"]
        env = {name: str(value) for name, value in env.items()}
        return self.lab.a.start("sh", "-c", WITH_KEYS, "sh", *place, *words, env=env)

    def finish(self, process):
        """Return the words of the script: its results, or its failure."""
        ((_, text),) = self.lab.finish([process])
        found = [line for line in text.splitlines() if line.startswith(("RESULTS ", "FAILED "))]
        assert found, text
        word, _, rest = found[0].partition(" ")
        return word, json.loads(rest), text

    def ranks(self):
        """Return the processes of all ranks once they are at work."""
        paths = [self.marks / str(rank) for rank in range(4)]
        wait_until(lambda: all(path.exists() for path in paths))
        return [int(path.read_text()) for path in paths]

    def cable(self, state):
        words = ["ip", "-n", self.lab.b.namespace, "link", "set", "eth0", state]
        subprocess.run(words, check=True)


@pytest.fixture(scope="module")
def launch(lab, interpreter, mpiexec, tmp_path_factory):
    """Start the script with an sshd on host b."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        if "ssh" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail("UNISONO_REQUIRE wants ssh, but there is no sshd")
        pytest.skip("no sshd here (openssh-server)")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    for name, text in (("server", SERVER), ("client", CLIENT)):
        (folder / name).write_text(text.format(folder=folder))
    work = folder / "launcher" / "work"
    work.mkdir(parents=True)
    (work / "train.py").write_text(SCRIPT)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    words = ["sh", "-c", WITH_OWN_FOLDER, "sh", folder / "launcher"]
    server = lab.b.start(*words, sshd, "-D", "-e", "-f", folder / "server")
    try:
        yield Launch(lab, folder, interpreter.python, mpiexec)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        lab.finish([server])


def test_ranks_of_two_hosts_that_share_no_directory(launch):
    word, told, text = launch.finish(launch.start("return", hosts="host-a,root@host-b"))
    assert word == "RESULTS", text
    results, hosts = told
    names = ["host-a", "host-a", "host-b", "host-b"]
    assert [r["host"] for r in results] == hosts == names
    assert [r["sums"] for r in results] == [[10.0]] * 4
    assert {r["variable"] for r in results} == {"swordfish-4711"}
    work = str(launch.folder / "launcher" / "work")
    assert [r["cwd"] for r in results] == [work, work, str(Path.home()), str(Path.home())]
    assert [r["sees_job"] for r in results] == [True, True, False, False]
    assert {r["nodes"] for r in results} == {"2"}
    assert not any(r["is_secret_seen"] for r in results)
    shown = sorted(line for line in text.splitlines() if "hello" in line)
    assert shown == [f"[{rank}] hello from {host}" for rank, host in enumerate(names)]
    assert list(launch.temporary.iterdir()) == []


def test_a_rank_that_fails_on_another_host_is_named_with_its_traceback(launch):
    word, failed, text = launch.finish(launch.start("fail"))
    assert (word, failed["rank"], failed["host"]) == ("FAILED", 3, "host-b"), text
    assert "ValueError: no luck" in failed["text"]
    assert "train.py" in failed["waiting"].get("0", ""), failed


def test_a_host_that_cannot_be_reached_is_told_with_what_to_try(launch):
    word, failed, text = launch.finish(launch.start("return", hosts="host-a,host-x"))
    assert word == "FAILED", text
    assert "mpiexec@host-a" in failed["text"]  # whose words do not always have those of ssh
    assert "ssh host-x true" in failed["notes"][0]


def test_a_network_that_is_cut_for_five_seconds_ends_nothing(launch):
    process = launch.start("wait")
    launch.ranks()
    launch.cable("down")
    try:
        time.sleep(5.0)
    finally:
        launch.cable("up")
    (launch.marks / "go").touch()
    word, _, text = launch.finish(process)
    assert word == "RESULTS", text


def test_a_host_that_stays_away_is_named_and_ends_its_ranks(launch):
    process = launch.start("wait")
    pids = launch.ranks()
    launch.cable("down")
    try:
        word, failed, text = launch.finish(process)
        wait_until(lambda: not any(map(is_running, pids)), 40.0)
    finally:
        launch.cable("up")
    assert (word, failed["host"]) == ("FAILED", "host-b"), text
    assert "was lost" in failed["text"]


def test_a_launcher_that_is_killed_leaves_nothing_on_any_host(launch):
    process = launch.start("wait", python=sys.executable)  # that of the tests is not so simple
    pids = launch.ranks()
    os.killpg(process.pid, signal.SIGKILL)
    ((code, _),) = launch.lab.finish([process])
    assert code != 0
    wait_until(lambda: not any(map(is_running, pids)), 20.0)
    wait_until(lambda: not list(launch.temporary.iterdir()), 20.0)
