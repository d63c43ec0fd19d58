"""What averaging gradients has cost so far."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.data_parallel.buckets import Bucket


@dataclass(frozen=True)
class Stats:
    """Cost of communication on this rank, since construction."""

    steps: int
    """Backwards that averaged gradients."""
    bytes: int
    """Bytes handed to the communicator: gradients, flags and buffers."""
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
        backward, forward = self.wait_backward_s, self.wait_forward_s
        return (
            f"{self.steps} steps, {len(self.buckets)} buckets, "
            f"{self.bytes_per_step / 2**20:.2f} MB a step, waited "
            f"{1e3 * backward / max(1, self.steps):.2f} ms in backward and "
            f"{1e3 * forward / max(1, self.steps):.2f} ms later"
        )
