"""`DASO`: ranks of a node average gradients every batch, nodes average parameters every few.

When is decided by `schedule.py`, how by `daso_exchange.py`; this file is the optimizer around them,
what a batch and an epoch do, and its checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.data_parallel import daso_state
from unisono.data_parallel.daso_agreement import agree
from unisono.data_parallel.daso_arguments import check_arguments, check_loss
from unisono.data_parallel.daso_averages import average_buffers, average_state
from unisono.data_parallel.daso_copies import DasoCopies
from unisono.data_parallel.daso_exchange import NodeExchange
from unisono.data_parallel.daso_local import LocalStep
from unisono.data_parallel.daso_outer import OuterOptimizer
from unisono.data_parallel.ranks import communicator_of
from unisono.data_parallel.replicas import broadcast_module
from unisono.data_parallel.schedule import DasoSchedule
from unisono.errors import explain
from unisono.expect import expect

__all__ = ["DASO"]


class DASO(DasoCopies):
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
        scheduler: learning-rate scheduler on `local_optimizer`; DASO calls its `step`.
        stability_level: relative improvement of the loss below which an epoch counts as a plateau.
        max_global_skips: largest number of batches between exchanges; 0: after every batch.
        sending_chunk_size: elements of a message.
        downcast_type: what travels in a blocking mean: differences as float32, bfloat16, float16.
        use_mpi_groups: accepted; both values build the same groups.
        skip_reduction_factor: skips are divided by this on a plateau.
        local_skip_factor: the largest skip over this gives how rarely a node synchronises.
        verbose: rank 0 prints what each epoch did.
        ranks_per_node: None: by hostname; else blocks of so many consecutive ranks, or of these.
        downcast_cycling: `downcast_type` also for exchanges in the background.
        outer_momentum: momentum of an outer optimizer on the means, in the cycling phase.
        outer_lr: its learning rate.
        outer_nesterov: whether it looks ahead.
        local_merge: ranks of a node that went apart meet at their `"mean"`, or at the `"rank"` that
            sends.
        sync_state: average optimizer state over all ranks at the end of each epoch.
        sync_buffers: average float buffers too (others: rank 0's).
        scheduler_step: when the scheduler steps: `"batch"`, or `"epoch"` in `epoch_loss_logic`.
        every: fixed distance between blocking means instead of skips that follow the loss.
    """

    _step_supports_amp_scaling = True
    """`scaler.step(daso)` always calls `step`: a batch that one node left out would be a batch
    that the others wait for."""

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
        downcast_cycling: bool = False,
        outer_momentum: float = 0.0,
        outer_lr: float = 1.0,
        outer_nesterov: bool = False,
        local_merge: str = "mean",
        sync_state: bool = False,
        sync_buffers: bool = True,
        scheduler_step: str = "batch",
        every: int | None = None,
    ) -> None:
        check_arguments(
            local_optimizer=local_optimizer,
            scheduler=scheduler,
            sending_chunk_size=sending_chunk_size,
            downcast_type=downcast_type,
            outer_momentum=outer_momentum,
            outer_lr=outer_lr,
            local_merge=local_merge,
            scheduler_step=scheduler_step,
            use_mpi_groups=use_mpi_groups,
            verbose=verbose,
            downcast_cycling=downcast_cycling,
            outer_nesterov=outer_nesterov,
            sync_state=sync_state,
            sync_buffers=sync_buffers,
        )
        self.schedule = DasoSchedule(
            total_epochs,
            warmup_epochs,
            cooldown_epochs,
            max_global_skips,
            skip_reduction_factor,
            local_skip_factor,
            stability_level,
            every=every,
        )
        self.local_optimizer = local_optimizer
        self.communicator = communicator_of(comm)
        self.comm = self.communicator if comm is None else comm
        self.verbose = verbose
        self.cast_dtype = downcast_type
        self.downcast_cycling = downcast_cycling
        self.sync_state = sync_state
        self.sync_buffers = sync_buffers
        self.module: nn.Module | None = None
        self._ranks_per_node = ranks_per_node
        is_plain = outer_momentum == 0 and outer_lr == 1
        exchange = NodeExchange(
            chunk=sending_chunk_size,
            wire=downcast_type,
            outer=None if is_plain else OuterOptimizer(outer_momentum, outer_lr, outer_nesterov),
            by_mean=local_merge == "mean",
        )
        by_epoch = scheduler_step == "epoch" or isinstance(scheduler, ReduceLROnPlateau)
        self._connect(exchange, LocalStep(local_optimizer, scheduler, by_epoch))
        self._warned_of_length = False
        self._start_over()
        if verbose and self.schedule.never_cycles:
            self.print0("DASO: nodes wait for each other after every batch of every epoch")

    @classmethod
    def post_local_sgd(
        cls,
        local_optimizer: Optimizer,
        total_epochs: int,
        every: int,
        warmup_epochs: int = 1,
        **options: Any,
    ) -> DASO:
        """Return DASO that averages parameters every so many batches after the warm-up."""
        options = {"cooldown_epochs": 0, **options}
        return cls(
            local_optimizer, total_epochs, warmup_epochs=warmup_epochs, every=every, **options
        )

    @classmethod
    def diloco(
        cls, local_optimizer: Optimizer, total_epochs: int, every: int, **options: Any
    ) -> DASO:
        """Return DASO as DiLoCo: means every so many batches, steps of an outer optimizer."""
        preset = {
            "warmup_epochs": 0,
            "cooldown_epochs": 0,
            "outer_momentum": 0.9,
            "outer_lr": 0.7,
            "outer_nesterov": True,
        }
        return cls(local_optimizer, total_epochs, every=every, **{**preset, **options})

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
        known = {id(p) for p in module.parameters()}
        held = self.params_ref
        if not any(id(p) in known for p in held):
            raise ValueError(
                explain(
                    f"set_model of a module with {len(known)} parameters",
                    f"the optimizer holds {len(held)} parameters, none of them this module's",
                    None,
                    "build the optimizer from module.parameters()",
                )
            )
        broadcast_module(module, self.communicator)
        self.module = module
        self.local.attach(local_sync)
        self.exchange.bind(module)
        self.must_agree = True

    def add_scaler(self, scaler: Any) -> None:
        """Let steps go through a gradient scaler; `scaler.step` and `update` are called for you."""
        expect("scaler", scaler, torch.amp.GradScaler, 'torch.amp.GradScaler("cpu")')
        self.local.scaler = scaler

    # -- a batch --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one batch: optimizer step, then what the schedule plans. Collective over `comm`.

        Returns:
            What the local optimizer's `step` returned.
        """
        n_batches = self._agreed_length()
        batch = self.current_batch
        plan = self.schedule.plan(batch, n_batches, self.sent_at)
        amp = (self.__dict__.get("grad_scale"), self.__dict__.get("found_inf"))
        result = self.local.step(closure, plan.local_sync, *amp)
        if plan.merge and self.sent_at is not None:
            self.exchange.merge(batch - self.sent_at, outer=self._is_cycling)
            self.sent_at = None
        if plan.blocking:
            self._mean()
        elif plan.send:
            self.exchange.send(self._next_group(), narrow=self.downcast_cycling)
            self.sent_at = batch
        self.batches_done += 1
        if plan.close:
            self._close()
        else:
            self.current_batch += 1
        following = self.schedule.plan(self.current_batch, n_batches, self.sent_at)
        self.local.switch(following.local_sync)
        return result

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients; zeros by default, as HeAT does."""
        self.local_optimizer.zero_grad(set_to_none=set_to_none)

    def _agreed_length(self) -> int:
        """Return the batches of this epoch, the same on all ranks; compared once an epoch."""
        if self.must_agree or self.batches_done == 0:
            agree(self)
        return self._n_batches or 1

    def _next_group(self) -> int:
        """Return the global group of the next exchange, with the node brought together for it."""
        group = self.rotation % len(self.reduced_ranks)
        self.rotation += 1
        if self.local.is_apart:
            self.exchange.align(group)
            self.local.aligned()
        return group

    def _mean(self) -> None:
        self.exchange.drop()
        self.sent_at = None
        self.exchange.mean(self._next_group(), outer=self._is_cycling)

    def _close(self) -> None:
        if self.sync_buffers and self.module is not None:
            average_buffers(self.module, self.communicator)
        if self.sync_state:
            average_state(self.local_optimizer, self.communicator)
            self.local.together()
        self.current_batch = 0
        self.rotation = 0
        self.has_closed = True

    # -- an epoch -------------------------------------------------------------------------------

    def epoch_loss_logic(self, loss: Tensor | float, loss_globally_averaged: bool = False) -> None:
        """End an epoch: choose from its loss how rarely nodes synchronise in the next. Collective.

        An epoch that had more or fewer batches than `last_batch` is closed here.

        Args:
            loss: this rank's loss, a number or a tensor with one.
            loss_globally_averaged: it is already the same on all ranks; rank 0's is used.
        """
        mine = check_loss(loss)
        expect("loss_globally_averaged", loss_globally_averaged, bool)
        if self.must_agree and self.batches_done:
            agree(self)
        report = torch.tensor([[mine]], dtype=torch.float64, device=self.communicator.device)
        losses = (
            self.communicator.all_gather(report, sizes=[1] * self.communicator.size)
            .flatten()
            .tolist()
        )
        mean = losses[0] if loss_globally_averaged else sum(losses) / len(losses)
        if self.batches_done and self.batches_done != self._n_batches:
            self._close_early()
        was_cycling = self._is_cycling
        self.schedule.epoch_end(mean)
        self.batches_done = 0
        self.has_closed = False
        if self._is_cycling and not was_cycling and self.module is not None:
            self.exchange.bind(self.module)
        self.local.end_epoch(mean)
        if self.verbose:
            count = f"{self.epoch} of {self.schedule.total_epochs}"
            self.print0(f"DASO: epoch {count}, loss {mean:.6g}, then {self.schedule.skips}")

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
        self.local.switch(True)

    def reset(self) -> None:
        """Go back to the state after construction; model and optimizer state stay. Collective."""
        self.exchange.drop()
        if self.exchange.outer is not None:
            self.exchange.outer.restart()
        self.schedule.reset()
        self.zero_grad()
        self._start_over()
        self.local.switch(True)

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue at this batch. Local.

        An exchange in flight is waited for, not used. Save one state for each rank; after the last
        batch of an epoch one rank's state serves all.
        """
        return daso_state.capture(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` gave. Local; call it on all ranks."""
        daso_state.restore(self, state_dict)
