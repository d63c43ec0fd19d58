"""Sizes and fields of a platform, and what is wrong with a bad one. No process here."""

from __future__ import annotations

import copy
import os
import pickle
import socket
from dataclasses import FrozenInstanceError

import pytest

import unisono
from unisono.comm import backends
from unisono.cores import cgroup_quota, threads_per_rank, usable_cores
from unisono.errors import MissingExtra, PlatformError, RankFailed
from unisono.launch import IO, Device, Platform, checks, platform
from unisono.launch.platform import gpu_index

QUIET = unisono.Logs(console="none")


@pytest.mark.parametrize(
    ("fields", "per_node", "world", "cpus"),
    [
        ({"device": "cpu", "n_gpus_per_node": 2}, 2, 2, None),
        ({"device": "cpu", "n_cpus_per_node": 3}, 3, 3, 1),
        ({"device": "cpu"}, 1, 1, None),
        ({"device": "cpu", "ranks": 6}, 6, 6, None),
        ({"device": "cpu", "ranks": 2, "n_cpus_per_node": 8}, 2, 2, 4),
        ({"device": "gpu", "n_gpus_per_node": 2, "n_cpus_per_node": 4}, 2, 2, 2),
        ({"device": "gpu"}, 1, 1, None),
        ({"device": "slurm", "n_nodes": 2, "n_gpus_per_node": 3}, 3, 6, 1),
        ({"device": "slurm", "n_nodes": 2, "n_gpus_per_node": 0}, 1, 2, 1),
        ({"device": "slurm", "n_nodes": 2, "ranks": 8}, 4, 8, 1),
        ({"device": "mps"}, 1, 1, None),
    ],
)
def test_sizes_follow_from_the_fields_that_were_given(fields, per_node, world, cpus):
    platform = Platform(**fields)
    assert (platform.ranks_per_node, platform.world_size) == (per_node, world)
    assert platform.cpus_per_rank == (cpus or max(1, usable_cores() // per_node))
    assert platform.requires_ipc == (world > 1)


def test_every_field_has_a_kind_and_the_table_of_places_names_fields_and_places():
    callables = {"device", "upon_finish", "upon_error"}
    assert platform.FIELDS.keys() - platform.KINDS.keys() == callables
    places = {device.value for device in Device}
    assert all(set(platform.places_of(name)) < places for name in platform.FIELDS)


def test_a_platform_does_not_change_but_another_one_may_differ():
    platform = Platform(device="cpu")
    with pytest.raises(FrozenInstanceError):
        platform.ranks = 3
    other = platform.but(n_gpus_per_node=3, device="gpu")
    assert (other.device, other.world_size) == (Device.GPU, 3)
    assert other.is_explicit("n_gpus_per_node")
    assert not platform.is_explicit("n_gpus_per_node")


def test_copies_and_pickles_keep_what_was_given():
    platform = Platform(device="cpu", n_cpus_per_node=3, ipc_groups=[[0], [1, 2]])
    for twin in (platform.but(), copy.deepcopy(platform), pickle.loads(pickle.dumps(platform))):
        assert twin == platform
        assert twin.world_size == 3
    platform = Platform(device="mpi", ipc_groups=[[0]], hosts=["a"], env={"A": "1"})
    twin = platform.but()
    twin.ipc_groups[0].append(9)
    twin.hosts.append("b")
    twin.env["B"] = "2"
    assert (platform.ipc_groups, platform.hosts, platform.env) == ([[0]], ["a"], {"A": "1"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "gqu"}, ["'gqu'", "'cpu', 'gpu', 'slurm'", "did you mean"]),
        ({"n_gpu": 2}, ["n_gpu=", "n_gpus_per_node", "did you mean n_gpus_per_node"]),
        ({"ranks": 0}, ["ranks=0", "not an integer >= 1"]),
        ({"ranks": 2.0}, ["ranks=2.0"]),
        (
            {"device": "slurm", "ranks": 7, "n_nodes": 2},
            ["7 ranks / 2 nodes = 3.5", "ranks=6 or ranks=8"],
        ),
        ({"ranks": 3, "n_cpus_per_node": 4}, ["4 CPUs / 3 ranks = 1.33333", "n_cpus_per_node=3"]),
        ({"n_nodes": 2}, ["n_nodes=2", "on='mpi', hosts=['a', 'b']", "torchrun"]),
        ({"hosts": ["a"]}, ["cpu takes no hosts", "on='mpi', hosts=['a']"]),
        ({"device": "mpi", "hosts": ["a", "b", "a"]}, ["'a' more than once", "ranks=3"]),
        (
            {"device": "mpi", "hosts": ["a", "-oProxyCommand=x"]},
            ["'-oProxyCommand=x' is not the name of a host"],
        ),
        ({"device": "mpi", "hosts": "a"}, ["str, not a list of strings", "hosts=['a']"]),
        ({"device": "mpi", "hosts": ["a", "b"], "n_nodes": 3}, ["3 nodes != 2 hosts"]),
        (
            {"device": "mpi", "hosts": ["a", "b"], "ranks": 3},
            ["3 ranks / 2 nodes = 1.5", "ranks=2 or ranks=4"],
        ),
        ({"device": "ssh"}, ["device='ssh'", 'on="mpi", hosts=']),
        ({"ssh_args": ["-p", "2222"]}, ["ssh_args=", "~/.ssh/config"]),
        ({"ranks": 2, "ipc_groups": [[0], [2]]}, ["rank 2 in group 1", "0 to 1"]),
        ({"ranks": 2, "ipc_groups": [[0, 1], [1]]}, ["rank 1 is in group 0 and group 1"]),
        ({"ranks": 3, "ipc_groups": [[0], [2]]}, ["rank 1 is in no group"]),
        ({"ranks": 2, "ipc_groups": [[0, 1], []]}, ["group 1 is empty"]),
        (
            {"spawn_method": "forksever"},
            ["'auto', 'forkserver'", "HINT: spawn_method='forkserver'"],
        ),
        ({"backend": "sm"}, ["'sm'", "HINT: backend='shm'"]),
        ({"master_port": 70000}, ["70000", "65535"]),
        ({"comm_timeout_s": 0}, ["comm_timeout_s=0"]),
        ({"grace_s": float("inf")}, ["not a finite number"]),
        ({"stack_signal": "SIGFOO"}, ["SIGFOO"]),
        ({"env": "x"}, ["env='x'", "str, not a table of strings", "HINT: env={'NAME': 'value'}"]),
        ({"env": {"A": 1}}, ["env={'A': 1}", "not a table of strings"]),
        (
            {"device": "mpi", "mpiexec_args": "-hosts n1,n2"},
            ["a list of strings", "HINT: mpiexec_args=['-hosts', 'n1,n2']"],
        ),
        ({"device": "slurm", "slurm_additional_parameters": "a=b"}, ["not a table"]),
        ({"oversubscribe": "no"}, ["not True or False"]),
        ({"device": "slurm", "timeout_min": 0}, ["timeout_min=0", "minutes"]),
        (
            {"device": "slurm", "n_gpus_per_node": 3, "ranks": 2},
            ["3 GPUs / 2 ranks = 1.5", "n_gpus_per_node=2, or ranks=3"],
        ),
        (
            {"device": "slurm", "n_gpus_per_node": 2, "ranks": 8, "n_nodes": 2},
            ["2 GPUs / 4 ranks = 0.5", "ranks=4, or oversubscribe=True"],
        ),
    ],
)
def test_a_bad_platform_says_what_is_wrong(fields, words):
    with pytest.raises(PlatformError) as caught:
        Platform(**{"device": "cpu", **fields}).validate()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(PlatformError) as again:
        Platform(device="cpu").but(**fields).validate()
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize(
    ("local_rank", "size", "visible", "oversubscribe", "index"),
    [
        (1, 2, 2, False, 1),
        (1, 2, 1, False, 0),
        (2, 4, 2, False, None),
        (3, 4, 2, True, 1),
        (0, 1, 0, True, None),
    ],
)
def test_the_gpu_of_a_rank(local_rank, size, visible, oversubscribe, index):
    assert gpu_index(local_rank, size, visible, oversubscribe=oversubscribe) == index


def test_the_printed_table_shows_where_ranks_meet_only_if_they_do(capsys, monkeypatch):
    monkeypatch.setattr(IO, "verbose", True)
    Platform(device="cpu", ranks=2).print()
    assert "master" in capsys.readouterr().out
    Platform(device="cpu").print()
    assert "master" not in capsys.readouterr().out
    monkeypatch.setattr(IO, "verbose", False)
    Platform(device="cpu").print()
    IO.print("loud", verbose=True)
    assert capsys.readouterr().out == "loud\n"


def test_a_backend_that_ranks_could_not_use_is_refused_before_any_is_started(monkeypatch):
    assert set(backends.NAMES) <= set(checks.BACKENDS)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingExtra, match="unisono\\[mpi\\]"):
        unisono.run(print, on=Platform(device="cpu", backend="mpi"))
    monkeypatch.setenv("UNISONO_BACKEND", "gluu")
    with pytest.raises(PlatformError, match="HINT: UNISONO_BACKEND='gloo'"):
        unisono.run(print, on="cpu")


def test_cores_are_limited_by_the_control_group(tmp_path):
    assert cgroup_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cgroup_quota(tmp_path) == 0.5
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cgroup_quota(tmp_path) == 1.5


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (8, 2, 1)]
)
def test_threads_are_shared_and_never_none(ranks, cores, threads):
    assert threads_per_rank(ranks, cores) == threads


def test_a_given_port_is_used_and_a_busy_one_is_refused():
    def where():
        unisono.world().barrier()
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        platform = unisono.Platform(device="cpu", ranks=2, master_port=port)
        probe.listen()
        with pytest.raises(RankFailed, match=f"rank 0 listens at .*:{port}") as caught:
            unisono.run(where, on=platform, logs=QUIET)
        assert isinstance(caught.value.exception, PlatformError)
    results = unisono.run(where, on=platform, logs=QUIET)
    assert list(results) == [("127.0.0.1", str(port))] * 2
