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


def choose(requested=None, device="cpu", nodes=1, available=ALL, **environ):
    return choose_backend(
        requested, device=device, nodes=nodes, available=available, environ=environ
    )


def test_the_fastest_that_works_is_chosen_unless_one_is_named():
    assert choose() == choose(nodes=3) == choose(device="mps") == "shm"
    assert choose(available={"shm": "/dev/shm is not writable"}) == "gloo"
    assert choose(device="cuda", nodes=2) == "cpu:shm,cuda:nccl"
    assert choose(device="xpu") == "cpu:shm,xpu:xccl"
    assert choose("xccl", device="xpu") == "xccl"
    assert choose(UNISONO_BACKEND="gloo") == "gloo"
    assert choose("mpi", UNISONO_BACKEND="gloo") == "mpi4py"


def test_a_misspelt_or_missing_backend_is_refused():
    with pytest.raises(PlatformError, match="HINT: backend='gloo'"):
        choose("glooo")
    with pytest.raises(MissingExtra, match=r'pip install "unisono\[mpi\]"'):
        choose("mpi", available={"mpi": "no mpi4py"})
    with pytest.raises(PlatformError, match="no memory"):
        choose("shm", available={"shm": "no memory"})


def test_torchcomms_that_makes_all_groups_leaves_none_to_us(tmp_path, monkeypatch):
    (tmp_path / "torchcomms").mkdir()
    (tmp_path / "torchcomms" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with config.patch(use_torchcomms=True):
        found = backends.available()
    with pytest.raises(PlatformError, match="TORCH_DISTRIBUTED_USE_TORCHCOMMS=1"):
        choose("shm", available=found)
    assert choose(available=found) == "gloo"


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
