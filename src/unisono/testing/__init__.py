"""For tests of code that runs on many ranks: a pool of ranks, a pytest plugin, and checks.

`@pytest.mark.ranks(2)` runs a test on two ranks; `check_adjoint` and `check_parity` compare an
operator with its adjoint and a parallel layer with one process; `compare` runs a whole training on
one rank and on several, and says what differs first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.testing.adjoint import check_adjoint
    from unisono.testing.comparing import Comparison, compare
    from unisono.testing.parity import Layout, check_parity
    from unisono.testing.pool import RankPool
    from unisono.testing.report import LeakFound, RankFailure
    from unisono.testing.shipping import CannotTravel

_WHERE = {
    "CannotTravel": "shipping",
    "Comparison": "comparing",
    "Layout": "parity",
    "LeakFound": "report",
    "RankFailure": "report",
    "RankPool": "pool",
    "check_adjoint": "adjoint",
    "check_parity": "parity",
    "compare": "comparing",
}

__all__ = [
    "CannotTravel",
    "Comparison",
    "Layout",
    "LeakFound",
    "RankFailure",
    "RankPool",
    "check_adjoint",
    "check_parity",
    "compare",
]


def __getattr__(name: str) -> object:
    # Lazy, because pytest loads the plugin in every run and most runs need neither torch nor ranks.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
