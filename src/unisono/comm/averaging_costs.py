"""What averaging gradients has cost in this process, and the ledger in which a record keeps it.

Whoever averages adds to an `AveragingCosts` of its own. Without an open ledger these are only known
weakly; an open one holds the numbers, so that those of a module that is gone are not lost. Neither
ever holds the module.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

_ADDED_UP = ("steps", "bytes", "wait_backward_s", "wait_forward_s")


@dataclass(eq=False)
class AveragingCosts:
    """Running totals of one module on this rank."""

    module: str
    """Class of the module."""
    ranks: int
    """How many ranks average."""
    buckets: int = 0
    """How many messages a step has."""
    steps: int = 0
    bytes: int = 0
    wait_backward_s: float = 0.0
    wait_forward_s: float = 0.0


class CostLedger:
    """The costs of all modules that live while it is open, from its opening on."""

    def __init__(self) -> None:
        self._held = [(costs, replace(costs)) for costs in _living.values()]

    def add(self, costs: AveragingCosts) -> None:
        """Hold these as well; they begin now."""
        self._held.append((costs, replace(costs)))

    def rows(self) -> list[dict[str, Any]]:
        """Return the costs since the opening, one row a module that had any, oldest first."""
        since = [
            (now, {name: getattr(now, name) - getattr(before, name) for name in _ADDED_UP})
            for now, before in self._held
        ]
        return [asdict(now) | costs for now, costs in since if any(costs.values())]


ledger: CostLedger | None = None
"""The ledger of the record that is open; None when nothing is recorded."""
_living: WeakValueDictionary[int, AveragingCosts] = WeakValueDictionary()
_numbers = itertools.count()


def announce(costs: AveragingCosts) -> AveragingCosts:
    """Make costs known to the record that is open and to those opened later; return them."""
    _living[next(_numbers)] = costs
    if ledger is not None:
        ledger.add(costs)
    return costs
