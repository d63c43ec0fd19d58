"""Places on other hosts, as far as they need none: what may be asked of them."""

from __future__ import annotations

import importlib.util

import pytest

import unisono
from unisono.errors import MissingExtra, PlatformError
from unisono.launch import Platform, dry_run
from unisono.launch.checks import check_platform

QUIET = unisono.Logs(console="none")


def nothing():
    return None


@pytest.mark.parametrize("word", ["ssh", "pbs", "lsf"])
def test_a_place_that_went_says_what_to_write_instead(word):
    with pytest.raises(PlatformError, match="mpi"):
        unisono.run(nothing, on=word)
    with pytest.raises(AttributeError, match=r"write instead: on=|no attribute"):
        getattr(unisono.Device, word.upper())


def test_hosts_are_the_nodes_of_mpi(monkeypatch):
    table = dry_run(nothing, on="mpi", hosts=["a", "user@b"], ranks=4)
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["0", "a"],
        ["1", "a"],
        ["2", "user@b"],
        ["3", "user@b"],
    ]
    assert len(dry_run(nothing, on="mpi", hosts=["a", "b", "c"]).splitlines()) == 4
    assert Platform(device="mpi", hosts=["a", "b", "c"], n_gpus_per_node=2).world_size == 6
    assert Platform(device="mpi", hosts=["a", "b"], ranks=2).but(hosts=["a"]).n_nodes == 1
    with pytest.raises(PlatformError, match="1 node != 2 hosts"):
        unisono.run(nothing, on="mpi", hosts=["a", "b"], nodes=1)
    monkeypatch.setenv("UNISONO_FORCE_ON", "cpu")  # a rehearsal of the same call
    table = dry_run(nothing, on="mpi", hosts=["a", "b"], ranks=4)
    assert len(table.splitlines()) == 5
    assert " a " not in table


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
        check_platform(Platform(device="ray", ranks=2, n_gpus_per_node=3))
    assert Platform(device="ray", ranks=4, n_cpus_per_node=8).cpus_per_rank == 2
    assert Platform(device="ray", ranks=4, n_cpus_per_node=None).cpus_per_rank == 1
