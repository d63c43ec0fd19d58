"""The kinds of places where ranks run."""

from __future__ import annotations

import difflib
from enum import Enum

from unisono.errors import PlatformError

__all__ = ["Device"]

_ALIASES = {"cuda": "gpu"}


class Device(Enum):
    """A kind of place, as `Platform(device=...)` and `run(on=...)` name it."""

    CPU = "cpu"
    GPU = "gpu"
    SLURM = "slurm"
    MPS = "mps"
    MPI = "mpi"

    @classmethod
    def from_str(cls, device: str | Device) -> Device:
        """Return the device of that name; case does not matter, and `"cuda"` is the GPU.

        Example:
            >>> Device.from_str("CUDA")
            <Device.GPU: 'gpu'>
        """
        if isinstance(device, Device):
            return device
        values = [member.value for member in cls]
        word = device.strip().lower() if isinstance(device, str) else device
        word = _ALIASES.get(word, word) if isinstance(word, str) else word
        if word in values:
            return cls(word)
        near = difflib.get_close_matches(str(word), [*values, *_ALIASES], n=1)
        raise PlatformError.because(
            f"device={device!r}",
            f"devices are {', '.join(map(repr, values))}",
            None,
            f"did you mean device={near[0]!r}?" if near else 'device="cpu"',
        )
