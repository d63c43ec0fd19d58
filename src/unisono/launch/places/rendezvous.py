"""How ranks on several hosts find each other: rank 0 leaves its addresses in a file they share.

Rank 0 listens at a port that the system gives it, at one address: that of the job's network. Only
where it does not know any, it listens at all, and the others try its addresses one by one. They
take the one behind which they find the word of this run, so an address that leads elsewhere
(somebody else's network, each host's own loopback) does no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
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
_LISTENING = "0A"
"""State of a socket that listens, as the kernel prints it."""


def meet(
    environment: Environment,
    path: Path,
    *,
    nonce: str,
    timeout_s: float,
    asked: tuple[str | None, int] = (None, 0),
) -> tuple[dist.Store, tuple[str, int]]:
    """Return the store of this world and where it is. Collective over the world.

    All ranks get the address at which rank 0 was found, rank 0 as well: what it listens at for
    other purposes should be on that network too.

    Args:
        environment: the place of this rank.
        path: file of this world, in a private directory that all hosts see.
        nonce: word of this world; ranks other than 0 may leave it empty, and then trust the file.
        timeout_s: deadline.
        asked: address and port of rank 0, where the user wants particular ones.
    """
    end = time.monotonic() + timeout_s
    environment = replace(environment, kind="unisono", master=None)
    if environment.rank == 0:
        store, address = _host(environment, path, nonce, timeout_s, asked)
    else:
        store, address = _join(environment, path, nonce, end)
    store.set_timeout(timedelta(seconds=timeout_s))
    if environment.nodes > 1 and environment.rank in (0, environment.size - 1):
        # A rank of the last node tells rank 0 by which of its addresses it was found.
        if environment.rank:
            store.set(_REACHED, address[0])
        address = store.get(_REACHED).decode(), address[1]
    return store, address


def _host(
    environment: Environment,
    path: Path,
    nonce: str,
    timeout_s: float,
    asked: tuple[str | None, int],
) -> tuple[dist.Store, tuple[str, int]]:
    from unisono.comm import machine as addresses
    from unisono.comm import seal
    from unisono.comm.lifecycle import open_store

    addr, port = asked
    if addr is None and environment.nodes > 1:
        addr = addresses.of_job(candidates()) or None
    store = open_store(environment, addr=addr, port=port, timeout_s=timeout_s, nonce=nonce)
    port = store.port  # pyright: ignore[reportAttributeAccessIssue]
    names = [addr] if addr else [LOOPBACK] if environment.nodes == 1 else candidates()
    entry: dict[str, Any] = {"addresses": names, "port": port, "nonce": nonce}
    if not seal.has_secret():  # no launcher of ours has brought one
        entry["secret"] = secrets.token_hex(32)
        seal.give_secret(entry["secret"].encode())
    write_private(path, json.dumps(entry).encode())
    return store, (names[0], port)


def _join(
    environment: Environment, path: Path, nonce: str, end: float
) -> tuple[dist.Store, tuple[str, int]]:
    from unisono.comm import seal
    from unisono.comm.lifecycle import open_store

    entry = _wait_for(path, environment, end)
    if not seal.has_secret():
        seal.give_secret(entry["secret"].encode())
    port, limit_s = int(entry["port"]), FIRST_TRY_S
    tried: list[str] = []
    while True:
        for addr in entry["addresses"]:
            left = end - time.monotonic()
            if left <= 0:
                raise PlatformError.because(
                    f"rank {environment.rank} of {environment.size} joins rank 0 at port {port}",
                    "no answer at " + "; ".join(tried[-len(entry["addresses"]) :]),
                    None,
                    "Platform(master_addr=...) with an address that all nodes reach",
                )
            try:
                store = open_store(
                    environment,
                    addr=addr,
                    port=port,
                    timeout_s=min(limit_s, left),
                    nonce=nonce or entry["nonce"],
                )
            except (RuntimeError, PlatformError) as error:
                tried.append(f"{addr} ({str(error).splitlines()[0][:80]})")
            else:
                return store, (addr, port)
        limit_s *= 2


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

    Loopback comes last: it helps where two nodes are one host, and misleads nobody.
    """
    from unisono.comm import machine as addresses

    found: list[str] = []
    if node := os.environ.get("SLURMD_NODENAME"):
        from unisono.launch.places.slurm.cluster import node_address

        with contextlib.suppress(OSError):
            found = addresses.resolve(node_address(node) or node)
    outward = [addr for addr in found if not addresses.is_loopback(addr)]
    return list(dict.fromkeys([*outward, *addresses.own_addresses(), LOOPBACK]))


def owner_of_port(port: int) -> str:
    """Return who listens at `port`, as `python (process 12)`; "" if nobody can tell."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) in links for fd in (process / "fd").iterdir()):  # noqa: PTH115
                name = (process / "comm").read_text().strip()
                return f"{name} (process {process.name})"
    return "a process of another user"


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found
