"""The gradient engine: averages the gradients of a module over ranks while backward runs.

Gradients live in flat buckets, each averaged by one collective (`averaging.py`). The engine hears
of every gradient by a hook, files it, and starts buckets in the same order on all ranks. Wrappers
call `before_forward` and `after_forward`; everything else is automatic.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.comm import Communicator
from unisono.comm.health.trace import AveragingCosts, all_costs
from unisono.data_parallel.averaging import (
    PendingBucket,
    SparseParameters,
    averaging_for,
    check_compression,
)
from unisono.data_parallel.bucket import Bucket, GradientBucket
from unisono.data_parallel.ranks import (
    broadcast_tensors,
    check_same_module,
    on_device,
    structure_of,
)
from unisono.data_parallel.replicas import ReplicaCheck
from unisono.errors import CollectiveMismatch, RankTimeout
from unisono.expect import expect, refusal
from unisono.operators.gradients import (
    BUCKET_MB,
    BackwardWatch,
    GradientPolicy,
    plan_buckets,
    tensors_in,
)
from unisono.torch_private import runs_uncompiled

if TYPE_CHECKING:
    from unisono.data_parallel.nonblocking import DeferredUpdates

SHARED_MEMORY_MB = 1024.0
"""Largest bucket in shared memory: reduced in place at the end of backward, so few are best."""

BACKWARDS = "averaged backwards"
"""What is counted in the group, so that a rank that has run out of data can be told from others."""

Unfinished = (CollectiveMismatch, RankTimeout)
"""Errors of a collective in which ranks did not come together."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Cost of communication on this rank, since construction."""

    steps: int
    """Backwards that averaged gradients."""
    bytes: int
    """Bytes handed to the communicator: gradients as they travel, compressed or not, flags and
    buffers. Of a compression function: what it was called with."""
    wait_backward_s: float
    """Seconds in which this rank waited at the end of backward."""
    wait_forward_s: float
    """Seconds in which it waited later: in forward, `step` or wherever gradients were needed."""
    buckets: tuple[Bucket, ...]
    """The buckets, in the order in which they travel."""

    @property
    def bytes_per_step(self) -> float:
        """Bytes of an average step."""
        return self.bytes / max(1, self.steps)

    @property
    def wait_s_per_step(self) -> float:
        """Seconds of an average step in which this rank did nothing but wait."""
        return (self.wait_backward_s + self.wait_forward_s) / max(1, self.steps)

    def __str__(self) -> str:
        per_step = 1e3 / max(1, self.steps)
        return (
            f"{self.steps} steps, {len(self.buckets)} buckets, "
            f"{self.bytes_per_step / 2**20:.2f} MB a step, waited "
            f"{per_step * self.wait_backward_s:.2f} ms in backward and "
            f"{per_step * self.wait_forward_s:.2f} ms later"
        )


@dataclasses.dataclass(frozen=True)
class Options:
    """How gradients are averaged; the same on all ranks."""

    bucket_mb: float | None
    """Largest bucket; None: by transport."""
    compression: object
    """See `averaging.py`."""
    broadcast_buffers: bool
    """Whether rank 0's buffers go to all before a synchronising forward."""
    equal_batches: bool = False
    """Whether ranks are meant to see the same rows."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        expect("bucket_mb", self.bucket_mb, (int, float, type(None)))
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise refusal(
                ValueError,
                f"bucket_mb={self.bucket_mb}",
                arithmetic=f"{self.bucket_mb} <= 0",
                hint="bucket_mb=25, any number above 0, or None for a size chosen by transport",
            )
        check_compression(self.compression)
        expect("broadcast_buffers", self.broadcast_buffers, bool)
        expect("equal_batches", self.equal_batches, bool)


class GradientEngine:
    """Averages gradients of `module` over `comm` in backward.

    Making one is collective over `comm` (buckets may lie in shared memory). In a world of one it
    does nothing at all.

    Args:
        module: gradients of its trainable parameters are averaged.
        comm: the ranks.
        options: how they are averaged.
        blocking: whether gradients are complete when `backward()` returns. Else the code that needs
            them waits for their buckets.
    """

    def __init__(
        self, module: nn.Module, comm: Communicator, options: Options, *, blocking: bool
    ) -> None:
        self.module = module
        self.comm = comm
        self.options = options
        self.blocking = blocking
        self.require_sync = True
        """Whether backward averages; False: it only accumulates locally."""
        self.averaging = averaging_for(options.compression, comm, blocking=blocking)
        self.updates: DeferredUpdates | None = None
        """Who uses gradients that arrive after backward; None in blocking mode."""
        self.weigh: Callable[[], float] | None = None
        """Gives the weight of this rank's gradients in a backward; None: all ranks' are equal."""
        self.replicas = ReplicaCheck(module, "DataParallel", equal_batches=options.equal_batches)
        """Looks for silent mistakes."""
        self.is_joining = False
        """Whether some ranks may have run out of data, and step no longer."""
        self.buckets: list[GradientBucket] = []
        """In the order in which they travel."""
        self._divisor = GradientPolicy(mean_over=(comm,)).divisor
        self.backward = BackwardWatch()
        """The backward whose gradients are coming."""
        self._handles: dict[int, PendingBucket] = {}  # of buckets under way, by index
        self._comms: dict[torch.device, Communicator] = {}
        self._hooks: list[RemovableHandle] = []
        self._sparse = SparseParameters([])
        self._structure: object = None
        self._costs = AveragingCosts(type(module).__name__, comm.size)
        self._on_output = _calling(self, GradientEngine.begin_backward)
        self._got_any = self._syncing = False
        self._factor: float | None = None
        self._next = 0
        self._late: set[int] = set()
        self.attach()
        if comm.size > 1:
            all_costs.append(self._costs)

    # -- set-up ---------------------------------------------------------------------------------

    @torch.inference_mode(mode=False)  # the first forward of a copy may be one of inference
    def attach(self) -> None:
        """Make buckets for the module as it is now. Collective over `comm`."""
        self.detach()
        if self.comm.size == 1:
            return
        sparse = SparseParameters.ids_in(self.module)
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self._sparse = SparseParameters([p for _, p in named if id(p) in sparse])
        self._make_buckets([(name, p) for name, p in named if id(p) not in sparse])
        self._costs.buckets = len(self.buckets)
        add = self._hooks.append
        for bucket in self.buckets:
            for i, param in enumerate(bucket.params):
                hook = _calling(self, GradientEngine.receive, bucket, i)
                add(param.register_post_accumulate_grad_hook(hook))
                add(param.register_hook(_calling(self, GradientEngine.make_room, bucket, i)))
        for i, param in enumerate(self._sparse.params):
            hook = _calling(self, GradientEngine.receive_sparse, i)
            add(param.register_post_accumulate_grad_hook(hook))
        if self.updates is not None:
            self.updates.attach()
        self._structure = structure_of(self.module)

    def _make_buckets(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        is_shared = self.comm.backend == "shm"

        def memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            if device.type == "cpu" and is_shared:
                return self.comm.shared_buffer((numel,), dtype)
            return torch.zeros(numel, dtype=dtype, device=device)

        largest = self.options.bucket_mb
        if largest is None:
            largest = SHARED_MEMORY_MB if is_shared else BUCKET_MB
        sizes = [(p.numel() * p.element_size(), (p.device, p.dtype)) for _, p in named]
        for index, members in enumerate(plan_buckets(sizes, largest * 2**20)):
            names, params = zip(*(named[i] for i in members), strict=True)
            self.buckets.append(GradientBucket(index, names, params, memory))
            device = params[0].device
            self._comms[device] = on_device(self.comm, device)
        for bucket in self.buckets[-1:]:
            bucket.is_last = True

    def detach(self) -> None:
        """Remove all hooks; gradients stay where they are. Local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.buckets.clear()
        self._handles.clear()
        self._structure = None
        self.backward.close()

    def rebuild(self) -> None:
        """Make buckets again after the module has changed. Collective over `comm`."""
        self._settle()
        check_same_module(self.module, self.comm, vars(self.options))
        self.attach()

    def __del__(self) -> None:
        """Leave no hooks behind."""
        if hasattr(self, "_hooks"):
            self.detach()

    def stats(self) -> Stats:
        """Return what averaging has cost this rank so far."""
        costs = self._costs
        return Stats(
            costs.steps,
            costs.bytes,
            costs.wait_backward_s,
            costs.wait_forward_s,
            tuple(bucket.info for bucket in self.buckets),
        )

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
        if self.backward.is_running:
            return  # a checkpoint repeats its forward
        if self.backward.is_open:
            self._abandon_backward()
        has_moved = any(bucket.has_moved() for bucket in self.buckets)
        if has_moved or self._structure != structure_of(self.module):
            self.rebuild()
        if self.options.broadcast_buffers and self.require_sync:
            try:
                self._costs.bytes += broadcast_tensors(self.module.buffers(), self.comm, src)
            except Unfinished as error:
                raise named_error(error, "buffers, before a forward") from None

    @runs_uncompiled
    def after_forward(self, outputs: Any) -> None:
        """End a forward; wrappers call it with what the module returned. Local."""
        if not self._hooks or not torch.is_grad_enabled():
            return
        if self.module.training:
            self.replicas.end_forward()
        for x in tensors_in(outputs, objects=4):
            # Called in the outermost backward, so that one inside a checkpoint does not end it. A
            # leaf, such as a parameter that is returned, would keep the hook for ever.
            if x.grad_fn is not None:
                x.register_hook(self._on_output)

    # -- backward: called by hooks --------------------------------------------------------------

    def begin_backward(self) -> None:
        """Notice that a backward has begun. Local."""
        if self.backward.is_running:
            return
        if self.backward.is_open:
            self._abandon_backward()
        if self._handles or self.updates is not None:
            self._settle()
        self.backward.begin(self._end_of_backward)

    def make_room(self, bucket: GradientBucket, i: int) -> None:
        """Prepare member `i` of `bucket` for a gradient that is about to be added to it."""
        if not self.backward.is_running:
            self.begin_backward()
        if bucket.index in self._handles:
            self._settle()
        if i in bucket.came and bucket.index < self._next:  # the second in one backward
            self._late.add(bucket.index)

    def receive(self, bucket: GradientBucket, i: int) -> None:
        """Take in member `i` of `bucket`, whose gradient has just been accumulated."""
        if not self._got_any:
            self._begin_gradients()
        bucket.receive(i)
        if bucket.is_full and self._syncing and self.averaging.eager:
            self._launch_full()

    def receive_sparse(self, i: int) -> None:
        """Note that the `i`-th parameter with sparse gradients got one."""
        self.begin_backward()
        if not self._got_any:
            self._begin_gradients()
        self._sparse.used[i] = True

    def _begin_gradients(self) -> None:
        """Decide how the gradients of this backward count. Collective where ranks have weights."""
        self._got_any = True
        self.replicas.backwards += 1
        self._syncing = self.require_sync
        if not self._syncing:
            return
        self.comm.count(BACKWARDS)
        self._factor = None if self.weigh is None else self.weigh() * self._divisor

    @runs_uncompiled
    def _end_of_backward(self) -> None:
        """All gradients of a backward are there (a callback of the autograd engine)."""
        if self._got_any and self._syncing:
            self._launch_rest()
            return
        if self._got_any:
            for bucket in self.buckets:
                bucket.gather(remember=False)
        self._end()

    # -- buckets under way ----------------------------------------------------------------------

    def _launch_full(self) -> None:
        while self._next < len(self.buckets):
            if not self.buckets[self._next].is_full:
                return
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: GradientBucket) -> None:
        """Put everything in its place and start the bucket. Collective."""
        self._next = max(self._next, bucket.index + 1)
        bucket.fill(self._factor)
        before, sent = time.perf_counter(), self.averaging.sent
        try:
            handle = self.averaging.start(bucket, self._comms[bucket.info.device])
        except Unfinished as error:
            raise named_error(error, bucket.describe()) from None
        self._costs.wait_backward_s += time.perf_counter() - before
        self._costs.bytes += self.averaging.sent - sent
        if handle is not None:
            self._handles[bucket.index] = handle
            bucket.sent_version = bucket.version
        elif bucket.before:
            bucket.resolve_unused()

    def _launch_rest(self) -> None:
        """Start every bucket not yet under way; in blocking mode, wait for all. Collective."""
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        for index in sorted(self._late):
            self.wait(self.buckets[index])
            self._launch(self.buckets[index])
        if self._sparse.params:
            weight = (1.0 if self._factor is None else self._factor) / self._divisor
            self._costs.bytes += self._sparse.average(self.comm, weight)
        self._costs.steps += 1
        self._end()
        if self.blocking and self._handles:
            self.wait_all()
        weighs = self.weigh is not None
        self.replicas.compare(self.comm, self._costs.steps, joins=self.is_joining, weighs=weighs)

    def _end(self) -> None:
        self.backward.close()
        self._got_any = False
        self._next = 0
        self._late.clear()
        for bucket in self.buckets:
            bucket.came.clear()

    @property
    def under_way(self) -> list[GradientBucket]:
        """The buckets that were started and that were not waited for yet."""
        return [self.buckets[index] for index in sorted(self._handles)]

    def has_arrived(self, bucket: GradientBucket) -> bool:
        """Whether `wait` would return at once."""
        handle = self._handles.get(bucket.index)
        return handle is None or handle.done()

    def wait(self, bucket: GradientBucket) -> None:
        """Return when `bucket` holds the mean and its members' `.grad` shows it. Local."""
        handle = self._handles.pop(bucket.index, None)
        if handle is None:
            return
        before = time.perf_counter()
        try:
            handle.wait()
        except Unfinished as error:
            raise named_error(error, bucket.describe()) from None
        waited = time.perf_counter() - before
        if self.blocking:
            self._costs.wait_backward_s += waited
        else:
            self._costs.wait_forward_s += waited
        if self.updates is not None:
            self.updates.check_untouched(bucket)
        bucket.resolve_unused()

    def wait_all(self) -> None:
        """Wait for all buckets. Local."""
        for bucket in self.under_way:
            self.wait(bucket)

    def _settle(self) -> None:
        if self.updates is not None:
            self.updates.finalize()
        else:
            self.wait_all()

    # -- other ways in and out ------------------------------------------------------------------

    @torch.no_grad()
    def clear_gradients(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Do what `optimizer.zero_grad(set_to_none)` does, with one fill per bucket. Local.

        A bucket under way is waited for, or it would come back over the zeros; unless a step is
        pending with it: then it is cleared right after that.
        """
        rest = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        for bucket in self.buckets:
            is_owed = self.updates is not None and self.updates.is_awaited(bucket)
            if not is_owed:
                self.wait(bucket)
            if not all(id(p) in rest for p in bucket.params):
                continue
            if self.updates is not None and is_owed and not set_to_none:
                self.updates.clear_later(bucket)
            else:
                bucket.clear(set_to_none)
            for p in bucket.params:
                del rest[id(p)]
        for p in rest.values():
            if p.grad is not None:
                p.grad = None if set_to_none else p.grad.detach().zero_()

    def deliver(self, bucket: GradientBucket, i: int, grad: Tensor) -> None:
        """File a gradient that does not come through autograd; starts full buckets. Collective."""
        if not self._got_any:
            self._settle()
            self.backward.is_open = True
            self._begin_gradients()
        bucket.params[i].grad = grad.detach().clone()
        bucket.receive(i)
        self._launch_full()
        if self._next == len(self.buckets):
            self._launch_rest()

    @property
    def holds_unsent(self) -> bool:
        """Whether gradients lie here that `no_sync` has accumulated and no backward has sent."""
        dense = [x for b in self.buckets for x in zip(b.used, b.params, strict=True)]
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
        self._launch_rest()
        self.wait_all()
        self._forget_gradients()

    def _all_params(self) -> list[nn.Parameter]:
        return [param for part in (*self.buckets, self._sparse) for param in part.params]

    def _forget_gradients(self) -> None:
        for param in self._all_params():
            param.grad = None

    def _abandon_backward(self) -> None:
        """End a backward that raised. Collective where buckets start during backward.

        Ranks may have started different numbers of them, so each starts the rest.
        """
        cleared = [p for p in self._all_params() if p.grad is None]
        written = {b.index for b in self.under_way if b.version != b.sent_version}
        self._settle()
        has_left = self._got_any and self._syncing and self.averaging.eager
        if has_left:
            self._launch_rest()
            self._settle()
            for bucket in self.buckets:
                bucket.forget_sum(bucket.index in written)
        for param in cleared:
            param.grad = None
        self._end()


def _calling(
    engine: GradientEngine, method: Callable[..., None], *args: object
) -> Callable[[Tensor], None]:
    """Return a hook for autograd that calls a method of the engine.

    It holds the engine weakly: parameters may outlive it.
    """
    me = weakref.ref(engine)

    @runs_uncompiled
    def hook(_: Tensor) -> None:
        engine = me()
        if engine is not None:
            method(engine, *args)

    return hook


def named_error(
    error: CollectiveMismatch | RankTimeout, what: str
) -> CollectiveMismatch | RankTimeout:
    """Return the error with `what` was to travel in front, and why ranks may disagree about it."""
    lines = [what, str(error)]
    if isinstance(error, CollectiveMismatch) and error.returned:
        lines[1] = lines[1].rpartition("\n  HINT: ")[0]
        lines += [
            f"  rank {rank} has finished: {counted.get(BACKWARDS, 0)} {BACKWARDS}"
            for rank, counted in sorted(error.returned.items())
        ]
        lines.append(
            "  HINT: equally many batches on all ranks (drop_last=True, or a DistributedSampler), "
            "or with model.join(): around the loop"
        )
    elif isinstance(error, CollectiveMismatch):
        lines.append(
            "  HINT: samples() and join() go around the same backwards on all ranks, or on none"
        )
    explained = type(error)("\n".join(lines))
    explained.__dict__.update(error.__dict__)
    return explained
