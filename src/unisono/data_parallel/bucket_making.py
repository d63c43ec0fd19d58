"""Makes the buckets of a module: where they lie and how large they grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.data_parallel.buckets import plan_buckets
from unisono.data_parallel.gradient_bucket import GradientBucket

NETWORK_MB = 25.0
"""Largest bucket where gradients pass through sockets or between GPUs."""

SHARED_MEMORY_MB = 1024.0
"""Largest bucket in shared memory: reduced in place at the end of backward, so few are best."""


def make_buckets(
    named: Sequence[tuple[str, nn.Parameter]], comm: Communicator, bucket_mb: float | None
) -> list[GradientBucket]:
    """Return the buckets of these parameters. Collective over `comm`: memory may be shared.

    Args:
        named: names and parameters with dense gradients.
        comm: the ranks that average.
        bucket_mb: largest bucket; None: by transport.
    """
    is_shared = comm.backend == "shm"

    def memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu" and is_shared:
            return comm.shared_buffer((numel,), dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    if bucket_mb is None:
        bucket_mb = SHARED_MEMORY_MB if is_shared else NETWORK_MB
    sizes = [(p.numel() * p.element_size(), (p.device, p.dtype)) for _, p in named]
    buckets: list[GradientBucket] = []
    for index, members in enumerate(plan_buckets(sizes, bucket_mb * 2**20)):
        names, params = zip(*(named[i] for i in members), strict=True)
        buckets.append(GradientBucket(index, names, params, memory))
    return buckets
