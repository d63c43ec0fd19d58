"""`Checkpoint`: the state of a training on disk, whole at any moment, for any number of ranks."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Iterator, KeysView, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unisono import accelerator
from unisono.comm import Communicator
from unisono.comm.machine import own_card
from unisono.errors import (
    CheckpointError,
    Requeue,
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
    put_together,
    shard_of,
    stored_name,
    taken_apart,
)
from unisono.train.checkpoint.blocks import (
    Path as PathInTree,
)
from unisono.train.checkpoint.folder import Manifest, Saved
from unisono.train.checkpoint.parts import Part, parts_of, parts_to_restore
from unisono.train.checkpoint.reading import Reading
from unisono.train.checkpoint.saving import Background, Order, advice, as_text, save, save_plans
from unisono.train.checkpoint.together import (
    check_equal,
    check_problems,
    on_all_ranks,
    shared_directory,
    together,
)
from unisono.train.exact.run import writes_here
from unisono.train.generators import (
    random_states,
    seed_generators,
    seed_of,
    set_random_states,
)

__all__ = ["Checkpoint", "Restored"]

_RANDOM, _VALUES = "~random", "~values"


@dataclass(frozen=True)
class Restored:
    """What `Checkpoint.restore` found; `restored["epoch"]` reads a plain value that was saved.

    Names of such values are looked up as in a dict: `"epoch" in restored`, `get`, `keys`, `len`.
    """

    step: int
    """The step at which it was saved."""
    path: Path
    """Its directory."""
    ranks: int
    """Number of ranks that saved it."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that were saved, by name."""

    def __getitem__(self, name: str) -> Any:
        """Return a plain value that was saved."""
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a plain value that was saved, `default` if this name was not saved."""
        return self.values.get(name, default)

    def keys(self) -> KeysView[str]:
        """Return the names of the plain values."""
        return self.values.keys()

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

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
        with on_all_ranks():
            settings_by_rank = self.comm.all_gather_object(settings)
        for name in settings:
            values = [theirs[name] for theirs in settings_by_rank]
            check_equal("Checkpoint(...)", name, values, f"the same {name} on all ranks")
        if keep is not None and (not is_integer(keep) or keep < 1):
            call = f"Checkpoint(keep={keep!r})"
            raise CheckpointError.because(call, "not an integer >= 1", hint="keep=3, or None")
        if keep_best is not None:
            expect_choice("keep_best", keep_best, ("min", "max"), error=CheckpointError)
        self._token = shared_directory(self.comm, self.directory)
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
        captured = self._capture(objects)
        with on_all_ranks():
            by_rank = self.comm.all_gather_object(
                (
                    step,
                    metric,
                    captured.kinds,
                    as_text(captured.problem),
                    captured.pieces,
                    captured.space,
                )
            )
        steps, metrics, names, problems, everything, (space, *_) = zip(*by_rank, strict=True)
        check_problems(call, problems, captured.problem)
        check_equal(call, "step", steps, "count steps alike on all ranks")
        hint = "one number for all: comm.all_reduce(loss, 'mean').item()"
        check_equal(call, "metric", list(map(str, metrics)), hint)
        check_equal(call, "objects", names, "name the same objects on all ranks")
        if not is_integer(step) or step < 0:
            raise CheckpointError.because(call, "not the number of a step", hint="save(100, ...)")
        try:
            metric = None if metric is None else float(metric)
        except (TypeError, ValueError, RuntimeError) as error:  # the last: several numbers
            problem = f"metric={metric!r}: {error}"
            raise CheckpointError.because(call, problem, hint="metric=loss.item()") from None
        comparison = compare(everything)
        plans, contents, size = save_plans(comparison, everything, captured.paths)
        if size > space:
            raise CheckpointError.because(
                call,
                f"{space / 1e6:.1f} MB free in {self.directory}",
                f"{size / 1e6:.1f} MB are needed",
                f"remove files there, or keep fewer checkpoints than keep={self.keep}",
            )
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
                parts=captured.kinds,
                versions=comparison.versions,
                metric=metric,
                format=folder.FORMAT,
            ),
            keep=self.keep,
            best=self.keep_best,
            timeout_s=self.comm.timeout_s,
            cards=self._cards,
        )
        state = {
            stored_name(*offer): captured.state[offer[0]]
            for offer in comparison.offers[self.comm.rank]
        }
        if self.asynchronous:
            self._under_way = Background(order, state)
        else:
            self._conclude(order, save(order, state, self.comm.gather_object))

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

    def _capture(self, objects: Mapping[str, Any]) -> _Captured:
        """Take the objects apart. Local; an error becomes part of the result."""
        try:
            space = shutil.disk_usage(self.directory).free
            parts, values = parts_of(objects)
            trees = {name: part.capture() for name, part in parts.items()}
            state: dict[str, Shard | bytes] = {}
            paths: dict[str, PathInTree] = {}
            for name, tree in {**trees, _VALUES: values, _RANDOM: random_states()}.items():
                rest, leaves = taken_apart(tree, is_leaf)
                tensors = {f"{name}.{key}": path for key, (path, _) in leaves.items()}
                state[f"~{name}"] = packed({"tree": rest, "tensors": tensors})
                for key, (path, leaf) in leaves.items():
                    shard = shard_of(leaf)
                    if not is_empty(shard):
                        full = f"{name}.{key}"
                        state[full], paths[full] = shard, (name, *path)
            pieces = describe(state, paths if self.comm.size > 1 else ())
            kinds = {name: part.kind for name, part in parts.items()}
        except Exception as error:
            return _Captured(problem=error)
        return _Captured(state, paths, pieces, kinds, space)

    def _conclude(self, order: Order, error: str | None) -> None:
        """Raise on all ranks if a save failed, by what rank 0 knows of it. Collective."""
        verdict = self.comm.broadcast_object(error)
        if verdict is not None:
            call = f"Checkpoint.save({order.manifest.step})"
            before = "the checkpoints before it are untouched"
            raise CheckpointError.because(call, verdict, before, advice(verdict))

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
        steps, names = zip(
            *self.comm.all_gather_object((step, dict.fromkeys(objects))), strict=True
        )
        call = f"Checkpoint.restore({'' if step is None else step})"
        check_equal(call, "step", steps, "the same step on all ranks, or restore() for the latest")
        check_equal(call, "objects", names, "name the same objects on all ranks")
        saved = self._chosen(step)
        if saved is None:
            return None
        call = f"Checkpoint.restore() of step {saved.step}, saved on {saved.manifest.ranks} ranks"
        same = saved.manifest.ranks == self.comm.size

        def prepare() -> tuple[Reading, dict[str, Part], dict[str, Any]]:
            parts = parts_to_restore(saved, objects, partial)
            if not same:
                _refuse_other_ranks(call, parts)
            as_rank = self.comm.rank if same else 0
            reading = Reading(saved, as_rank, weights_only=weights_only)
            reading.check_fits(parts)
            small = {name: part for name, part in parts.items() if not part.in_place}
            return reading, parts, reading.trees({**small, _VALUES: None})

        reading, parts, trees = together(self.comm, call, prepare)
        small = {name: part for name, part in parts.items() if not part.in_place}
        large = {name: part for name, part in parts.items() if part.in_place}
        self._take_small(call, {n: p for n, p in small.items() if same or not p.of_rank}, trees)

        def load() -> None:
            for name, tree in reading.trees(large).items():
                large[name].take(tree)
            if random_states:
                self._restore_random(saved)

        call = f"{call}: some objects have changed; restore again, or start the program again"
        together(self.comm, call, load)
        return Restored(saved.step, saved.path, saved.manifest.ranks, trees[_VALUES])

    def _take_small(self, call: str, parts: Mapping[str, Part], trees: dict[str, Any]) -> None:
        """Let objects take their states; if one of them refuses, all return to what they had.

        These are the objects with small states, which may refuse them. Nothing else has been
        changed by then. Collective.
        """
        before: dict[str, Any] = {}
        problem: BaseException | None = None
        try:
            before = _copies_of(parts)
            for name, part in parts.items():
                part.take(trees[name])
        except Exception as error:
            problem = error
        problems = self.comm.all_gather_object(as_text(problem))
        if any(problems):
            lost = self.comm.all_gather_object(_take_back(parts, before))
            odd = ", ".join(dict.fromkeys(name for names in lost for name in names))
            but = f", but {odd} would not take its state of before" if odd else ""
            check_problems(f"{call}: all objects are as they were{but}", problems, problem)

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
        problems = list(lost.values())
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


@dataclass(frozen=True)
class _Captured:
    """The objects of a save on this rank, taken apart."""

    state: dict[str, Shard | bytes] = field(default_factory=dict)
    """Blocks of tensors and packed objects, by name."""
    paths: dict[str, PathInTree] = field(default_factory=dict)
    pieces: dict[str, BlockFacts] = field(default_factory=dict)
    """What other ranks learn of the state."""
    kinds: dict[str, str] = field(default_factory=dict)
    space: int = 0
    """Free bytes in the directory."""
    problem: BaseException | None = None


def _copies_of(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return the states that objects have now, in memory of their own. Local."""
    before: dict[str, Any] = {}
    for name, part in parts.items():
        rest, leaves = taken_apart(part.capture(), is_leaf)
        with suppress(Exception):  # what cannot be copied is kept as it is
            rest = copy.deepcopy(rest)
        copies = {
            path: (leaf.tensor if isinstance(leaf, Shard) else leaf).detach().clone()
            for path, leaf in leaves.values()
        }
        before[name] = put_together(rest, copies)
    return before


def _take_back(parts: Mapping[str, Part], before: Mapping[str, Any]) -> list[str]:
    """Give objects the states that they had before a restore; return names of those that refuse."""
    refused: list[str] = []
    for name in before:
        try:
            parts[name].take(before[name])
        except Exception:
            refused.append(name)
    return refused


def _refuse_other_ranks(call: str, parts: Mapping[str, Part]) -> None:
    """Refuse states that are those of one rank among equally many."""
    for name, part in parts.items():
        if part.other_ranks is not None:
            problem = f"{name}={part.kind} has the position of one rank among those that saved it"
            raise CheckpointError.because(call, problem, hint=part.other_ranks)
