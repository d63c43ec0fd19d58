"""Worlds over two hosts: a master on localhost, or a name that nobody knows, does not pass here.

Processes are forks of the warm interpreter that enter the namespaces of their host, except the
ranks of `doctor`.
"""

from __future__ import annotations

import json
import os
import time

import pytest
from tests.waiting import scaled_by_load

import unisono
from unisono.errors import PlatformError
from unisono.launch.places.mpi import find_mpiexec

SCRIPT = """
import json, os, socket
from pathlib import Path
import torch, unisono

def work():
    comm = unisono.world()
    total = comm.all_reduce(torch.full((1000,), comm.rank + 1.0))
    gathered = comm.all_gather(torch.tensor([comm.rank])).tolist()
    first = comm.rank // 2 * 2
    here = comm.sub([first, first + 1])
    here.barrier()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "host": socket.gethostname(),
        "sums": sorted(set(total.tolist())),
        "gathered": gathered,
        "backends": [comm.backend, here.backend],
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "shared": sorted({line.split()[4] for line in maps if "memfd:unisono" in line}),
    }

results = unisono.run(work)
if unisono.world().rank == 0:
    print("RESULTS " + json.dumps(list(results)), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "two.py"
    path.write_text(SCRIPT)
    return path


def variables(rank, *, master, port, per_host=2):
    """Return what torchrun would tell a rank of two hosts."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(2 * per_host),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "UNISONO_TIMEOUT_S": "60",
    }


def start_world(lab, python, script, *, master, port, per_host=2):
    """Start ranks on both hosts, which do not know their names; return exit codes and outputs."""
    processes = [
        host.start(
            python,
            script,
            env=variables(rank, master=master, port=port, per_host=per_host),
            hosts="poor",
        )
        for rank, host in enumerate([lab.a] * per_host + [lab.b] * per_host)
    ]
    return lab.finish(processes)


def check_results(ends, between="gloo"):
    """The world of four ranks came together over eth0, and each host shares its own memory."""
    output = "".join(text for _, text in ends)
    assert all(code == 0 for code, _ in ends), output
    (line,) = [line for line in output.splitlines() if "RESULTS " in line]
    results, _ = json.JSONDecoder().raw_decode(line.split("RESULTS ")[1])
    assert [r["host"] for r in results] == ["host-a", "host-a", "host-b", "host-b"]
    for result in results:
        assert result["sums"] == [10.0]
        assert result["gathered"] == [0, 1, 2, 3]
        assert result["backends"] == [between, "shm"]  # of the world, of the ranks of a host
        assert result["interface"] == "eth0"
    shared = [r["shared"] for r in results]
    assert shared[0] == shared[1] != shared[2] == shared[3]
    assert shared[0]
    assert shared[2]


def test_ranks_of_two_hosts_share_memory_inside_and_use_gloo_between(lab, interpreter, script):
    # Where hosts files know both names, torchrun's c10d below has the same ranks.
    check_results(start_world(lab, interpreter.python, script, master=lab.a.address, port=29611))


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_script_under_torchrun_on_two_hosts(lab, interpreter, script, rendezvous):
    python = interpreter.python
    port = 29612 if rendezvous == "static" else 29613

    def words(node, host):
        common = [python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        if rendezvous == "static":
            meet = [
                f"--node-rank={node}",
                f"--master-addr={lab.a.address}",
                f"--master-port={port}",
            ]
        else:
            meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={lab.a.address}:{port}"]
            meet += [f"--local-addr={host.address}", "--rdzv-id=two"]
        return [*common, *meet, script]

    env = {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}  # torchrun's word for its workers
    hosts = "poor" if rendezvous == "static" else "rich"  # c10d itself asks for the own host name
    processes = [
        host.start(*words(node, host), env=env, hosts=hosts)
        for node, host in enumerate([lab.a, lab.b])
    ]
    check_results(lab.finish(processes))


NO_MEETING = """
import os, unisono
from unisono.errors import PlatformError

for master in ("host-a", "localhost"):
    os.environ["MASTER_ADDR"] = master
    try:
        unisono.world()
    except PlatformError as error:
        print(error)
"""


def test_a_meeting_point_that_cannot_work_is_explained_at_once(lab, interpreter, tmp_path):
    path = tmp_path / "nowhere.py"
    path.write_text(NO_MEETING)
    python = interpreter.python
    begin = time.monotonic()
    ends = start_world(lab, python, path, master="host-a", port=29614, per_host=1)
    assert time.monotonic() - begin < scaled_by_load(80)  # not the deadline of the store
    for code, output in ends:
        assert code == 0, output
        for master, found in (
            ("host-a", "host-a does not resolve on host-"),
            ("localhost", "localhost is 127.0.0.1: another machine on each of 2 hosts"),
        ):
            assert f"MASTER_ADDR={master} MASTER_PORT=29614 for 2 ranks" in output
            assert found in output
        assert output.count("HINT: MASTER_ADDR=10.0.0.1") == 2


REMOTE_SHELL = """#!/bin/sh
# What ssh would do for mpiexec: run the words behind the host name on the other host.
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec nsenter --net=/run/netns/%(namespace)s unshare --mount --uts sh -c \\
  'hostname %(name)s && mount --bind %(hosts)s /etc/hosts && exec sh -c "$*"' sh "$@"
"""


@pytest.fixture
def over_mpi(lab, tmp_path):
    """Return words for an mpiexec on host `a` that reaches host `b`, too."""
    try:
        found = find_mpiexec(unisono.Platform(device="mpi"))
    except PlatformError:
        pytest.skip("no mpiexec here")
    if found.flavour != "mpich":
        pytest.skip("these are words for MPICH")
    shell = tmp_path / "shell"
    values = {"namespace": lab.b.namespace, "name": lab.b.name, "hosts": lab.b.folder / "poor"}
    shell.write_text(REMOTE_SHELL % values)
    shell.chmod(0o755)
    words = ["-hosts", f"{lab.a.address},{lab.b.address}", "-iface", "eth0"]
    return found.path, [*words, "-launcher", "ssh", "-launcher-exec", str(shell)]


@pytest.mark.mpi
def test_a_script_under_the_users_mpiexec_on_two_hosts(lab, interpreter, script, over_mpi):
    pytest.importorskip("mpi4py")
    path, words = over_mpi
    words = (path, "-n", 4, "-ppn", 2, *words, interpreter.python, script)
    ends = lab.finish([lab.a.start(*words, env={"OMP_NUM_THREADS": "1"}, hosts="poor")])
    check_results(ends, between="mpi4py")


def test_doctor_starts_ranks_on_a_host_that_does_not_know_itself(lab, interpreter):
    words = (interpreter.python, "-m", "unisono", "doctor")
    ((code, output),) = lab.finish([lab.a.start(*words, hosts="poor", env={"COLUMNS": "200"})])
    assert code == 0, output
    assert "ok    two ranks    all_reduce is right over gloo, shm" in output
    assert os.environ.get("HOSTNAME") != "host-a"
