"""A checkpoint as one rank reads it. Local: every rank reads what it needs, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from unisono.nn import Shard
from unisono.train.checkpoint.folder import Saved
from unisono.train.checkpoint.parts import Part
from unisono.train.checkpoint.planners import LoadPlanner, stored_name
from unisono.train.checkpoint.tree import Path, put_together


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

    def problems(self, parts: Mapping[str, Part]) -> dict[str, list[str]]:
        """Return for each part why it does not fit, if so."""
        found: dict[str, list[str]] = {}
        for name, part in parts.items():
            rest = self._rest(name)
            shapes = {path: self._shape(key) for key, path in rest["tensors"].items()}
            if told := part.problems(rest["tree"], shapes):
                found[name] = told
        return found

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
