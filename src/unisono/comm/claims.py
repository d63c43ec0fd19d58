"""Which wrapper brings the gradients of a parameter together: two over the same ranks are refused.

Each would sum or average what the other has summed, and gradients would be wrong by a factor.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from unisono.errors import LayoutError, an

_claims = WeakIdKeyDictionary()
"""For each parameter the wrappers that look after it, with the world ranks of each."""


def check_unclaimed(parameters: Iterable[Tensor], wrapper: object, ranks: Iterable[int]) -> None:
    """Refuse parameters that a wrapper of the same kind, or over some of the same ranks, has."""
    members, listed = frozenset(ranks), list(parameters)
    if _conflict(listed, wrapper, members) is None:
        return
    gc.collect()  # one that was deleted may live on in a cycle of references
    if (conflict := _conflict(listed, wrapper, members)) is not None:
        place, other, theirs = conflict
        raise LayoutError.because(
            f"{type(wrapper).__name__} of a module with {len(listed)} parameters",
            f"{an(type(other).__name__)} over {len(theirs)} ranks brings the gradient of "
            f"parameter {place} together already, so it would be summed twice",
            None,
            f"wrap the module once; `del` the {type(other).__name__} before another one",
        )


def _conflict(
    parameters: list[Tensor], wrapper: object, ranks: frozenset[int]
) -> tuple[int, object, frozenset[int]] | None:
    """Return the place of the first parameter with another wrapper, that wrapper, and its ranks."""
    for place, p in enumerate(parameters):
        for other, theirs in _holders(p):
            is_alike = type(other) is type(wrapper) or len(ranks & theirs) > 1
            if other is not wrapper and is_alike:
                return place, other, theirs
    return None


def claim(parameters: Iterable[Tensor], wrapper: object, ranks: Iterable[int]) -> None:
    """Note that `wrapper` brings gradients together over `ranks`, as long as it lives."""
    listed, members = list(parameters), frozenset(ranks)
    check_unclaimed(listed, wrapper, members)
    for p in listed:
        if not any(other is wrapper for other, _ in _holders(p)):
            _claims[p] = [*(_claims.get(p) or []), (weakref.ref(wrapper), members)]


def is_claimed(p: Tensor, kind: type) -> bool:
    """Whether a wrapper of this class looks after a parameter."""
    return any(isinstance(other, kind) for other, _ in _holders(p))


def _holders(p: Tensor) -> list[tuple[object, frozenset[int]]]:
    living = [(other(), ranks) for other, ranks in (_claims.get(p) or [])]
    return [(other, ranks) for other, ranks in living if other is not None]
