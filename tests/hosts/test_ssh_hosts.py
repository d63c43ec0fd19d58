"""Ranks on two hosts by a real ssh and a real sshd on each; the launcher is on the first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.waiting import wait_until

SERVER = """
Port 2222
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
SetEnv WARM_PYTHON={python}
"""
CLIENT = """
Port 2222
IdentityFile {folder}/user_key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
"""
SCRIPT = """
import json, os, socket, sys, time
from pathlib import Path
import torch, unisono

def work(secret):
    comm = unisono.world()
    print("hello from", socket.gethostname(), flush=True)
    total = comm.all_reduce(torch.full((1000,), comm.rank + 1.0))
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    if sys.argv[1] == "fail" and comm.rank == 3:
        raise ValueError("no luck")
    if sys.argv[1] == "fail":
        comm.barrier()
    if sys.argv[1] == "sleep":
        Path(sys.argv[3], f"rank-{comm.rank}").write_text(str(os.getpid()))
        time.sleep(60)
    return {
        "host": socket.gethostname(),
        "sums": sorted(set(total.tolist())),
        "backend": comm.backend,
        "variable": os.environ.get("MINE"),
        "cwd": os.getcwd(),
        "is_secret_seen": any(secret.encode() in line for line in lines),
        "nodes": os.environ["GROUP_WORLD_SIZE"],
    }

if __name__ == "__main__":
    begin = time.monotonic()
    try:
        results = unisono.run(
            work,
            "sword" + "fish-4711",
            on=unisono.Platform(
                device="ssh",
                hosts=sys.argv[4].split(","),
                ranks=4,
                ssh_args=["-F", sys.argv[2]],
                python=sys.argv[5],
                env={"MINE": "sword" + "fish-4711"},
            ),
            timeout_s=60,
        )
        print("RESULTS " + json.dumps(list(results)), flush=True)
    except unisono.errors.RankFailed as error:
        told = {"rank": error.rank, "host": error.host, "text": str(error)}
        print("FAILED " + json.dumps({**told, "waiting": error.waiting}), flush=True)
    print("SECONDS", time.monotonic() - begin)
"""


@pytest.fixture(scope="module")
def by_ssh(lab, interpreter, tmp_path_factory):
    """Run the script on host a, with an sshd on both hosts; nothing may be left when it ends."""
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
        (folder / name).write_text(text.format(folder=folder, python=interpreter.python))
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    servers = [host.start(sshd, "-D", "-e", "-f", folder / "server") for host in (lab.a, lab.b)]
    temporary = folder / "temporary"

    def start(what, hosts="host-a,host-b", python=interpreter.python):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for path in folder.glob("rank-*"):
            path.unlink()
        words = [python, script, what, folder / "client", folder, hosts]
        env = {"TMPDIR": str(temporary), "WARM_PYTHON": interpreter.python}
        return lab.a.start(*words, interpreter.python, env=env)

    start.folder = folder
    try:
        yield start
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
        lab.finish(servers)


def ranks_at_work(folder):
    """Return the processes of all ranks once they are at work."""
    wait_until(lambda: len([p for p in folder.glob("rank-*") if p.read_text()]) == 4)
    return [int(path.read_text()) for path in sorted(folder.glob("rank-*"))]


def are_gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def failure_in(text):
    assert "FAILED " in text, text
    return json.loads(text.partition("FAILED ")[2].splitlines()[0])


def copies():
    return [path for path in Path("/tmp").glob("unisono-*") if (path / "payload.pkl").exists()]


def test_ranks_of_two_hosts_by_ssh(lab, by_ssh):
    before = copies()
    ((code, text),) = lab.finish([by_ssh("return")])
    assert code == 0, text
    (line,) = [line for line in text.splitlines() if line.startswith("RESULTS ")]
    results = json.loads(line.removeprefix("RESULTS "))
    assert [r["host"] for r in results] == ["host-a", "host-a", "host-b", "host-b"]
    assert [r["sums"] for r in results] == [[10.0]] * 4
    assert {r["backend"] for r in results} == {"gloo"}
    assert {r["variable"] for r in results} == {"swordfish-4711"}
    assert {r["cwd"] for r in results} == {str(Path.cwd())}
    assert {r["nodes"] for r in results} == {"2"}
    assert not any(r["is_secret_seen"] for r in results)
    shown = sorted(line for line in text.splitlines() if "hello" in line)
    assert shown == [f"[{rank}] hello from host-{'aabb'[rank]}" for rank in range(4)]
    assert copies() == before


def test_a_rank_that_fails_on_another_host_is_named_with_its_traceback(lab, by_ssh):
    ((code, text),) = lab.finish([by_ssh("fail")])
    failed = failure_in(text)
    assert (code, failed["rank"], failed["host"]) == (0, 3, "host-b")
    assert "ValueError: no luck" in failed["text"]
    assert "train.py" in failed["waiting"].get("0", ""), failed


def test_an_unreachable_host_is_named_with_what_ssh_said(lab, by_ssh):
    ((_, text),) = lab.finish([by_ssh("return", "host-a,host-x")])
    failed = failure_in(text)
    assert (failed["rank"], failed["host"]) == (2, "host-x")
    assert "could not be started: ssh: Could not resolve hostname host-x" in failed["text"]


def test_ctrl_c_ends_the_ranks_of_all_hosts(lab, by_ssh):
    before = copies()
    process = by_ssh("sleep")
    pids = ranks_at_work(by_ssh.folder)
    os.killpg(process.pid, signal.SIGINT)
    ((code, _),) = lab.finish([process])
    assert code != 0
    wait_until(lambda: are_gone(pids), 3.0)
    assert copies() == before


def test_a_launcher_that_is_killed_leaves_nothing_on_any_host(lab, by_ssh):
    before = copies()
    process = by_ssh("sleep", python=sys.executable)  # that of the tests is not killed so simply
    pids = ranks_at_work(by_ssh.folder)
    os.killpg(process.pid, signal.SIGKILL)
    lab.finish([process])
    wait_until(lambda: are_gone(pids), 15.0)
    wait_until(lambda: copies() == before, 5.0)


def test_a_host_whose_cable_is_cut_is_named_and_ends_its_ranks(lab, by_ssh):
    process = by_ssh("sleep")
    pids = ranks_at_work(by_ssh.folder)
    cable = ["ip", "-n", lab.b.namespace, "link", "set", "eth0"]
    subprocess.run([*cable, "down"], check=True)
    try:
        ((_, text),) = lab.finish([process])
        wait_until(lambda: are_gone(pids), 25.0)
    finally:
        subprocess.run([*cable, "up"], check=True)
    failed = failure_in(text)
    assert failed["host"] == "host-b"
    assert "was lost" in failed["text"]
