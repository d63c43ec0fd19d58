"""Copies of DASO, by deepcopy or pickle: the same state, and groups of ranks of their own.

A copy meets the other ranks when it is first used, so a file can be loaded on any rank by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from unisono.data_parallel.daso_arguments import node_layout
from unisono.data_parallel.daso_exchange import NodeExchange
from unisono.data_parallel.daso_facade import DasoFacade
from unisono.data_parallel.daso_local import LocalStep
from unisono.data_parallel.ranks import communicator_of

__all__ = ["DasoCopies"]

Self = TypeVar("Self", bound="DasoCopies")

_CONNECTED = ("exchange", "local", "reduced_ranks")


class DasoCopies(DasoFacade):
    """The part of DASO that ties it to ranks, now or later."""

    module: nn.Module | None
    reduced_ranks: tuple[tuple[int, ...], ...]
    """Ranks of each global group."""
    is_foreign: bool
    """Whether the exchange in flight came from another rank."""
    must_agree: bool
    """Whether ranks compare themselves before the next batch."""
    _ranks_per_node: int | Sequence[int] | None
    _unconnected: tuple[NodeExchange, LocalStep, int, int]
    """In a copy that was not yet used: its parts, and rank and size where it was made."""

    def _connect(self, exchange: NodeExchange, local: LocalStep) -> None:
        """Find the nodes and make their groups. Collective over `comm`."""
        layout = node_layout(self.communicator, self._ranks_per_node)
        exchange.connect(self.communicator, layout)
        local.node = exchange.node
        self.exchange, self.local, self.reduced_ranks = exchange, local, layout.groups

    def __getattr__(self, name: str) -> Any:
        """Connect a copy that is used for the first time; else see `DasoFacade`."""
        if name not in _CONNECTED or "_unconnected" not in self.__dict__:
            return super().__getattr__(name)
        exchange, local, rank, size = self._unconnected
        self._connect(exchange, local)
        if self.module is not None:
            exchange.take(self.module)
        here = self.communicator
        self.is_foreign = exchange.in_flight is not None and (rank, size) != (here.rank, here.size)
        del self._unconnected
        return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        parts = (self.exchange, self.local, self.communicator.rank, self.communicator.size)
        ours = ("comm", "communicator", *_CONNECTED)
        rest = {name: value for name, value in self.__dict__.items() if name not in ours}
        return {**rest, "must_agree": True, "_unconnected": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.comm = self.communicator = communicator_of(None)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin.comm, twin.communicator = self.comm, self.communicator
        return twin
