"""A simulated accelerator: `import simdev` gives torch the device "sim" and the backend "simccl".

This module is `torch.sim`, with the names that `torch.cuda` has. `patience` and `counters` are for
tests: the first holds work back that is not waited for, the second counts what makes the host wait.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import _C

# -- devices -----------------------------------------------------------------------------------


def is_available() -> bool:
    return _C.device_count() > 0


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Any) -> None:
    _C.set_device(_index(device))


class device:
    """Make a device the current one for a block, as `torch.cuda.device` does."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _C.current_device()
        _C.set_device(self.index)

    def __exit__(self, *error: object) -> None:
        _C.set_device(self.before)


class device_of(device):
    """Make the device of a tensor the current one for a block."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "sim" else None)


def get_device_name(device: Any = None) -> str:
    return "Simulated accelerator"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (1, 0)


def init() -> None:
    _C.initialise()


_lazy_init = init


def is_initialized() -> bool:
    return _C.is_initialised() and not _C.is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return _C.is_in_bad_fork()


def _index(device: Any = None) -> int:
    if not isinstance(device, int):
        device = None if device is None else torch.device(device).index
    return _C.current_device() if device is None or device < 0 else device


# -- streams and events ------------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
    # No class: `torch.Event.elapsed_time` refuses subclasses.
    return torch.Event(
        device="sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
    )


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("sim", _index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    kind = int(torch._C._autograd.DeviceType.PrivateUse1.value)
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(torch.device("sim", _index(device)))


# -- random numbers, precision, memory ---------------------------------------------------------


def manual_seed(seed: int) -> None:
    _C.default_generator(-1).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _C.default_generator(index).manual_seed(int(seed))


def seed_all() -> None:
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    return _C.default_generator(-1).initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _C.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def empty_cache() -> None:
    torch.accelerator.memory.empty_cache()


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory.memory_reserved(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.memory.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.memory.get_memory_info(_index(device))


# -- for tests ---------------------------------------------------------------------------------


@contextlib.contextmanager
def patience(default_stream_s: float = 0.0, side_streams_s: float = 0.0) -> Iterator[None]:
    """Hold back tasks of default streams, or of all others, until waited for or this old."""
    before = _C.patience()
    _C.set_patience(default_stream_s, side_streams_s)
    try:
        yield
    finally:
        _C.set_patience(*before)


class counters:
    """Count what happens in a block: `with simdev.counters() as counted: ...`.

    Attributes:
        syncs: how often the host had to wait for the device, by cause: `item`, `copy to host`,
            `copy from host`, `stream.synchronize`, `event.synchronize`, `device.synchronize`,
            `work.wait(timeout)`, `barrier`, or the name of an operator whose shape depends on
            values or that has no meta kernel.
        bytes: bytes copied, by `to device, pageable`, `to device, pinned`, `to host, pageable`
            and `to host, pinned`.
    """

    def __init__(self) -> None:
        self._end: tuple[dict[str, int], dict[str, int]] | None = None
        self.reset()

    def __enter__(self) -> counters:
        self.reset()
        return self

    def __exit__(self, *error: object) -> None:
        self._end = _C.counters()

    def reset(self) -> None:
        """Count from now on."""
        self._start = _C.counters()

    @property
    def syncs(self) -> dict[str, int]:
        return self._difference(0)

    @property
    def bytes(self) -> dict[str, int]:
        return self._difference(1)

    def _difference(self, which: int) -> dict[str, int]:
        start, end = self._start[which], (self._end or _C.counters())[which]
        return {key: end[key] - start.get(key, 0) for key in end if end[key] != start.get(key, 0)}


_schedule = "0,0"


def follow_environment() -> None:
    """Take over SIM_PATIENCE_MS (of default streams, of side streams) if it has changed."""
    global _schedule
    before, _schedule = _schedule, os.environ.get("SIM_PATIENCE_MS", "0,0")
    if _schedule != before:
        default_ms, side_ms = map(float, _schedule.split(","))
        _C.set_patience(default_ms / 1e3, side_ms / 1e3)


# -- registration ------------------------------------------------------------------------------


def autoload() -> None:
    """Entry point of the group `torch.backends`: importing this package has done all."""


def _create_simccl(options: Any, _: Any) -> Any:
    follow_environment()  # ranks of a pool outlive tests, each of which has its schedule
    store = dist.PrefixStore("simccl", options.store)
    seconds = options.timeout.total_seconds()
    return _C.SimCCL(store, options.group_rank, options.group_size, seconds)


def _register() -> None:
    torch.utils.rename_privateuse1_backend("sim")
    module = sys.modules[__name__]
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    dist.Backend.register_backend("simccl", _create_simccl, extended_api=True, devices=["sim"])
    atexit.register(_C.finish)
    follow_environment()


_utils = types.SimpleNamespace(_get_device_index=lambda device, *_, **__: _index(device))
_register()
