"""The backends of torch.distributed: ours, which of them work here, and which one a world uses.

`register()` makes ours known; then `init_process_group("shm")`, `new_group(backend="mpi4py")`, DDP,
FSDP and DTensor use them like gloo.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from torch.distributed import config

from unisono import accelerator
from unisono.comm.arguments import environment_timeout_s
from unisono.comm.engines import core, mpi
from unisono.comm.engines.base import SelfEngine
from unisono.comm.engines.rendezvous import Rendezvous
from unisono.comm.health import watchdog
from unisono.comm.torch.process_group import TransportProcessGroup
from unisono.errors import MissingExtra, PlatformError

NAMES: tuple[str, ...] = ("gloo", "shm", "mpi", *accelerator.BACKENDS)
"""What the platform's `backend` may say."""

_TORCH_NAME = {"mpi": "mpi4py"}
"""Names torch.distributed uses where they differ; it keeps "mpi" for a backend of its own."""


def choose_backend(
    requested: str | None,
    *,
    device: str,
    nodes: int,
    available: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    is_mpi_job: bool = False,
) -> str:
    """Return the backend for a world, as `torch.distributed.init_process_group` wants it.

    Args:
        requested: the platform's `backend`, None for a choice.
        device: kind of device the tensors live on.
        nodes: number of hosts.
        available: for each backend "ok" or why it does not work here.
        environ: `UNISONO_BACKEND` in it goes before our choice, not before `requested`.
        is_mpi_job: whether MPI joins the ranks.

    >>> choose_backend(None, device="cpu", nodes=1, available={"shm": "ok"}, environ={})
    'shm'
    """
    if requested is not None:
        return _checked(requested, f"backend={requested!r}", available)
    if name := environ.get("UNISONO_BACKEND"):
        return _checked(name, f"UNISONO_BACKEND={name}", available)
    if nodes > 1 and is_mpi_job:
        on_cpu = "mpi4py"  # MPI between hosts, shared memory inside one
    else:
        on_cpu = "shm" if available.get("shm") == "ok" else "gloo"
    default = dist.Backend.default_device_backend_map.get(device, "gloo")
    if device == "cpu" or default == "gloo":  # tensors of the device travel through CPU memory
        return on_cpu
    return f"cpu:{on_cpu},{device}:{default}"


def _checked(name: str, source: str, available: Mapping[str, str]) -> str:
    """Return torch's word for `name`, or explain what is wrong with it."""
    if ":" in name:
        return name  # a device map such as cpu:gloo,cuda:nccl, which torch checks itself
    name = "mpi" if name == "mpi4py" else name
    if name not in NAMES and name not in dist.Backend.backend_list:
        near = difflib.get_close_matches(name, NAMES, n=1)
        raise PlatformError.because(
            source,
            f"backends are {', '.join(NAMES)}",
            None,
            f"backend={(near[0] if near else 'gloo')!r}",
        )
    state = available.get(name, "ok")
    if state != "ok" and name == "mpi":
        raise MissingExtra.of("mpi", source, state)
    if state != "ok":
        raise PlatformError.because(
            source, state, None, "leave it out, and one that works is taken"
        )
    return _TORCH_NAME.get(name, name)


def register() -> None:
    """Make the backends known to torch.distributed. Idempotent, local.

    Usually `unisono.autoload` has done it when torch was imported.
    """
    for name in _MAKERS:
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(
                name, partial(create, name), extended_api=True, devices=["cpu"]
            )


def create(name: str, options: Any, _: Any) -> Any:
    """Make a group of one of our backends for torch.distributed, from its backend options."""
    group = _MAKERS[name](
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.global_ranks_in_group,
        str(options.group_id),
    )
    if isinstance(group, TransportProcessGroup):
        group.is_for_torch = True
    return group


def make_shm_group(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: Sequence[int] = (),
    name: str = "",  # noqa: ARG001
) -> Any:
    """Make a group of ranks that share memory, or talk over gloo where they cannot. Collective.

    Args:
        store: where the ranks meet.
        rank: own rank in the group.
        size: ranks of the group.
        timeout: deadline of making the group, and of each call.
        ranks: world ranks of the group; empty means 0 to `size` - 1.
        name: name of the group.
    """
    deadline_s = environment_timeout_s()
    ranks = tuple(ranks) or tuple(range(size))
    if size == 1:
        prefixed = dist.PrefixStore("shm/alone", store)
        return TransportProcessGroup(SelfEngine(), ranks, timeout, "shm", deadline_s, prefixed)
    rendezvous = Rendezvous(dist.PrefixStore("shm", store), rank, ranks, timeout.total_seconds())
    rendezvous.introduce()
    engine = rendezvous.share_memory()
    prefixed = dist.PrefixStore(f"shm/{rendezvous.nonce}", store)
    group: Any
    if engine is None:
        group = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    else:
        group = TransportProcessGroup(engine, ranks, timeout, "shm", deadline_s, prefixed)
    rendezvous.clean()
    if not dist.is_initialized():
        watchdog.ensure_soon()  # others may wait for this rank before it makes a call
    return group


_MAKERS: dict[str, Callable[..., Any]] = {"shm": make_shm_group, "mpi4py": mpi.make_group}
"""How groups of our backends are made, by torch's names."""


class _Available(Mapping[str, str]):
    """Looks for a transport when it is asked for: to look for MPI loads its library."""

    def __init__(self) -> None:
        self._obstacle = _taken_by_torchcomms()

    def __getitem__(self, name: str) -> str:
        reason = self._obstacle or _LOOKS[name]()
        if reason is None:
            return "ok"
        return f"{reason}; tensors go over gloo instead" if name == "shm" else reason

    def __iter__(self) -> Iterator[str]:
        return iter(_LOOKS)

    def __len__(self) -> int:
        return len(_LOOKS)


_LOOKS: dict[str, Callable[[], str | None]] = {"shm": core.unavailable, "mpi": mpi.unavailable}
"""What tells why a transport is not to be had."""


def available() -> Mapping[str, str]:
    """Return for each transport "ok", or why it is not to be had here."""
    return _Available()


def _taken_by_torchcomms() -> str | None:
    """Return why torch would not come to us for a group, if it would not."""
    if config.use_torchcomms and find_spec("torchcomms") is not None:
        return "TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 has torchcomms make all groups"
    return None
