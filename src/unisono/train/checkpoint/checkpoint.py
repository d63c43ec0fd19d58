"""`Checkpoint`: the state of a training on disk, whole at any moment, for any number of ranks."""

from __future__ import annotations

import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from unisono import accelerator
from unisono.comm import Communicator
from unisono.comm.machine import own_card
from unisono.errors import (
    SAVED_ALONE,
    CheckpointError,
    CollectiveMismatch,
    RankTimeout,
    Requeue,
    compress_ranks,
)
from unisono.expect import expect_choice, is_integer
from unisono.nn import Shard
from unisono.train.checkpoint import folder
from unisono.train.checkpoint.blocks import (
    BlockFacts,
    compare,
    describe,
    is_empty,
    is_leaf,
    packed,
    shard_of,
    stored_name,
    taken_apart,
)
from unisono.train.checkpoint.blocks import Path as PathInTree
from unisono.train.checkpoint.folder import Manifest, Saved
from unisono.train.checkpoint.parts import Part, parts_of, parts_to_restore
from unisono.train.checkpoint.reading import Reading
from unisono.train.checkpoint.saving import Background, Order, as_text, save, save_plans
from unisono.train.exact.run import writes_here
from unisono.train.generators import (
    random_states,
    seed_generators,
    seed_of,
    set_random_states,
)

__all__ = ["Checkpoint", "Restored"]

T = TypeVar("T")
_RANDOM, _VALUES = "~random", "~values"
_SHARED_S = 5.0
"""How long a network file system may take to show a file to other hosts."""
_ADVICE = {
    ("FileExistsError", "NotADirectoryError"): "a directory of its own: Checkpoint('runs/mine')",
    ("PermissionError", "Read-only file system"): (
        "a directory that you may write to, such as Checkpoint('runs/mine')"
    ),
    ("No space left", "quota"): "remove files there, or keep fewer checkpoints",
    ("pickle",): "save values, not code: leave out lambdas, local functions, open files and locks",
}
"""By words of an error, which reaches other ranks as text: what to type."""


@dataclass(frozen=True, eq=False)
class Restored(Mapping[str, Any]):
    """What `Checkpoint.restore` found; a mapping of the plain values that were saved, by name."""

    step: int
    """The step at which it was saved."""
    path: Path
    """Its directory."""
    ranks: int
    """Number of ranks that saved it."""
    values_by_name: Mapping[str, Any] = field(default_factory=dict)
    """The plain values."""

    def __getitem__(self, name: str) -> Any:
        """Return a plain value that was saved."""
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def __bool__(self) -> bool:
        """Return True: something was restored, with or without plain values."""
        return True


class Checkpoint:
    """Saves and restores a training; a kill at any moment leaves the last good checkpoint.

    Collective over `comm`, as `save`, `restore`, `wait` and leaving a `with` block are. The
    directory must be one that all ranks see. One run at a time writes into it; others may restore.

    Args:
        directory: where checkpoints are; made if need be.
        keep: how many of the last checkpoints stay; None: all.
        keep_best: also keep the one with the lowest (`"min"`) or highest (`"max"`) `metric`.
        asynchronous: `save` copies the state and returns; files are written while training goes on.
        comm: the ranks that train; None: the world.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as place, Checkpoint(place) as checkpoint:
    ...     first = checkpoint.restore(model=model)
    ...     checkpoint.save(10, model=model, epoch=3)
    ...     again = checkpoint.restore(model=model)
    >>> first, again.step, again["epoch"]
    (None, 10, 3)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = 3,
        keep_best: Literal["min", "max"] | None = None,
        asynchronous: bool = False,
        comm: object = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.comm = Communicator.of(comm)
        self.asynchronous = asynchronous
        self.keep, self.keep_best = keep, keep_best
        settings = {"keep": keep, "keep_best": keep_best, "asynchronous": asynchronous}
        table = _together(self.comm, "Checkpoint(...)", lambda: settings)
        for name in settings:
            values = [row[name] for row in table]
            _check_equal("Checkpoint(...)", name, values, f"the same {name} on all ranks")
        if keep is not None and (not is_integer(keep) or keep < 1):
            call = f"Checkpoint(keep={keep!r})"
            raise CheckpointError.because(call, "not an integer >= 1", hint="keep=3, or None")
        if keep_best is not None:
            expect_choice("keep_best", keep_best, ("min", "max"), error=CheckpointError)
        self._token = _shared_directory(self.comm, self.directory)
        self._cards = self.comm.all_gather_object(own_card())
        self._saves = 0
        self._under_way: Background | None = None

    # What is there.

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, the latest last. Local."""
        return [saved.step for saved in folder.saved_in(self.directory)]

    @property
    def latest(self) -> int | None:
        """Step of the checkpoint that `restore` would take; None without a checkpoint. Local."""
        return next(reversed(self.steps), None)

    @property
    def best(self) -> int | None:
        """Step of the checkpoint with the best metric, by `keep_best`. Local."""
        best = folder.best_of(folder.saved_in(self.directory), self.keep_best)
        return None if best is None else best.step

    # Saving.

    def save(self, step: int, /, *, metric: float | None = None, **objects: Any) -> None:
        """Save everything that is named, and the random states of all ranks. Collective.

        Objects: modules (also wrapped, split or sharded), Bayesian nets, optimizers, DASO, learning
        rate schedulers, gradient scalers, samplers, `Resumable` loaders, generators, anything with
        `state_dict` and `load_state_dict`. Everything else is a plain value, such as `epoch=3`.
        In the loop of `unisono.train.elastic` one member saves, and the others go on.

        Args:
            step: number of the step, the same on all ranks.
            metric: how good the model is; needed for `keep_best`, the same on all ranks.
            **objects: what to save, each under its own name.
        """
        if not writes_here():
            return
        self.wait()
        call = f"Checkpoint.save({step!r})"
        state: dict[str, Shard | bytes] = {}
        paths: dict[str, PathInTree] = {}

        def capture() -> tuple[int, float | None, dict[str, str], dict[str, BlockFacts]]:
            if not is_integer(step) or step < 0:
                problem = "not the number of a step"
                raise CheckpointError.because(call, problem, hint="save(100, ...)")
            number = None if metric is None else _number(call, metric)
            parts, values = parts_of(objects)
            trees = {name: part.capture() for name, part in parts.items()}
            for name, tree in {**trees, _VALUES: values, _RANDOM: random_states()}.items():
                _add(name, tree, state, paths)
            pieces = describe(state, paths if self.comm.size > 1 else ())
            return step, number, {name: part.kind for name, part in parts.items()}, pieces

        rows = _together(self.comm, call, capture)
        steps, metrics, kinds, pieces = zip(*rows, strict=True)
        _check_equal(call, "step", steps, "count steps alike on all ranks")
        hint = "one number for all: comm.all_reduce(loss, 'mean').item()"
        _check_equal(call, "metric", list(map(str, metrics)), hint)
        _check_equal(call, "objects", kinds, "name the same objects on all ranks")
        comparison = compare(pieces)
        plans, contents = save_plans(comparison, pieces, paths)
        self._saves += 1
        partial = self.directory / f"{folder.PARTIAL}{self._token}-{self._saves}"
        if self.comm.rank == 0:  # of killed runs, and of a rank that came too late to a failed save
            folder.sweep(self.directory, partial.name)
        order = Order(
            rank=self.comm.rank,
            ranks=self.comm.size,
            partial=partial,
            plan=plans[self.comm.rank],
            contents=contents,
            manifest=Manifest(
                step=step,
                sequence=0,
                ranks=self.comm.size,
                parts=kinds[0],
                versions=comparison.versions,
                metric=metrics[0],
                format=folder.FORMAT,
            ),
            keep=self.keep,
            best=self.keep_best,
            timeout_s=self.comm.timeout_s,
            cards=self._cards,
        )
        offers = comparison.offers[self.comm.rank]
        stored = {stored_name(*offer): state[offer[0]] for offer in offers}
        if self.asynchronous:
            self._under_way = Background(order, stored)
        else:
            self._conclude(order, save(order, stored, self.comm.gather_object))

    def wait(self) -> None:
        """Wait for a save in the background; raises on all ranks if it failed. Collective.

        Without one under way it returns at once.
        """
        job, self._under_way = self._under_way, None
        if job is not None:
            self._conclude(job.order, job.join())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        # A rank that failed alone must not wait for the others here; its save ends all the same.
        if error is None or isinstance(error, Requeue):
            self.wait()

    def _conclude(self, order: Order, error: str | None) -> None:
        """Raise on all ranks if a save failed, by what rank 0 knows of it. Collective."""
        verdict = self.comm.broadcast_object(error)
        if verdict is not None:
            call = f"Checkpoint.save({order.manifest.step})"
            before = "the checkpoints before it are untouched"
            raise CheckpointError.because(call, verdict, before, _advice(verdict))

    # Restoring.

    def restore(
        self,
        step: int | None = None,
        /,
        *,
        partial: bool = False,
        random_states: bool = True,
        weights_only: bool = True,
        **objects: Any,
    ) -> Restored | None:
        """Put objects into the state of a checkpoint; None, and nothing changed, without one.

        Collective. The number of ranks may be another one than at the save. A damaged checkpoint is
        passed over with a warning, for the one before it. Nothing is changed unless all fits.

        Args:
            step: which one, the same on all ranks; None: the latest.
            partial: leave out objects of the checkpoint that are not named here, such as the
                optimizer when a model is only evaluated.
            random_states: take back the states of torch's, numpy's and Python's generators.
            weights_only: take plain data alone: numbers, texts, lists, dicts, tensors. False also
                takes objects of other classes, for which code that the files name is run.
            **objects: what to restore, under the names of `save`.
        """
        self.wait()
        call = f"Checkpoint.restore({'' if step is None else step})"
        rows = self.comm.all_gather_object((step, dict.fromkeys(objects)))
        steps, names = zip(*rows, strict=True)
        _check_equal(call, "step", steps, "the same step on all ranks, or restore() for the latest")
        _check_equal(call, "objects", names, "name the same objects on all ranks")
        saved = self._chosen(step)
        if saved is None:
            return None
        ranks, values = saved.manifest.ranks, {}
        call = f"Checkpoint.restore() of step {saved.step}, saved on {ranks} ranks"
        as_rank = self.comm.rank if ranks == self.comm.size else 0
        parts: dict[str, Part] = {}
        readings: list[Reading] = []

        def prepare() -> None:
            parts.update(parts_to_restore(saved, objects, partial))
            if ranks != self.comm.size:
                _refuse_other_ranks(call, parts)
            readings.append(Reading(saved, as_rank, weights_only=weights_only))
            readings[0].check_fits(parts)
            values.update(readings[0].trees({_VALUES: None})[_VALUES])

        def load() -> None:
            for name, tree in readings[0].trees(parts).items():
                parts[name].take(tree)
            if random_states:
                self._restore_random(saved)

        _together(self.comm, call, prepare)
        call = f"{call}: some objects have changed; restore again, or start the program again"
        _together(self.comm, call, load)
        return Restored(saved.step, saved.path, ranks, values)

    def _restore_random(self, saved: Saved) -> None:
        """Go on with the states of this rank; a rank that is new gets a stream of its own.

        Unless all ranks were in one state: then they were seeded alike on purpose, and stay so.
        """
        ranks = saved.manifest.ranks
        states = Reading(saved, self.comm.rank % ranks).trees({_RANDOM: None})[_RANDOM]
        were_alike = not any(_RANDOM in name for name in saved.manifest.versions)
        if self.comm.rank < ranks or (were_alike and ranks > 1):
            set_random_states(states)
            if accelerator.kind() not in states:  # written on a CPU, or on another kind of device
                accelerator.seed(seed_of(states["torch"].numpy().tobytes()))
        else:
            seed_generators(seed_of(states["torch"].numpy().tobytes(), self.comm.rank))

    def _chosen(self, step: int | None) -> Saved | None:
        """Return the checkpoint to restore, the same on all ranks; damaged ones are passed over."""
        there, lost = self.comm.broadcast_object(
            (folder.saved_in(self.directory), folder.unreadable_in(self.directory))
        )
        if step is not None:
            chosen = [saved for saved in there if saved.step == step]
            if not chosen:
                raise CheckpointError.because(
                    f"Checkpoint.restore({step})",
                    f"checkpoints of steps {[saved.step for saved in there]} in {self.directory}",
                    hint="restore() takes the latest",
                )
            there = chosen
        problems = list(lost)
        for saved in reversed(there):
            names = sorted(saved.manifest.files)[self.comm.rank :: self.comm.size]
            damages = self.comm.all_gather_object(folder.damage(saved, names))
            problem = next(filter(None, damages), None)
            if problem is None:
                for text in problems:
                    warnings.warn(
                        f"step {saved.step} is restored, a damaged checkpoint passed over: {text}",
                        UserWarning,
                        stacklevel=3,
                    )
                return saved
            problems.append(f"{saved.path.name}: {problem}")
        if problems:
            raise CheckpointError.because(
                f"Checkpoint.restore() from {self.directory}",
                "no checkpoint is whole:\n" + "\n".join(problems),
                hint="start again in another directory, or bring the files back",
            )
        return None


def _add(
    name: str, tree: Any, state: dict[str, Shard | bytes], paths: dict[str, PathInTree]
) -> None:
    """Add the state of an object: its tensors one by one, as blocks, and the rest of the tree."""
    rest, leaves = taken_apart(tree, is_leaf)
    tensors = {f"{name}.{key}": path for key, (path, _) in leaves.items()}
    state[f"~{name}"] = packed({"tree": rest, "tensors": tensors})
    for key, (path, leaf) in leaves.items():
        shard = shard_of(leaf)
        if not is_empty(shard):
            state[f"{name}.{key}"], paths[f"{name}.{key}"] = shard, (name, *path)


def _number(call: str, metric: Any) -> float:
    try:
        return float(metric)
    except (TypeError, ValueError, RuntimeError) as error:  # the last: several numbers
        problem = f"metric={metric!r}: {error}"
        raise CheckpointError.because(call, problem, hint="metric=loss.item()") from None


def _refuse_other_ranks(call: str, parts: Mapping[str, Part]) -> None:
    """Refuse states that are those of one rank among equally many."""
    for name, part in parts.items():
        if part.other_ranks is not None:
            problem = f"{name}={part.kind} has the position of one rank among those that saved it"
            raise CheckpointError.because(call, problem, hint=part.other_ranks)


# What ranks do or refuse together: an error of one is that of all.


def _together(comm: Communicator, call: str, action: Callable[[], T]) -> list[T]:
    """Return what a local action gave on each rank; if it failed on one, all raise. Collective."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    try:
        rows = comm.all_gather_object((result, as_text(problem)))
    except (CollectiveMismatch, RankTimeout) as error:  # a call that other ranks do not make
        error.add_note(SAVED_ALONE)
        raise
    if isinstance(problem, CheckpointError):
        raise problem
    failed = [rank for rank, (_, text) in enumerate(rows) if text]
    if failed:
        text = rows[failed[0]][1]
        raise CheckpointError.because(
            call, f"rank {failed[0]}: {text}", f"ranks: {compress_ranks(failed)}", _advice(text)
        ) from problem
    return [value for value, _ in rows]


def _advice(text: str) -> str | None:
    """Return what to type against a problem."""
    hints = (hint for words, hint in _ADVICE.items() if any(word in text for word in words))
    return next(hints, None)


def _check_equal(call: str, what: str, values: Sequence[Any], hint: str) -> None:
    """Raise if ranks do not agree on something."""
    for rank, value in enumerate(values):
        if value != values[0]:
            first, other = (
                ", ".join(v) if isinstance(v, dict) else repr(v) for v in (values[0], value)
            )
            problem = f"rank 0 has {what} {first}, rank {rank} has {other}"
            raise CheckpointError.because(call, problem, hint=hint)


def _shared_directory(comm: Communicator, directory: Path) -> str:
    """Make a directory, check that all ranks see it, return a token of this run. Collective."""
    call = f"Checkpoint({str(directory)!r})"
    token = comm.broadcast_object(secrets.token_hex(6))
    sign = directory / f".seen-{token}"

    def make() -> None:
        if comm.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            sign.touch()

    _together(comm, call, make)
    end = time.monotonic() + _SHARED_S
    while not (is_visible := sign.exists()) and time.monotonic() < end:
        time.sleep(0.05)
    views = comm.all_gather_object((is_visible, f"{directory} on {socket.gethostname()}"))
    if comm.rank == 0:
        sign.unlink(missing_ok=True)
    blind = [rank for rank, (sees, _) in enumerate(views) if not sees]
    if blind:
        raise CheckpointError.because(
            call,
            f"rank {blind[0]} looks into {views[blind[0]][1]} and does not see what rank 0 writes "
            f"into {views[0][1]}",
            f"ranks without the directory: {compress_ranks(blind)}",
            "a directory on a file system that all hosts share, the same on all ranks",
        )
    return token
