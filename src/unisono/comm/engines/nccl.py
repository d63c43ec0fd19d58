"""The nccl group beside a transport's group: CUDA tensors of the same ranks go there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


class NcclBeside:
    """Makes an nccl group of the same ranks when it is first asked for.

    Args:
        store: store of the group, under a prefix of this group alone.
        rank: own rank in the group.
        size: ranks of the group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._group: Any = None

    def group(self, timeout: timedelta) -> Any:
        """Return the nccl group. Collective over the ranks when it is made."""
        if self._group is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(
                dist.PrefixStore("nccl", self._store), self._rank, self._size, options
            )
        return self._group

    def shutdown(self) -> None:
        """End the group, if there is one."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None
