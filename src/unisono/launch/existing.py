"""`run` in a process that is already a rank: the function runs here, nothing is started.

So one script works under plain python, `unisono run` and torchrun. Return values are shared as
plain data only; nothing that comes from another rank is unpickled.
"""

from __future__ import annotations

import io
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from unisono.launch.request import Request
from unisono.launch.results import Elsewhere, Results

if TYPE_CHECKING:
    from unisono.comm import Communicator

T = TypeVar("T")


def is_in_world() -> bool:
    """Whether this process is a rank already, by its process group or by its environment."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return True
    from unisono.comm.environment import detect

    return detect().is_world


def run_here(fn: Callable[..., T], request: Request) -> Results[T]:
    """Call `fn` on this rank of the world it is in; collective over that world."""
    from unisono.comm.environment import detect
    from unisono.comm.failures import post_failure
    from unisono.comm.start import start_world

    begin = time.perf_counter()
    comm = start_world(detect())
    if request.is_explicit and comm.rank == 0 and request.ranks != comm.size:
        print(
            f"unisono: already in a world of {comm.size} ranks; ranks={request.ranks} is not used",
            file=sys.stderr,
        )
    ready = time.perf_counter()
    try:
        value = fn(*request.args, **request.kwargs)
    except BaseException as error:
        post_failure(error)
        raise
    wall_s = time.perf_counter() - ready
    packed = [pack(value), socket.gethostname().encode()]
    gathered = _gather_bytes(comm, packed[0]), _gather_bytes(comm, packed[1])
    values = [
        value if rank == comm.rank else unpack(data, rank) for rank, data in enumerate(gathered[0])
    ]
    return Results(
        values,
        hosts=[host.decode(errors="replace") for host in gathered[1]],
        platform=comm.backend,
        wall_s=wall_s,
        start_s=ready - begin,
    )


def pack(value: object) -> bytes:
    """Write a value with its type name in front; a value that torch cannot write stays here."""
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:
        buffer = io.BytesIO()
    kind = type(value).__qualname__.encode()
    return len(kind).to_bytes(4, "little") + kind + buffer.getvalue()


def unpack(data: bytes, rank: int) -> Any:
    """Read a value of `rank` if it is plain data, numpy arrays or tensors; else say where it is."""
    import numpy as np
    import torch

    length = int.from_bytes(data[:4], "little")
    kind, body = data[4 : 4 + length].decode(), data[4 + length :]
    numpy_names = [
        np.ndarray,
        np.dtype,
        np._core.multiarray._reconstruct,  # pyright: ignore[reportAttributeAccessIssue]
        np._core.multiarray.scalar,  # pyright: ignore[reportAttributeAccessIssue]
        *{type(np.dtype(code)) for code in np.typecodes["All"]},
    ]
    try:
        with torch.serialization.safe_globals(numpy_names):
            return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception:
        return Elsewhere(rank, kind)


def _gather_bytes(comm: Communicator, data: bytes) -> list[bytes]:
    """Return the bytes of every rank; collective over `comm`."""
    import torch

    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    sizes = comm.all_gather(torch.tensor([mine.numel()])).tolist()
    joined = comm.all_gather(mine.to(comm.device), sizes=sizes).cpu().numpy()
    parts: list[bytes] = []
    offset = 0
    for size in sizes:
        parts.append(joined[offset : offset + size].tobytes())
        offset += size
    return parts
