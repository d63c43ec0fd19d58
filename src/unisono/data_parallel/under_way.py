"""Gradient buckets that have been started: who waits for them, and what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.comm import Communicator
from unisono.comm.health.trace import AveragingCosts
from unisono.data_parallel.averaging import Averaging, Handle
from unisono.data_parallel.gradient_bucket import GradientBucket
from unisono.data_parallel.naming import Unfinished, named


class UnderWay:
    """The buckets of an engine that were started and for which nobody has waited yet.

    Args:
        averaging: how a bucket becomes its mean.
        costs: told of bytes and waits.
        in_backward: whether waits belong to backward, not to whatever comes later.
    """

    def __init__(self, averaging: Averaging, costs: AveragingCosts, in_backward: bool) -> None:
        self._averaging = averaging
        self._costs = costs
        self._in_backward = in_backward
        self._handles: dict[int, tuple[GradientBucket, Handle]] = {}
        self.on_start: Callable[[GradientBucket], object] | None = None
        """Called with each bucket that has just been started."""
        self.on_arrival: Callable[[GradientBucket], object] | None = None
        """Called with each bucket that has been waited for, instead of `resolve_unused`."""

    def __len__(self) -> int:
        """Return how many buckets there are."""
        return len(self._handles)

    def __contains__(self, bucket: GradientBucket) -> bool:
        """Whether this bucket was started and nobody has waited for it."""
        return bucket.index in self._handles

    def start(self, bucket: GradientBucket, comm: Communicator) -> None:
        """Begin to average a bucket that is filled. Collective, in the same order on all ranks."""
        before = time.perf_counter()
        try:
            handle = self._averaging.start(bucket, comm)
        except Unfinished as error:
            raise named(error, bucket.describe()) from None
        self._handles[bucket.index] = bucket, handle
        self._costs.wait_backward_s += time.perf_counter() - before
        self._costs.bytes += bucket.nbytes
        if self.on_start is not None:
            self.on_start(bucket)

    def proceed(self) -> None:
        """Start what comes after the first message of each bucket. Collective."""
        for index in sorted(self._handles):
            self._handles[index][1].proceed()

    def has_arrived(self, bucket: GradientBucket) -> bool:
        """Whether `wait` would return at once."""
        known = self._handles.get(bucket.index)
        return known is None or known[1].done()

    def wait(self, bucket: GradientBucket) -> None:
        """Return when `bucket` holds the mean and its members' `.grad` shows it. Local."""
        known = self._handles.pop(bucket.index, None)
        if known is None:
            return
        before = time.perf_counter()
        try:
            known[1].wait()
        except Unfinished as error:
            raise named(error, bucket.describe()) from None
        waited = time.perf_counter() - before
        if self._in_backward:
            self._costs.wait_backward_s += waited
        else:
            self._costs.wait_forward_s += waited
        if self.on_arrival is not None:
            self.on_arrival(bucket)
        else:
            bucket.resolve_unused()

    def wait_all(self) -> None:
        """Wait for all buckets. Local."""
        for index in sorted(self._handles):
            known = self._handles.get(index)
            if known is not None:
                self.wait(known[0])

    def forget(self) -> None:
        """Let go of all buckets, without waiting."""
        self._handles.clear()
