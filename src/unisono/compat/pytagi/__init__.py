"""pytagi's names: `from unisono.compat.pytagi.nn import Linear, Sequential`.

The same classes as in `unisono.bayes`. Imports inside the package are relative, so the tree also
works when it is registered as `pytagi`.
"""

from __future__ import annotations

from typing import NoReturn

from unisono.bayes import (
    HRCSoftmax,
    HRCSoftmaxMetric,
    Normalizer,
    Utils,
    exponential_scheduler,
    manual_seed,
)

from . import cuda, metric, nn, tagi_utils

__version__ = "0.2.1"
"""The release of pytagi whose names these are."""

__all__ = [
    "HRCSoftmax",
    "HRCSoftmaxMetric",
    "Normalizer",
    "Utils",
    "cuda",
    "exponential_scheduler",
    "manual_seed",
    "metric",
    "nn",
    "tagi_utils",
]


def __getattr__(name: str) -> NoReturn:
    """Say what is not offered."""
    raise AttributeError(
        f"{__name__} has no {name!r}: it offers {', '.join(__all__)}\n"
        "  HINT: layers are in pytagi.nn; everything that is offered is in unisono.bayes"
    )
