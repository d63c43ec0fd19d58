"""What a way of splitting would cost, and why another is not possible. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from unisono.plan.cluster import Cluster
from unisono.plan.workload import Workload

__all__ = ["Impossible", "Prediction", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One training step of all ranks."""

    way: str
    """How the work is split."""
    ranks: int
    """Ranks in all."""
    samples: float
    """Samples of all ranks."""
    step_s: float
    """The whole step."""
    compute_s: float
    """Forward, backward and update of a rank."""
    communication_s: float
    """All messages of a rank, whether it waits for them or not."""
    memory_bytes: float
    """Parameters, gradients, optimizer state and activations of a rank."""
    alone_s: float
    """One rank that does the work of one rank, with nobody around."""
    algorithm: str = "-"
    """How gradients are added."""
    note: str = ""
    """What to know."""

    @property
    def waiting_s(self) -> float:
        """What of the communication is not hidden."""
        return self.step_s - self.compute_s

    @property
    def communication_share(self) -> float:
        """Of the step."""
        return self.waiting_s / self.step_s if self.step_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.samples / self.step_s if self.step_s else 0.0

    @property
    def efficiency(self) -> float:
        """Throughput over that of as many ranks that do not have to talk.

        Above 1 where ranks share the update of the parameters, which those do whole.
        """
        return self.alone_s / self.step_s if self.step_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        return asdict(self) | {
            "waiting_s": self.waiting_s,
            "communication_share": self.communication_share,
            "samples_per_s": self.samples_per_s,
            "efficiency": self.efficiency,
        }


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A way that this model or these ranks do not allow."""

    way: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return both, for JSON."""
        return asdict(self)


def predicted(
    way: str,
    workload: Workload,
    cluster: Cluster,
    batch: float,
    *,
    compute_s: float,
    waiting_s: float,
    communication_s: float,
    memory_bytes: float,
    algorithm: str = "-",
    note: str = "",
) -> Prediction:
    """Return the prediction of a way with `batch` samples for each rank."""
    return Prediction(
        way=way,
        ranks=cluster.ranks,
        samples=batch * cluster.ranks,
        step_s=compute_s + waiting_s,
        compute_s=compute_s,
        communication_s=communication_s,
        memory_bytes=memory_bytes,
        alone_s=workload.compute(batch) / cluster.rank_speed,
        algorithm=algorithm,
        note=note,
    )
