"""The sliver of HeAT's arrays that data-parallel programs touch: rows split over ranks, or whole.

Not on torch's DTensor: it cuts rows by the ceiling, where HeAT balances them, and needs a mesh even
for one rank. Everything HeAT's arrays do beyond this names itself in an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.mpi_style import get_comm, sanitize_comm
from unisono.data_parallel import shard
from unisono.errors import PartitionError, PlatformError, an

__all__ = [
    "DNDarray", "Device", "arange", "array", "cpu", "get_device", "gpu", "ones", "rand", "randn",
    "resplit", "seed", "use_device", "zeros",
]  # fmt: skip


class Device:
    """Where arrays live; `str` gives HeAT's name, `torch_device` torch's."""

    def __init__(self, device_type: str, device_id: int = 0) -> None:
        self.device_type, self.device_id = device_type, device_id

    @property
    def torch_device(self) -> str:
        """The device as torch calls it."""
        return "cpu" if self.device_type == "cpu" else f"cuda:{self.device_id}"

    def __str__(self) -> str:
        return f"{self.device_type}:{self.device_id}"

    def __repr__(self) -> str:
        return f"device({self})"

    def __eq__(self, other: object) -> bool:
        return str(self) == (f"{other}:0" if other in ("cpu", "gpu") else str(other))

    def __hash__(self) -> int:
        return hash(str(self))


cpu, gpu = Device("cpu"), Device("gpu")
_default = cpu


def get_device() -> Device:
    """Return the device on which arrays are made if none is named."""
    return _default


def use_device(device: str | Device | None = None) -> None:
    """Make arrays here from now on: `"cpu"`, `"gpu"`, or a `Device`; None changes nothing."""
    global _default
    _default = _device(device)


def _device(name: str | Device | None) -> Device:
    if name is None:
        return _default
    kind, _, number = str(name).partition(":")
    if kind not in ("cpu", "gpu") or not (number or "0").isdigit():
        raise PlatformError.because(f"device {name!r}", hint='"cpu", "gpu" or "gpu:1"')
    if kind == "gpu" and not torch.cuda.is_available():
        raise PlatformError.because(
            f"device {name!r}", "no CUDA device on this machine", hint='ht.use_device("cpu")'
        )
    return Device(kind, int(number or 0))


class DNDarray:
    """An array that every rank holds whole (`split=None`), or whose rows are split (`split=0`).

    Arithmetic is that of the local parts, between arrays of equal layout and with plain numbers.

    Args:
        larray: this rank's part.
        gshape: shape of the whole.
        split: 0 or None.
        device: where it lives.
        comm: the ranks.
    """

    def __init__(
        self, larray: Tensor, gshape: Sequence[int], split: int | None, device: Device, comm: Any
    ) -> None:
        self.larray = larray
        self.gshape = tuple(int(n) for n in gshape)
        self.split, self.device, self.comm = split, device, comm

    shape = property(lambda self: self.gshape, doc="Shape of the whole.")
    lshape = property(lambda self: tuple(self.larray.shape), doc="Shape of the own part.")
    dtype = property(lambda self: self.larray.dtype, doc="Type of the numbers.")
    ndim = property(lambda self: len(self.gshape), doc="Number of dims.")
    size = property(lambda self: int(np.prod(self.gshape)), doc="Numbers of the whole.")
    __array_ufunc__ = None  # or numpy would make an array of arrays

    def __len__(self) -> int:
        return self.gshape[0]

    def numpy(self) -> np.ndarray:
        """Return the whole on every rank. Collective where rows are split."""
        return self.resplit(None).larray.detach().cpu().numpy()

    def item(self) -> Any:
        """Return the only number."""
        return self.numpy().item()

    def astype(self, dtype: torch.dtype) -> DNDarray:
        """Return the same numbers as another type."""
        return self._like(self.larray.to(dtype))

    def resplit(self, axis: int | None = None) -> DNDarray:
        """Return the array in another layout: rows split (0), or whole (None). Collective."""
        _check_split(axis)
        larray = self.larray
        if axis is None and self.split == 0:
            larray = Communicator.of(self.comm).all_gather(larray.contiguous())
        elif axis == 0 and self.split is None:
            larray = shard(larray, comm=self.comm).clone()
        return DNDarray(larray, self.gshape, axis, self.device, self.comm)

    def resplit_(self, axis: int | None = None) -> DNDarray:
        """Change the layout of this very array; returns it. Collective."""
        self.larray, self.split = self.resplit(axis).larray, axis
        return self

    def _like(self, larray: Tensor) -> DNDarray:
        return DNDarray(larray, self.gshape, self.split, self.device, self.comm)

    def _combined(self, verb: Callable[[Any, Any], Any], other: Any, turned: bool) -> Any:
        if not isinstance(other, DNDarray) and np.ndim(other):
            raise TypeError(
                f"{verb.__name__} of an array and {an(type(other).__name__)}\n"
                "  HINT: ht.array(other, split=x.split), of which each rank has its rows, too"
            )
        if isinstance(other, DNDarray):
            layout, other_layout = ((a.gshape, a.lshape, a.split) for a in (self, other))
            if layout != other_layout:
                raise PartitionError.because(
                    f"{verb.__name__} of arrays of shapes {self.gshape} and {other.gshape}",
                    f"split={self.split} and split={other.split}",
                    "layouts have to be equal",
                    "x.resplit(0), or heat itself for more",
                )
            other = other.larray
        pair = (other, self.larray) if turned else (self.larray, other)
        result = verb(*pair)
        return self._like(result) if isinstance(result, Tensor) else result

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"an array has no {name!r} here\n  HINT: x.larray is this rank's tensor, x.numpy() the "
            "whole; for more keep heat and pass x.larray"
        )

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"indices of an array of shape {self.gshape} are not offered\n"
            "  HINT: x.larray[...] has this rank's rows, x.numpy()[...] all of them"
        )

    def __repr__(self) -> str:
        return (
            f"DNDarray({self.gshape}, own part {self.lshape}, dtype={self.dtype}, "
            f"device={self.device}, split={self.split})"
        )


def _verb(name: str, turned: bool) -> Callable[[DNDarray, Any], Any]:
    verb = getattr(operator, name)
    return lambda self, other: self._combined(verb, other, turned)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(DNDarray, f"__{_name}__", _verb(_name, False))
    setattr(DNDarray, f"__r{_name}__", _verb(_name, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):  # Python would compare the objects
    setattr(DNDarray, f"__{_name}__", _verb(_name, False))
setattr(DNDarray, "__neg__", lambda self: self._like(-self.larray))  # noqa: B010


def _check_split(split: object) -> None:
    if split not in (None, 0):
        raise PartitionError.because(
            f"split={split!r}", "rows are split here, or nothing", hint="split=0, or keep heat"
        )


def _made(whole: Tensor, split: int | None, device: Any, comm: Any) -> DNDarray:
    """Return an array of what every rank holds whole."""
    _check_split(split)
    there, ranks = _device(device), get_comm() if comm is None else sanitize_comm(comm)
    local = whole if split is None else shard(whole, comm=ranks).clone()
    return DNDarray(local.to(there.torch_device), whole.shape, split, there, ranks)


def array(
    obj: Any,
    dtype: torch.dtype | None = None,
    copy: bool | None = None,  # noqa: ARG001 - always one
    ndmin: int = 0,
    order: str = "C",  # noqa: ARG001
    split: int | None = None,
    is_split: int | None = None,
    device: str | Device | None = None,
    comm: Any = None,
) -> DNDarray:
    """Return an array of numbers, nested lists, a tensor or another array.

    Args:
        obj: the whole, the same on all ranks; with `is_split` this rank's rows. An array of which
            each rank has its rows is gathered.
        dtype: type of the numbers; default that of `obj`.
        copy: always done.
        ndmin: dims are added in front until there are as many.
        order: of memory; always rows first.
        split: 0: this rank keeps its rows.
        is_split: 0: `obj` holds this rank's rows, of any number. Collective then.
        device: where it lives.
        comm: the ranks; default the world.
    """
    _check_split(is_split)
    if isinstance(obj, DNDarray):
        obj = (obj if is_split == 0 else obj.resplit(None)).larray
    tensor = torch.as_tensor(obj).detach().clone()
    tensor = tensor if dtype is None else tensor.to(dtype)
    tensor = tensor.reshape((1,) * (ndmin - tensor.dim()) + tuple(tensor.shape))
    if is_split is None:
        return _made(tensor, split, device, comm)
    made = _made(tensor, None, device, comm)
    rows = sum(Communicator.of(made.comm).block_lengths(made.larray))
    return DNDarray(made.larray, (rows, *tensor.shape[1:]), 0, made.device, made.comm)


def _filled(fill: Callable[..., Tensor]) -> Callable[..., DNDarray]:
    def make(
        shape: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        split: int | None = None,
        device: str | Device | None = None,
        comm: Any = None,
        order: str = "C",  # noqa: ARG001
    ) -> DNDarray:
        return _made(fill(shape, dtype=dtype), split, device, comm)

    make.__name__ = make.__qualname__ = fill.__name__
    make.__doc__ = f"Return an array of {fill.__name__}."
    return make


zeros, ones = _filled(torch.zeros), _filled(torch.ones)


def arange(
    *args: float,
    dtype: torch.dtype | None = None,
    split: int | None = None,
    device: str | Device | None = None,
    comm: Any = None,
) -> DNDarray:
    """Return numbers `[start, stop)` at steps of 1, or the third argument."""
    kind = torch.float32 if any(isinstance(n, float) for n in args) else torch.int32
    return _made(torch.arange(*args, dtype=dtype or kind), split, device, comm)


def resplit(arr: DNDarray, axis: int | None = None) -> DNDarray:
    """Return an array in another layout. Collective."""
    return arr.resplit(axis)


# ht.random: one stream for all ranks, so that numbers do not depend on how many there are. Whole
# arrays are drawn, which is why this is for small ones; the global generators are not touched.

_generator: torch.Generator | None = None


def seed(seed: int | None = None) -> None:
    """Restart the stream; None: at a number of rank 0's choice, at the next draw."""
    global _generator
    _generator = None if seed is None else torch.Generator().manual_seed(seed)


def _drawn(draw: Callable[..., Tensor]) -> Callable[..., DNDarray]:
    def make(
        *d: int,
        dtype: torch.dtype = torch.float32,
        split: int | None = None,
        device: str | Device | None = None,
        comm: Any = None,
    ) -> DNDarray:
        if _generator is None:
            ranks = Communicator.of(get_comm() if comm is None else sanitize_comm(comm))
            seed(ranks.broadcast_object(torch.Generator().seed(), 0))
        return _made(draw(d, generator=_generator, dtype=dtype), split, device, comm)

    make.__name__ = make.__qualname__ = draw.__name__
    make.__doc__ = f"Return random numbers as `torch.{draw.__name__}` draws them."
    return make


rand, randn = _drawn(torch.rand), _drawn(torch.randn)
