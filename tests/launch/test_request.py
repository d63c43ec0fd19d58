"""Bad requests: an error that teaches, before anything is started."""

from __future__ import annotations

import functools
import sys
import threading
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


def knows_all(on=1, ranks=2, nodes=3, timeout_s=4, max_restarts=5, logs=6, seed=7, record=8):
    return on, ranks, nodes, timeout_s, max_restarts, logs, seed, record


@pytest.fixture(autouse=True)
def nothing_may_start(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def refuse(*_args, **_kwargs):
        raise AssertionError("a rank was started")

    monkeypatch.setattr("unisono.launch.places.local.spawn_rank", refuse)
    monkeypatch.setattr("unisono.launch.pool.client.WarmServer", refuse)
    launching = sys.modules["unisono.launch.api"]
    monkeypatch.setattr(launching, "get_server", lambda: None)  # that is no rank yet


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: unisono.run(train, 1, on="cqu"), ["on='cqu'", "'cpu', 'gpu'", "did you mean"]),
        (lambda: unisono.run(train, 1, on="gpu"), ["0 GPUs visible", 'on="cpu", ranks=1']),
        (lambda: unisono.run(train, 1, on="cuda", ranks=3), ["3 ranks > 0 GPUs", "CUDA_VISIBLE"]),
        (lambda: unisono.run(train, 1, on=unisono.Device.MPS), ["no Apple GPU", 'device="cpu"']),
        (lambda: unisono.run(train, 1, ranks=0), ["ranks=0", "not an integer >= 1"]),
        (lambda: unisono.run(train, 1, ranks=-2), ["ranks=-2"]),
        (lambda: unisono.run(train, 1, ranks=2.0), ["ranks=2.0", "float, not an integer"]),
        (lambda: unisono.run(train, 1, ranks=True), ["ranks=True"]),
        (lambda: unisono.run(train, 1, on="inline", ranks=2), ["2 ranks > 1 process"]),
        (lambda: unisono.run(train, 1, nodes=2), ["nodes=2", "torchrun"]),
        (lambda: unisono.run(train, 1, timeout_s=0), ["timeout_s=0"]),
        (
            lambda: unisono.run(train, 1, timeout_s="1h"),
            ["timeout_s='1h'", "not a number"],
        ),
        (lambda: unisono.run(train, 1, timeout_s=float("nan")), ["timeout_s=nan"]),
        (lambda: unisono.run(train, 1, max_restarts=-1), ["max_restarts=-1"]),
        (
            lambda: unisono.run(train, 1, max_restarts=1.5),
            ["max_restarts=1.5", "integer"],
        ),
        (lambda: unisono.run(train), ["train(cfg, lr=0.1)", "missing a required argument"]),
        (lambda: unisono.run(train, 1, momentum=2), ["unexpected keyword", "momentum"]),
        (lambda: unisono.run(needs_ranks, ranks=2), ["functools.partial(needs_ranks, ranks="]),
        *(
            (
                functools.partial(call, knows_all, **{name: value}),
                [f"run takes {name} itself", f"functools.partial(knows_all, {name}=...)"],
            )
            for call in (unisono.run, unisono.submit, dry_run)
            for name, value in (
                *(("on", "cpu"), ("ranks", 2), ("nodes", 1), ("timeout_s", 5), ("logs", "here")),
                *(("max_restarts", 1), ("seed", 0)),
            )
        ),
        (lambda: unisono.run(knows_all, record="x"), ["run takes record itself"]),
        (lambda: unisono.run(train, 1, seed=-1), ["seed=-1", "not an integer >= 0"]),
        (lambda: unisono.run(train, 1, seed=1.5), ["seed=1.5"]),
        (lambda: unisono.run(train, 1, on="inline", watch=True), ["busy with it", 'on="cpu"']),
        (lambda: unisono.run(train(1)), ["cannot be called"]),
        (lambda: unisono.run(coroutine), ["coroutine", "asyncio.run"]),
        (lambda: unisono.run(generator, 3), ["generator function", "list(generator(...))"]),
        (lambda: unisono.run(functools.partial(generator, 3)), ["generator function"]),
        (lambda: unisono.run(train, 1, logs=3), ["logs=3"]),
        (lambda: unisono.run(train, 1, logs=unisono.Logs(console="al")), ["console='al'"]),
        (lambda: unisono.run(train, 1, logs=unisono.Logs(console=[0, 2])), ["2 is not a rank"]),
    ],
)
def test_a_senseless_request_says_what_is_wrong(call, words):
    with pytest.raises(PlatformError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


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
