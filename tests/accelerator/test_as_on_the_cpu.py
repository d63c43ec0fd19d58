"""Tests of other rooms, run once more with tensors of the device: the same tests, not copies.

Each runs on two ranks with everything held back. Whatever makes a tensor without naming a device
makes it there. A test that needs further fixtures, or a generator of the CPU, is left out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from tests.accelerator.conftest import SCHEDULES
from tests.accelerator.ranks import device_ranks, on_device, own_device

ROOMS: dict[str, tuple[str, ...]] = {
    "operators.test_halo": ("test_conv_of_the_windows_has_the_values_and_gradients_of_torch",),
    "operators.test_repartition": (),
    "operators.test_table": (),
}
"""Modules of tests, and their tests that are left out: they take minutes on this device."""


def parametrised(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a test, for each of its parameters."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    axes: list[list[dict[str, Any]]] = []
    for mark in marks:
        names, values = mark.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        rows = [getattr(value, "values", value) if len(names) == 1 else value for value in values]
        rows = [row if len(names) > 1 or isinstance(row, tuple) else (row,) for row in rows]
        axes.append([dict(zip(names, row, strict=False)) for row in rows])
    for chosen in itertools.product(*axes):
        yield {name: value for part in chosen for name, value in part.items()}


def is_for_ranks(test: object) -> bool:
    """Whether a name of a module is a test that runs on two ranks and needs no fixture."""
    marks = getattr(test, "pytestmark", [])
    ranks = [mark.args[0] for mark in marks if mark.name == "ranks"]
    if not inspect.isfunction(test) or not ranks:
        return False
    has_two = ranks[0] == 2 or (not isinstance(ranks[0], int) and 2 in ranks[0])
    return has_two and set(inspect.signature(test).parameters) == set(next(parametrised(test)))


@functools.cache
def cases_of(room: str) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return the tests of a module with their arguments, by name and number."""
    module = importlib.import_module(f"tests.{room}")
    chosen = {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_") and name not in ROOMS[room] and is_for_ranks(test)
    }
    return {
        f"{name}-{number}": (test, arguments)
        for name, test in chosen.items()
        for number, arguments in enumerate(parametrised(test))
    }


CASES = [(room, name) for room in ROOMS for name in cases_of(room)]


@pytest.fixture(autouse=True)
def _everything_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIM_PATIENCE_MS", SCHEDULES["all_late"])


@pytest.mark.parametrize(("room", "name"), CASES)
@device_ranks(2, timeout=60)
def test_a_test_of_the_cpu_holds_on_the_device(room, name, monkeypatch):
    test, arguments = cases_of(room)[name]
    monkeypatch.setattr(f"tests.{room}.world", on_device, raising=False)
    if hasattr(test, "hypothesis"):
        test = hypothesis.seed(0)(test)  # ranks must try the same examples
    with torch.device(own_device()):
        test(**arguments)
