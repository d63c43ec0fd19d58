"""Ranks as actors of a real Ray cluster of two nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.waiting import wait_until

import unisono
from unisono.errors import PlatformError, RankFailed
from unisono.launch.places import ray as ray_place

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]
QUIET = unisono.Logs(console="none")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a cluster with two nodes of two CPUs, which this process has not joined."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        if "ray" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail("UNISONO_REQUIRE wants ray, but it is not installed")
        pytest.skip("no ray here")
    before = tempfile.tempdir
    tempfile.tempdir = None
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    try:
        yield made
    finally:
        made.shutdown()
        tempfile.tempdir = before


@pytest.fixture
def hygiene():
    """Ray keeps processes and files of its own; what a run leaves in Ray is looked at here."""


@pytest.fixture
def on_ray(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    assert_nothing_left(cluster.address)


QUESTION = """
import json, sys
import ray
from ray.util import list_named_actors, placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
groups = [g["state"] for g in placement_group_table().values()]
print(json.dumps([list_named_actors(all_namespaces=True), groups, ray.available_resources()]))
"""


def assert_nothing_left(address):
    """No actor lives, no placement group is there, all CPUs are free."""

    def is_empty():
        words = [sys.executable, "-c", QUESTION, address]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        actors, groups, free = json.loads(done.stdout.splitlines()[-1])
        return not actors and set(groups) <= {"REMOVED"} and free.get("CPU") == 4.0

    wait_until(is_empty, 15)


def test_ranks_on_two_nodes_return_values_logs_and_hosts(on_ray, capfd):
    def work(start):
        comm = unisono.world()
        print("hello from", comm.rank)
        total = comm.all_reduce(torch.tensor([start + comm.rank])).item()
        sizes = os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]
        return comm.rank, total, sizes, torch.get_num_threads()

    results = unisono.run(work, 10.0, on="ray", ranks=4, timeout_s=60)
    assert list(results) == [(rank, 46.0, ("2", "2"), 1) for rank in range(4)]
    assert (results.platform, results.ranks, results.dir) == ("ray", 4, None)
    shown = sorted(capfd.readouterr().out.splitlines())
    assert shown == [f"[{rank}] hello from {rank}" for rank in range(4)]


def test_a_failure_on_ray_has_traceback_and_where_others_waited(on_ray):
    def work():
        comm = unisono.world()
        if comm.rank == 1:
            raise KeyError("learning_rate")
        comm.barrier()

    with pytest.raises(RankFailed) as caught:
        unisono.run(work, on="ray", ranks=2, nodes=2, logs=QUIET, timeout_s=60)
    error = caught.value
    assert error.rank == 1
    assert isinstance(error.exception, KeyError)
    assert "test_ray.py" in error.waiting[0]


def test_a_killed_actor_is_named_within_five_seconds(on_ray, tmp_path):
    def work(folder):
        comm = unisono.world()
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()  # of the agent
        Path(folder, f"rank-{comm.rank}").write_text(stat.rpartition(")")[2].split()[1])
        while True:
            comm.barrier()
            time.sleep(0.01)

    job = unisono.submit(work, str(tmp_path), on="ray", ranks=2, timeout_s=60)
    path = tmp_path / "rank-1"
    wait_until(lambda: path.exists() and path.read_text())
    time.sleep(0.5)
    os.kill(int(path.read_text()), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        job.result(timeout_s=60)
    seconds = time.monotonic() - begin
    assert caught.value.rank == 1
    assert "rank 1 of 2" in str(caught.value)
    assert "was lost" in str(caught.value)
    assert "test_ray.py" in str(caught.value.waiting)
    assert seconds < 10.0, seconds  # five are promised; a loaded machine may take longer


def test_more_than_the_cluster_has_is_refused_at_once(on_ray):
    with pytest.raises(PlatformError) as caught:
        unisono.run(lambda: None, on="ray", ranks=6, nodes=3, logs=QUIET)
    assert "6 ranks with 1 CPU each on 3 nodes" in str(caught.value)
    assert "CPU: 6 x 1 = 6 needed, it has 2 + 2" in str(caught.value)


def test_a_cluster_that_is_not_there_is_named():
    pytest.importorskip("ray")
    platform = unisono.Platform(device="ray", ranks=2, ray_init={"address": "127.0.0.1:1"})
    with pytest.raises(PlatformError, match=r"at 127\.0\.0\.1:1\s+found: ConnectionRefusedError"):
        unisono.run(lambda: None, on=platform, logs=QUIET)


def test_ctrl_c_ends_ranks_on_a_local_ray_that_the_run_has_started(tmp_path):
    pytest.importorskip("ray")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    words = [sys.executable, script]
    pipe, errors = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(words, stdout=pipe, stderr=errors, text=True) as program:
        try:
            assert program.stdout is not None
            next(line for line in program.stdout if "has begun" in line)
            begin = time.monotonic()
            program.send_signal(signal.SIGINT)
            rest, _ = program.communicate(timeout=60)
        finally:
            program.kill()  # the block waits for its end
    assert program.returncode == -signal.SIGINT, rest
    assert "saved" in rest
    assert time.monotonic() - begin < 10.0, rest  # 2 s on an idle machine


TRAIN = """
import time
import unisono

def train():
    comm = unisono.world()
    comm.barrier()
    print("has begun", flush=True)
    try:
        while True:
            comm.barrier()
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("saved", flush=True)
        raise

if __name__ == "__main__":
    place = unisono.Platform(device="ray", ranks=2, ray_init={"address": "local"})
    unisono.run(train, on=place)
"""


def test_the_address_of_a_dead_cluster_is_not_believed(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "ray_current_cluster").write_text("127.0.0.1:1")
    assert ray_place._running_here(str(tmp_path)) != "127.0.0.1:1"
