"""Transport for ranks of one host: tensors go through shared memory, not through the network."""

from __future__ import annotations

from unisono.comm.engines.shm.engine import ShmEngine
from unisono.comm.engines.shm.rendezvous import Rendezvous

__all__ = ["Rendezvous", "ShmEngine"]
