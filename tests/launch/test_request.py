"""Bad requests: an error that teaches, before anything is started."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest

import unisono
from unisono.errors import PlatformError
from unisono.launch import dry_run


def train(cfg, lr=0.1):
    return cfg, lr


async def coroutine():
    return 1


def generator(n):
    yield n


def needs_ranks(ranks):
    return ranks


OPTIONS = inspect.signature(unisono.submit).parameters.keys() - {"fn", "args", "kwargs"}


def knows_all(
    on=1,
    ranks=2,
    nodes=3,
    hosts=4,
    timeout_s=5,
    max_restarts=6,
    check=0,
    logs=7,
    seed=8,
    record=9,
    elastic=0,
):
    pass


@pytest.fixture(autouse=True)
def nothing_may_start(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def refuse(*_args, **_kwargs):
        raise AssertionError("a rank was started")

    monkeypatch.setattr("unisono.launch.places.local.spawn_rank", refuse)
    monkeypatch.setattr("unisono.launch.pool.client.WarmServer", refuse)
    launching = sys.modules["unisono.launch.api"]
    monkeypatch.setattr(launching, "get_server", lambda: None)  # that is no rank yet


def said_of(call, *args, **given):
    """Return what a call is refused with."""
    with pytest.raises(PlatformError) as caught:
        call(*args, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on": "cqu"}, ["on='cqu'", "'cpu', 'gpu'", "did you mean"]),
        ({"on": "gpu"}, ["0 GPUs visible", "1 rank > 0 GPUs", "on='cpu', ranks=1"]),
        ({"on": unisono.Device.MPS}, ["no Apple GPU", "on='cpu'"]),
        ({"ranks": 0}, ["ranks=0", "not an integer >= 1"]),
        ({"ranks": 2.0}, ["ranks=2.0", "float, not an integer"]),
        ({"ranks": True}, ["ranks=True"]),
        ({"ranks": 10**20}, ["open files", f"{10**20} ranks > "]),
        ({"on": "inline", "ranks": 2}, ["2 ranks > 1 process"]),
        ({"nodes": 2}, ["nodes=2", "torchrun"]),
        ({"timeout_s": 0}, ["timeout_s=0"]),
        ({"timeout_s": float("nan")}, ["timeout_s=nan"]),
        ({"max_restarts": -1}, ["max_restarts=-1"]),
        ({"momentum": 2}, ["unexpected keyword", "momentum"]),
        ({"seed": -1}, ["seed=-1", "not an integer >= 0"]),
        ({"on": "inline", "watch": True}, ["busy with it", 'on="cpu"']),
        ({"logs": 3}, ["logs=3"]),
        ({"logs": unisono.Logs(console="al")}, ["console='al'"]),
        ({"logs": unisono.Logs(console=[0, 2])}, ["Logs.console=2", "from 0 to 1"]),
    ],
)
def test_a_senseless_request_says_what_is_wrong(given, words):
    text = said_of(unisono.run, train, 1, **given)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("function", "args", "given", "words"),
    [
        (train, (), {}, ["train(cfg, lr=0.1)", "missing a required argument"]),
        (needs_ranks, (), {"ranks": 2}, ["functools.partial(needs_ranks, ranks="]),
        (knows_all, (), {"record": "x"}, ["run takes record itself"]),
        (train(1), (), {}, ["cannot be called"]),
        (coroutine, (), {}, ["coroutine", "asyncio.run"]),
        (generator, (3,), {}, ["generator function", "list(generator(...))"]),
        (functools.partial(generator, 3), (), {}, ["generator function"]),
    ],
)
def test_a_function_that_cannot_be_called_so_says_why(function, args, given, words):
    text = said_of(unisono.run, function, *args, **given)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("call", [unisono.run, unisono.submit, dry_run])
def test_a_keyword_that_both_know_belongs_to_neither(call):
    for name in OPTIONS:
        text = said_of(call, knows_all, **{name: 1})
        assert f"run takes {name} itself" in text
        assert f"functools.partial(knows_all, {name}=...)" in text


def test_a_keyword_that_looks_like_an_option_of_run_is_asked_about():
    def takes_any(**keywords):
        return sorted(keywords)

    with pytest.warns(RuntimeWarning, match=r"did you mean ranks=4, timeout_s=5\?") as caught:
        results = unisono.run(takes_any, on="inline", rank=4, timeout=5, lr=1)
    assert (list(results), len(caught)) == ([["lr", "rank", "timeout"]], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unisono.run(takes_any, on="inline", n=1, one=2, logger=3, epochs=4)
    assert "did you mean ranks=4?" in said_of(unisono.run, train, 1, rank=4)


def test_what_cannot_be_pickled_is_named_by_its_path():
    cfg = SimpleNamespace(model={"lock": threading.Lock()})
    with pytest.raises(PlatformError, match=r"kwargs\['cfg'\]\.model\['lock'\] is a lock"):
        unisono.run(train, cfg=cfg)
    lock = threading.Lock()
    with pytest.raises(PlatformError, match="lock is a lock that cannot be pickled"):
        unisono.run(lambda: lock)


def test_a_deadline_without_end_is_none():
    assert list(unisono.run(train, 1, on="inline", timeout_s=float("inf"))) == [(1, 0.1)]


def test_a_partial_may_fill_a_reserved_keyword():
    results = unisono.run(functools.partial(needs_ranks, ranks=5), on="inline", ranks=1)
    assert list(results) == [5]
    assert list(unisono.run(needs_ranks, 6, on="inline", ranks=1)) == [6]


def test_a_log_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="cannot be made"):
        unisono.run(train, 1, logs=tmp_path / "file")
