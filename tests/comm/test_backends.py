"""The choice of a backend, and the words that go with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed import config

from unisono.comm import backends
from unisono.comm.backends import choose_backend
from unisono.errors import MissingExtra, PlatformError

ALL = {"gloo": "ok", "shm": "ok", "mpi": "ok"}


@pytest.mark.parametrize(
    ("device", "nodes", "expected"),
    [
        ("cpu", 1, "shm"),
        ("cpu", 3, "shm"),
        ("cuda", 2, "cpu:shm,cuda:nccl"),
        ("mps", 1, "shm"),
    ],
)
def test_nothing_asked_gives_the_fastest_that_works(device, nodes, expected):
    choice = choose_backend(None, device=device, nodes=nodes, available=ALL, environ={})
    assert choice.name == expected
    assert choice.reason


def test_the_environment_is_heard_unless_the_caller_says_otherwise():
    environ = {"UNISONO_BACKEND": "gloo"}
    choice = choose_backend(None, device="cpu", nodes=1, available=ALL, environ=environ)
    assert (choice.name, choice.reason) == ("gloo", "asked for by UNISONO_BACKEND=gloo")
    choice = choose_backend("mpi", device="cpu", nodes=1, available=ALL, environ=environ)
    assert choice.name == "mpi4py"


def test_a_backend_of_another_accelerator_is_chosen_by_device_and_taken_by_name():
    for asked, expected in ((None, "cpu:shm,xpu:xccl"), ("xccl", "xccl")):
        choice = choose_backend(asked, device="xpu", nodes=1, available=ALL, environ={})
        assert choice.name == expected


def test_without_shared_memory_gloo_is_taken_and_the_reason_told():
    available = {"shm": "/dev/shm is not writable"}
    choice = choose_backend(None, device="cpu", nodes=1, available=available, environ={})
    assert choice.name == "gloo"
    assert "/dev/shm is not writable" in choice.reason


def test_a_misspelt_or_missing_backend_is_refused():
    with pytest.raises(PlatformError, match="HINT: backend='gloo'"):
        choose_backend("glooo", device="cpu", nodes=1, available=ALL, environ={})
    with pytest.raises(MissingExtra, match=r'pip install "unisono\[mpi\]"'):
        choose_backend("mpi", device="cpu", nodes=1, available={"mpi": "no mpi4py"}, environ={})
    with pytest.raises(PlatformError, match="no memory"):
        choose_backend("shm", device="cpu", nodes=1, available={"shm": "no memory"}, environ={})


def test_torchcomms_that_makes_all_groups_leaves_none_to_us(tmp_path, monkeypatch):
    (tmp_path / "torchcomms").mkdir()
    (tmp_path / "torchcomms" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with config.patch(use_torchcomms=True):
        found = backends.available()
    with pytest.raises(PlatformError, match="TORCH_DISTRIBUTED_USE_TORCHCOMMS=1"):
        choose_backend("shm", device="cpu", nodes=1, available=found, environ={})
    choice = choose_backend(None, device="cpu", nodes=1, available=found, environ={})
    assert choice.name == "gloo"


NEVER_IMPORTS_US = """
import sys
import torch
import torch.distributed as dist

loaded = {name for name in sys.modules if name.partition(".")[0] == "unisono"}
assert loaded == {"unisono", "unisono.autoload"}, loaded
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("shm", store=store, rank=rank, world_size=2)
x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 3, x
dist.destroy_process_group()
"""


@pytest.mark.skipif(backends.available()["shm"] != "ok", reason=backends.available()["shm"])
def test_torch_knows_our_backends_in_programs_that_never_import_us(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", NEVER_IMPORTS_US, str(rank), str(tmp_path / "store")]
        )
        for rank in range(2)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]


def test_torch_can_be_told_not_to_load_us():
    code = (
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "import sys, torch; assert 'unisono' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
