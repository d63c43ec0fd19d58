"""The way to ranks on other hosts: gloo groups, made when they are first needed.

Everything travels as bytes, so every dtype does. Errors of gloo become `RankFailed` and
`RankTimeout`.
"""

from __future__ import annotations

import contextlib
import threading
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

    def group(self, members: tuple[int, ...]) -> Any:
        """Return the gloo group of these ranks. Collective over them when it is first asked for."""
        with self._making:
            group = self._groups.get(members)
            if group is None:
                name = "gloo/" + "_".join(map(str, members))
                group = dist.ProcessGroupGloo(
                    dist.PrefixStore(name, self._store),
                    members.index(self._rank),
                    len(members),
                    self._timeout,
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
            TorchTicket([work]).wait(timeout_s)
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
            TorchTicket([work]).wait(timeout_s)

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
