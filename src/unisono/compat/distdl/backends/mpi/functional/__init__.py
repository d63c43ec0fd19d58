"""DistDL's `backends.mpi.functional`: movements of data as functions with their adjoints.

Called by hand as `Function.apply(...)`; derivatives of any order work.
"""

from __future__ import annotations

from . import all_sum_reduce, broadcast, halo_exchange, repartition, sum_reduce

__all__ = ["all_sum_reduce", "broadcast", "halo_exchange", "repartition", "sum_reduce"]
