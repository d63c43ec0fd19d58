"""How ranks on several hosts find each other: rank 0 tells its addresses, and the others try them.

The addresses travel over the channels of our launcher, or in a file where another one started the
ranks. Rank 0 listens at a port that the system gives it, at one address: that of the job's network.
Only where it does not know any, it listens at all, and the others try its addresses one by one.
They take the one behind which they find the word of this run, so an address that leads elsewhere
(another network, each host's own loopback) does no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.environment import Environment
from unisono.errors import PlatformError
from unisono.launch.job_files import check_ours, write_private

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
FIRST_TRY_S = 2.0
"""How long the first try of an address may take; later ones get longer."""
_POLL_S = 0.05
_REACHED = "unisono/reached"


def meet(
    environment: Environment, path: Path, *, nonce: str, timeout_s: float
) -> tuple[dist.Store, tuple[str, int]]:
    """Return the store of a world that no launcher of ours has started, and where it is.

    Collective over the world.

    Args:
        environment: the place of this rank.
        path: file of this world, in a private directory that all hosts see.
        nonce: word of this world; ranks other than 0 may leave it empty, and then trust the file.
        timeout_s: deadline.
    """
    from unisono.comm import seal

    end = time.monotonic() + timeout_s
    if environment.rank == 0:
        store, names, port = host(environment, nonce=nonce, timeout_s=timeout_s)
        entry: dict[str, Any] = {"addresses": names, "port": port, "nonce": nonce}
        entry["secret"] = secrets.token_hex(32)
        seal.give_secret(entry["secret"].encode())
        write_private(path, json.dumps(entry).encode())
        return store, agreed_address(environment, store, (names[0], port))
    entry = _wait_for(path, environment, end)
    seal.give_secret(entry["secret"].encode())
    return join(
        environment,
        (entry["addresses"], int(entry["port"])),
        nonce=nonce or entry["nonce"],
        timeout_s=max(0.0, end - time.monotonic()),
    )


def host(
    environment: Environment,
    *,
    nonce: str,
    timeout_s: float,
    requested: tuple[str | None, int] = (None, 0),
) -> tuple[dist.Store, list[str], int]:
    """Open the store of a world on rank 0; return it, addresses that may lead to it, and its port.

    Args:
        environment: the place of this rank.
        nonce: word of this world.
        timeout_s: deadline.
        requested: address and port, where the user wants particular ones.
    """
    from unisono.comm import machine as addresses
    from unisono.comm.lifecycle import open_store

    addr, port = requested
    if addr is None and environment.nodes > 1:
        addr = addresses.of_job(candidates()) or None
    environment = replace(environment, kind="unisono", master=None)
    store = open_store(environment, addr=addr, port=port, timeout_s=timeout_s, nonce=nonce)
    store.set_timeout(timedelta(seconds=timeout_s))
    names = [addr] if addr else [LOOPBACK] if environment.nodes == 1 else candidates()
    return store, names, store.port  # pyright: ignore[reportAttributeAccessIssue]


def join(
    environment: Environment,
    where: tuple[Sequence[str], int],
    *,
    nonce: str,
    timeout_s: float,
) -> tuple[dist.Store, tuple[str, int]]:
    """Find the store of rank 0 at one of its addresses; return it and where it is."""
    from unisono.comm.lifecycle import open_store

    names, port = where
    environment = replace(environment, kind="unisono", master=None)
    end = time.monotonic() + timeout_s
    limit_s = timeout_s if len(names) == 1 else FIRST_TRY_S
    tried: list[str] = []
    while True:
        for addr in names:
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                raise PlatformError.because(
                    f"rank {environment.rank} of {environment.size} joins rank 0 at port {port}",
                    "no answer at " + "; ".join(tried[-len(names) :]),
                    None,
                    "Platform(master_addr=...) with an address that all nodes reach",
                )
            try:
                store = open_store(
                    environment,
                    addr=addr,
                    port=port,
                    timeout_s=min(limit_s, remaining_s),
                    nonce=nonce,
                )
            except (RuntimeError, PlatformError) as error:
                tried.append(f"{addr} ({str(error).splitlines()[0][:80]})")
            else:
                store.set_timeout(timedelta(seconds=timeout_s))
                return store, agreed_address(environment, store, (addr, port))
        limit_s *= 2


def agreed_address(
    environment: Environment, store: dist.Store, address: tuple[str, int]
) -> tuple[str, int]:
    """Return the address at which the last node found rank 0.

    Rank 0 takes it over: what it listens at for other purposes should be on that network, too.
    """
    if environment.nodes > 1 and environment.rank in (0, environment.size - 1):
        if environment.rank:
            store.set(_REACHED, address[0])
        address = store.get(_REACHED).decode(), address[1]
    return address


def _wait_for(path: Path, environment: Environment, end: float) -> dict[str, Any]:
    """Return what rank 0 has left at `path`."""
    while not path.exists():
        if time.monotonic() > end:
            raise PlatformError.because(
                f"rank {environment.rank} of {environment.size} waits for the address of rank 0",
                f"no {path} on {socket.gethostname()}",
                None,
                "UNISONO_JOB_DIR=... with a directory that all nodes share",
            )
        time.sleep(_POLL_S)
    check_ours(path)
    return json.loads(path.read_text(encoding="utf-8"))


def candidates() -> list[str]:
    """Return the addresses at which other hosts may find this one, the likeliest first.

    Loopback comes last: it helps where two nodes are one host, and does no harm elsewhere.
    """
    from unisono.comm import machine as addresses

    names: list[str] = []
    if node := os.environ.get("SLURMD_NODENAME"):
        from unisono.launch.places.slurm.cluster import node_address

        with contextlib.suppress(OSError):
            names = addresses.resolve(node_address(node) or node)
    outward = [addr for addr in names if not addresses.is_loopback(addr)]
    return list(dict.fromkeys([*outward, *addresses.own_addresses(), LOOPBACK]))


def address_of_job() -> str:
    """Return the address at which other hosts find this one."""
    from unisono.comm import machine  # which loads torch

    return machine.of_job(candidates()) or candidates()[0]
