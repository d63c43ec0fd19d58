"""Saving as torch.distributed.checkpoint does it.

Ranks agree on the plan by the verbs of their communicator, which are signed and have deadlines;
then each of them runs torch's `save` alone. In the background ranks leave each other
files in the new directory: a thread that took part in collectives would get in the way of those of
the training. No code in these files is run, for others may be able to write there.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from unisono.comm.machine import is_card_dead
from unisono.errors import CheckpointError, CollectiveMismatch, RankFailed, RankTimeout
from unisono.launch.job_files import write_private
from unisono.launch.pool.rank import add_work, remove_work
from unisono.nn import Shard
from unisono.train.checkpoint import folder
from unisono.train.checkpoint.blocks import BlockFacts, Offers, Path, copied, stored_name
from unisono.train.checkpoint.folder import Manifest

_OUTCOME = "outcome-"
_POLL_S = 0.02
_ALONE = "torch.distributed is disabled, unavailable or uninitialized"
"""How torch's `save` and `load` warn when they do not communicate, as we ask them not to."""


def as_text(problem: BaseException | None) -> str | None:
    """Return a problem as text that can travel."""
    if problem is None or isinstance(problem, CheckpointError):
        return problem and str(problem)
    return f"{type(problem).__name__}: {problem}"


@contextmanager
def without_communication() -> Generator[None]:
    """Let torch's `save` or `load` run without communication, and raise what it met as it was."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ALONE)
            yield
    except CheckpointException as error:
        raise error.failures[0][0] from None


# What torch pickles, read without running code.

_PLAIN_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorProperties", "ChunkStorageMetadata", "StorageMeta"),
        *("BytesStorageMetadata", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(x)[6:] for x in vars(torch).values() if isinstance(x, torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}


class PlainUnpickler(pickle.Unpickler):
    """Reads tables of contents, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a type of torch's tables; raise `UnpicklingError` for any other."""
        if name not in _PLAIN_TYPES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} in a table of contents")
        return super().find_class(module, name)


# The plan, the files of this rank, and, on rank 0, the rename that makes them count.


def save_plans(
    comparison: Offers, pieces: Sequence[Mapping[str, BlockFacts]], paths: Mapping[str, Path]
) -> tuple[list[SavePlan], Metadata]:
    """Return the plan of every rank, and the table of contents.

    Args:
        comparison: what each rank can write; torch chooses one writer for each block.
        pieces: what each rank has.
        paths: where a name belongs in the nested state, for tools that build it again.
    """
    offered: list[SavePlan] = []
    for of_rank, offers in zip(pieces, comparison.offers, strict=True):
        items = [_write_item(stored_name(*offer), of_rank[offer[0]]) for offer in offers]
        names = [item.index.fqn for item in items]
        data = {name: paths.get(name, (name,)) for name in names}
        offered.append(SavePlan(items, planner_data=data))
    return DefaultSavePlanner().create_global_plan(offered)


def _write_item(name: str, piece: BlockFacts) -> WriteItem:
    if not piece.kind:
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    shape, dtype = piece.kind
    offsets, sizes = torch.Size(piece.offsets), torch.Size(piece.sizes)
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size(shape)
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


class _SavePlanner(DefaultSavePlanner):
    """Follows a plan on which all ranks have agreed.

    Args:
        plan: what this rank writes.
        contents: the table of contents, of all ranks.
    """

    def __init__(self, plan: SavePlan, contents: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.plan, self.contents = plan, contents

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans as they are: torch's choice of writers is made."""
        return all_plans, self.contents

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor, or the bytes, of a piece."""
        piece = self.state_dict[index.fqn]
        return piece.tensor if isinstance(piece, Shard) else piece

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: ARG002
        """Objects are packed already."""
        return io.BytesIO(object) if isinstance(object, bytes) else object


class _CheckedFile(io.FileIO):
    """A file that adds up the checksum of what is written to it, from beginning to end."""

    checksum = 0

    def write(self, data: Any) -> int:
        """Write all of the data."""
        rest = memoryview(data).cast("B")
        self.checksum = zlib.crc32(rest, self.checksum)
        total = len(rest)
        while rest:
            rest = rest[super().write(rest) or 0 :]
        return total


class _CheckedFiles(FileSystem):
    """The file system of a writer that notes size and checksum of its files."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Open a file."""
        with _CheckedFile(os.fspath(path), mode.replace("b", "")) as file:
            yield file
        if mode == "wb":
            size = pathlib.Path(path).stat().st_size
            self.files[pathlib.Path(path).name] = (size, file.checksum)


@dataclass(frozen=True)
class Outcome:
    """What became of the files of one rank."""

    error: str | None = None
    results: list[WriteResult] = field(default_factory=list)
    """Where each piece lies, for the table of contents."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and checksum of each file."""

    def to_bytes(self) -> bytes:
        """Return it as plain data."""
        return pickle.dumps((self.error, self.results, self.files))

    @classmethod
    def from_bytes(cls, data: bytes) -> Outcome:
        """Undo `to_bytes`; raise `UnpicklingError` where code would be run."""
        outcome = cls(*PlainUnpickler(io.BytesIO(data)).load())
        names = [*outcome.files, *(r.storage_data.relative_path for r in outcome.results)]
        if any(pathlib.Path(name).name != name for name in names):
            raise pickle.UnpicklingError("names of files outside of the directory of a save")
        return outcome


@dataclass(frozen=True, kw_only=True)
class Order:
    """What has to be done for one save on this rank."""

    rank: int
    ranks: int
    partial: pathlib.Path
    """Directory to write into."""
    plan: SavePlan
    contents: Metadata
    manifest: Manifest
    keep: int | None
    best: str | None
    timeout_s: float
    cards: Sequence[list[str | int]]
    """The process of each rank, as `own_card` names it."""


class Writer(FileSystemWriter):
    """Writes the files of this rank; on rank 0 it publishes the checkpoint. Errors are kept.

    Args:
        order: what to do.
        exchange: hands the outcome of this rank over, and returns those of all to rank 0.
    """

    def __init__(
        self, order: Order, exchange: Callable[[Outcome], Sequence[Outcome] | None]
    ) -> None:
        super().__init__(order.partial, thread_count=1, overwrite=False)
        self.fs = _CheckedFiles()
        self.order = order
        self.planner = _SavePlanner(order.plan, order.contents)
        self.error: str | None = None
        """What went wrong; on rank 0 for all ranks."""
        self._exchange = exchange
        self._outcome = Outcome()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank writes, in memory that training does not write to."""
        names = {item.index.fqn for item in self.order.plan.items}
        return {
            name: copied(piece) if isinstance(piece, Shard) else piece
            for name, piece in state_dict.items()
            if name in names
        }

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name files after the rank."""
        rank = self.order.rank
        return super().prepare_global_plan([*[SavePlan([])] * rank, *plans])[rank:]

    def write_data(self, plan: SavePlan, planner: Any) -> torch.futures.Future[list[WriteResult]]:
        """Write and sync the pieces of this rank."""
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        try:
            results = super().write_data(plan, planner).value() if plan.items else []
            self._outcome = Outcome(None, results, dict(self.fs.files))
        except Exception as error:
            self._outcome = Outcome(error=f"rank {self.order.rank}: {as_text(error)}")
        done.set_result(self._outcome.results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """Wait for the other ranks, and publish; only rank 0 does."""
        try:
            outcomes = self._exchange(self._outcome)
            if outcomes is not None:
                self._publish(metadata, outcomes)
        except (CollectiveMismatch, RankFailed, RankTimeout):
            raise  # these name the rank that is missing
        except Exception as error:
            self.error = f"rank {self.order.rank}: {as_text(error)}"
        if self.error and self.order.rank == 0:
            folder.remove(self.order.partial)  # a full disk is not made fuller by what is no use

    def _publish(self, contents: Metadata, outcomes: Sequence[Outcome]) -> None:
        """Make the checkpoint count, and remove old ones."""
        order = self.order
        if failed := [outcome.error for outcome in outcomes if outcome.error]:
            self.error = "\n".join(failed)
            return
        super().finish(contents, [outcome.results for outcome in outcomes])
        for path in order.partial.glob(f"{_OUTCOME}*"):
            path.unlink()
        files = {folder.CONTENTS: self.fs.files[f"{folder.CONTENTS}.tmp"]}
        for outcome in outcomes:
            files |= outcome.files
        directory = order.partial.parent
        last = max((saved.manifest.sequence for saved in folder.saved_in(directory)), default=0)
        folder.commit(order.partial, replace(order.manifest, sequence=last + 1, files=files))
        for path in folder.outdated(directory, order.keep, order.best):
            folder.remove(path)


def save(
    order: Order,
    state: dict[str, Shard | bytes],
    exchange: Callable[[Outcome], Sequence[Outcome] | None],
) -> str | None:
    """Write and publish; return what went wrong, on rank 0 for all ranks."""
    writer = Writer(order, exchange)
    with without_communication():
        dcp.save(state, storage_writer=writer, planner=writer.planner, no_dist=True)
    return writer.error


class Background:
    """A save in a thread of its own.

    The process does not end before the thread has: an interpreter that exits waits, and so does a
    rank, also one whose function raised.
    """

    def __init__(self, order: Order, state: dict[str, Shard | bytes]) -> None:
        self.order = order
        self._writer = writer = Writer(order, self._exchange)
        # The thread warns, and filters are those of the process.
        warnings.filterwarnings("ignore", _ALONE)
        self._future = cast(
            "Future[Any]",
            dcp.async_save(state, storage_writer=writer, planner=writer.planner, no_dist=True),
        )
        add_work(self)

    def join(self) -> str | None:
        """Wait for the end; return what went wrong, on rank 0 for all ranks."""
        error = self._future.exception()
        remove_work(self)
        return self._writer.error or as_text(error)

    def finish(self, limit_s: float) -> str | None:
        """Wait for the end where no `join` will follow; return what went wrong. Local."""
        what = f"the save of step {self.order.manifest.step} in {self.order.partial.parent}"
        end = time.monotonic() + limit_s
        wait([self._future], limit_s)
        # The launcher may end all ranks as soon as the first one has left.
        while self.order.rank and self.order.partial.exists() and time.monotonic() < end:
            if is_card_dead(self.order.cards[0]):
                break
            time.sleep(_POLL_S)
        if not self._future.done():
            return f"{what} was not done after {limit_s:g} s, and is given up"
        error = self._writer.error or as_text(self._future.exception())
        return None if error is None else f"{what} failed: {error}"

    def _exchange(self, outcome: Outcome) -> Sequence[Outcome] | None:
        if self.order.rank:
            path = self.order.partial / f"{_OUTCOME}{self.order.rank}"
            write_private(path, outcome.to_bytes())
            return None
        return outcomes_of(self.order, outcome)


def outcomes_of(order: Order, outcome: Outcome) -> Sequence[Outcome]:
    """Return the outcomes of all ranks from their files; on rank 0, with its own."""
    outcomes = {0: outcome}
    end = time.monotonic() + order.timeout_s
    while True:
        late = [rank for rank in range(order.ranks) if rank not in outcomes]
        gone = {rank for rank in late if is_card_dead(order.cards[rank])}
        # In this order: one that has ended may have left its outcome a moment before.
        for rank in late:
            path = order.partial / f"{_OUTCOME}{rank}"
            if path.exists():
                outcomes[rank] = Outcome.from_bytes(path.read_bytes())
        late = [rank for rank in late if rank not in outcomes]
        if not late:
            return [outcomes[rank] for rank in range(order.ranks)]
        error = None
        if gone & set(late):
            error = f"ranks {sorted(gone & set(late))} ended before their part was written"
        elif time.monotonic() > end:
            error = f"ranks {late} have written nothing for {order.timeout_s:g} s"
        if error is not None:
            return [*outcomes.values(), Outcome(error=error)]
        time.sleep(_POLL_S)
