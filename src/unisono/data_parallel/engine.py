"""The gradient engine: averages the gradients of a module over ranks while backward runs.

Gradients live in flat buckets, each averaged by one collective (`averaging.py`). The engine hears
of every gradient by a hook, files it, and starts buckets in the same order on all ranks. Wrappers
call `before_forward` and `after_forward`; everything else happens by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.comm import Communicator
from unisono.comm.health.trace import AveragingCosts, announce
from unisono.comm.torch.private import runs_uncompiled
from unisono.data_parallel import hooks
from unisono.data_parallel.autograd_graph import reached_leaves, tensors_in
from unisono.data_parallel.bucket_making import make_buckets
from unisono.data_parallel.buckets import Bucket
from unisono.data_parallel.compression import UserFunction, averaging_for
from unisono.data_parallel.construction import check_same_module, on_device
from unisono.data_parallel.forward_buffers import BufferBroadcast
from unisono.data_parallel.gradient_bucket import GradientBucket
from unisono.data_parallel.naming import BACKWARDS, Unfinished, named
from unisono.data_parallel.sparse import SparseParameters, sparse_parameters
from unisono.data_parallel.stats import Stats
from unisono.data_parallel.structure import Structure
from unisono.data_parallel.under_way import UnderWay

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class GradientEngine:
    """Averages gradients of `module` over `comm` in backward.

    Making one is collective over `comm` (buckets may lie in shared memory). In a world of one it
    does nothing at all.

    Args:
        module: gradients of its trainable parameters are averaged.
        comm: the ranks.
        bucket_mb: largest bucket; None: by transport.
        compression: see `compression.py`.
        broadcast_buffers: whether rank 0's buffers go to all before a synchronising forward.
        find_unused: whether to look for unused parameters after forward, so that they do not hold
            up their bucket. Results do not depend on it.
        blocking: whether gradients are complete when `backward()` returns. Else whoever needs
            them waits for their buckets `under_way`.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        bucket_mb: float | None = None,
        compression: object = None,
        broadcast_buffers: bool = True,
        find_unused: bool = False,
        blocking: bool = True,
    ) -> None:
        self.module = module
        self.comm = comm
        self.blocking = blocking
        self.find_unused = find_unused
        self.require_sync = True
        """Whether backward averages; False: it only accumulates locally."""
        self.averaging = averaging_for(compression, comm, blocking=blocking)
        self.on_attach: Callable[[], object] | None = None
        """Called when buckets were made again."""
        self.on_reuse: Callable[[], object] | None = None
        """Called before a backward may change gradients, instead of waiting for all buckets."""
        self.weigh: Callable[[], float | None] | None = None
        """Gives the weight of this rank's gradients in a backward; None: all ranks' are equal."""
        self.options: tuple[object, ...] = (bucket_mb, compression, broadcast_buffers, find_unused)
        """What ranks must agree on."""
        self._bucket_mb = bucket_mb
        self._buckets: list[GradientBucket] = []
        self._hooks: list[RemovableHandle] = []
        self._buffers = BufferBroadcast(module, comm) if broadcast_buffers else None
        self._sparse = SparseParameters([])
        self._structure: Structure | None = None
        self._costs = AveragingCosts(type(module).__name__, comm.size)
        self.under_way = UnderWay(self.averaging, self._costs, in_backward=blocking)
        """Buckets that were started and not yet waited for."""
        self._on_output = hooks.on_output(self)
        self._in_backward = self._got_any = self._syncing = self._walked = False
        self._weight: float | None = None
        self._factor: float | None = None
        self._next = 0
        self._late: set[int] = set()
        self.attach()
        if comm.size > 1:
            announce(self._costs)

    # -- set-up ---------------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What each bucket holds, in the order in which they travel."""
        return tuple(bucket.info for bucket in self._buckets)

    @property
    def gradient_buckets(self) -> Sequence[GradientBucket]:
        """The buckets with their memory."""
        return self._buckets

    def stats(self) -> Stats:
        """Return what averaging has cost this rank so far."""
        costs = self._costs
        return Stats(
            steps=costs.steps,
            bytes=costs.bytes,
            wait_backward_s=costs.wait_backward_s,
            wait_forward_s=costs.wait_forward_s,
            buckets=self.buckets,
        )

    def attach(self) -> None:
        """Make buckets for the module as it is now. Collective over `comm`."""
        self.detach()
        if self.comm.size == 1:
            return
        sparse = sparse_parameters(self.module)
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        dense = [(name, p) for name, p in named if id(p) not in sparse]
        self._sparse = SparseParameters([p for _, p in named if id(p) in sparse])
        self._buckets = make_buckets(dense, self.comm, self._bucket_mb)
        self._costs.buckets = len(self._buckets)
        if isinstance(self.averaging, UserFunction):
            self.averaging.bucket_count = len(self._buckets)
        self._attach_hooks()
        if self.on_attach is not None:
            self.on_attach()
        self.note_structure()

    def _attach_hooks(self) -> None:
        add = self._hooks.append
        for bucket in self._buckets:
            for i, param in enumerate(bucket.params):
                hook = hooks.on_arrival(self, bucket, i)
                add(param.register_post_accumulate_grad_hook(hook))
                add(param.register_hook(hooks.before_arrival(self, bucket, i)))
        for i, param in enumerate(self._sparse.params):
            add(param.register_post_accumulate_grad_hook(hooks.on_sparse_arrival(self, i)))

    def detach(self) -> None:
        """Remove all hooks; gradients stay where they are. Local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()
        self.under_way.forget()
        self._structure = None
        self._in_backward = False

    def note_structure(self) -> None:
        """Take the module as it is for unchanged. Local."""
        self._structure = Structure(self.module)

    def has_changed(self) -> bool:
        """Whether parameters were added, moved, frozen or unfrozen since `attach`. Local."""
        return self._structure is not None and self._structure.has_changed()

    def rebuild(self) -> None:
        """Make buckets again after the module has changed. Collective over `comm`."""
        self._settle()
        check_same_module(self.module, self.comm, self.options)
        self.attach()

    def close(self) -> None:
        """Complete what is under way and remove all hooks. Local."""
        try:
            self.under_way.wait_all()
        finally:
            self.detach()

    def __del__(self) -> None:
        """Leave no hooks behind."""
        if hasattr(self, "_hooks"):
            self.detach()

    # -- forward --------------------------------------------------------------------------------

    @runs_uncompiled
    def before_forward(self, src: int = 0, *, shadowing: bool = False) -> None:
        """Begin a forward; wrappers call it first. Collective when training with gradients.

        Rebuilds the buckets of a module that has changed, and broadcasts buffers.

        Args:
            src: rank whose buffers all get.
            shadowing: take part in the other ranks' forward, whatever this one's mode is.
        """
        trains = self.module.training and torch.is_grad_enabled()
        if self.comm.size == 1 or not (trains or shadowing):
            return
        if self._in_backward:
            self._abandon_backward()
        if self.has_changed():
            self.rebuild()
        else:
            for bucket in self._buckets:
                bucket.take_back()
        if self._buffers is not None and self.require_sync:
            try:
                self._costs.bytes += self._buffers.run(src)
            except Unfinished as error:
                raise named(error, "buffers, before a forward") from None

    @runs_uncompiled
    def after_forward(self, outputs: Any) -> None:
        """End a forward; wrappers call it with what the module returned. Local."""
        if not self._hooks or not torch.is_grad_enabled():
            return
        tensors = [x for x in tensors_in(outputs) if x.requires_grad]
        for x in tensors:
            # Heard in the outermost backward, so that one inside a checkpoint does not end it.
            x.register_hook(self._on_output)
        if self.find_unused and self.require_sync:
            reached = reached_leaves(tensors)
            for bucket in self._buckets:
                idle = {i for i, p in enumerate(bucket.params) if id(p) not in reached}
                bucket.came = bucket.came & idle if self._walked else idle
            self._walked = True

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Notice that a backward has begun. Local."""
        if not self._in_backward:
            self._in_backward = True
            self._settle()
            _queue_callback(self._end_of_backward)

    def make_room(self, bucket: GradientBucket, i: int) -> None:
        """Prepare member `i` of `bucket` for a gradient that is about to be added to it."""
        if bucket in self.under_way:
            self._settle()
        if self._in_backward and i in bucket.came:  # the second in one backward
            if bucket.index < self._next:
                self._late.add(bucket.index)
            else:
                bucket.take_weight_off(i, self._factor)

    def receive(self, bucket: GradientBucket, i: int) -> None:
        """Take in member `i` of `bucket`, whose gradient has just been accumulated."""
        if not self._got_any:
            self.begin_backward()
            self._begin_gradients()
        bucket.used[i] = True
        bucket.came.add(i)
        if not bucket.is_small[i]:
            bucket.file_large(i, self._factor)
        if len(bucket.came) == len(bucket.params) and self._syncing and self.averaging.eager:
            self._launch_full()

    def receive_sparse(self, i: int) -> None:
        """Note that the `i`-th parameter with sparse gradients got one."""
        if not self._got_any:
            self.begin_backward()
            self._begin_gradients()
        self._sparse.used[i] = True

    def _begin_gradients(self) -> None:
        """Decide how the gradients of this backward count. Collective where ranks have weights."""
        self._got_any = True
        self._syncing = self.require_sync
        self._factor = None
        if self._syncing:
            self.comm.count(BACKWARDS)
            self._weight = self.weigh() if self.weigh is not None else None
            self._factor = self.averaging.factor(self._weight, self.comm.size)

    def _launch_full(self) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if len(bucket.came) < len(bucket.params):
                return
            self._launch(bucket)

    def _launch(self, bucket: GradientBucket) -> None:
        """Put everything in its place and start the bucket. Collective."""
        self._next = max(self._next, bucket.index + 1)
        bucket.fill(self._factor)
        self.under_way.start(bucket, on_device(self.comm, bucket.info.device))

    def _end_of_backward(self) -> None:
        """All gradients of a backward are there (a callback of the autograd engine)."""
        if self._got_any and self._syncing:
            self.launch_rest()
            return
        if self._got_any:
            for bucket in self._buckets:
                bucket.gather(remember=False)
        self._end()

    @property
    def holds_unsent(self) -> bool:
        """Whether gradients lie here that `no_sync` has accumulated and no backward has sent."""
        dense = [x for b in self._buckets for x in zip(b.used, b.params, strict=True)]
        sparse = zip(self._sparse.used, self._sparse.params, strict=True)
        return any(used and param.grad is not None for used, param in (*dense, *sparse))

    def shadow_backward(self, brings: bool) -> None:
        """Take part in the other ranks' backward. Collective over `comm`.

        Args:
            brings: whether with the gradients that lie here; else without any.
        """
        self._settle()
        if not brings:
            self._forget_gradients()
        self._begin_gradients()
        self.launch_rest()
        self.under_way.wait_all()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for bucket in self._buckets:
            for param in bucket.params:
                param.grad = None
        for param in self._sparse.params:
            param.grad = None

    def deliver(self, bucket: GradientBucket, i: int, grad: Tensor) -> None:
        """File a gradient that does not come through autograd; starts full buckets. Collective."""
        if not self._got_any:
            self._settle()
            self._in_backward = True
            self._begin_gradients()
        bucket.params[i].grad = grad.detach().clone()
        bucket.used[i] = True
        bucket.came.add(i)
        self._launch_full()
        if self._next == len(self._buckets):
            self.launch_rest()

    def launch_rest(self) -> None:
        """Start every bucket not yet under way; in blocking mode, wait for all. Collective."""
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        for index in sorted(self._late):
            self.under_way.wait(self._buckets[index])
            self._launch(self._buckets[index])
        self.under_way.proceed()
        if not self.averaging.carries_flags:
            self._add_flags()
        self.averaging.end_step()
        weight = 1.0 / self.comm.size if self._weight is None else self._weight
        self._costs.bytes += self._sparse.average(self.comm, weight)
        self._costs.steps += 1
        self._end()
        if self.blocking:
            self.under_way.wait_all()

    def _add_flags(self) -> None:
        """Sum up the flags of all buckets in one message of their own."""
        if not self._buckets:
            return
        device = self._buckets[0].info.device
        flags = [bucket.flags.real.to(device, torch.float32) for bucket in self._buckets]
        summed = on_device(self.comm, device).all_reduce_(torch.cat(flags), "sum")
        sizes = [len(part) for part in flags]
        for bucket, part in zip(self._buckets, summed.split(sizes), strict=True):
            bucket.flags.copy_(part)

    def _end(self) -> None:
        self._in_backward = self._got_any = self._walked = False
        self._next = 0
        self._late.clear()
        for bucket in self._buckets:
            bucket.came.clear()

    def _abandon_backward(self) -> None:
        """Complete what a backward has started that raised before its end. Local."""
        travelling = {b.index: tuple(b.before) for b in self._buckets if b in self.under_way}
        self._settle()
        for bucket in self._buckets:
            unused = travelling.get(bucket.index)
            bucket.abandon(self._factor, unused is not None, unused or ())
        self._end()

    def _settle(self) -> None:
        if self.on_reuse is not None:
            self.on_reuse()
        else:
            self.under_way.wait_all()
