"""DistDL's `backends.mpi.compare`: are two communicators or groups the same, or nobody's."""

from __future__ import annotations

from typing import Any

from .nulls import mpi4py, null_rank


def check_identical_comm(c1: Any, c2: Any) -> bool:
    """Return whether two communicators are the same one. Nobody's is unlike any."""
    if check_null_comm(c1) or check_null_comm(c2):
        return False
    mpi = mpi4py()
    if mpi is not None and isinstance(c1, mpi.Comm) and isinstance(c2, mpi.Comm):
        return mpi.Comm.Compare(c1, c2) == mpi.IDENT
    return bool(c1 == c2)


def check_identical_group(g1: Any, g2: Any) -> bool:
    """Return whether two groups hold the same ranks in the same order. Nobody's is unlike any."""
    if check_null_group(g1) or check_null_group(g2):
        return False
    mpi = mpi4py()
    if mpi is not None and isinstance(g1, mpi.Group) and isinstance(g2, mpi.Group):
        return mpi.Group.Compare(g1, g2) == mpi.IDENT
    return bool(g1 == g2)


def check_null_comm(c: Any) -> bool:
    """Return whether this is the communicator of nobody."""
    mpi = mpi4py()
    return c is None or (mpi is not None and isinstance(c, mpi.Comm) and c == mpi.COMM_NULL)


def check_null_group(g: Any) -> bool:
    """Return whether this is the group of nobody."""
    mpi = mpi4py()
    return g is None or (mpi is not None and isinstance(g, mpi.Group) and g == mpi.GROUP_NULL)


def check_null_rank(r: int) -> bool:
    """Return whether this is the rank of nobody."""
    return r == null_rank()
