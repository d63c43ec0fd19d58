"""The way to ranks on other hosts: gloo groups, whose connections are made when first used.

Everything travels as bytes, so every dtype does. Errors of gloo become `RankFailed` and
`RankTimeout`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.torch_engine import TorchTicket, bytes_of
from unisono.errors import RankFailed, RankTimeout


class Network:
    """Gloo groups among ranks of one group.

    Args:
        store: store of the group.
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
        timeout_s: deadline of making a connection.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], Any] = {}
        self._making = threading.Lock()
        self.waited_ns = 0
        """Time spent in waits so far, the transfers themselves included."""

    def group(self, members: tuple[int, ...]) -> Any:
        """Return the gloo group of these ranks; each must ask for it before they can talk."""
        with self._making:
            group = self._groups.get(members)
            if group is None:
                name = "gloo/" + "_".join(map(str, members))
                options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = self._timeout
                options._devices = _devices()
                group = dist.ProcessGroupGloo(
                    dist.PrefixStore(name, self._store),
                    members.index(self._rank),
                    len(members),
                    options,
                )
                self._groups[members] = group
            return group

    def swap(
        self,
        members: tuple[int, ...],
        outs: Sequence[Tensor],
        ins: Sequence[Tensor],
        timeout_s: float,
    ) -> None:
        """All-to-all among `members`: `outs[i]` becomes what member `i` has for this rank."""
        received = [out.numel() * out.element_size() for out in outs]
        sent = [block.numel() * block.element_size() for block in ins]
        send = torch.cat([bytes_of(block) for block in ins])
        receive = send.new_empty(sum(received))
        with self.translating("exchange between hosts", members, timeout_s):
            work = self.group(members).alltoall_base(
                receive, send, received, sent, dist.AllToAllOptions()
            )
            self._wait(work, timeout_s)
        for out, block in zip(outs, receive.split(received), strict=True):
            if out.numel():
                bytes_of(out).copy_(block)

    def spread(self, members: tuple[int, ...], x: Tensor, src: int, timeout_s: float) -> None:
        """Broadcast `x` of `members[src]` to all `members`."""
        if x.numel() == 0:
            return
        with self.translating("broadcast between hosts", members, timeout_s):
            options = dist.BroadcastOptions()
            options.rootRank = src
            work = self.group(members).broadcast([bytes_of(x)], options)
            self._wait(work, timeout_s)

    def _wait(self, work: dist.Work, timeout_s: float) -> None:
        before = time.perf_counter_ns()
        TorchTicket([work]).wait(timeout_s)
        self.waited_ns += time.perf_counter_ns() - before

    @contextlib.contextmanager
    def translating(self, what: str, members: Sequence[int], timeout_s: float) -> Iterator[None]:
        """Turn errors of gloo into ours."""
        others = [self._ranks[r] for r in members if r != self._rank]
        try:
            yield
        except (RankFailed, RankTimeout):
            raise
        except TimeoutError as error:
            raise RankTimeout(
                f"{what} on rank {self._ranks[self._rank]} timed out after {timeout_s:g} s\n"
                f"  with ranks {others}",
                missing=others,
                op=what,
            ) from error
        except RuntimeError as error:
            raise RankFailed(
                f"{what} on rank {self._ranks[self._rank]} broke off: one of ranks {others} "
                f"has gone\n  gloo says: {error}",
                rank=others[0] if len(others) == 1 else None,
            ) from error

    def close(self) -> None:
        """Close all connections."""
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()


def _devices() -> list[Any]:
    """Return the network devices that torch would take, set to connect two ranks at first use."""
    gloo = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [gloo.create_default_device(lazy_init=True)]
    return [gloo.create_device(interface=name, lazy_init=True) for name in names]
