"""Tests of other rooms, run once more with tensors of the device: the same tests, not copies.

Each runs on two ranks with everything held back. What makes a tensor without naming a device makes
it there, and what draws from a generator of the CPU moves the numbers there.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from tests.accelerator.conftest import SCHEDULES
from tests.accelerator.ranks import device_ranks, on_device, own_device
from torch.overrides import TorchFunctionMode

TOO_SLOW = (
    "test_conv_of_the_windows_has_the_values_and_gradients_of_torch",
    "test_wrapped_mirrored_and_repeated_points_go_home_in_the_adjoint",
)
ROOMS: dict[str, tuple[str, ...]] = {
    "operators.test_halo": (),
    "operators.test_repartition": (),
    "operators.test_table": (),
    "data_parallel.gradients.test_parity": (
        "test_a_torch_optimizer_works_without_any_wrapper",
        "test_batch_norm_buffers_follow_rank_0",
        "test_complex_channels_last_and_half_parameters_are_averaged",
        "test_gradients_are_views_of_the_buckets",
    ),
    "data_parallel.gradients.test_accumulation_and_join": (
        "test_a_rank_that_runs_out_while_it_accumulates_loses_nothing",
        "test_join_nests_with_no_sync_and_samples",
    ),
    "data_parallel.gradients.test_non_blocking": (
        "test_clipping_is_exact_before_the_step",
        "test_layers_whose_forward_is_not_called_are_updated_before_they_are_read",
        "test_the_state_of_the_optimizer_inside_is_complete_too",
    ),
    "nn.test_attention": ("test_the_ring_keeps_and_sends_no_more_than_blocks",),
    "nn.test_windows": ("test_integers_are_copied_but_not_weighed",),
    "nn.split_tensors.test_split": (
        "test_a_second_input_may_be_split_too",
        "test_a_step_of_a_split_network_is_that_of_one_process",
        "test_labels_may_be_split_too_and_classes_weighted",
        "test_second_derivatives_are_those_of_one_process",
        "test_states_are_those_of_the_plain_module",
    ),
    "graph_parallel.test_plan": (),
    "graph_parallel.test_regions": (
        "test_both_conventions_have_the_derivatives_of_one_process",
        "test_each_region_is_the_adjoint_of_its_backward",
        "test_inputs_and_incoming_gradients_stay_and_any_layout_is_right",
        "test_two_derivatives_of_every_region_equal_finite_differences",
    ),
}
"""Modules of tests and the tests of each that run here; none listed: all that need no fixture."""

_DRAWS = (torch.rand, torch.randn, torch.randint, torch.randperm)


class DrawnOnTheCpu(TorchFunctionMode):
    """Let numbers be drawn from generators of the CPU, and moved to a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draw = kwargs.get("generator")
        if draw is None or draw.device.type != "cpu" or func not in _DRAWS or "device" in kwargs:
            return func(*args, **kwargs)
        needs_grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs, device="cpu").to(self._device).requires_grad_(needs_grad)


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


def module_of(room: str) -> Any:
    """Return a module of tests; those beside it are importable, as pytest has it."""
    folder = str(Path(__file__).parents[1].joinpath(*room.split(".")[:-1]))
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"tests.{room}")


def names_in(room: str) -> list[str]:
    """Return the names of the tests of a module that run here."""
    tests = {name: test for name, test in vars(module_of(room)).items() if name.startswith("test_")}
    unknown = [name for name in ROOMS[room] if not is_for_ranks(tests.get(name))]
    assert not unknown, f"no tests of tests/{room} on two ranks without fixtures: {unknown}"
    every = [name for name in tests if is_for_ranks(tests[name]) and name not in TOO_SLOW]
    return list(ROOMS[room]) or every


CASES = [(room, name) for room in ROOMS for name in names_in(room)]


@pytest.fixture(autouse=True)
def _everything_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIM_PATIENCE_MS", SCHEDULES["all_late"])


@pytest.mark.parametrize(("room", "name"), CASES)
@device_ranks(2, timeout=120)
def test_a_test_of_the_cpu_holds_on_the_device(room, name, monkeypatch):
    test = getattr(module_of(room), name)
    monkeypatch.setattr(f"tests.{room}.world", on_device, raising=False)
    if hasattr(test, "hypothesis"):
        test = hypothesis.seed(0)(test)  # ranks must try the same examples
    with torch.device(own_device()) as device, DrawnOnTheCpu(device):
        for arguments in parametrised(test):
            test(**arguments)
