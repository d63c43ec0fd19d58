"""`DASO`: ranks of a node average gradients every batch, nodes average parameters every few.

When is decided by `schedule.py`, how by `exchange.py`; this file is the optimizer around them:
what a batch and an epoch do, with scheduler and scaler, and its checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.data_parallel.daso.exchange import (
    InFlight,
    NodeExchange,
    all_ranks,
    average_buffers,
    layout_of,
)
from unisono.data_parallel.daso.schedule import DasoSchedule
from unisono.data_parallel.ranks import broadcast_module
from unisono.expect import expect, expect_choice, expect_int, refusal

__all__ = ["DASO"]

_WIRES = (torch.float32, torch.bfloat16, torch.float16)

_COUNTERS = ("current_batch", "rotation", "sent_at", "batches_done", "has_closed", "last_batch")
"""What a checkpoint has of the optimizer itself."""


class DASO(Optimizer):
    """Distributed asynchronous and selective optimization, for nodes with a slow network between.

    Ranks of a node average gradients in backward (`DataParallelMultiGPU` sees to it). Nodes average
    parameters: after every batch in the first and last epochs, in between only every few batches
    and in the background. How rarely follows from the loss; see `DasoSchedule`. Any device, any
    number of ranks on a node, one process too. Collective over `comm`.

    Args:
        local_optimizer: the torch optimizer that makes the steps.
        total_epochs: epochs of the training.
        comm: all ranks; None is the world.
        warmup_epochs: first epochs, in which nodes wait for each other after every batch.
        cooldown_epochs: last epochs, the same.
        scheduler: learning-rate scheduler on `local_optimizer`, stepped after each batch.
        stability_level: relative improvement of the loss below which an epoch counts as a plateau.
        max_global_skips: largest number of batches between exchanges; 0: after every batch.
        sending_chunk_size: elements of a message.
        downcast_type: what travels in a blocking mean: differences as float32, bfloat16, float16.
        use_mpi_groups: accepted; both values build the same groups.
        skip_reduction_factor: skips are divided by this on a plateau.
        local_skip_factor: the largest skip over this gives how rarely a node synchronises.
        verbose: rank 0 prints what each epoch did.
        ranks_per_node: None: by hostname; else sizes of blocks of consecutive ranks.
    """

    _step_supports_amp_scaling = True
    """`scaler.step(daso)` always calls `step`, which refuses it: a batch that one node left out
    would be a batch that the others wait for."""

    def __init__(
        self,
        local_optimizer: Optimizer,
        total_epochs: int,
        comm: object = None,
        warmup_epochs: int = 4,
        cooldown_epochs: int = 4,
        scheduler: LRScheduler | None = None,
        stability_level: float = 0.05,
        max_global_skips: int = 8,
        sending_chunk_size: int = 10_000_000,
        downcast_type: torch.dtype = torch.bfloat16,
        use_mpi_groups: bool = True,
        skip_reduction_factor: int = 2,
        local_skip_factor: int = 4,
        verbose: bool = False,
        *,
        ranks_per_node: int | Sequence[int] | None = None,
    ) -> None:
        _check_optimizer(local_optimizer, scheduler)
        expect_int("sending_chunk_size", sending_chunk_size, 1)
        expect("downcast_type", downcast_type, torch.dtype, "torch.bfloat16")
        expect_choice("downcast_type", str(downcast_type), [str(wire) for wire in _WIRES])
        expect("use_mpi_groups", use_mpi_groups, bool)
        expect("verbose", verbose, bool)
        self.schedule = DasoSchedule(
            total_epochs,
            warmup_epochs,
            cooldown_epochs,
            max_global_skips,
            skip_reduction_factor,
            local_skip_factor,
            stability_level,
        )
        self.total_epochs, self.max_gs = total_epochs, max_global_skips
        self.warmup_epochs, self.cooldown_epochs = warmup_epochs, cooldown_epochs
        self.skip_reduction_factor = skip_reduction_factor
        self.local_skip_factor = local_skip_factor
        self.stability = self.schedule.detector
        self.local_optimizer = local_optimizer
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self, hooks, getattr(local_optimizer, hooks))
        self.communicator = all_ranks(comm)
        self.comm = self.communicator if comm is None else comm
        self.verbose = verbose
        self.cast_dtype = downcast_type
        self.module: nn.Module | None = None
        self.scheduler = scheduler
        self.scaler: torch.amp.GradScaler | None = None
        self.syncs_node = True
        """Whether the next backward averages gradients in the node."""
        self.went_apart = False
        """Whether ranks of the node may differ since they were brought together."""
        self._switch: Callable[[bool], None] | None = None
        layout = layout_of(self.communicator, ranks_per_node)
        self.reduced_ranks = layout.groups
        """Ranks of each global group."""
        self.exchange = NodeExchange(
            self.communicator, layout, chunk=sending_chunk_size, wire=downcast_type
        )
        self._warned_of_length = False
        self._start_over()
        if verbose and self.schedule.never_cycles:
            self.print0("DASO: nodes wait for each other after every batch of every epoch")

    def _start_over(self) -> None:
        self.current_batch = 0
        self.rotation = 0
        """Exchanges since the epoch began; chooses the global group."""
        self.sent_at: int | None = None
        self.batches_done = 0
        """Batches since the last `epoch_loss_logic`."""
        self.has_closed = False
        """Whether an epoch was closed since then."""
        self.is_foreign = False
        """Whether the exchange in flight came with another rank's checkpoint."""
        self.must_agree = True
        self._n_batches: int | None = None

    # -- the model ------------------------------------------------------------------------------

    def set_model(
        self, module: nn.Module, *, local_sync: Callable[[bool], None] | None = None
    ) -> None:
        """Take the model whose parameters nodes average. Collective over `comm`.

        All ranks get rank 0's parameters and buffers. `DataParallelMultiGPU` calls this.

        Args:
            module: the model.
            local_sync: switches the averaging of gradients in the node on and off; None: there is
                none, and ranks of a node meet at each exchange instead.
        """
        expect("module", module, nn.Module)
        module_ids = {id(p) for p in module.parameters()}
        if not any(id(p) in module_ids for p in self.params_ref):
            raise refusal(
                ValueError,
                f"set_model of a module with {len(module_ids)} parameters",
                f"the optimizer holds {len(self.params_ref)} parameters, none of them this one's",
                hint="build the optimizer from module.parameters()",
            )
        broadcast_module(module, self.communicator)
        self.module = module
        self._switch, self.syncs_node, self.went_apart = local_sync, True, False
        self.exchange.bind(module)
        self.must_agree = True

    def add_scaler(self, scaler: Any) -> None:
        """Let steps go through a gradient scaler; `scaler.step` and `update` are called for you."""
        expect("scaler", scaler, torch.amp.GradScaler, 'torch.amp.GradScaler("cpu")')
        self.scaler = scaler

    # -- a batch --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one batch: optimizer step, then what the schedule plans. Collective over `comm`.

        Returns:
            What the local optimizer's `step` returned.
        """
        if self.must_agree or self.batches_done == 0:
            self._agree()
        batch, n_batches = self.current_batch, self._n_batches or 1
        plan = self.schedule.plan(batch, n_batches, self.sent_at)
        self.went_apart = self.went_apart or not plan.local_sync
        result = self._local_step(closure)
        if plan.merge and self.sent_at is not None:
            self.exchange.merge(batch - self.sent_at)
            self.sent_at = None
        if plan.blocking:
            self._mean()
        elif plan.send:
            self.exchange.send(self._next_group())
            self.sent_at = batch
        self.batches_done += 1
        if plan.close:
            self._close()
        else:
            self.current_batch += 1
        following = self.schedule.plan(self.current_batch, n_batches, self.sent_at)
        self._sync_node(following.local_sync)
        return result

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        """Make the optimizer step of a batch, then that of the scheduler."""
        arguments = () if closure is None else (closure,)
        if self.__dict__.get("found_inf") is not None:  # a scaler sets it when it calls us
            hint = "daso.add_scaler(scaler), then daso.step() alone"
            raise refusal(RuntimeError, "scaler.step(daso)", hint=hint)
        if self.scaler is None:
            result, skipped = self.local_optimizer.step(*arguments), False
        else:
            before = self.scaler.get_scale()
            result = self.scaler.step(self.local_optimizer, *arguments)
            self.scaler.update()
            skipped = self.scaler.get_scale() < before
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        return result

    def _sync_node(self, on: bool) -> None:
        """Set whether the next backward averages gradients in the node. Collective over it."""
        if on and not self.syncs_node and self.scaler is not None and self.scaler.is_enabled():
            # Ranks that scaled differently would average unlike things.
            node = self.exchange.node
            scale = torch.tensor([self.scaler.get_scale()], dtype=torch.float64)
            self.scaler.update(node.all_reduce(scale.to(node.device), "min").item())
        self.syncs_node = on
        if self._switch is not None:
            self._switch(on)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients; zeros by default, as HeAT does."""
        self.local_optimizer.zero_grad(set_to_none=set_to_none)

    def _agree(self) -> None:
        """Compare what must be the same on all ranks, and take up what has changed. Collective.

        Called once an epoch, and after what may have changed it: a model or a checkpoint.

        Raises:
            ValueError: on all ranks, where a model is missing or numbers of batches differ.
        """
        exchange, module = self.exchange, self.module
        changed = self.batches_done == 0 and module is not None and exchange.has_changed()
        settings = [self.last_batch or 0, module is not None, self.is_foreign, changed]
        table = self.communicator.all_gather_ints([int(x) for x in settings])
        lengths, models, foreign, changes = zip(*table, strict=True)
        if module is None or not all(models):
            raise refusal(
                ValueError,
                "DASO.step()",
                f"no model on rank {models.index(0)}",
                hint="DataParallelMultiGPU(module, daso), or self.set_model(module)",
            )
        if min(lengths) == 0 or min(lengths) != max(lengths):
            raise refusal(
                ValueError,
                "DASO.step()",
                f"last_batch on ranks 0 to {len(lengths) - 1}: {[n or None for n in lengths]}",
                hint="self.last_batch = len(loader), the same number on all ranks",
            )
        if any(foreign):
            exchange.drop()
            self.sent_at, self.is_foreign = None, False
            warnings.warn(
                "DASO: one rank's checkpoint serves all: the exchange in flight is left out",
                UserWarning,
                stacklevel=3,
            )
        if any(changes):
            exchange.bind(module)
        self.must_agree = False

    def _next_group(self) -> int:
        """Return the global group of the next exchange, with the node brought together for it."""
        group = self.rotation % len(self.reduced_ranks)
        self.rotation += 1
        if self.exchange.node.size > 1 and (self.went_apart or self._switch is None):
            self.exchange.align()
            # Parameters are equal again; they stay so unless optimizer state differs.
            self.went_apart = self.went_apart and any(self.local_optimizer.state.values())
        return group

    def _mean(self) -> None:
        self.exchange.drop()
        self.sent_at = None
        self.exchange.mean(self._next_group())

    def _close(self) -> None:
        if self.module is not None:
            average_buffers(self.module, self.communicator)
        self.current_batch = self.rotation = 0
        self.has_closed = True

    # -- an epoch -------------------------------------------------------------------------------

    def epoch_loss_logic(self, loss: Tensor | float, loss_globally_averaged: bool = False) -> float:
        """End an epoch: choose from its loss how rarely nodes synchronise in the next. Collective.

        An epoch that had more or fewer batches than `last_batch` is closed here.

        Args:
            loss: this rank's loss, a number or a tensor with one.
            loss_globally_averaged: it is already the same on all ranks; rank 0's is used.

        Returns:
            The mean loss of all ranks.
        """
        expect("loss", loss, (int, float, Tensor))
        if isinstance(loss, Tensor) and loss.numel() != 1:
            call = f"epoch_loss_logic of a tensor of shape {list(loss.shape)}"
            raise refusal(ValueError, call, f"{loss.numel()} values", hint="loss.mean()")
        expect("loss_globally_averaged", loss_globally_averaged, bool)
        if self.must_agree and self.batches_done:
            self._agree()
        number = float(loss.detach() if isinstance(loss, Tensor) else loss)
        report = torch.tensor([[number]], dtype=torch.float64, device=self.communicator.device)
        sizes = [1] * self.communicator.size
        losses = self.communicator.all_gather(report, sizes=sizes).flatten().tolist()
        mean = losses[0] if loss_globally_averaged else sum(losses) / len(losses)
        if self.batches_done and self.batches_done != self._n_batches:
            self._close_early()
        was_cycling = self.phase == "cycling"
        self.schedule.epoch_end(mean)
        self.batches_done = 0
        self.has_closed = False
        if self.phase == "cycling" and not was_cycling and self.module is not None:
            self.exchange.bind(self.module)
        if self.verbose:
            count = f"{self.epoch} of {self.schedule.total_epochs}"
            self.print0(f"DASO: epoch {count}, loss {mean:.6g}, then {self.schedule.skips}")
        return mean

    def _close_early(self) -> None:
        if not self._warned_of_length:
            self._warned_of_length = True
            warnings.warn(
                f"DASO: an epoch had {self.batches_done} batches, but last_batch is "
                f"{self._n_batches}; {self.batches_done} is used until last_batch is set again",
                UserWarning,
                stacklevel=3,
            )
        self._n_batches = self.batches_done
        self._mean()
        self._close()
        self._sync_node(True)

    def reset(self) -> None:
        """Go back to the state after construction; model and optimizer state stay. Collective."""
        self.exchange.drop()
        self.schedule.reset()
        self.zero_grad()
        self._start_over()
        self._sync_node(True)

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue at this batch. Local.

        An exchange in flight is waited for, not used. Save one state for each rank; after the last
        batch of an epoch one rank's state serves all.
        """
        self.exchange.complete()
        sent = self.exchange.in_flight
        return {
            "local_optimizer": self.local_optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "in_flight": None if sent is None else {"group": sent.group, "sums": sent.sums},
            "common": self.exchange.common,
            "went_apart": self.went_apart,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "place": [self.communicator.rank, self.communicator.size],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` gave. Local; call it on all ranks."""
        state, exchange = state_dict, self.exchange
        if self.module is None:
            raise refusal(
                ValueError,
                "DASO.load_state_dict()",
                "no model yet",
                hint="first DataParallelMultiGPU(module, daso), then load",
            )
        if "in_flight" not in state:
            call = f"DASO.load_state_dict of {sorted(state)}"
            raise refusal(ValueError, call, hint="pass what daso.state_dict() returned")
        exchange.drop()
        self.local_optimizer.load_state_dict(state["local_optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])
        sent, place = state["in_flight"], [self.communicator.rank, self.communicator.size]
        device = self.params_ref[0].device
        if sent is not None:
            exchange.in_flight = InFlight(sent["group"], [x.to(device) for x in sent["sums"]])
        self.is_foreign = sent is not None and list(state["place"]) != place
        if exchange.common is not None and state["common"] is not None:
            exchange.common = [x.to(device) for x in state["common"]]
        self.went_apart = state["went_apart"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.must_agree = True
        if self._n_batches is not None:
            plan = self.schedule.plan(self.current_batch, self._n_batches, self.sent_at)
            self.syncs_node = plan.local_sync
            self._sync_node(plan.local_sync)

    def __getstate__(self) -> NoReturn:
        """Refuse a copy or a pickle: the groups of ranks belong to this object."""
        raise refusal(
            TypeError,
            f"a copy or a pickle of {type(self).__name__}",
            "it holds groups of ranks",
            hint="another DASO, and load_state_dict(daso.state_dict())",
        )

    # -- what users read ------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of the local optimizer."""
        return self.local_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the local optimizer."""
        return self.local_optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the local optimizer."""
        return self.local_optimizer.defaults

    @property
    def last_batch(self) -> int | None:
        """Number of batches of an epoch, `len(loader)`; to be set before the first step."""
        return self._n_batches

    @last_batch.setter
    def last_batch(self, value: int | None) -> None:
        self._n_batches = None if value is None else expect_int("last_batch", value, 1)

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
    def params_ref(self) -> list[Tensor]:
        """All parameters of all groups of the local optimizer."""
        return [p for group in self.local_optimizer.param_groups for p in group["params"]]

    @property
    def amp(self) -> bool:
        """Whether steps go through a gradient scaler."""
        return self.scaler is not None

    @property
    def loc_gpus(self) -> int:
        """Ranks on this node."""
        return self.exchange.node.size

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


def _check_optimizer(local_optimizer: Any, scheduler: Any) -> None:
    """Raise unless these are a plain torch optimizer and a scheduler of it, or None."""
    hint = "torch.optim.SGD(model.parameters(), 0.1)"
    expect("local_optimizer", local_optimizer, Optimizer, hint)
    call, kind = f"local_optimizer={type(local_optimizer).__name__}(...)", type(scheduler).__name__
    if hasattr(local_optimizer, "local_optimizer") or hasattr(local_optimizer, "torch_optimizer"):
        problem = "an optimizer that synchronises ranks itself"
        raise refusal(TypeError, call, problem, hint="pass the torch optimizer inside it")
    if scheduler is None:
        return
    expect("scheduler", scheduler, LRScheduler, "StepLR(local_optimizer, 10), an instance")
    if isinstance(scheduler, ReduceLROnPlateau):
        hint = "scheduler.step(daso.epoch_loss_logic(loss)) in your loop"
        raise refusal(TypeError, f"scheduler={kind}(...)", "it steps once an epoch", hint=hint)
    if scheduler.optimizer is not local_optimizer:
        problem = "it was made for another optimizer than local_optimizer"
        hint = f"{kind}(local_optimizer, ...)"
        raise refusal(ValueError, f"scheduler={kind}(...)", problem, hint=hint)
