"""Running in this very process: as a rank of the world it is in, or as a world of one.

A process that another launcher started as a rank joins that world and starts nothing. So one script
works under plain python, `unisono run`, torchrun, mpiexec and srun. Return values are shared as
plain data only; nothing that comes from another rank is unpickled.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from unisono.accelerator import is_accelerator
from unisono.environment import detect
from unisono.errors import RankFailed, Requeue
from unisono.launch import stopping
from unisono.launch.context import checked, here, seeded
from unisono.launch.job_files import check_ours
from unisono.launch.platform import Device
from unisono.launch.pool.stacks import hide_own_frames, site_of
from unisono.launch.request import RunRequest
from unisono.launch.results import Elsewhere, Results
from unisono.launch.stopping import deadline

if TYPE_CHECKING:
    from unisono.comm import Communicator
    from unisono.environment import Environment

_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # a server that listens there gets a free port
    "UNISONO_DETECT": "0",  # still not a rank
}
"""With these a script can initialise torch.distributed in a process on its own."""
MEET_S = 300.0
"""Longest wait for ranks that the user's own `srun` started to find each other."""


def world(*, timeout_s: float | None = None) -> Communicator:
    """Return the communicator of all ranks; in a plain process that is a world of one.

    The first call in a process that torchrun or another launcher started as a rank joins that
    world, so it is collective over it. The world is closed when the process ends.

    Args:
        timeout_s: deadline of each wait; None is that of the process group.
    """
    from unisono.comm import communicator, has_world
    from unisono.comm.lifecycle import leave_at_exit, start_world

    if not has_world() and (environment := detect()).is_world:
        if environment.kind == "slurm" and environment.master is None:
            _start_in_step(environment)
        else:
            start_world(environment)
        leave_at_exit()
        _show_own_errors_only()
    comm = communicator.world(timeout_s=timeout_s)
    me = here()
    return comm if me is None or me.device == comm.device else comm.with_device(me.device)


def _start_in_step(environment: Environment) -> None:
    """Start the world of a step of `srun`. Collective over the step.

    Its ranks meet through a file of a private directory, which all of them see and no other step
    uses; it is gone afterwards.
    """
    from unisono.comm.lifecycle import start_world
    from unisono.launch.places.rendezvous import meet

    variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    name = "slurm-" + ".".join(os.environ.get(variable, "0") for variable in variables)
    if environment.job_dir is not None:
        directory = environment.job_dir / name
    elif environment.nodes == 1:
        directory = Path(tempfile.gettempdir(), f"unisono-{os.getuid()}-{name}")
    else:
        directory = Path(".unisono", name).absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_ours(directory)
    path, nonce = directory / "rendezvous.json", secrets.token_hex(8)
    try:
        store, address = meet(
            environment, path, nonce=nonce if environment.rank == 0 else "", timeout_s=MEET_S
        )
        start_world(replace(environment, master=address), store=store)
    finally:
        if environment.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)


def _show_own_errors_only() -> None:
    """Print one line in a rank that stops because of another, which shows its traceback."""
    from unisono.comm import communicator

    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        if not isinstance(error, RankFailed) or error.rank in (None, rank):
            hide_own_frames(error)
            before(kind, error, error.__traceback__)
            return
        reason = str(error).partition("\n")[0]
        print(f"unisono: rank {rank} stopped at {site_of(error)}: {reason}", file=sys.stderr)

    rank = communicator.world().rank
    sys.excepthook = show


def run_here(request: RunRequest) -> Results[Any]:
    """Call the function on this rank of the world it is in; collective over that world."""
    from unisono.comm.health import streams
    from unisono.comm.health.failures import post_failure

    begin = time.perf_counter()
    comm = world()
    if request.is_explicit and comm.rank == 0 and (unused := _unused(request, comm)):
        verb = "is" if len(unused) == 1 else "are"
        print(
            f"unisono: already in a world of {comm.size} ranks on {comm.device.type}; "
            f"{' and '.join(unused)} {verb} not used",
            file=sys.stderr,
        )
    ready = time.perf_counter()
    try:
        with (
            deadline(request.timeout_s, rank=comm.rank, size=comm.size),
            seeded(request.seed, comm.rank),
            checked(request.check),
        ):
            value = request.fn(*request.args, **request.kwargs)
            streams.settle()
    except BaseException as error:
        post_failure(error)
        raise
    wall_s = time.perf_counter() - ready
    hosts = _gather_bytes(comm, socket.gethostname().encode())
    values = [
        value if rank == comm.rank else unpack(data, rank)
        for rank, data in enumerate(_gather_bytes(comm, pack(value)))
    ]
    return Results(
        values,
        hosts=[host.decode(errors="replace") for host in hosts],
        platform=comm.backend,
        wall_s=wall_s,
        start_s=ready - begin,
    )


def run_inline(request: RunRequest) -> Results[Any]:
    """Call the function here; `requeue` in it calls it again."""
    variables = {"UNISONO_RESTART": "0", **(_ALONE if request.is_script else {})}
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ |= variables
    begin = time.perf_counter()
    try:
        for attempt in range(request.platform.max_requeues + 1):
            os.environ["UNISONO_RESTART"] = str(attempt)
            stopping.forget_request()
            try:
                with seeded(request.seed, 0), checked(request.check):
                    value = request.fn(*request.args, **request.kwargs)
            except Requeue:
                continue
            return Results(
                [value],
                hosts=[socket.gethostname()],
                platform="inline",
                wall_s=time.perf_counter() - begin,
                restarts=attempt,
            )
    finally:
        stopping.forget_request()
        for name in variables:
            os.environ.pop(name, None)
        os.environ |= before
    limit = request.platform.max_requeues
    raise RankFailed(f"the function asked to be started again more than max_requeues={limit} times")


def _unused(request: RunRequest, comm: Communicator) -> list[str]:
    """Return the options that this world does not follow."""
    platform, nodes = request.platform, request.platform.n_nodes
    kinds = [platform.accelerator or comm.device.type] if is_accelerator(comm.device) else []
    words: list[str] = []
    if platform.kind in (Device.GPU, Device.MPS) and comm.device.type not in kinds:
        words.append(f'on="{request.place}"')
    if request.ranks != comm.size:
        words.append(f"ranks={request.ranks}")
    if nodes > 1 and nodes != detect().nodes:
        words.append(f"nodes={nodes}")
    return words


def pack(value: object) -> bytes:
    """Serialise a value behind the name of its type; one that torch cannot save stays here."""
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:
        buffer = io.BytesIO()
    kind = type(value).__qualname__.encode()
    return len(kind).to_bytes(4, "little") + kind + buffer.getvalue()


def unpack(data: bytes, rank: int) -> Any:
    """Return a value of `rank` if it is plain data, arrays or tensors, else an `Elsewhere`."""
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

    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
    sizes = [size for (size,) in comm.all_gather_ints([len(data)])]
    joined = comm.all_gather(local, sizes=sizes).cpu()
    return [part.numpy().tobytes() for part in joined.split(sizes)]
