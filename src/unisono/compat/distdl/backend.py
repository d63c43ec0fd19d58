"""DistDL's `backend`: the back end in use."""

from __future__ import annotations

from .backends import mpi as backend

__all__ = ["backend"]
