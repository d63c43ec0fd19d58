"""A directory of checkpoints: each appears by one rename, and disappears by one.

A name that begins with a dot is being written or removed; a kill leaves nothing worse behind.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.errors import CheckpointError

FORMAT = 3
"""Version of what is written. 1, without a number in it, is that of unisono 0.2."""
MANIFEST, CONTENTS = "manifest.json", ".metadata"
PARTIAL, REMOVED = ".saving-", ".removed-"
_CHUNK = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    sequence: int
    """Number of the save in its directory; the latest has the highest."""
    ranks: int
    parts: dict[str, str]
    """Names of the objects in it, and what they were."""
    versions: dict[str, list[int]] = field(default_factory=dict)
    """Names that differ between ranks: which version each rank has."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and CRC-32 of each file."""
    metric: float | None = None
    format: int = 1
    """Version of the files; a manifest without one is of unisono 0.2."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step at which it was saved."""
        return self.manifest.step


def saved_in(directory: Path) -> list[Saved]:
    """Return the checkpoints of a directory, the latest last; one a step."""
    by_step: dict[int, Saved] = {}
    for saved in _readable(directory):
        by_step.pop(saved.step, None)
        by_step[saved.step] = saved
    return list(by_step.values())


def _readable(directory: Path) -> list[Saved]:
    read = map(_read, directory.glob("step-*"))
    checkpoints = [saved for saved in read if isinstance(saved, Saved)]
    return sorted(checkpoints, key=lambda saved: saved.manifest.sequence)


def unreadable_in(directory: Path) -> list[str]:
    """Return why what looks like a checkpoint cannot be read."""
    read = map(_read, sorted(directory.glob("step-*")))
    return [problem for problem in read if isinstance(problem, str)]


def _read(path: Path) -> Saved | str:
    """Return a checkpoint, or why it cannot be read."""
    try:
        values = json.loads((path / MANIFEST).read_text())
        if (number := values.get("format", 1)) > FORMAT:
            return f"{path.name}: format {number} of a later unisono; this one reads 1 to {FORMAT}"
        return Saved(path, Manifest(**values))
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{path.name}: {MANIFEST} cannot be read"


def commit(partial: Path, manifest: Manifest) -> Path:
    """Let the directory `partial` become a checkpoint by one rename; return its path."""
    text = json.dumps(asdict(manifest), indent=1)
    with (partial / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    directory = partial.parent
    path = directory / f"step-{manifest.step:08d}"
    if path.exists():  # a step that is saved again: both are there until the new one is
        path = directory / f"{path.name}.{manifest.sequence}"
    partial.rename(path)
    _sync(directory)
    return path


def convert(old: Path, new: Path) -> list[Path]:
    """Copy the checkpoints of a directory into another one, in the format of this version.

    The files of torch.distributed.checkpoint are verified and stay as they are; the manifest is
    written again. Returns the new checkpoints. Local.
    """
    call = f"unisono checkpoint convert {old} {new}"
    everything = saved_in(old)
    problems = unreadable_in(old)
    if not everything or problems:
        raise CheckpointError.because(
            call,
            "\n".join(problems) or f"no checkpoint in {old}",
            hint="the directory of Checkpoint(...), in which step-00000010 and others are",
        )
    if new.exists() and any(new.iterdir()):
        raise CheckpointError.because(
            call, f"{new} is not empty", hint="a new directory; the old one stays as it is"
        )
    for saved in everything:
        if problem := damage(saved, saved.manifest.files):
            raise CheckpointError.because(
                call, f"{saved.path.name} is damaged: {problem}", hint=f"remove {saved.path}"
            )
    new.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for saved in everything:
        partial = new / f"{PARTIAL}convert-{saved.path.name}"
        try:
            shutil.copytree(saved.path, partial)
            for name in saved.manifest.files:
                _sync(partial / name)
            paths.append(commit(partial, replace(saved.manifest, format=FORMAT)))
        except OSError as error:
            remove(partial)
            raise CheckpointError.because(call, f"{type(error).__name__}: {error}") from error
    return paths


def remove(path: Path) -> None:
    """Remove a directory of checkpoints' directory; half removed, it is no checkpoint any more."""
    if not path.name.startswith("."):
        hidden = path.with_name(f"{REMOVED}{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        path = hidden
    shutil.rmtree(path, ignore_errors=True)


def sweep(directory: Path, current: str) -> None:
    """Remove what killed saves and removals have left, except for what begins with `current`."""
    for pattern in (f"{PARTIAL}*", f"{REMOVED}*"):
        for path in directory.glob(pattern):
            if not path.name.startswith(current):
                shutil.rmtree(path, ignore_errors=True)


def outdated(directory: Path, keep: int | None, best: str | None) -> list[Path]:
    """Return the checkpoints that need not be kept: all but the last `keep` and the best one."""
    everything = saved_in(directory)
    kept = {saved.path for saved in (everything if keep is None else everything[-keep:])}
    champion = best_of(everything, best)
    if champion is not None:
        kept.add(champion.path)
    return [saved.path for saved in _readable(directory) if saved.path not in kept]


def best_of(everything: list[Saved], best: str | None) -> Saved | None:
    """Return the checkpoint with the lowest (`"min"`) or highest (`"max"`) metric."""
    rated = [
        (saved.manifest.metric, i)
        for i, saved in enumerate(everything)
        if saved.manifest.metric is not None and not math.isnan(saved.manifest.metric)
    ]
    if best is None or not rated:
        return None
    return everything[(min if best == "min" else max)(rated)[1]]


def damage(saved: Saved, names: Iterable[str]) -> str | None:
    """Return what is wrong with these files of a checkpoint, if anything is."""
    expected: Mapping[str, Any] = saved.manifest.files
    for name in names:
        size, checksum = expected[name]
        try:
            there, sum_there = _measured(saved.path / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:  # on one rank perhaps, and all must come to the same verdict
            return f"{name} cannot be read: {error}"
        if there != size:
            return f"{name} has {there} bytes of {size}"
        if sum_there != checksum:
            return f"{name} has other content than was written"
    return None


def _measured(path: Path) -> tuple[int, int]:
    """Return size and CRC-32 of a file."""
    checksum, buffer = 0, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
        return file.tell(), checksum


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
