"""A checkpoint as one rank reads it: what it needs, from the files of all ranks.

torch's reader and planner do it, without communication; no code in the files is run.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from unisono.errors import CheckpointError
from unisono.nn import Shard
from unisono.train.checkpoint import folder
from unisono.train.checkpoint.blocks import (
    Path,
    empty_like,
    is_leaf,
    put_together,
    shard_of,
    stored_name,
    taken_apart,
    unpacked,
)
from unisono.train.checkpoint.folder import Saved
from unisono.train.checkpoint.parts import Part, described
from unisono.train.checkpoint.saving import PlainUnpickler, without_communication

_SHOWN = 8
"""Lines of a list of differences."""


class Reading:
    """What a rank reads from a checkpoint. Local.

    Args:
        saved: the checkpoint.
        as_rank: the saved rank whose version counts, where ranks had different ones.
        weights_only: whether to refuse objects that are more than plain data.
    """

    def __init__(self, saved: Saved, as_rank: int, *, weights_only: bool = True) -> None:
        self._path = saved.path
        self._weights_only = weights_only
        self._versions = saved.manifest.versions
        self._as_rank = as_rank
        self._contents = read_contents(saved.path)
        self._rests: dict[str, dict[str, Any]] = {}

    def check_fits(self, parts: Mapping[str, Part]) -> None:
        """Raise if a part is not what was saved. Reads no tensor."""
        for name, part in parts.items():
            rest = self._rest(name)
            tensors = {path: self._described(key) for key, path in rest["tensors"].items()}
            if problems := part.problems(rest["tree"], tensors):
                more = f"\nand {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
                raise CheckpointError.because(
                    f"Checkpoint.restore({name}=...) into {part.kind}: what was saved does not fit",
                    "\n".join(problems[:_SHOWN]) + more,
                    hint=f"build {name} as it was when it was saved",
                )

    def trees(self, parts: Mapping[str, Part | None]) -> dict[str, Any]:
        """Return the states; those of parts that are restored in place are changed by it.

        All others are in memory of their own.
        """
        state: dict[str, Any] = {}
        leaves: dict[str, dict[Path, Any]] = {}
        for name, part in parts.items():
            leaves[name] = {}
            live: dict[Path, Any] = {}
            if part is not None and part.in_place:
                live = dict(taken_apart(part.capture(), is_leaf)[1].values())
            for key, path in self._rest(name)["tensors"].items():
                shard, value = self._target(key, part, path, live.get(path))
                state[self._stored(key)], leaves[name][path] = shard, value
        self._load(state)
        return {name: put_together(self._rest(name)["tree"], leaves[name]) for name in parts}

    def _target(self, key: str, part: Part | None, path: Path, live: Any) -> tuple[Shard, Any]:
        """Return the block into which a tensor is read, and the tensor that it is part of."""
        shape, dtype = self._described(key)
        if live is not None and described(live) == (shape, dtype):
            return shard_of(live), live
        if part is not None and (like := part.block_at(path, shape)) is not None:
            return empty_like(like, dtype)
        made = torch.empty(shape, dtype=dtype)
        return shard_of(made), made

    def _rest(self, name: str) -> dict[str, Any]:
        if name not in self._rests:
            stored = self._stored(f"~{name}")
            state: dict[str, Any] = {stored: None}
            self._load(state)
            self._rests[name] = state[stored]
        return self._rests[name]

    def _stored(self, name: str) -> str:
        versions = self._versions.get(name)
        return stored_name(name, versions[self._as_rank]) if versions else name

    def _described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        stored = self._stored(name)
        entry = self._contents.state_dict_metadata[stored]
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{stored} is not a tensor")
        return tuple(entry.size), entry.properties.dtype

    def _load(self, state: dict[str, Any]) -> None:
        try:
            load(self._path, self._contents, state, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            objects = ", ".join(name.strip("~") or "values" for name in state)
            raise CheckpointError.because(
                f"Checkpoint.restore(): {objects}",
                f"an object that is more than plain data ({str(error).splitlines()[0]})",
                "to read it, code named in the file has to be run",
                "restore(..., weights_only=False), if you trust the file as you trust code",
            ) from None


# torch's reader and planner.


def read_contents(path: pathlib.Path) -> Metadata:
    """Return the table of contents of a checkpoint; no code in it is run."""
    with (path / folder.CONTENTS).open("rb") as file:
        contents: Metadata = PlainUnpickler(file).load()
    if contents.storage_meta is None:
        contents.storage_meta = StorageMeta()
    return contents


class _Reader(FileSystemReader):
    """Reads a checkpoint whose table of contents is known."""

    def __init__(self, path: pathlib.Path, contents: Metadata) -> None:
        super().__init__(path)
        self._contents = contents

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Return the table of contents, which was read by `read_contents`."""
        return self._contents


class _LoadPlanner(DefaultLoadPlanner):
    """Reads tensors into the blocks that wait for them, and objects."""

    def __init__(self, *, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the blocks as they are."""
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return what to read from where."""
        items: list[ReadItem] = []
        contents = cast("Metadata", self.metadata).state_dict_metadata
        for name, shard in self.state_dict.items():
            entry = contents[name]
            if isinstance(entry, BytesStorageMetadata):
                index, nothing = MetadataIndex(name), torch.Size((0,))
                items.append(
                    ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
                )
            elif shard.tensor.numel():
                chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.tensor.shape)
                items += create_read_items_for_chunk_list(name, entry, [chunk])
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object."""
        item = unpacked(value, weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = item

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the block that waits for this tensor."""
        return self.state_dict[index.fqn].tensor


def load(
    path: pathlib.Path, contents: Metadata, state: dict[str, Any], *, weights_only: bool
) -> None:
    """Read into the blocks of `state`; None in it becomes the object of that name. Local."""
    planner = _LoadPlanner(weights_only=weights_only)
    with without_communication():
        dcp.load(state, storage_reader=_Reader(path, contents), planner=planner, no_dist=True)
