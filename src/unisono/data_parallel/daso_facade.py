"""What DASO shows to the outside: a torch optimizer, and HeAT's names for what it knows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.data_parallel.daso_exchange import NodeExchange
from unisono.data_parallel.daso_local import LocalStep
from unisono.data_parallel.schedule import DasoSchedule
from unisono.expect import expect_int

__all__ = ["DasoFacade"]

_INNER = (
    "param_groups",
    "state",
    "defaults",
    "register_step_pre_hook",
    "register_step_post_hook",
)

_READABLE = {
    "stability": ("schedule", "detector"),
    "max_gs": ("schedule", "max_global_skips"),
    "total_epochs": ("schedule", "total_epochs"),
    "warmup_epochs": ("schedule", "warmup_epochs"),
    "cooldown_epochs": ("schedule", "cooldown_epochs"),
    "skip_reduction_factor": ("schedule", "skip_reduction_factor"),
    "local_skip_factor": ("schedule", "local_skip_factor"),
    "stability_level": ("schedule", "stability_level"),
    "scheduler": ("local", "scheduler"),
    "scaler": ("local", "scaler"),
}


class DasoFacade(Optimizer):
    """Reads the parts of DASO under the names that users know. Changes nothing by itself."""

    local_optimizer: Optimizer
    comm: object
    communicator: Communicator
    schedule: DasoSchedule
    exchange: NodeExchange
    local: LocalStep
    has_closed: bool
    _n_batches: int | None

    @property
    def last_batch(self) -> int | None:
        """Number of batches of an epoch, `len(loader)`; to be set before the first step."""
        return self._n_batches

    @last_batch.setter
    def last_batch(self, value: int | None) -> None:
        self._n_batches = None if value is None else expect_int("last_batch", value, 1)

    batches_per_epoch = last_batch

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self.schedule.epoch + int(self.has_closed)

    @property
    def phase(self) -> str:
        """`"warmup"`, `"cycling"` or `"cooldown"`."""
        return self.schedule.phase

    @property
    def global_skip(self) -> int:
        """Batches between exchanges of nodes; 0: after every batch."""
        return self.schedule.skips.global_skip

    @property
    def local_skip(self) -> int:
        """Batches between synchronisations in the node, away from exchanges."""
        return self.schedule.skips.local_skip

    @property
    def batches_to_wait(self) -> int:
        """Batches from the start of an exchange to the use of its result."""
        return self.schedule.skips.batches_to_wait

    @property
    def _is_cycling(self) -> bool:
        return self.schedule.phase == "cycling"

    @property
    def params_ref(self) -> list[Tensor]:
        """All parameters of all groups of the local optimizer."""
        return [p for group in self.local_optimizer.param_groups for p in group["params"]]

    @property
    def amp(self) -> bool:
        """Whether steps go through a gradient scaler."""
        return self.local.scaler is not None

    @property
    def loc_gpus(self) -> int:
        """Ranks on this node."""
        return self.exchange.node.size

    def __getattr__(self, name: str) -> Any:
        """Read what the schedule, the local step or the inner optimizer hold."""
        inner = self.__dict__.get("local_optimizer")
        if inner is not None and name in _INNER:
            return getattr(inner, name)
        home, own_name = _READABLE.get(name, (None, ""))
        if home is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(getattr(self, home), own_name)

    def __repr__(self) -> str:
        skips = tuple(self.schedule.skips)
        return f"DASO(epoch {self.epoch}, {self.phase}, skips {skips}, {self.local_optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the local optimizer."""
        self.local_optimizer.add_param_group(param_group)

    def print0(self, *args: object) -> None:
        """Print on rank 0 only."""
        if self.communicator.rank == 0:
            print(*args, flush=True)
