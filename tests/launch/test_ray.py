"""Ranks as actors of a real Ray cluster of two nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.launch.contract import CASES, OF_ALL_PLACES, Place, shows_stacks
from tests.waiting import is_running, scaled_by_load, wait_until

import unisono
from unisono.errors import JobCancelled, PlatformError, RankFailed
from unisono.launch.places import ray as ray_place

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]
QUIET = unisono.Logs(console="none")
AT_ONCE_S = 8.0  # two seconds are promised; a loaded machine may take longer


OTHER_PYTHON = """
import pathlib, sys
if "default_worker.py" in " ".join(sys.orig_argv):
    sys.executable = str(pathlib.Path(__file__).with_name("python"))
"""
PYTHON = """#!/bin/sh
[ -e "$0.real" ] && exec {real} "$@"
WARM_PYTHON={warm} exec {warm} "$@"
"""
HEALTH = {
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    "health_check_timeout_ms": 60_000,
}
"""A node that is killed refuses these calls at once; one that is only slow has a minute."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, interpreter):
    """A cluster with two nodes of two CPUs, which this process has not joined.

    Actors start their ranks as forks of the warm interpreter: loading torch is no part of a test.
    """
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        if "ray" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail("UNISONO_REQUIRE wants ray, but it is not installed")
        pytest.skip("no ray here")
    folder = tmp_path_factory.mktemp("ray")
    (folder / "sitecustomize.py").write_text(OTHER_PYTHON)
    (folder / "python").write_text(PYTHON.format(real=sys.executable, warm=interpreter.python))
    (folder / "python").chmod(0o755)
    search_path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("PYTHONPATH", search_path.rstrip(os.pathsep))
        options = {"num_cpus": 2, "include_dashboard": False, "_system_config": HEALTH}
        made = Cluster(initialize_head=True, head_node_args=options)
        made.add_node(num_cpus=2)
    made.real_python, made.search_path = folder / "python.real", search_path
    try:
        yield made
    finally:
        sys.modules["ray"].shutdown()  # a run has made this process a driver
        made.shutdown()


@pytest.fixture
def hygiene():
    """Ray keeps processes and files of its own; what a run leaves in Ray is looked at here."""


@pytest.fixture
def on_ray(cluster, monkeypatch):
    """The cluster, for runs of a process that is no driver; they leave nothing in it."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    wait_until(lambda: is_empty(cluster.global_state), 15)


def is_empty(state):
    """Whether no actor lives, no placement group is there, and all CPUs are free."""
    actors = state.actor_table(None, actor_state_name="ALIVE")
    groups = {group["state"] for group in state.placement_group_table().values()}
    return not actors and groups <= {"REMOVED"} and state.available_resources().get("CPU") == 4.0


def test_ranks_on_two_nodes_return_values_and_signals_of_this_process_stay(on_ray, capfd):
    def work(start):
        comm = unisono.world()
        print("hello from", comm.rank)
        total = comm.all_reduce(torch.tensor([start + comm.rank])).item()
        sizes = os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]
        return comm.rank, total, sizes, torch.get_num_threads(), os.environ.get("PYTHONBREAKPOINT")

    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    results = unisono.run(work, 10.0, on="ray", ranks=4, timeout_s=60)
    assert list(results) == [(rank, 46.0, ("2", "2"), 1, None) for rank in range(4)]
    assert (results.platform, results.ranks, results.dir) == ("ray", 4, None)
    shown = sorted(capfd.readouterr().out.splitlines())
    assert shown == [f"[{rank}] hello from {rank}" for rank in range(4)]
    assert [signal.getsignal(number) for number in numbers] == before
    assert "PYTHONBREAKPOINT" not in os.environ


def sleep_for_ever(folder):
    """Leave the number of this process and of its agent, and be there until the end."""
    comm = unisono.world()
    text = f"{os.getpid()} {os.getppid()}"
    Path(folder, f"rank-{comm.rank}.tmp").write_text(text)
    Path(folder, f"rank-{comm.rank}.tmp").rename(Path(folder, f"rank-{comm.rank}"))
    while True:
        comm.barrier()
        time.sleep(0.01)


def processes(folder, ranks):
    """Return rank and agent of all ranks, once they are at work."""
    paths = [folder / f"rank-{rank}" for rank in range(ranks)]
    wait_until(lambda: all(path.exists() for path in paths))
    return [tuple(map(int, path.read_text().split())) for path in paths]


def test_runs_of_one_process_share_ray_and_one_that_waits_for_room_can_be_cancelled(
    on_ray, tmp_path, capfd
):
    def quick():
        return unisono.world().size

    first = unisono.submit(sleep_for_ever, str(tmp_path), on="ray", ranks=3, logs=QUIET)
    processes(tmp_path, 3)
    assert list(unisono.run(quick, on="ray", ranks=1, logs=QUIET)) == [1]
    second = unisono.submit(quick, on="ray", ranks=2, logs=unisono.Logs(console="all"))
    wait_until(lambda: "waiting for room in the cluster" in capfd.readouterr().err, 30)
    begin = time.monotonic()
    second.cancel()
    assert time.monotonic() - begin < scaled_by_load(AT_ONCE_S)
    assert first.status() == "running"
    first.cancel()
    with pytest.raises(JobCancelled):
        first.result()


def test_a_ray_that_the_user_has_initialised_is_used_and_left(on_ray):
    import ray

    ray.shutdown()
    ray.init(address=on_ray.address, log_to_driver=False, logging_level="ERROR")
    assert list(unisono.run(os.getpgid, 0, on="ray", ranks=1, logs=QUIET)) != [os.getpgid(0)]
    assert ray.is_initialized()
    for options in ({"address": "local"}, {"runtime_env": {"env_vars": {"A": "1"}}}):
        place = unisono.Platform(device="ray", ranks=1, ray_init=options)
        with pytest.raises(PlatformError, match="a driver of Ray already"):
            unisono.run(print, on=place, logs=QUIET)


def test_a_cluster_that_is_not_there_is_named():
    ray = pytest.importorskip("ray")
    ray.shutdown()
    platform = unisono.Platform(device="ray", ranks=2, ray_init={"address": "127.0.0.1:1"})
    with pytest.raises(PlatformError, match=r"at 127\.0\.0\.1:1\s+found: ConnectionRefusedError"):
        unisono.run(lambda: None, on=platform, logs=QUIET)


@OF_ALL_PLACES
def test_the_contract_of_places(on_ray, case, tmp_path):
    if shows_stacks(case):
        on_ray.real_python.touch()
    try:
        CASES[case](Place("ray"), tmp_path)
    finally:
        on_ray.real_python.unlink(missing_ok=True)


def test_a_node_that_leaves_is_a_rank_that_died_and_is_not_waited_for(on_ray, tmp_path, has_ended):
    node = on_ray.add_node(num_cpus=2)
    try:
        job = unisono.submit(sleep_for_ever, str(tmp_path), on="ray", ranks=6, logs=QUIET)
        pids = processes(tmp_path, 6)
        waiting = unisono.submit(os.getpid, on="ray", ranks=6, nodes=3, logs=QUIET)
        wait_until(lambda: waiting.status() == "running")
    finally:
        begin = time.monotonic()
        on_ray.remove_node(node, allow_graceful=False)
    wait_until(lambda: job.done(), 60)
    assert time.monotonic() - begin < scaled_by_load(2 * AT_ONCE_S)
    with pytest.raises(RankFailed, match="was lost"):
        job.result()
    assert all(has_ended(pid) for pair in pids for pid in pair)
    with pytest.raises(PlatformError, match=r"CPU: 6 x 1 = 6 needed, it has 2 \+ 2"):
        waiting.result(60)


def test_more_than_the_cluster_has_is_refused_at_once(on_ray):
    with pytest.raises(PlatformError) as caught:
        unisono.run(lambda: None, on="ray", ranks=6, nodes=3, logs=QUIET)
    assert "6 ranks with 1 CPU each on 3 nodes" in str(caught.value)
    assert "CPU: 6 x 1 = 6 needed, it has 2 + 2" in str(caught.value)


def test_ctrl_c_ends_ranks_on_a_local_ray_that_the_run_has_started(cluster, warm_python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    words, env = [warm_python, script], {**os.environ, "PYTHONPATH": cluster.search_path}
    pipe, errors = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(words, stdout=pipe, stderr=errors, text=True, env=env) as program:
        try:
            assert program.stdout is not None
            line = next(line for line in program.stdout if "has begun" in line)
            begin = time.monotonic()
            program.send_signal(signal.SIGINT)
            rest, _ = program.communicate(timeout=60)
        finally:
            program.kill()  # the block waits for its end
    assert program.returncode in (1, -signal.SIGINT), rest  # Ray's exit functions hide the signal
    assert "saved" in rest
    assert time.monotonic() - begin < scaled_by_load(10.0), rest  # 2 s on an idle machine
    wait_until(lambda: not is_running(int(line.split()[-1])), 20)


TRAIN = """
import os
import signal
import time
import unisono

def train():
    comm = unisono.world()
    comm.barrier()
    print("has begun", os.getppid(), flush=True)
    try:
        while True:
            comm.barrier()
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("saved", flush=True)
        raise

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    place = unisono.Platform(device="ray", ranks=2, ray_init={"address": "local"})
    unisono.run(train, on=place)
"""


def test_the_address_of_a_dead_cluster_is_not_believed(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray_current_cluster").write_text("127.0.0.1:1")
    assert ray_place._address({"_temp_dir": str(tmp_path)}) != "127.0.0.1:1"


@pytest.mark.parametrize(
    ("size", "need", "nodes", "has", "words"),
    [
        (4, {"CPU": 1}, 2, [{"CPU": 2.0}] * 2, None),
        (2, {"CPU": 1, "GPU": 0.5}, None, [{"CPU": 8.0, "GPU": 1.0}], None),
        (5, {"CPU": 1}, None, [{"CPU": 2.0}] * 2, r"CPU: 5 x 1 = 5 needed, it has 2 \+ 2"),
        (2, {"CPU": 3}, None, [{"CPU": 4.0}, {"CPU": 2.0}], r"room for 1 \+ 0 ranks"),
        (4, {"CPU": 1}, 2, [{"CPU": 3.0}, {"CPU": 1.0}], "on 2 nodes"),
        (1, {"CPU": 1, "GPU": 1}, None, [{"CPU": 8.0}], "GPU: 1 x 1 = 1 needed, it has 0"),
    ],
)
def test_what_a_ray_cluster_lacks_is_told_with_the_arithmetic(size, need, nodes, has, words):
    demand = ray_place.Demand(size=size, need=need, nodes=nodes)
    assert sum(bundle["CPU"] for bundle in demand.bundles) == size * need["CPU"]
    refusal = pytest.raises(PlatformError, match=words) if words else contextlib.nullcontext()
    with refusal:
        demand.check(has)
