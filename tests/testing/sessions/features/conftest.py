"""Fixtures of plain data, of own classes, and one that cannot travel."""

from __future__ import annotations

import os
import threading

import pytest
from support_module import Pair


class Plain:
    def __init__(self, value):
        self.value = value


def check_positive(x):
    assert x > 0, "from conftest"


@pytest.fixture
def numbers():
    return {"a": 1, "b": [2, 3]}


@pytest.fixture
def plain():
    return Plain(7)


@pytest.fixture
def pair():
    return Pair(1, 2)


@pytest.fixture
def checker():
    return check_positive


@pytest.fixture
def lock():
    return threading.Lock()


@pytest.fixture
def variable(monkeypatch):
    monkeypatch.setenv("FROM_A_FIXTURE", "yes")
    return os.environ["FROM_A_FIXTURE"]


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
