"""The small parts of the launcher: frames, stacks, cores, pickles, results."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.cores import cgroup_quota, threads_per_rank, usable_cores
from unisono.errors import PlatformError
from unisono.launch.in_process import pack, unpack
from unisono.launch.logs import Logs
from unisono.launch.pool import payload
from unisono.launch.pool.protocol import Hello, MessageReader, Ready, Returned, send_message
from unisono.launch.pool.stacks import outside_collectives, user_line, user_threads
from unisono.launch.results import Elsewhere, Results

DUMP = """\
Thread 0x00007f1200000640 (most recent call first):
  File "/env/unisono/launch/pool/protocol.py", line 60 in _read_orders
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f1300000740 (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 5000 in barrier
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 30 in train
  File "/env/unisono/launch/pool/rank.py", line 86 in _live
  File "/env/unisono/launch/pool/rank.py", line 61 in main
  File "<string>", line 1 in <module>
"""


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 40))
def test_messages_survive_any_cut_of_the_pipe(values, step):
    sent = [Hello(host="a"), *(Returned(value=v, wall_s=0.5) for v in values), Ready()]
    read_fd, write_fd = os.pipe()
    try:
        for message in sent:
            send_message(write_fd, message)
        data = os.read(read_fd, 1 << 16)
    finally:
        os.close(read_fd)
        os.close(write_fd)
    reader = MessageReader()
    got = [m for i in range(0, len(data), step) for m in reader.feed(data[i : i + step])]
    assert got == sent


def test_stacks_show_the_users_code_and_not_ours():
    text = user_threads(DUMP)
    assert "_read_orders" not in text
    assert "rank.py" not in text
    assert text.splitlines()[-1] == '  File "/home/me/train.py", line 30 in train'
    assert outside_collectives({0: text, 1: 'File "/home/me/train.py", line 3 in f'}) == [1]
    bottom = [line for line in DUMP.splitlines() if "barrier" not in line and "train" not in line]
    text = user_threads("\n".join(bottom))  # run(time.sleep, 60)
    assert text.splitlines()[1:] == ["  in a function that is not written in Python"]


def test_the_innermost_user_line_skips_installed_packages():
    import sysconfig

    site = sysconfig.get_path("purelib")
    assert user_line(DUMP.replace("/env/", f"{site}/")) == "train.py:12 in step"
    assert user_line("") == "no Python code"


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


def test_a_function_of_a_module_that_ranks_cannot_import_travels_by_value(tmp_path, monkeypatch):
    file = tmp_path / "hidden_module.py"
    file.write_text("STEP = 1\ndef shift(x):\n    return x + STEP\n")
    spec = importlib.util.spec_from_file_location("hidden_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hidden_module", module)
    spec.loader.exec_module(module)
    by_value = payload.dump_call(module.shift, (2,), {})
    monkeypatch.syspath_prepend(tmp_path)
    by_reference = payload.dump_call(module.shift, (2,), {})
    assert by_reference.nbytes() < by_value.nbytes() / 2
    monkeypatch.delitem(sys.modules, "hidden_module")
    monkeypatch.undo()
    fn, args, _ = by_value.load()
    assert fn(*args) == 3
    with pytest.raises(ModuleNotFoundError):
        by_reference.load()


def test_a_function_may_use_modules_with_a_class_of_their_own():
    def fn():
        torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
        return torch.backends.cudnn

    loaded, _, _ = payload.dump_call(fn, (), {}).load()
    assert loaded() is torch.backends.cudnn


def test_exceptions_travel_only_if_they_come_back():
    class Needs(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    assert payload.dump_exception(Needs(1, 2)) is None
    error = payload.load_exception(payload.dump_exception(ValueError("x", 3)))
    assert isinstance(error, ValueError)
    assert error.args == ("x", 3)
    assert payload.load_exception(b"rubbish") is None


def test_plain_data_is_shared_in_a_world_and_other_objects_stay():
    import numpy as np
    import torch

    value = {"a": [1, 2.5, "x"], "t": torch.arange(3), "n": np.float32(2), "m": np.ones((2, 2))}
    copy = unpack(pack(value), 1)
    assert copy["a"] == value["a"]
    assert torch.equal(copy["t"], value["t"])
    assert np.array_equal(copy["m"], value["m"])
    assert unpack(pack(Results), 1) == Elsewhere(1, "ABCMeta")
    assert unpack(pack(lambda: 1), 2) == Elsewhere(2, "function")


def test_results_are_a_sequence_with_facts():
    results = Results([3, 4, Elsewhere(2, "Model")], hosts=["a"] * 3, platform="cpu", logs={1: "x"})
    assert (results[0], results[-2], results.rank(1), results[:2]) == (3, 4, 4, (3, 4))
    assert (results.log(1), results.log(0)) == ("x", "")
    with pytest.raises(PlatformError, match="stayed on rank 2"):
        results[2]
    with pytest.raises(IndexError, match="rank 3 of a world of 3"):
        results.rank(3)
    assert repr(results) == "Results([3, 4, <Model on rank 2>], platform='cpu', wall_s=0.000)"


def test_the_console_shows_all_ranks_of_small_worlds():
    assert Logs().shown(8) == frozenset(range(8))
    assert Logs().shown(9) == {0}
    assert Logs(console="all").shown(9) == frozenset(range(9))
    assert Logs(console="none").shown(2) == frozenset()
    assert Logs(console=[1]).shown(2) == {1}


def test_a_packed_value_comes_back():
    assert payload.dump_value({"a": (1, 2)}).load() == {"a": (1, 2)}
