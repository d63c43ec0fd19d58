"""One save under way: files of this rank, then, on rank 0, the rename that makes it count.

In the background ranks tell each other by files in the new directory: a thread that took part in
collectives would get in the way of those of the training. These files are plain data, for others
may be able to write there.
"""

from __future__ import annotations

import atexit
import errno
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from unisono.comm.machine import is_card_dead
from unisono.errors import CheckpointError
from unisono.launch.job_files import write_private
from unisono.launch.pool.rank import add_work, remove_work
from unisono.train.checkpoint import folder
from unisono.train.checkpoint.folder import Manifest
from unisono.train.checkpoint.pieces import SavePlanner

_OUTCOME = "outcome-"
_POLL_S = 0.02
_ADVICE = {
    ("FileExistsError", "NotADirectoryError"): "a directory of its own: Checkpoint('runs/mine')",
    ("PermissionError", "Read-only file system"): (
        "a directory that you may write to, such as Checkpoint('runs/mine'); "
        "ls -ld shows whose this one is"
    ),
    ("pickle",): (
        "save values, not code: numbers, strings, tensors, a function of a module by its name; "
        "leave out lambdas, local functions, open files and locks"
    ),
}
"""By words of an error, which reaches other ranks as text: what to type."""


@dataclass(frozen=True)
class Outcome:
    """What became of the files of one rank."""

    error: str | None = None
    results: list[WriteResult] = field(default_factory=list)
    """Where each piece lies, for the table of contents."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as plain data."""
        rows = [
            {
                "index": [r.index.fqn, r.index.offset and list(r.index.offset), r.index.index],
                "size": r.size_in_bytes,
                "place": asdict(r.storage_data),
            }
            for r in self.results
        ]
        return json.dumps({"error": self.error, "results": rows, "files": self.files})

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Undo `to_json`; raises `ValueError` where that is not what the text is."""
        try:
            found = json.loads(text)
            results = [
                WriteResult(MetadataIndex(*row["index"]), row["size"], _StorageInfo(**row["place"]))
                for row in found["results"]
            ]
            files = {name: (size, crc) for name, (size, crc) in found["files"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the outcome of a save: {error}") from error
        names = [r.storage_data.relative_path for r in results]
        if any(Path(name).name != name for name in names):
            raise ValueError("the outcome of a save names files outside of its directory")
        return cls(found["error"], results, files)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What has to be done for one save on this rank."""

    rank: int
    ranks: int
    partial: Path
    """Directory to write into."""
    plans: Sequence[SavePlan]
    contents: Metadata
    planner: SavePlanner
    manifest: Manifest
    keep: int | None
    best: str | None
    timeout_s: float
    cards: Sequence[list[str | int]]
    """The process of each rank, as `own_card` names it."""


def write(order: Order) -> Outcome:
    """Write and sync the pieces of this rank. Local; errors become part of the outcome."""
    try:
        writer = _writer(order)
        plan = writer.prepare_global_plan(list(order.plans))[order.rank]
        order.partial.mkdir(parents=True, exist_ok=True)
        results = writer.write_data(plan, order.planner).value() if plan.items else []
        return Outcome(None, results, folder.checked_files(order.partial, f"__{order.rank}_"))
    except Exception as error:
        return Outcome(error=f"rank {order.rank}: {as_text(error)}")


def commit(order: Order, outcomes: Sequence[Outcome]) -> str | None:
    """Make the checkpoint count, and remove old ones; on rank 0. Returns what went wrong."""
    failed = [outcome.error for outcome in outcomes if outcome.error]
    try:
        if failed:
            folder.remove(order.partial)
            return "\n".join(failed)
        _writer(order).finish(order.contents, [outcome.results for outcome in outcomes])
        for path in order.partial.glob(f"{_OUTCOME}*"):
            path.unlink()
        files = folder.checked_files(order.partial, ".metadata")
        for outcome in outcomes:
            files |= outcome.files
        directory = order.partial.parent
        last = max((saved.manifest.sequence for saved in folder.saved_in(directory)), default=0)
        folder.commit(order.partial, replace(order.manifest, sequence=last + 1, files=files))
        for path in folder.outdated(directory, order.keep, order.best):
            folder.remove(path)
    except Exception as error:
        folder.remove(order.partial)  # a full disk is not made fuller by what does not count
        return f"rank 0: {as_text(error)}"
    return None


def as_text(problem: BaseException | None) -> str | None:
    """Return a problem as text that can travel, with what to do about a full disk."""
    if problem is None:
        return None
    if isinstance(problem, CheckpointError):
        return str(problem)
    text = f"{type(problem).__name__}: {problem}"
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{text} (the disk is full: remove files, or keep fewer checkpoints)"
    return text


def advice(text: str) -> str | None:
    """Return what to type against a problem that `as_text` has told."""
    for words, hint in _ADVICE.items():
        if any(word in text for word in words):
            return hint
    return None


def _writer(order: Order) -> FileSystemWriter:
    writer = FileSystemWriter(order.partial, thread_count=1, overwrite=False)
    writer.set_up_storage_writer(order.rank == 0)
    return writer


class Background:
    """A save in a thread of its own.

    The process does not end before the thread has: an interpreter that exits waits, and so does a
    rank, also one whose function raised.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.outcome = Outcome()
        self.error: str | None = None
        """On rank 0, after `join`: what went wrong."""
        self._written = threading.Event()
        self._handed: Sequence[Outcome] | None = None
        self._thread = threading.Thread(target=self._run, name="unisono-checkpoint", daemon=True)
        atexit.register(self._thread.join)
        add_work(self)
        self._thread.start()

    def written(self) -> Outcome:
        """Wait for the files of this rank. Local."""
        self._written.wait()
        return self.outcome

    def join(self, outcomes: Sequence[Outcome] | None) -> None:
        """Wait for the end; rank 0 brings the outcomes of all and need not look for them."""
        self._handed = outcomes
        self._thread.join()
        atexit.unregister(self._thread.join)
        remove_work(self)

    def finish(self, limit_s: float) -> str | None:
        """Wait for the end where nobody will ask for the outcome; return what went wrong. Local."""
        what = f"the save of step {self.order.manifest.step} in {self.order.partial.parent}"
        end = time.monotonic() + limit_s
        self._thread.join(limit_s)
        atexit.unregister(self._thread.join)
        # Whoever starts ranks may end them all as soon as the first one has left.
        while self.order.rank and self.order.partial.exists() and time.monotonic() < end:
            if is_card_dead(self.order.cards[0]):
                break
            time.sleep(_POLL_S)
        if self._thread.is_alive():
            return f"{what} was not done after {limit_s:g} s, and is given up"
        return None if self.error is None else f"{what} failed: {self.error}"

    def _run(self) -> None:
        order = self.order
        self.outcome = write(order)
        self._written.set()
        try:
            if order.rank == 0:
                self.error = commit(order, self._outcomes())
            else:
                path = order.partial / f"{_OUTCOME}{order.rank}"
                write_private(path, self.outcome.to_json().encode())
        except Exception as error:
            self.error = f"rank {order.rank}: {as_text(error)}"

    def _outcomes(self) -> Sequence[Outcome]:
        """Return the outcomes of all ranks, from their files or from the foreground."""
        found = {0: self.outcome}
        end = time.monotonic() + self.order.timeout_s
        while len(found) < self.order.ranks:
            if self._handed is not None:
                return self._handed
            for rank in set(range(self.order.ranks)) - set(found):
                path = self.order.partial / f"{_OUTCOME}{rank}"
                if path.exists():
                    found[rank] = Outcome.from_json(path.read_text(encoding="utf-8"))
            late = sorted(set(range(self.order.ranks)) - set(found))
            gone = [rank for rank in late if is_card_dead(self.order.cards[rank])]
            # One that has ended may have left its outcome a moment before.
            gone = [r for r in gone if not (self.order.partial / f"{_OUTCOME}{r}").exists()]
            if gone:
                words = f"ranks {gone} ended before their part was written"
                return [*found.values(), Outcome(error=words)]
            if late and time.monotonic() > end:
                words = f"ranks {late} have written nothing for {self.order.timeout_s:g} s"
                return [*found.values(), Outcome(error=words)]
            if late:
                time.sleep(_POLL_S)
        return [found[rank] for rank in range(self.order.ranks)]
