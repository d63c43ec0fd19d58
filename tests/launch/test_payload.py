"""What travels between processes: calls, values, exceptions, messages; large parts beside them."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import sys
import types
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import unisono
from unisono.errors import RankFailed
from unisono.launch.pool import client, payload
from unisono.launch.pool.payload import APART_BYTES, Parcel
from unisono.launch.pool.protocol import send_message, take_messages

LARGE = 1 << 18
"""So many numbers of four bytes do not fit into a pipe."""
QUIET = unisono.Logs(console="none")


def _open_files() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{fd.name} {fd.readlink()}")
        except OSError:
            continue
    return {name for name in found if "memfd:unisono" in name}


@pytest.mark.parametrize("count", [3, APART_BYTES // 4, 2 * LARGE])
def test_tensors_and_arrays_come_back_as_they_were(count):
    base = torch.arange(float(count))
    value = {
        "tensor": base,
        "view": base[1:],
        "strided": torch.arange(2.0 * count).view(2, count).t(),
        "parameter": nn.Parameter(torch.ones(count)),
        "half": torch.ones(count, dtype=torch.bfloat16),
        "complex": torch.ones(count, dtype=torch.complex64).conj(),
        "array": np.arange(count),
        "fortran": np.asfortranarray(np.ones((count, 2))),
        "holes": np.arange(2 * count)[::2],
        "bytes": b"x" * count,
        "bytearray": bytearray(b"y" * count),
        "objects": [{"a": None}, lambda x: x + count],
    }
    packed = Parcel.of(value)
    for again in (packed.load(), packed.load()):
        for name in ("tensor", "view", "strided", "parameter", "half", "complex"):
            assert torch.equal(again[name], value[name]), name
            assert again[name].stride() == value[name].stride(), name
            assert type(again[name]) is type(value[name])
        assert again["parameter"].requires_grad
        for name in ("array", "fortran", "holes"):
            assert np.array_equal(again[name], value[name])
            assert again[name].flags.writeable
        assert again["fortran"].flags.f_contiguous
        assert (again["bytes"], again["bytearray"]) == (value["bytes"], value["bytearray"])
        assert again["objects"][1](1) == count + 1
        again["tensor"].zero_()  # memory of its own: the next one is as it was
        again["tensor"].resize_(count + 1)
        again["array"][:] = 0


def test_tensors_that_share_memory_still_do():
    base = torch.arange(float(LARGE))
    again = Parcel.of([base, base[2:], base.view(2, -1)]).load()
    base.resize_(LARGE + 1)  # packing leaves it as it was
    again[0].fill_(7)
    assert bool((again[1] == 7).all())
    assert bool((again[2] == 7).all())


def test_a_parcel_is_a_snapshot_and_its_file_goes_with_it():
    before = _open_files()
    value = torch.ones(LARGE)
    packed = Parcel.of(value)
    value.zero_()
    assert len(_open_files() - before) == 1
    assert bool((packed.load() == 1).all())
    del packed
    assert _open_files() == before


def test_a_parcel_survives_a_file_of_another_host(tmp_path):
    def opened(path):
        return Parcel(os.open(path, os.O_RDONLY), is_owner=True)

    for value in ({"a": 1}, {"a": torch.arange(LARGE), "b": np.ones(LARGE)}):
        Parcel.of(value).save(tmp_path / "result")
        assert (tmp_path / "result").stat().st_mode & 0o777 == 0o600
        again = opened(tmp_path / "result").load()
        assert str(again) == str(value)
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    whole = (tmp_path / "result").read_bytes()
    (tmp_path / "result").write_bytes(whole[:-1])
    with pytest.raises(EOFError, match="1 bytes are missing"):
        opened(tmp_path / "result").load()


def _weigh(x, y):
    return torch.full((LARGE,), float(x.sum()) + float(y.sum()) + unisono.world().rank), y


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_arguments_and_results_travel_beside_the_pipe(method, monkeypatch):
    received = []
    read = client.read_available
    monkeypatch.setattr(
        client, "read_available", lambda fd: received.append(read(fd)) or received[-1]
    )
    before = _open_files()
    place = unisono.Platform(device="cpu", ranks=2, spawn_method=method)
    results = unisono.run(_weigh, torch.ones(2 * LARGE), np.ones(LARGE), on=place)
    for rank, (weights, y) in enumerate(results):
        assert float(weights[-1]) == 3 * LARGE + rank
        assert np.array_equal(y, np.ones(LARGE))
    assert sum(len(data or b"") for data in received) < 4 * LARGE
    assert _open_files() == before


def _die_when_packed():
    class Deadly:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)
            return str, ("never",)

    return torch.ones(LARGE), (Deadly() if unisono.world().rank else None)


def _die_after_packing():
    import unisono.launch.pool.rank as rank

    if unisono.world().rank:
        rank.tell = lambda *_, **_news: os.kill(os.getpid(), signal.SIGKILL)
    return torch.ones(LARGE)


@pytest.mark.parametrize("fn", [_die_when_packed, _die_after_packing])
def test_a_rank_that_dies_while_it_returns_leaves_nothing(fn):
    before = _open_files()
    with pytest.raises(RankFailed, match="rank 1 of 2"):
        unisono.run(fn, on="cpu", ranks=2)
    assert _open_files() == before


def test_what_is_submitted_may_be_changed_at_once():
    x = torch.ones(LARGE)
    job = unisono.submit(_weigh, x, np.zeros(1), on="cpu", ranks=2)
    x.zero_()
    assert [float(weights[0]) for weights, _ in job.result()] == [LARGE, LARGE + 1]


@given(st.lists(st.text(max_size=50), max_size=5), st.integers(1, 40))
def test_messages_survive_any_cut_of_the_pipe(values, step):
    sent = [{"state": "ready"}, *({"warning": value} for value in values), {"finishing_s": 0.5}]
    read_fd, write_fd = os.pipe()
    try:
        for message in sent:
            send_message(write_fd, message)
        data = os.read(read_fd, 1 << 16)
    finally:
        os.close(read_fd)
        os.close(write_fd)
    received, got = bytearray(), []
    for begin in range(0, len(data), step):
        received += data[begin : begin + step]
        got += take_messages(received)
    assert got == sent
    assert not received


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
    assert by_reference.end < by_value.end / 2
    monkeypatch.delitem(sys.modules, "hidden_module")
    monkeypatch.undo()
    fn, args, _ = by_value.load()
    assert fn(*args) == 3
    with pytest.raises(ModuleNotFoundError):
        by_reference.load()


def test_a_module_is_taken_by_value_until_the_last_thread_that_wants_it_is_done():
    module = types.ModuleType("of_no_file")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "of_no_file", module)
        first, second = payload.taken_by_value([module]), payload.taken_by_value([module])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert "of_no_file" in cloudpickle.list_registry_pickle_by_value()
        second.__exit__(None, None, None)
        assert "of_no_file" not in cloudpickle.list_registry_pickle_by_value()


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


def test_a_packed_value_comes_back_and_parameters_of_a_gpu_stay_parameters():
    assert payload.dump_value({"a": (1, 2)}).load() == {"a": (1, 2)}
    for weight in (nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)):
        twin = payload.on_cpu(weight)
        assert type(twin) is nn.Parameter
        assert (twin.is_leaf, twin.requires_grad) == (True, weight.requires_grad)
    assert payload.on_cpu(2 * torch.ones(2, requires_grad=True)).requires_grad


def test_a_large_payload_is_worth_a_warning(monkeypatch):
    monkeypatch.setattr(payload, "LARGE_BYTES", 1 << 20)
    table = np.zeros(1 << 18)
    with pytest.warns(RuntimeWarning, match="sent 2 MB: load large data inside") as caught:
        unisono.run(lambda _x, table: table.sum(), 1, table=table, on="cpu", ranks=1, logs=QUIET)
    assert [warning.filename for warning in caught] == [__file__]


class Counter:
    def __init__(self, start):
        self.start = start

    def count(self, by=1):
        return self.start + by

    def __call__(self):
        return self.start


def test_anything_that_can_be_called_runs_also_a_cell_edited_between_runs():
    def run(function, *args):
        return unisono.run(function, *args, on="cpu", ranks=1, logs=QUIET)[0]

    cell = {"__name__": "__main__", "STEP": 2}  # where a notebook, or `python -`, keeps its names
    for step in (1, 3):
        exec(f"def shift(x):\n    return x * STEP + {step}", cell)
        assert run(cell["shift"], 10) == 20 + step
    calls = Counter(3).count, Counter(4), functools.partial(Counter(5).count, by=2), lambda: 8
    assert [run(call) for call in calls] == [4, 4, 7, 8]
    assert run(Counter, 9).start == 9
