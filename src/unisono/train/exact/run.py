"""`elastic`: a training loop whose results have the same bits for any number of members."""

from __future__ import annotations

import hashlib
import io
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import default_restore_location

from unisono import accelerator
from unisono.errors import (
    CheckpointError,
    PlatformError,
    UnisonoError,
)
from unisono.expect import expect, expect_float, expect_int
from unisono.launch import stopping
from unisono.train.exact.checks import check_model, check_world, device_of
from unisono.train.exact.data import Loader, Shards
from unisono.train.exact.link import ElasticLink, InVain, open_link
from unisono.train.exact.shards import undisturbed
from unisono.train.exact.sums import Closure, ShardSums
from unisono.train.generators import seed_of

_DATA_EVERY = 64
"""Steps between two comparisons of a sample over members."""


class ElasticStep:
    """One step of the loop; call it once with what computes the loss of a shard.

    Attributes:
        number: counts from 0.
        epoch: which pass over the data.
        loss: mean loss over the batch, after the call.
        metrics: mean of what `log` got, after the call.
        members: how many ranks took part, after the call.
        is_logger: whether this rank is the one that prints and saves.
    """

    def __init__(self, run: ElasticRun, number: int, is_logger: bool) -> None:
        self.number, self.epoch = number, number // run.shards.steps_per_epoch
        self.is_logger = is_logger
        self.loss = float("nan")
        self.metrics: dict[str, float] = {}
        self.members = 0
        self.is_done = False
        self.logged: dict[str, float] | None = None
        self._run = run

    def __call__(self, closure: Closure) -> float:
        """Compute shards until the step has happened, and apply it; returns the mean loss.

        Args:
            closure: given a batch, returns its mean loss; called once per shard, and again for
                shards of ranks that died. It calls no collective.
        """
        if self.is_done:
            raise UnisonoError.because(
                f"step {self.number} is taken a second time", hint="one call in the loop"
            )
        self._run.take(self, closure)
        self.is_done = True
        return self.loss

    def log(self, **values: float | Tensor) -> None:
        """Note numbers of a shard, inside the closure; their mean over the batch is `metrics`."""
        if self.logged is None:
            raise UnisonoError.because(
                "step.log(...) outside of the closure",
                "no shard that it could be about",
                hint="unisono.train.log after the step",
            )
        self.logged |= {
            name: float(value.detach() if isinstance(value, Tensor) else value)
            for name, value in values.items()
        }


class ElasticRun:
    """Train in steps that are the same to the last bit for any number of ranks.

    Each step's batch is cut into `shards`; their gradients are computed one by one, by the members
    that are there, and added up in one fixed order. In `run(..., elastic=True)` ranks may be killed
    and join at any moment: no step is lost, none is done twice. Elsewhere it trains in this process
    alone.

    What a step must know of the steps before is in the model, the optimizer, the scheduler, the
    scaler, or named by `state`: a rank that joins gets these from a member. Randomness inside the
    closure is seeded by seed, step and shard.

    Iterate over it once. With `state_dict` and `load_state_dict` a `Checkpoint` can hold it whole:
    model, optimizer, scheduler, scaler, what `state` names, and the step.

    Args:
        model: holds all parameters of the optimizer; on the CPU, or whole on the device of the
            rank. There, only deterministic kernels are used while a step computes.
        optimizer: steps once for each batch, on all members alike.
        data: a dataset with a length, a tensor, or a tuple of tensors; samples that fill no batch
            at the end of an epoch are left out.
        batch_size: samples of a step, over all members.
        shards: into how many parts a step is cut; as many ranks can share the work.
        seed: of the order of samples and of randomness in closure and dataset.
        scheduler: a learning rate scheduler, stepped after the optimizer.
        clip: largest norm of the whole gradient.
        epochs: passes over the data.
        steps: number of steps instead.
        shuffle: whether each epoch has an order of its own.
        collate: makes a batch of a list of samples; torch's `default_collate` if not given.
        workers: processes of each member that fetch shards ahead of time.
        scaler: a `torch.amp.GradScaler`.
        threads: of each member while it computes; the bits depend on it.
        strict: False takes a checkpoint of other settings with a warning.

    Attributes:
        number: steps that have happened.
        members: ranks of the last step.

    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.randn(64, 4), torch.randn(64, 1)
    >>> run = elastic(model, optimizer, data, batch_size=32)
    >>> for step in run:
    ...     loss = step(lambda batch: nn.functional.mse_loss(model(batch.x), batch.y))
    >>> run.number
    2
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        *,
        batch_size: int,
        shards: int = 8,
        seed: int = 0,
        scheduler: Any = None,
        clip: float | None = None,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        scaler: Any = None,
        threads: int = 1,
        strict: bool = True,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("shards", shards), ("threads", threads)):
            expect_int(name, value, 1, error=PlatformError)
        for name, value in (("seed", seed), ("epochs", epochs), ("workers", workers)):
            expect_int(name, value, 0, error=PlatformError)
        if steps is not None:
            expect_int("steps", steps, 0, error=PlatformError)
        if clip is not None:
            expect_float("clip", clip, 0.0)
        if batch_size < shards:
            raise PlatformError.because(
                f"elastic(..., batch_size={batch_size}, shards={shards})",
                "shards without a sample",
                f"{batch_size} < {shards}",
                f"shards={batch_size}, or a larger batch",
            )
        check_world(shards)
        check_model(model, optimizer)
        cut = Shards(data, batch_size, shards, seed, shuffle=shuffle, collate=collate)
        last = epochs * cut.steps_per_epoch if steps is None else steps
        self.model, self.optimizer, self.shards = model, optimizer, cut
        self.number, self.members = 0, 1
        self._last, self._clip, self._threads = last, clip, threads
        self._scheduler, self._scaler, self._strict = scheduler, scaler, strict
        self._extra: dict[str, Any] = {}
        self._link: ElasticLink | None = None
        self._is_logger = self._is_stopping = False
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._device = device_of(model)
        self._sums = ShardSums(model, cut, Loader(cut, workers, last), scaler, self._device)
        buffers = [name for name, _ in model.named_buffers()]
        self._facts = {
            "batch_size": batch_size,
            "clip": clip,
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "device": accelerator.name(self._device),
            "model": self._sums.layout.digest([*trained, *buffers]),
            "optimizer": type(optimizer).__name__,
            "samples": cut.samples,
            "seed": seed,
            "shards": shards,
            "shuffle": shuffle,
            "threads": threads,
            "torch": str(torch.__version__),
        }
        self._watched = [*model.parameters(), *model.buffers()]
        self._versions: list[int] = []
        self._changed = ""
        """Digest of a model that the program has changed since the last step, else nothing."""

    def state(self, **objects: Any) -> None:
        """Name objects that carry something from step to step, so that newcomers get it, too.

        Each has `state_dict` and `load_state_dict`, or is a tensor, a dict or a list.
        """
        ours = {"scheduler": self._scheduler, "scaler": self._scaler}
        for name, value in objects.items():
            if ours.get(name) is not None:
                raise UnisonoError.because(
                    f"run.state({name}=...)",
                    f"elastic(..., {name}=...) has a state under this name",
                    hint=f"another name: run.state(my_{name}=...)",
                )
            if not hasattr(value, "load_state_dict"):
                expect(name, value, (Tensor, dict, list))
            self._extra[name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        objects = {"scheduler": self._scheduler, "scaler": self._scaler, **self._extra}
        model = self.model.state_dict()
        return {
            "step": self.number,
            "facts": dict(self._facts),
            "model": model,
            # Not persistent, but steps change them all the same.
            "buffers": {name: b for name, b in self.model.named_buffers() if name not in model},
            "optimizer": self.optimizer.state_dict(),
            "objects": {
                name: value.state_dict() if hasattr(value, "state_dict") else value
                for name, value in objects.items()
                if value is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; one of other settings is refused, unless `strict=False`."""
        facts = {"device": "cpu", **state["facts"]}  # of all that were saved before devices could
        unlike = [
            f"{name}: {facts.get(name)} there, {value} here"
            for name, value in self._facts.items()
            if facts.get(name) != value
        ]
        if unlike:
            problem = "it was trained with other settings: the bits will differ\n" + "\n".join(
                unlike
            )
            if self._strict:
                raise CheckpointError.because(
                    "the state of an elastic training",
                    problem,
                    hint="the same settings, or elastic(..., strict=False)",
                )
            warnings.warn(problem, UserWarning, stacklevel=2)
        self.model.load_state_dict(state["model"])
        buffers = dict(self.model.named_buffers())
        for name, value in state.get("buffers", {}).items():
            _set_state(buffers[name], value)
        self.optimizer.load_state_dict(state["optimizer"])
        objects = {"scheduler": self._scheduler, "scaler": self._scaler, **self._extra}
        for name, value in state["objects"].items():
            _set_state(objects[name], value)
        self.number = state["step"]

    def __len__(self) -> int:
        """Number of steps of the whole training."""
        return self._last

    def __iter__(self) -> Iterator[ElasticStep]:
        """Join the other members, and yield the steps that are left."""
        if self._link is not None:
            raise UnisonoError.because(
                "a second loop over one elastic training", hint="epochs=..., or steps=..."
            )
        global _active
        self._link = link = open_link()
        _active = self
        stopping.agree_by(lambda: self._is_stopping)
        try:
            self._join(link)
            while self.number < self._last:
                step = ElasticStep(self, self.number, self._is_logger)
                yield step
                if not step.is_done:
                    raise UnisonoError.because(
                        f"step {step.number} of an elastic training",
                        "the body of the loop did not call it",
                        hint="step(lambda batch: loss_fn(model(batch.x), batch.y))",
                    )
        finally:
            stopping.agree_by(None)
            _active = None
            try:
                link.tell("left", step=self.number)
            finally:
                link.close()

    def _join(self, link: ElasticLink) -> None:
        """Become a member: with the state of another one, or as the first."""
        samples = self.shards.samples
        # Not a fact of a checkpoint, which may go on with other data.
        facts = {**self._facts, "data": self.shards.digest(0, samples // 2, samples - 1)}
        link.join(facts, self._sums.layout.board_bytes, len(self.shards.cuts), self.number)
        while (order := link.order())["kind"] == "load":
            state = link.get_state(order)
            if state is not None:
                donated = torch.load(
                    io.BytesIO(state), map_location=self._own_place, weights_only=False
                )
                self.load_state_dict(donated["state"])
                self._changed = donated["changed"]
                link.tell("loaded", step=order["step"])
                break
            link.tell("missed", step=order["step"])
        else:
            self._is_logger = True
        self._versions = [tensor._version for tensor in self._watched]

    def _own_place(self, storage: Any, place: str) -> Any:
        """Return memory of a member's device as memory of ours; step counters stay on the CPU."""
        return storage if place == "cpu" else default_restore_location(storage, str(self._device))

    def take(self, step: ElasticStep, closure: Closure) -> None:
        """Follow orders until the step has happened."""
        if (link := self._link) is None:
            raise UnisonoError("a step of an elastic training outside of its loop")
        link.follower.step = step.number
        word = self._since_last_step() << 1
        with undisturbed(self._threads, self._device):
            while (due := link.next()) != "commit":
                if due == "donate":
                    data = io.BytesIO()
                    torch.save({"state": self.state_dict(), "changed": self._changed}, data)
                    link.put_state(data.getvalue())
                    link.tell("donated", step=step.number, bytes=data.tell())
                    continue
                try:
                    if due == "compute":
                        self._sums.compute(link, step, closure)
                    elif due == "reduce":
                        self._sums.reduce(link)
                    is_new = due != "confirm"
                    link.show(due, word | stopping.is_wanted() if is_new else None)
                except InVain:
                    pass
            self._apply(link, step)
        self._changed, self._versions = "", [tensor._version for tensor in self._watched]
        self.number += 1
        if step.is_logger:
            _record(step, self.shards.batch_size)

    def _since_last_step(self) -> int:
        """Return what is equal on members whose programs did the same since the last step.

        It tells the settings of the optimizer, and the bits of the model where the program has
        changed them: a member that does so alone would train another model from here on.
        """
        if self._versions != [tensor._version for tensor in self._watched]:
            bits = hashlib.sha256()
            for tensor in self._watched:
                flat = tensor.detach().cpu().contiguous().flatten()
                bits.update(flat.view(torch.uint8).numpy())
            self._changed = bits.hexdigest()
        settings = [
            sorted((name, value) for name, value in group.items() if name != "params")
            for group in self.optimizer.param_groups
        ]
        data = self.shards.digest(self.number) if self.number % _DATA_EVERY == 0 else 0
        return seed_of(settings, self._changed, data) >> 1

    def _apply(self, link: ElasticLink, step: ElasticStep) -> None:
        """The step has happened: change the model as every member does."""
        self._agree(link, step)
        step.loss, step.metrics = self._sums.deliver(link, step.number)
        if self._scaler is not None:
            self._scaler.scale(
                self._sums.result.new_zeros(1)
            )  # a member without shards has to begin
            self._scaler.unscale_(self.optimizer)
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._sums.parameters, self._clip)
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()

    def _agree(self, link: ElasticLink, step: ElasticStep) -> None:
        """Take over what all members say of the step; end if their programs have parted."""
        order = link.follower.order
        ways: dict[int, list[int]] = {}
        words = link.words()
        for rank, word in zip(order["ranks"], words, strict=True):
            ways.setdefault(word >> 1, []).append(rank)
        if len(ways) > 1:
            parted = " and ".join(f"ranks {ranks}" for ranks in ways.values())
            why = (
                f"{parted} came to step {step.number} with other parameters, buffers, settings of "
                "the optimizer or data: their programs changed them between steps, and not alike, "
                f"or sample {step.number % self.shards.samples} is not the same on all of them"
            )
            link.tell("mismatch", why=why)
            while True:  # the launcher ends all
                link.order()
        self._is_stopping = any(word & 1 for word in words)
        step.members = self.members = len(words)
        step.is_logger = self._is_logger = order["logger"]


elastic = ElasticRun
_active: ElasticRun | None = None


def writes_here() -> bool:
    """Whether this process is the one that writes checkpoints; always, outside of such a loop."""
    return _active is None or _active._is_logger


def _record(step: ElasticStep, samples: int) -> None:
    """Put a step into the record of the run, if one is open."""
    from unisono.train.recording.run import log

    log(step=step.number, loss=step.loss, samples=samples, members=step.members, **step.metrics)


def _set_state(target: Any, state: Any) -> None:
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(state)
    elif isinstance(target, Tensor):
        with torch.no_grad():
            target.copy_(state)
    elif isinstance(target, dict):
        target.clear()
        target.update(state)
    else:
        target[:] = state
