"""A checkpoint as one rank reads it. Local: every rank reads what it needs, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from unisono.errors import CheckpointError
from unisono.nn import Shard
from unisono.train.checkpoint.folder import Saved
from unisono.train.checkpoint.parts import Part, parts_of
from unisono.train.checkpoint.pieces import LoadPlanner, Path, put_together, stored_name

_SHOWN = 8
"""Lines of a list of differences."""


class Reading:
    """What a rank reads from a checkpoint.

    Args:
        saved: the checkpoint.
        as_rank: the saved rank whose version counts, where ranks held different ones.
    """

    def __init__(self, saved: Saved, as_rank: int) -> None:
        self._versions = saved.manifest.versions
        self._as_rank = as_rank
        self._reader = FileSystemReader(saved.path)
        self._contents = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._contents, is_coordinator=True)
        self._rests: dict[str, dict[str, Any]] = {}

    def check_fits(self, parts: Mapping[str, Part]) -> None:
        """Raise if a part is not what was saved."""
        for name, part in parts.items():
            rest = self._rest(name)
            shapes = {path: self._shape(key) for key, path in rest["tensors"].items()}
            if problems := part.problems(rest["tree"], shapes):
                more = f"\nand {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
                raise CheckpointError.because(
                    f"Checkpoint.restore({name}=...) into {part.kind}: what was saved does not fit",
                    "\n".join(problems[:_SHOWN]) + more,
                    None,
                    f"build {name} as it was when it was saved",
                )

    def trees(self, parts: Mapping[str, Part | None]) -> dict[str, Any]:
        """Return the states, in memory of their own; a part that is None takes whole tensors."""
        wanted: dict[str, Shard | None] = {}
        leaves: dict[str, dict[Path, Any]] = {}
        for name, part in parts.items():
            leaves[name] = {}
            for key, path in self._rest(name)["tensors"].items():
                stored = self._stored(key)
                placed = part.place(path, self._shape(key)) if part is not None else None
                shard, value = placed or self._whole(stored)
                wanted[stored], leaves[name][path] = shard, value
        self._read(wanted)
        return {name: put_together(self._rest(name)["tree"], leaves[name]) for name in parts}

    def _rest(self, name: str) -> dict[str, Any]:
        if name not in self._rests:
            stored = self._stored(f"~{name}")
            wanted: dict[str, Any] = {stored: None}
            self._read(wanted)
            self._rests[name] = wanted[stored]
        return self._rests[name]

    def _stored(self, name: str) -> str:
        versions = self._versions.get(name)
        return stored_name(name, versions[self._as_rank]) if versions else name

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._found(self._stored(name)).size)

    def _found(self, stored: str) -> TensorStorageMetadata:
        found = self._contents.state_dict_metadata[stored]
        if not isinstance(found, TensorStorageMetadata):
            raise TypeError(f"{stored} is not a tensor")
        return found

    def _whole(self, stored: str) -> tuple[Shard, torch.Tensor]:
        found = self._found(stored)
        made = torch.empty(found.size, dtype=found.properties.dtype)
        return Shard(made, tuple(found.size), (0,) * made.dim()), made

    def _read(self, wanted: dict[str, Any]) -> None:
        planner = LoadPlanner(wanted, self._contents)
        self._reader.read_data(planner.create_local_plan(), planner).wait()


def parts_to_restore(saved: Saved, objects: Mapping[str, Any], partial: bool) -> dict[str, Part]:
    """Return the objects as parts, or say which names do not fit the checkpoint. Local."""
    parts, values = parts_of(objects)
    there = saved.manifest.parts
    asked = f"Checkpoint.restore({', '.join(f'{name}=' for name in objects)})"
    held = ", ".join(f"{n} ({kind})" for n, kind in there.items()) or "no object"
    found = f"step {saved.step} holds {held}"
    if values:
        name = next(iter(values))
        raise CheckpointError.because(
            asked,
            f"{name} is a plain value, {type(values[name]).__name__}",
            None,
            f"restored = checkpoint.restore(...); then restored[{name!r}]",
        )
    # Parts with a "~" are made by us, for objects that may be wrapped differently now.
    unknown = [name for name in parts if name not in there and "~" not in name]
    if unknown:
        raise CheckpointError.because(
            asked, found, f"nothing under {', '.join(unknown)}", "the names that save() was given"
        )
    left_out = [name for name in there if name not in parts and "~" not in name]
    if left_out and not partial:
        raise CheckpointError.because(
            asked,
            found,
            f"not asked for: {', '.join(left_out)}",
            f"restore(..., {left_out[0]}=...), or partial=True to leave them as they are",
        )
    return {name: part for name, part in parts.items() if name in there}
