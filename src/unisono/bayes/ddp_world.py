"""Which ranks a `DDPSequential` belongs to: a given group, the running world, or one it starts."""

from __future__ import annotations

import atexit
import os
import sys

import torch

from unisono import launch
from unisono.bayes.ddp_config import DDPConfig
from unisono.comm import (
    Communicator,
    Environment,
    detect,
    groups,
    has_world,
    start_world,
    stop_world,
    transports,
)
from unisono.errors import MissingExtra


def join(config: DDPConfig, source: object, timeout_s: float | None) -> Communicator:
    """Return the communicator of a replica's ranks. Collective when a world or group is made.

    Args:
        config: what the user asked for.
        source: a communicator, group or mesh axis that is used as it is; None to look for a world.
        timeout_s: deadline of each wait; None keeps the world's.
    """
    config.check(torch.cuda.is_available())
    if config.backend == "mpi" and (reason := transports.available()["mpi"]) != "ok":
        raise MissingExtra.of("mpi", 'DDPConfig(backend="mpi")', reason)
    if source is not None:
        comm = Communicator.of(source)
        config.check_agrees(comm.rank, comm.size, "the communicator")
    elif has_world():
        comm = launch.world()
        config.check_agrees(comm.rank, comm.size, "the running world")
        comm = _on_backend(comm, config)
    else:
        comm = _started(config)
    return comm if timeout_s is None else comm.with_timeout(timeout_s)


def _started(config: DDPConfig) -> Communicator:
    environment = detect()
    if environment.is_world:
        config.check_agrees(
            environment.rank, environment.size, f"the launcher ({environment.kind})"
        )
    elif config.world_size > 1:
        environment = config.environment(_address())
    backend = None if config.backend == "auto" else config.backend
    device = device_of(config, environment)
    comm = start_world(environment, backend=backend, device=device)
    if environment.is_world:
        atexit.register(_leave)
    return comm


def _leave() -> None:
    """Close the world together, unless this rank ends with an exception and nobody should wait."""
    if getattr(sys, "last_value", None) is None:
        stop_world()


def _address() -> tuple[str, int] | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdigit() else None


def _on_backend(comm: Communicator, config: DDPConfig) -> Communicator:
    """Return the same ranks on the backend that was named, in a group of its own if need be."""
    wanted = {"mpi": "mpi4py"}.get(config.backend, config.backend)
    if wanted in ("auto", comm.backend) or comm.size == 1:
        return comm
    entry = groups.entry_for(comm.ranks, backend=wanted)
    device = device_of(config, detect()) if wanted == "nccl" else torch.device("cpu")
    return Communicator(entry, device=device)


def device_of(config: DDPConfig, environment: Environment) -> torch.device:
    """Return the device of this rank: its entry of `device_ids` with nccl, else the CPU."""
    wants_cuda = config.backend == "nccl" or (
        config.backend == "auto" and torch.cuda.device_count() >= environment.local_size > 0
    )
    if not wants_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    ids = config.device_ids
    if len(ids) == environment.size:
        return torch.device("cuda", ids[environment.rank])
    local = environment.local_rank
    return torch.device("cuda", ids[local] if local < len(ids) else local)
