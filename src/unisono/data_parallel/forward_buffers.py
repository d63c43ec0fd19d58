"""Buffers of a module (running means and the like) kept in step: one message before a forward."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.data_parallel.construction import distinct, on_device


class BufferBroadcast:
    """Copies one rank's buffers to all ranks, all dtypes in one message a device."""

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self._module = module
        self._comm = comm

    @torch.no_grad()
    def run(self, src: int = 0) -> int:
        """Overwrite all buffers with those of rank `src`; returns bytes sent. Collective."""
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        seen: set[int] = set()
        for part in self._module.modules():
            for buffer in part._buffers.values():
                if buffer is not None and buffer.numel() and id(buffer) not in seen:
                    seen.add(id(buffer))
                    by_device[buffer.device].append(distinct(buffer))
        sent = 0
        for device, buffers in by_device.items():
            # Wide elements first: each part then begins where its dtype may begin.
            buffers.sort(key=lambda x: -x.element_size())
            flat = torch.cat([x.reshape(-1).view(torch.uint8) for x in buffers])
            on_device(self._comm, device).broadcast_(flat, src)
            sent += flat.numel()
            if self._comm.rank != src:
                sizes = [x.numel() * x.element_size() for x in buffers]
                for x, part in zip(buffers, flat.split(sizes), strict=True):
                    x.copy_(part.view(x.dtype).view(x.shape))
        return sent
