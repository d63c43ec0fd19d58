"""The planners of torch.distributed.checkpoint for our blocks and packed objects."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from unisono.nn import Shard
from unisono.train.checkpoint.arrangement import Arrangement, Held


class SavePlanner(DefaultSavePlanner):
    """Writes the pieces that the arrangement gives to this rank.

    Args:
        pieces: what this rank writes, by the name under which it is stored.
    """

    def __init__(self, pieces: Mapping[str, Shard | bytes]) -> None:
        super().__init__()
        self.pieces = pieces

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor, or the bytes, of a piece."""
        piece = self.pieces[index.fqn]
        return piece.tensor if isinstance(piece, Shard) else piece

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: ARG002
        """Objects are packed already."""
        return io.BytesIO(object) if isinstance(object, bytes) else object


def save_plans(
    arrangement: Arrangement, held: Sequence[Mapping[str, Held]]
) -> tuple[list[SavePlan], Metadata]:
    """Return the plan of every rank, and the checkpoint's table of contents."""
    plans: list[SavePlan] = []
    for mine, writes in zip(held, arrangement.writes, strict=True):
        items = [_write_item(stored_name(*piece), mine[piece[0]]) for piece in writes]
        plans.append(SavePlan(items, planner_data={i.index.fqn: (i.index.fqn,) for i in items}))
    return DefaultSavePlanner().create_global_plan(plans)


def stored_name(name: str, version: int) -> str:
    """Return the name under which a version is stored."""
    return f"{name}@{version}" if version else name


def _write_item(name: str, held: Held) -> WriteItem:
    if not held.kind:
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    shape, dtype = held.kind
    offsets, sizes = torch.Size(held.offsets), torch.Size(held.sizes)
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size(shape)
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


class LoadPlanner(DefaultLoadPlanner):
    """Reads tensors into the blocks that wait for them, and objects.

    Args:
        wanted: blocks to be filled, by stored name; None where an object is wanted, which then
            takes its place.
        contents: the checkpoint's table of contents.
    """

    def __init__(self, wanted: dict[str, Shard | Any], contents: Metadata) -> None:
        super().__init__()
        self.wanted = wanted
        self.contents = contents

    def create_local_plan(self) -> LoadPlan:
        """Return what to read from where."""
        items: list[ReadItem] = []
        for name, shard in self.wanted.items():
            found = self.contents.state_dict_metadata[name]
            if isinstance(found, BytesStorageMetadata):
                index, nothing = MetadataIndex(name), torch.Size((0,))
                items.append(
                    ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
                )
            elif shard.tensor.numel():
                chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.tensor.shape)
                items += create_read_items_for_chunk_list(name, found, [chunk])
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object."""
        self.wanted[read_item.dest_index.fqn] = torch.load(value, "cpu", weights_only=False)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the block that waits for this tensor."""
        return self.wanted[index.fqn].tensor
