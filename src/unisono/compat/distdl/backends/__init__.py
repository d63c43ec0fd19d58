"""DistDL's `backends`. There is one, named after MPI; MPI is one of the networks it runs on."""

from __future__ import annotations

from . import mpi

__all__ = ["mpi"]
