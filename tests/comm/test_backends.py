"""The choice of a backend, and the words that go with it."""

from __future__ import annotations

import pytest

from unisono.comm.backends import choose_backend
from unisono.errors import MissingExtra, PlatformError

ALL = {"gloo": "ok", "shm": "ok", "mpi": "ok"}


@pytest.mark.parametrize(
    ("device", "nodes", "expected"),
    [
        ("cpu", 1, "shm"),
        ("cpu", 3, "shm"),
        ("cuda", 2, "cpu:gloo,cuda:nccl"),
        ("mps", 1, "gloo"),
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
