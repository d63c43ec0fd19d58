"""Places on other hosts, as far as they need none: requests and copies of files."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

import unisono
from unisono.errors import MissingExtra, PlatformError
from unisono.launch import Platform, dry_run
from unisono.launch.checks import check_platform
from unisono.launch.places.mailbox import Mailbox
from unisono.launch.places.mirror import CHUNK, Change, Lost, Mirror, forwarded

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
        check_platform(Platform(device="ray", ranks=2, n_gpus_per_node=3))
    assert Platform(device="ray", ranks=4, n_cpus_per_node=8).cpus_per_rank == 2
    assert Platform(device="ray", ranks=4, n_cpus_per_node=None).cpus_per_rank == 1


@pytest.mark.parametrize(
    ("wanted", "nodes", "words"),
    [
        ({"size": 4, "need": {"CPU": 1}}, [{"CPU": 2.0}, {"CPU": 2.0}], None),
        (
            {"size": 5, "need": {"CPU": 1}},
            [{"CPU": 2.0}] * 2,
            "CPU: 5 x 1 = 5 needed, it has 2 + 2",
        ),
        ({"size": 2, "need": {"CPU": 3}}, [{"CPU": 4.0}, {"CPU": 2.0}], "room for 1 + 0 ranks"),
        ({"size": 4, "need": {"CPU": 1}, "nodes": 2}, [{"CPU": 3.0}, {"CPU": 1.0}], "on 2 nodes"),
        ({"size": 4, "need": {"CPU": 1}, "nodes": 2}, [{"CPU": 2.0}] * 2, None),
        ({"size": 2, "need": {"CPU": 1, "GPU": 0.5}}, [{"CPU": 8.0, "GPU": 1.0}], None),
        (
            {"size": 1, "need": {"CPU": 1, "GPU": 1}},
            [{"CPU": 8.0}],
            "GPU: 1 x 1 = 1 needed, it has 0",
        ),
    ],
)
def test_what_a_ray_cluster_lacks_is_told_with_the_arithmetic(wanted, nodes, words):
    from unisono.launch.places.ray import Wanted

    found = Wanted(**wanted)
    assert found.has_room(nodes) == (words is None)
    if words is not None:
        assert words in str(found.refusal(nodes, "has"))
    assert sum(bundle["CPU"] for bundle in found.bundles) == found.size * wanted["need"]["CPU"]


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
