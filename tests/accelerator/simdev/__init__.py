"""A simulated accelerator: `import simdev` gives torch the device "sim", with `torch.sim` and the backend "simccl".

Its memory cannot be read by host code (that is a segmentation fault with a sentence), its kernels run later on streams, and what is
not waited for is not there. Values come from torch's CPU kernels.
"""

import atexit
import contextlib
import os
import sys
import types

import torch

from . import _C


def is_available() -> bool:
    return True


def device_count() -> int:
    return _C.DEVICES


def _index(device=None) -> int:
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return _C.current_device() if device < 0 else device
    device = torch.device(device)
    return _C.current_device() if device.index is None else device.index


def current_device() -> int:
    return _C.current_device()


def set_device(device) -> None:
    _C.set_device(_index(device))


class device:  # noqa: N801, named as torch.cuda's
    def __init__(self, device):
        self.index, self.before = _index(device), None

    def __enter__(self):
        self.before = _C.current_device()
        _C.set_device(self.index)

    def __exit__(self, *_):
        _C.set_device(self.before)


class device_of(device):  # noqa: N801
    def __init__(self, tensor):
        super().__init__(tensor.device if tensor.device.type == "sim" else None)


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


def Event(enable_timing=False, blocking=False, interprocess=False):  # noqa: N802, torch.Event.elapsed_time refuses subclasses
    return torch.Event(device="sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device=None):
    return torch.accelerator.current_stream(torch.device("sim", _index(device)))


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(torch._C._autograd.DeviceType.PrivateUse1.value))


def set_stream(stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream):
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device=None) -> None:
    _C.synchronize(_index(device))


def manual_seed(seed: int) -> None:
    _C.default_generator(-1).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(_C.DEVICES):
        _C.default_generator(index).manual_seed(int(seed))


def initial_seed() -> int:
    return _C.default_generator(-1).initial_seed()


def get_rng_state(device=None):
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state, device=None) -> None:
    _C.default_generator(_index(device)).set_state(state)


def get_rng_state_all():
    return [get_rng_state(index) for index in range(_C.DEVICES)]


def set_rng_state_all(states) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def get_device_name(device=None) -> str:
    return f"Simulated accelerator {_index(device)}"


def get_device_capability(device=None):
    return (1, 0)


def is_initialized() -> bool:
    return _C.initialised() and not _C.in_bad_fork()


def init() -> None:
    _C.init()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return _C.in_bad_fork()


def empty_cache() -> None:
    pass


def memory_allocated(device=None) -> int:
    return _C.usage(_index(device))[0]


def max_memory_allocated(device=None) -> int:
    return _C.usage(_index(device))[1]


@contextlib.contextmanager
def patience(default_stream_s: float = 0.0, side_streams_s: float = 0.0):
    """Hold back tasks of the default stream, or of all others, until they are waited for or are this old."""
    before = _C.patience()
    _C.set_patience(default_stream_s, side_streams_s)
    try:
        yield
    finally:
        _C.set_patience(*before)


def synchronous_ops() -> dict[str, int]:
    """The operators that made the host wait since the last call, and how often: `item`, data-dependent shapes, no meta kernel."""
    return _C.synchronous_ops()


def _create_simccl(options, _backend_options=None):
    import torch.distributed as dist

    store = dist.PrefixStore("simccl", options.store)
    wire = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
    return _C.SimCCL(wire, options.timeout.total_seconds())


def autoload() -> None:
    """The entry point of the group `torch.backends`; importing this package is all there is to do."""


def _register() -> None:
    torch.utils.rename_privateuse1_backend("sim")
    module = sys.modules[__name__]
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True)
    import torch.distributed as dist

    dist.Backend.register_backend("simccl", _create_simccl, extended_api=True, devices=["sim"])
    atexit.register(_C.drain)
    if words := os.environ.get("SIM_PATIENCE_MS"):  # "default,side", such as "0,200"
        default, side = (float(word) / 1e3 for word in words.split(","))
        _C.set_patience(default, side)


_utils = types.SimpleNamespace(_get_device_index=lambda device, optional=False, allow_cpu=False: _index(device))
_register()
