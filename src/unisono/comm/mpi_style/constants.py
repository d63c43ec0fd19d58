"""The constants of MPI as we spell them, and how mpi4py's own are recognised.

mpi4py is never imported here: its constants are known only where the user has imported it. Our
numbers for "any" and "none" differ from those of every MPI library, so both can be passed.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from unisono.comm.reductions import check_op
from unisono.errors import an, explain

ANY_SOURCE: Final = -1001
"""Receive from any rank."""
ANY_TAG: Final = -1002
"""Receive whatever the tag."""
PROC_NULL: Final = -1003
"""No rank: a message to or from it is complete at once."""
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
    """Name of the reduction of a `Communicator`; empty without one."""
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
        if not self.is_logical:
            check_op(self.reduction, dtype)


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


def _mpi4py() -> Any:
    return sys.modules.get("mpi4py.MPI")


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
    mpi = _mpi4py()
    return buffer is IN_PLACE or (mpi is not None and buffer is mpi.IN_PLACE)


def _is_constant(name: str, ours: int, value: object) -> bool:
    mpi = _mpi4py()
    return value == ours or (mpi is not None and value == getattr(mpi, name))


# Whether a number is that constant, ours or mpi4py's.
is_any_source = partial(_is_constant, "ANY_SOURCE", ANY_SOURCE)
is_any_tag = partial(_is_constant, "ANY_TAG", ANY_TAG)
is_proc_null = partial(_is_constant, "PROC_NULL", PROC_NULL)
is_undefined = partial(_is_constant, "UNDEFINED", UNDEFINED)


def Init() -> None:
    """Do nothing: ranks meet at the first verb."""


def Finalize() -> None:
    """Do nothing: the world is closed by all ranks together, when they end."""


def __getattr__(name: str) -> Any:
    """Return what else programs of this style find in `mpi4py.MPI`: this module is our `MPI`."""
    if name in _ELSEWHERE:
        module, _, attribute = _ELSEWHERE[name].partition(":")
        return getattr(importlib.import_module(f"unisono.comm.mpi_style.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_ELSEWHERE = {
    "COMM_WORLD": "communication:MPI_WORLD",
    "COMM_SELF": "communication:MPI_SELF",
    "Comm": "communication:MPICommunication",
    "Request": "messages:Request",
    "Status": "messages:Status",
}
