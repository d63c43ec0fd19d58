"""Tests on ranks that have the simulated device; the process of pytest itself never loads it.

Marked tests (`@device_ranks(2)`) run on a pool of their own, whose warm server has loaded the
device but has not used it: a process that is forked after first use cannot use it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.accelerator import build

from unisono.testing.pool import RankPool

SCHEDULES = {
    "prompt": "0,0",
    "late_kernels": "50,0",
    "late_collectives": "0,50",
    "all_late": "50,50",
}
"""How long, in milliseconds, tasks of the default stream and of all others are held back."""
_PRELOAD = (
    "simdev",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "unisono.data_parallel",
)
_BUILD_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory; the first of them may have to wait for the compiler."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("accelerator")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_BUILD_S))


@pytest.fixture(scope="session")
def device_path() -> Path:
    """The directory of the built package; skip without a compiler."""
    if sys.platform != "linux" or build.compiler() is None:
        reason = "the simulated accelerator needs Linux and a C++ compiler (CXX)"
        if "accelerator" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail(f"UNISONO_REQUIRE wants accelerator, but {reason}")
        pytest.skip(reason)
    return build.ensure()


class DevicePool(RankPool):
    """Ranks that have the device, from a warm server that has its directory on the path."""

    def __init__(self, device_path: Path) -> None:
        super().__init__(preload=_PRELOAD)
        self._device_path = str(device_path)

    def warm_up(self):
        sys.path.insert(0, self._device_path)
        try:
            return super().warm_up()
        finally:
            sys.path.remove(self._device_path)


@pytest.fixture(scope="session")
def rank_pool(rank_pool: RankPool, device_path: Path) -> Iterator[RankPool]:
    """The pool of this directory, instead of that of all other tests."""
    with DevicePool(device_path) as pool:
        pool.by_value = rank_pool.by_value
        yield pool


@pytest.fixture
def device_environment(
    device_path: Path, forked_python: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Let every process that the test starts load the device with torch."""
    monkeypatch.syspath_prepend(device_path)
    monkeypatch.setenv("PYTHONPATH", str(device_path), prepend=os.pathsep)
    return device_path


@pytest.fixture
def device_python(device_environment: Path, forked_python: str) -> str:
    """`python` with the device: its processes are forks that have loaded torch."""
    return forked_python


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test under four schedules; a right program gives the same numbers under all.

    Ranks read the variable when they make their process group.
    """
    monkeypatch.setenv("SIM_PATIENCE_MS", SCHEDULES[request.param])
    return request.param
