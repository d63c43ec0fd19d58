"""The accelerator of this machine: its devices, their generators, names and memory.

The only file that knows how kinds of accelerators differ. Others ask here or go by the device of
a tensor, so that cuda, xpu, hpu, mps and devices of plugins are one thing to them. torch is loaded
when a question needs it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import PlatformError

if TYPE_CHECKING:
    import torch

KINDS = ("cuda", "xpu", "mps", "mtia", "hpu")
"""Kinds that torch knows by name; one more comes with a plugin."""
BACKENDS = ("nccl", "xccl", "hccl")
"""Their process group backends that torch or a plugin of a maker has."""
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/dri/renderD128", "/dev/accel")
"""One of them is there wherever torch could see an accelerator on Linux."""
_HIDDEN_BY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def kind() -> str | None:
    """Return the kind of the accelerator that ranks of this process could use, such as `"cuda"`.

    None without one. Where no driver is installed torch is not imported for the answer.
    """
    if "torch" not in sys.modules and not _may_exist():
        return None
    import torch

    default = torch.accelerator.current_accelerator()
    return default.type if default is not None and count(default.type) else None


def is_kind(word: str) -> bool:
    """Whether `word` names a kind of accelerator, on this machine or on another one."""
    if word in KINDS:
        return True
    if word in ("cpu", "meta"):
        return False
    import torch

    default = torch.accelerator.current_accelerator()
    return default is not None and default.type == word


def refuse_number(word: str) -> None:
    """Raise `PlatformError` if `word` names one device by its number, such as `"cuda:0"`."""
    of, _, number = word.partition(":")
    if number.isdigit() and (of == "gpu" or is_kind(of)):
        variable = {"xpu": _HIDDEN_BY[-1]}.get(of, _HIDDEN_BY[0] if of in ("cuda", "gpu") else "")
        alone = f"; for this device alone: {variable}={number} and ranks=1" if variable else ""
        raise PlatformError.because(
            f"ranks on {word!r}",
            "a place is a kind of device; rank r of a host works on device r of it",
            hint=f'on="{of}"{alone}',
        )


def is_backend(word: str) -> bool:
    """Whether `word` names a backend of process groups that serves an accelerator."""
    if word in BACKENDS:
        return True
    import torch.distributed as dist

    return word in dist.Backend.default_device_backend_map.values() and word != "gloo"


def backend(of: str) -> str | None:
    """Return the process group backend that torch has for a kind; None if only host memory has."""
    import torch.distributed as dist

    name = dist.Backend.default_device_backend_map.get(of)
    if name in (None, "gloo", "fake"):
        return None
    is_built = getattr(dist, f"is_{name}_available", None)
    return name if is_built is None or is_built() else None


def is_accelerator(device: torch.device) -> bool:
    """Whether tensors on `device` lie in the memory of an accelerator."""
    return device.type not in ("cpu", "meta")


def count(of: str | None = None) -> int:
    """Return the number of devices of a kind, by default of `kind()`, that this process sees.

    On CUDA this does not initialise the driver where NVML is there.
    """
    of = of or kind()
    if of is None or ("torch" not in sys.modules and not _may_exist()):
        return 0
    module = _module(of)
    return module.device_count() if module is not None and module.is_available() else 0


def visibility() -> str:
    """Return in words which variables may hide devices from this process."""
    hiding = [f"{name}={os.environ[name]!r}" for name in _HIDDEN_BY if name in os.environ]
    return " ".join(hiding) or "no variable hides any"


def current() -> torch.device | None:
    """Return the device that this process computes on; None without an accelerator."""
    import torch

    if (name := kind()) is None:
        return None
    return torch.device(name, torch.accelerator.current_device_index())


def set_device(device: torch.device) -> None:
    """Make `device` the current one of its kind; nothing on a CPU or where there is only one."""
    choose = getattr(_module(device.type), "set_device", None)
    if is_accelerator(device) and device.index is not None and choose is not None:
        choose(device)


def initialised() -> str | None:
    """Return the kind of the accelerator that this process has begun to use; None if none is.

    A process that is forked from this one afterwards cannot use it.
    """
    torch = sys.modules.get("torch")
    default = torch.accelerator.current_accelerator() if torch is not None else None
    return default.type if default is not None and _has_begun(default.type) else None


def generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of the default generator of a device, as a CPU tensor."""
    return _module(device.type).get_rng_state(*_place(device))


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Put the default generator of a device into a state that `generator_state` returned."""
    _module(device.type).set_rng_state(state, *_place(device))


def device_in_use() -> torch.device | None:
    """Return the device whose generator this process draws from; None if no accelerator is used."""
    import torch

    default = torch.accelerator.current_accelerator()
    is_used = default is not None and _has_begun(default.type) is not False
    return current() if is_used else None


def seed(number: int) -> None:
    """Seed the generator of the device in use."""
    if (device := device_in_use()) is not None:
        _module(device.type).manual_seed(number)


@contextmanager
def forked_generators(devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Restore the generators of torch on exit: the CPU's, and those of `devices`.

    By default those of all devices of the accelerator in use.
    """
    import torch

    if devices is None:
        used = device_in_use()
        devices = () if used is None else (torch.device(used.type, i) for i in range(count()))
    states = {device: generator_state(device) for device in devices if is_accelerator(device)}
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for device, state in states.items():
                set_generator_state(device, state)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Make a device the current one, and use only kernels of it that give the same bits again.

    Nothing on the CPU.
    """
    import torch

    if not is_accelerator(device):
        yield
        return
    cudnn: Any = torch.backends.cudnn
    mode, benchmark = torch.get_deterministic_debug_mode(), cudnn.benchmark
    try:
        torch.set_deterministic_debug_mode("error")
        cudnn.benchmark = False  # it chooses by the time that kernels take
        with torch.accelerator.device_index(device.index):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.benchmark = benchmark


def copied_once(
    constant: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a constant on a device; only the first call copies it there.

    A copy from pageable memory makes the host wait for all kernels before it.
    """
    import torch

    dtype = dtype or constant.dtype
    if (constant.device, constant.dtype) == (device, dtype) or torch.compiler.is_compiling():
        return constant.to(device, dtype)
    copies = _copies().setdefault(constant, {})
    if (copy := copies.get((device, dtype))) is None:
        with torch.inference_mode(False):  # kept, and used where gradients are wanted
            copy = constant.to(device, dtype)
        if type(copy) is torch.Tensor:  # not one that only pretends, while shapes are traced
            copies[device, dtype] = copy
    return copy


@functools.cache
def _copies() -> MutableMapping[torch.Tensor, dict[tuple[torch.device, torch.dtype], torch.Tensor]]:
    """Return the copies of constants; they live as long as these."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def name(device: torch.device) -> str:
    """Return the name of a device; its kind where torch has no name."""
    tell = getattr(_module(device.type), "get_device_name", None)
    return device.type if tell is None else tell(device)


def memory(device: torch.device) -> tuple[int, int] | None:
    """Return the free bytes of a device and all of them; None where it does not say."""
    import torch

    with suppress(NotImplementedError, RuntimeError, ValueError):
        free, total = torch.accelerator.get_memory_info(device)
        return free, total
    return None


def _may_exist() -> bool:
    """Whether torch could see an accelerator here, as far as can be told without it."""
    if sys.platform != "linux":
        return True
    is_hidden = any(os.environ.get(name) == "" for name in _HIDDEN_BY)
    if not is_hidden and any(Path(file).exists() for file in _DRIVERS):
        return True
    from importlib.metadata import entry_points

    plugins = entry_points(group="torch.backends")
    return any(plugin.name != "unisono" for plugin in plugins)


def _has_begun(of: str) -> bool | None:
    """Whether this process has initialised the devices of a kind; None where none can tell."""
    begun = getattr(_module(of), "is_initialized", None)
    return None if begun is None else begun()


def _module(of: str) -> Any:
    """Return torch's module of a kind; None if this torch has none."""
    import torch

    try:
        return torch.get_device_module(of)
    except RuntimeError:
        return None


def _place(device: torch.device) -> tuple[torch.device, ...]:
    """Return the argument that names a device; there is one Apple GPU, and it takes none."""
    return () if device.type == "mps" else (device,)
