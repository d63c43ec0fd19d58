"""Silent mistakes of a training by torch's own wrappers, looked for in check mode.

`DistributedDataParallel` is followed by hooks from its construction on, and compared as our
`DataParallel` is: at the end of a backward, which is collective. Parameters that are sharded
(FSDP2) cannot be compared; the settings of their optimizer can.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unisono.comm import Communicator
from unisono.comm.health import check
from unisono.data_parallel.replicas import ReplicaCheck, plain_settings, unlike_settings
from unisono.errors import LayoutError, explain
from unisono.operators.gradients import BackwardWatch, tensors_in
from unisono.torch_private import is_joining


def follow(ddp: DistributedDataParallel) -> None:
    """Compare the replicas of `ddp` from now on, as long as check mode is on. Local."""
    followed = _Followed(ddp)
    ddp.register_forward_pre_hook(followed.before_forward, with_kwargs=True)
    ddp.register_forward_hook(followed.after_forward)


class _Followed:
    """One module of torch's, from its construction on."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._step = 0
        self._backward = BackwardWatch()

    @cached_property
    def _replicas(self) -> ReplicaCheck:
        ddp = cast(DistributedDataParallel, self._ddp())  # it has its module by now
        return ReplicaCheck(ddp.module, "DistributedDataParallel")

    def before_forward(
        self, ddp: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Look at a batch. Local."""
        if self._is_watching(ddp):
            self._replicas.see_forward((inputs, named))

    def after_forward(self, ddp: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Wait for the backward of what a forward has returned. Local."""
        if self._is_watching(ddp):
            self._replicas.end_forward()
            for x in tensors_in(outputs, objects=4):
                if x.grad_fn is not None:
                    x.register_hook(self._begin_backward)

    def _is_watching(self, ddp: nn.Module) -> bool:
        trains = check.active and ddp.training and torch.is_grad_enabled()
        return trains and not torch.compiler.is_compiling() and not is_joining(ddp)

    def _begin_backward(self, _gradient: Tensor) -> None:
        if not self._backward.is_running:
            self._backward.begin(self._end_backward)

    def _end_backward(self) -> None:
        """Compare this rank with the others. Collective over DDP's ranks."""
        self._replicas.backwards += 1
        ddp = self._ddp()
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        comm = Communicator.of(ddp.process_group)
        if comm.size > 1:
            self._step += 1
            self._replicas.compare(comm, self._step)


def compare_settings(optimizer: torch.optim.Optimizer) -> None:
    """Raise where ranks step sharded parameters with different settings. Collective over them."""
    sharded = [p for group in optimizer.param_groups for p in group["params"]]
    mesh = next(p for p in sharded if isinstance(p, DTensor)).device_mesh
    comm = Communicator.of(mesh.get_group(0))
    settings = [plain_settings(group) for group in optimizer.param_groups]
    number = zlib.crc32(json.dumps(settings, sort_keys=True).encode())
    if len(set(comm.all_gather_ints([number]))) == 1:
        return
    everywhere = comm.all_gather_object(settings)
    raise LayoutError(
        explain(
            f"a step of sharded parameters on {comm.size} ranks",
            unlike_settings(everywhere, comm) or "the settings of the optimizer differ",
            None,
            "the same optimizer settings on all ranks",
        )
    )
