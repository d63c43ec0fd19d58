"""Uneven data: how much each rank's gradient counts, and ranks that have run out of batches.

Those take part in the collectives of the others until all have run out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.data_parallel.engine import GradientEngine, Unfinished, named_error
from unisono.data_parallel.nonblocking import DataParallelOptimizer, only_observes
from unisono.data_parallel.ranks import broadcast_module, on_device
from unisono.expect import one_line, refusal


class Weights:
    """Weights of this rank's gradients.

    Within one accumulation (`no_sync` backwards and the one that synchronises) the k-th gradient is
    multiplied with n_k / r, where r is the first of them, so that the sum is worth r samples.

    Args:
        engine: asks for the weight at each synchronising backward, while ranks may differ.
    """

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine
        self._samples: float | None = None
        self._reference: float | None = None
        self._total = 0.0
        self._marks_before: list[tuple[int, int] | None] = []  # gradients after the last of them
        self._is_scaling = self._accumulates = False
        self._joining: bool | None = None
        self.divide_by_world = False
        """Inside `join`: whether ranks without data count."""

    def join(self, has_data: bool | None) -> None:
        """Note whether this rank still has data; None: outside of `join`."""
        self._joining = has_data
        self._offer()

    def _offer(self) -> None:
        """Let the engine ask, or else take all ranks for equal."""
        counts = self._samples is not None or self._total > 0 or self._joining is not None
        self._engine.weigh = self.weigh if counts else None

    @contextlib.contextmanager
    def samples(self, n: float) -> Iterator[None]:
        """Count the gradient of the backward inside as `n` samples."""
        is_number = isinstance(n, int | float | Tensor) and not isinstance(n, bool)
        if not is_number or not 0 <= float(n) < math.inf:
            hint = "samples(len(batch)), a number of at least 0"
            raise refusal(ValueError, f"samples({n!r})", hint=hint)
        self._forget_what_was_cleared()
        n = float(n)
        before, self._samples = self._samples, n
        self._accumulates = False
        self._offer()
        try:
            with self.scaling():
                yield
            if self._accumulates:
                self._total += n
                self._marks_before = self._marks()
            elif self._engine.comm.size == 1:
                self._divide_alone(n)
        finally:
            self._samples = before
            self._offer()

    def _forget_what_was_cleared(self) -> None:
        """Start again where an accumulation was given up: its gradients are gone.

        Or they are zeros that were written; those of a backward may be zeros, too.
        """
        if (self._reference is None and self._total == 0) or self._marks() == self._marks_before:
            return
        grads = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        if not any((g.coalesce().values() if g.is_sparse else g).any() for g in grads):
            self._reference, self._total = None, 0.0

    def _marks(self) -> list[tuple[int, int] | None]:
        """Return marks that change when gradients are replaced or written to."""
        grads = [p.grad for p in self._engine.module.parameters()]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    @contextlib.contextmanager
    def scaling(self) -> Iterator[None]:
        """Multiply gradients as they come, where later ones of the accumulation need it.

        Entered by `samples` and by `no_sync`, in any order.
        """
        n = self._samples
        if n is not None and not self._engine.require_sync:
            self._accumulates = True
        is_alone = self._engine.comm.size == 1 and n == 0
        is_needed = self._accumulates or self._reference is not None or is_alone
        if n is None or self._is_scaling or not is_needed:
            yield
            return
        if self._reference is None and n > 0:
            self._reference = n
        factor = n / (self._reference or 1.0)
        params = [p for p in self._engine.module.parameters() if p.requires_grad]

        def scaled(grad: Tensor) -> Tensor:
            return grad * factor if factor else torch.zeros_like(grad)

        hooks = [p.register_hook(scaled) for p in params] if factor != 1 else []
        self._is_scaling = True
        try:
            yield
        finally:
            self._is_scaling = False
            for hook in hooks:
                hook.remove()

    def weigh(self) -> float:
        """Return this rank's weight in the backward that begins. Collective over the ranks."""
        samples, counted = 0.0, self._samples is not None or self._total > 0
        if self._joining is not False:
            samples = self._total + (self._samples or 0.0) if counted else 1.0
        buckets, comm = self._engine.buckets, self._engine.comm
        if buckets:
            comm = on_device(comm, buckets[0].info.device)
        dtype = torch.float32 if comm.device.type == "mps" else torch.float64
        report = torch.tensor([[samples, float(counted)]], dtype=dtype, device=comm.device)
        # Odd in bytes: a rank without weights cannot take it for a bucket.
        odd = nn.functional.pad(report.view(torch.uint8), (0, 1))
        try:
            gathered = comm.all_gather(odd, sizes=[1] * comm.size)
            reports = gathered[:, :-1].contiguous().view(dtype)
        except Unfinished as error:
            raise named_error(error, "weights of this backward, from samples() or join()") from None
        total, some_counted = reports.sum(0).tolist()
        if not some_counted and self.divide_by_world:
            total = comm.size
        worth = samples if self._reference is None else self._reference
        self._reference, self._total = None, 0.0
        self._offer()
        return worth / total if total > 0 and samples > 0 else 0.0

    def _divide_alone(self, n: float) -> None:
        """Finish an accumulation in a world of one, where nothing else sees to it."""
        total = self._total + n
        if self._reference is not None and total > 0:
            for param in self._engine.module.parameters():
                if param.grad is not None:
                    param.grad.mul_(self._reference / total)
        self._reference, self._total = None, 0.0


class Join:
    """One `join` block of a rank.

    Args:
        engine: whose collectives are shadowed.
        weights: of the gradients, by the ranks that still count.
        attached: optimizers of the `DataParallel`.
        partners: what else steps with the batches. Optimizers that hold parameters of the module
            and step inside are noticed without it.
    """

    def __init__(
        self,
        engine: GradientEngine,
        weights: Weights,
        attached: Sequence[DataParallelOptimizer],
        partners: Sequence[object],
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._attached = attached
        self._last_source: int | None = None
        self._batches = 0
        self._parameter_ids = {id(p) for p in engine.module.parameters()}
        self._stepped: dict[int, Any] = {}
        self._first_rates: dict[int, list[float]] = {}
        for optimizer in attached:
            self._note(optimizer)
        for one in partners:
            _check_stateful(one)
            of_scheduler = getattr(one, "optimizer", None)
            if isinstance(of_scheduler, optim.Optimizer):
                self._note(of_scheduler)
            self._note(one)

    def _note(self, one: Any) -> None:
        """Bring the state of `one` together in the end; an optimizer of ours is the one inside."""
        inner = _inner(one)
        if id(inner) not in self._stepped:
            self._stepped[id(inner)] = one
            if isinstance(inner, optim.Optimizer):
                self._first_rates[id(inner)] = _rates(inner)

    @only_observes
    def _saw_step(self, optimizer: optim.Optimizer, *_: object) -> None:
        params = (p for group in optimizer.param_groups for p in group["params"])
        if any(id(p) in self._parameter_ids for p in params):
            self._note(optimizer)

    def before_forward(self) -> int:
        """Tell all ranks that this one has a batch; returns the rank whose buffers all take.

        Collective over the ranks.
        """
        self._batches += 1
        source, _ = self._exchange(has_data=True)
        return 0 if source is None else source

    @contextlib.contextmanager
    def block(self, divide_by_world: bool) -> Iterator[None]:
        """Run the user's loop, then shadow the others until all have run out. Collective."""
        self._weights.divide_by_world = divide_by_world
        self._weights.join(has_data=True)
        hook = register_optimizer_step_post_hook(self._saw_step)
        self._engine.is_joining = True
        try:
            yield
            for optimizer in self._attached:
                optimizer.finalize()
            with torch.enable_grad():
                self._shadow()
            self._make_equal()
        finally:
            hook.remove()
            self._engine.is_joining = False
            self._weights.divide_by_world = False
            self._weights.join(has_data=None)

    def _exchange(self, has_data: bool) -> tuple[int | None, bool]:
        """Return the lowest rank with data, None if there is none, and whether they synchronise."""
        flags = [int(has_data), int(has_data and self._engine.require_sync)]
        try:
            rows = self._engine.comm.all_gather_ints(flags)
        except Unfinished as error:
            raise named_error(error, "who has data left, from join()") from None
        source = next((rank for rank, (active, _) in enumerate(rows) if active), None)
        if source is not None:
            self._last_source = source
        return source, any(syncs for _, syncs in rows)

    def _shadow(self) -> None:
        while True:
            source, syncs = self._exchange(has_data=False)
            if source is None:
                return
            if syncs:
                # What `no_sync` has accumulated here counts once more, then there is nothing left.
                brings = self._engine.holds_unsent
                self._weights.join(has_data=brings)
                self._engine.before_forward(source, shadowing=True)
                self._engine.shadow_backward(brings)

    def _make_equal(self) -> None:
        """Give all ranks the state of one that trained to the end. Collective over the ranks."""
        comm, source = self._engine.comm, self._last_source
        if source is None or comm.size == 1:
            return
        stepped = list(self._stepped.values())
        rates = [_rates(x) for x in stepped if isinstance(x, optim.Optimizer)]
        is_scheduled = any(
            not isinstance(x, optim.Optimizer | torch.amp.GradScaler | nn.Module) for x in stepped
        )
        has_changed = not is_scheduled and rates != list(self._first_rates.values())
        names = ", ".join(_describe(x) for x in stepped)
        report = (self._batches, names, rates, has_changed)
        reports = comm.all_gather_object(report)
        batches, descriptions, all_rates, changed = zip(*reports, strict=True)
        ends_apart = len(set(batches)) > 1 or any(rate != rates for rate in all_rates)
        if len(set(descriptions)) > 1:
            raise _unlike(
                "ranks know of different optimizers; one is noticed at its first step inside",
                [
                    f"{n} batches, {text or '-'}"
                    for n, text in zip(batches, descriptions, strict=True)
                ],
                "with model.join(optimizer): on every rank, with all that is stepped inside",
            )
        if any(changed) and ends_apart:
            raise _unlike(
                "a learning rate changes inside, and ranks step its scheduler unlike many times",
                [f"{n} batches, lr {rate}" for n, rate in zip(batches, all_rates, strict=True)],
                "with model.join(scheduler):, which gives it the same state on all ranks; write a "
                "schedule of your own as torch.optim.lr_scheduler.LambdaLR",
            )
        broadcast_module(self._engine.module, comm, source)
        if len(set(batches)) == 1:
            return  # all have made the same steps
        states = [x.state_dict() for x in stepped] if comm.rank == source else None
        states = comm.broadcast_object(states, source)
        if comm.rank != source:
            for one, state in zip(stepped, states, strict=True):
                one.load_state_dict(state)


def _inner(one: Any) -> Any:
    return one.torch_optimizer if isinstance(one, DataParallelOptimizer) else one


def _rates(optimizer: optim.Optimizer) -> list[float]:
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def _describe(one: Any) -> str:
    inner = _inner(one)
    if isinstance(inner, optim.Optimizer):
        count = sum(len(group["params"]) for group in inner.param_groups)
        return f"{type(inner).__name__} of {count} tensors"
    return type(inner).__name__


def _check_stateful(one: object) -> None:
    names = ("state_dict", "load_state_dict")
    if isinstance(one, type) or not all(callable(getattr(one, name, None)) for name in names):
        problem = f"{type(one).__name__}, without state_dict() and load_state_dict()"
        hint = "join(optimizer, scheduler), whatever is stepped inside"
        raise refusal(TypeError, f"join({one_line(one)})", problem, hint=hint)


def _unlike(problem: str, by_rank: Sequence[str], hint: str) -> ValueError:
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(by_rank)]
    return refusal(ValueError, "the end of join()", problem, "\n".join(lines), hint)
