"""This host as other processes see it: its identity and its addresses.

Host names mislead: many hosts know their own only as a loopback address, or not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from unisono.processes import is_dead, is_stopped, pid_namespace, process_start


def host_id() -> str:
    """Return a name that is equal exactly for processes of one running host.

    `UNISONO_HOST_ID` replaces it, to rehearse several hosts on one.
    """
    return os.environ.get("UNISONO_HOST_ID") or _actual_host_id()


@lru_cache(maxsize=1)
def _actual_host_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()}/{boot}"
    except OSError:
        return socket.gethostname()


def own_card() -> list[str | int]:
    """Return what another process needs to know whether this one lives; see `is_card_dead`."""
    pid = os.getpid()
    return [f"{host_id()}-{pid_namespace()}", pid, process_start(pid) or 0]


def is_card_dead(card: list[str | int]) -> bool:
    """Whether the process that wrote the card has ended; False where this one cannot see it."""
    where, pid, started = card
    return where == own_card()[0] and is_dead(int(pid), int(started))


def condition_of(card: list[str | int]) -> str:
    """Return whether the process that wrote the card is `alive`, `stopped` or `dead`.

    One of another host, or that this one cannot see, counts as alive.
    """
    if is_card_dead(card):
        return "dead"
    return "stopped" if card[0] == own_card()[0] and is_stopped(int(card[1])) else "alive"


_TRY_S = 2.0
_SIOCGIFADDR = 0x8915
"""Linux: ask an interface for its IPv4 address."""


def resolve(host: str) -> list[str]:
    """Return the numeric addresses of `host`; raises `OSError` if it has none."""
    records = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in records))


def is_loopback(address: str) -> bool:
    """Whether a numeric address means the host that uses it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class _ResolverState(ctypes.Structure):
    """How the first fields of glibc's `struct __res_state` lie."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong))


_RES_INIT = 1


@contextlib.contextmanager
def without_name_server() -> Iterator[None]:
    """Ask no name server in this thread inside the block, where the C library is glibc.

    For connections to numeric addresses: torch looks up the name of each, only for its log, and a
    name server that many ranks ask at once answers some of them after a time-out of 5 s. A process
    in which one lookup has failed makes no more of them.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_state") or not hasattr(libc, "__res_init"):
        yield
        return
    libc.__res_state.restype = ctypes.POINTER(_ResolverState)
    state = libc.__res_state().contents  # of this thread
    if not state.options & _RES_INIT:
        libc.__res_init()
    retry, state.retry = state.retry, 0
    try:
        yield
    finally:
        state.retry = retry


def own_addresses() -> list[str]:
    """Return numeric addresses at which other hosts may reach this one, the likeliest first."""
    named: list[str] = []
    with contextlib.suppress(OSError):
        named = resolve(socket.gethostname())
    addresses = dict.fromkeys([*named, *interfaces().values()])
    return [address for address in addresses if not is_loopback(address)]


def of_job(candidates: Sequence[str] = ()) -> str:
    """Return the own address at which the other hosts of a job find this one.

    The interface that the user names for gloo or NCCL goes first, then `candidates`, then
    `own_addresses`. An address that this host does not have itself (of a gateway, say) is left
    out. Empty without one: then the store listens at all addresses.
    """
    chosen = [
        interfaces().get(name, "")
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        for name in os.environ.get(variable, "").split(",")
    ]
    for address in filter(None, (*chosen, *candidates, *own_addresses())):
        if not is_loopback(address) and _is_own(address):
            return address
    return ""


def _is_own(address: str) -> bool:
    """Whether a socket of this host can listen at a numeric address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def first_reachable(candidates: Sequence[str], port: int) -> str:
    """Return the first of some addresses that takes connections at `port`, else the first."""
    for address in candidates:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), timeout=_TRY_S),
        ):
            return address
    return candidates[0]


def interface_towards(host: str) -> str | None:
    """Return the interface by which this host reaches `host`; None if that cannot be told."""
    try:
        source = _source_address(host)
    except OSError:
        return None
    return next((name for name, address in interfaces().items() if address == source), None)


def _source_address(host: str) -> str:
    """Return the own address from which packets to `host` would leave; sends none."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


@lru_cache(maxsize=1)
def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
