"""The constants of MPI as we spell them, and how mpi4py's own are recognised.

mpi4py is never imported here: its constants are known only where the user has imported it. Our
numbers for "any" and "none" are none of those that an MPI library uses, so both can be passed.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch

from unisono.comm.reductions import defined_ops
from unisono.errors import PartitionError, an, explain

ANY_SOURCE: Final = -1001
"""Receive from whoever sends."""
ANY_TAG: Final = -1002
"""Receive whatever the tag."""
PROC_NULL: Final = -1003
"""Nobody: a message to or from it is complete at once."""
UNDEFINED: Final = -32766
"""Colour of a rank that is in no part of a `Split`."""


class InPlace:
    """Type of `IN_PLACE`: the values to send are already in the receive buffer."""

    def __repr__(self) -> str:
        return "IN_PLACE"


IN_PLACE: Final = InPlace()


@dataclass(frozen=True)
class Op:
    """A reduction, for tensors and for Python objects.

    >>> SUM.reduction, LAND.is_logical, MAX.combine(2, 3)
    ('sum', True, 3)
    """

    name: str
    """Name in MPI."""
    reduction: str
    """Name of the reduction of a `Communicator`; empty where there is none."""
    combine: Callable[[Any, Any], Any] = field(repr=False)
    """The same for two Python objects."""
    is_logical: bool = False
    """Whether values count as true or false."""

    def check(self, dtype: torch.dtype, verb: str) -> None:
        """Refuse what MPI does not define for tensors of `dtype`."""
        if not self.reduction:
            extreme = "MIN" if self.name == "MINLOC" else "MAX"
            raise NotImplementedError(
                explain(
                    f"{verb}(op={self.name})",
                    "reductions of pairs (value, place) are not offered",
                    None,
                    f"Allreduce the values with {extreme}, then the place where yours equals it",
                )
            )
        legal = defined_ops(dtype)
        if not self.is_logical and self.reduction not in legal:
            word = str(dtype).removeprefix("torch.")
            raise PartitionError.because(
                f"{verb}(op={self.name}) of {word}",
                f"defined for {word}: {', '.join(sorted(_names_of(legal)))}",
                None,
                "an integer or bool buffer for bitwise operations, or another op",
            )


SUM = Op("SUM", "sum", operator.add)
PROD = Op("PROD", "product", operator.mul)
MIN = Op("MIN", "min", min)
MAX = Op("MAX", "max", max)
LAND = Op("LAND", "and", lambda a, b: bool(a) and bool(b), is_logical=True)
LOR = Op("LOR", "or", lambda a, b: bool(a) or bool(b), is_logical=True)
LXOR = Op("LXOR", "xor", lambda a, b: bool(a) != bool(b), is_logical=True)
BAND = Op("BAND", "and", operator.and_)
BOR = Op("BOR", "or", operator.or_)
BXOR = Op("BXOR", "xor", operator.xor)
MINLOC = Op("MINLOC", "", min)
MAXLOC = Op("MAXLOC", "", max)

OPS: tuple[Op, ...] = (SUM, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR, BXOR, MINLOC, MAXLOC)


def _names_of(reductions: tuple[str, ...]) -> list[str]:
    return [op.name for op in OPS if op.is_logical or op.reduction in reductions]


def as_op(op: object, verb: str) -> Op:
    """Return `op` as ours; it may be mpi4py's."""
    if isinstance(op, Op):
        return op
    mpi = _mpi4py()
    if mpi is not None and isinstance(op, mpi.Op):
        for ours in OPS:
            if op == getattr(mpi, ours.name):
                return ours
    raise TypeError(
        explain(f"{verb}(op={op!r})", an(type(op).__name__), None, "op=MPI.SUM, MPI.MAX, ...")
    )


def is_in_place(buffer: object) -> bool:
    """Whether `buffer` is `IN_PLACE`, ours or mpi4py's."""
    if buffer is IN_PLACE:
        return True
    mpi = _mpi4py()
    return mpi is not None and buffer is mpi.IN_PLACE


def is_any_source(source: int) -> bool:
    """Whether `source` is `ANY_SOURCE`, ours or mpi4py's."""
    return source == ANY_SOURCE or source == _numbers().get("ANY_SOURCE")


def is_nobody(rank: int) -> bool:
    """Whether `rank` is `PROC_NULL`, ours or mpi4py's."""
    return rank == PROC_NULL or rank == _numbers().get("PROC_NULL")


def is_any_tag(tag: int) -> bool:
    """Whether `tag` is `ANY_TAG`, ours or mpi4py's."""
    return tag == ANY_TAG or tag == _numbers().get("ANY_TAG")


def is_undefined(color: int | None) -> bool:
    """Whether `color` is `UNDEFINED`, ours or mpi4py's."""
    return color is None or color == UNDEFINED or color == _numbers().get("UNDEFINED")


def _mpi4py() -> Any:
    return sys.modules.get("mpi4py.MPI")


def _numbers() -> dict[str, int]:
    mpi = _mpi4py()
    return {} if mpi is None else _numbers_of(mpi)


@cache
def _numbers_of(mpi: Any) -> dict[str, int]:
    return {
        name: getattr(mpi, name) for name in ("ANY_SOURCE", "ANY_TAG", "PROC_NULL", "UNDEFINED")
    }
