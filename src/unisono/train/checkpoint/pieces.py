"""The pieces of a checkpoint: how a state is taken apart, who writes what, torch's plans for it.

A state is a tree of plain values with tensors in it. Tensors are stored one by one as blocks of
whole tensors, each under its path; the rest of a tree is one small object.
"""

from __future__ import annotations

import hashlib
import io
import math
import pathlib
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PosixPath
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
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
from torch.distributed.tensor import DTensor

from unisono.comm.arguments import bytes_of
from unisono.nn import Shard

Path = tuple[Any, ...]
"""Keys and positions from the root of a tree to a leaf."""

# Trees.


def taken_apart(
    tree: Any, is_leaf: Callable[[Any], bool]
) -> tuple[Any, dict[str, tuple[Path, Any]]]:
    """Return the tree with None in place of its leaves, and the leaves by name, each with its path.

    >>> taken_apart({"lr": 0.1, "w": [1j]}, lambda value: isinstance(value, complex))
    ({'lr': 0.1, 'w': [None]}, {'w.0': (('w', 0), 1j)})
    """
    leaves: dict[str, tuple[Path, Any]] = {}

    def visit(node: Any, path: Path) -> Any:
        if is_leaf(node):
            name = ".".join(map(str, path))
            while name in leaves:  # {"a.b": x, "a": {"b": y}}
                name += "'"
            leaves[name] = (path, node)
            return None
        return _mapped(node, path, visit)

    return visit(tree, ()), leaves


def put_together(rest: Any, leaves: Mapping[Path, Any]) -> Any:
    """Return the tree that was taken apart, with these leaves.

    >>> put_together({"lr": 0.1, "w": [None]}, {("w", 0): 1j})
    {'lr': 0.1, 'w': [1j]}
    """

    def visit(node: Any, path: Path) -> Any:
        return leaves[path] if path in leaves else _mapped(node, path, visit)

    return visit(rest, ())


def _mapped(node: Any, path: Path, visit: Callable[[Any, Path], Any]) -> Any:
    # Exact types only: a Counter or a user's list is a value, and comes back as what it was.
    if type(node) in (dict, OrderedDict):
        return {key: visit(value, (*path, key)) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(visit(value, (*path, i)) for i, value in enumerate(node))
    return node


# Tensors as blocks of whole tensors: uncut, cut by our layers, or by DTensor.


def is_leaf(value: object) -> bool:
    """Return whether a value of a state is stored as a tensor, not inside of an object."""
    if isinstance(value, Shard):
        return True
    is_plain = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor)
    if not is_plain or not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and not value.is_quantized


def shard_of(value: Any) -> Shard:
    """Return this rank's block of a tensor, with its place in the whole. Local."""
    if isinstance(value, Shard):
        inner = shard_of(value.tensor)  # a block may be cut again, by FSDP2 on another axis
        offsets = tuple(a + b for a, b in zip(value.offsets, inner.offsets, strict=True))
        return Shard(inner.tensor, value.global_shape, offsets)
    if isinstance(value, DTensor):
        (chunk,) = value.__create_chunk_list__()  # what torch's own planners ask a DTensor
        return Shard(value.to_local().detach(), tuple(value.shape), tuple(chunk.offsets))
    return Shard(value.detach(), tuple(value.shape), (0,) * value.dim())


def empty_like(value: Any) -> tuple[Shard, Any]:
    """Return memory for the block of a rank that holds `value`, and the tensor that it fills."""
    if isinstance(value, Shard):
        made = torch.empty_like(value.tensor, requires_grad=False)
        return shard_of(Shard(made, value.global_shape, value.offsets)), made
    made = torch.empty_like(value, requires_grad=False)
    return shard_of(made), made


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    return value.global_shape if isinstance(value, Shard) else tuple(value.shape)


def is_empty(shard: Shard) -> bool:
    """Return whether a rank holds no part of a tensor that others hold."""
    return shard.tensor.numel() == 0 and math.prod(shard.global_shape) > 0


def copied(shard: Shard) -> Shard:
    """Return the block in memory that training does not write to."""
    own = shard.tensor.detach().to("cpu", copy=True)
    return Shard(own, shard.global_shape, shard.offsets)


def packed(value: object) -> bytes:
    """Return an object as bytes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def unpacked(data: io.BytesIO, *, weights_only: bool) -> Any:
    """Undo `packed`; code in it is run only if `weights_only` is false."""
    numpy_array = [
        (numpy.zeros(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
        (numpy.zeros(0).__reduce__()[0], "numpy._core.multiarray._reconstruct"),
        (numpy.float64(0).__reduce__()[0], "numpy._core.multiarray.scalar"),
        *(numpy.ndarray, numpy.dtype, defaultdict, deque, PosixPath),
        *(type(numpy.dtype(code)) for code in "?bBhHiIlLqQefd"),
    ]
    with torch.serialization.safe_globals(numpy_array):
        return torch.load(data, "cpu", weights_only=weights_only)


_TYPES_OF_CONTENTS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorProperties", "ChunkStorageMetadata", "StorageMeta"),
        *("BytesStorageMetadata", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(x)[6:] for x in vars(torch).values() if isinstance(x, torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}


class _PlainUnpickler(pickle.Unpickler):
    """Reads a table of contents, which torch pickles, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _TYPES_OF_CONTENTS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} in a table of contents")
        return super().find_class(module, name)


def read_contents(path: pathlib.Path) -> Metadata:
    """Return the table of contents of a checkpoint."""
    with (path / ".metadata").open("rb") as file:
        contents: Metadata = _PlainUnpickler(file).load()
    if contents.storage_meta is None:
        contents.storage_meta = StorageMeta()
    return contents


# Who writes which piece. What all ranks hold alike is written once, by the rank with least to
# write. What they hold differently (random states, running values, replicas of DASO between two
# exchanges) is written in several versions, and the checkpoint notes which rank had which.


@dataclass(frozen=True)
class Held:
    """What a rank holds under a name: a block of a tensor, or an object."""

    kind: tuple[Any, ...]
    """Shape and dtype of the whole tensor; empty for an object."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int
    digest: bytes
    """Equal for equal content."""


def held(value: Shard | bytes, *, compare: bool) -> Held:
    """Describe what this rank holds.

    Args:
        value: a block, or a packed object.
        compare: whether content has to be told apart from that of other ranks.
    """
    if isinstance(value, bytes):
        digest = hashlib.sha256(value).digest() if compare else b""
        return Held((), (), (), len(value), digest)
    tensor = value.tensor
    digest = b""
    if compare:
        raw = bytes_of(tensor.detach().cpu().contiguous())
        digest = hashlib.sha256(raw.numpy().data).digest()
    kind = (value.global_shape, tensor.dtype)
    return Held(kind, value.offsets, tuple(tensor.shape), tensor.nbytes, digest)


@dataclass(frozen=True)
class Arrangement:
    """The pieces of a checkpoint: who writes them, and which version each rank holds."""

    writes: list[list[tuple[str, int]]]
    """For each rank, names and versions of what it writes."""
    versions: dict[str, list[int]]
    """For names with several versions, that of each rank."""


def arrange(held: Sequence[Mapping[str, Held]]) -> Arrangement:
    """Return the arrangement for what each rank holds; the same answer wherever it is asked."""
    load = [0] * len(held)
    writes: list[list[tuple[str, int]]] = [[] for _ in held]
    versions: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for mine in held for name in mine):
        mine = {rank: have[name] for rank, have in enumerate(held) if name in have}
        of_rank, sources = _versions(mine)
        if len(sources) > 1:
            versions[name] = [of_rank.get(rank, 0) for rank in range(len(held))]
        for version, ranks in enumerate(sources):
            for source in ranks:
                able = [rank for rank, block in mine.items() if block == mine[source]]
                writer = min(able, key=lambda rank: (load[rank], rank))
                load[writer] += mine[source].bytes
                writes[writer].append((name, version))
    return Arrangement(writes, versions)


def _versions(mine: Mapping[int, Held]) -> tuple[dict[int, int], list[list[int]]]:
    """Return the version of each rank, and for each version the ranks whose blocks make it whole.

    The i-th holders of all blocks of a tensor belong together: on a mesh they are one replica.
    """
    of_rank: dict[int, int] = {}
    sources: list[list[int]] = []
    for kind in dict.fromkeys(block.kind for block in mine.values()):
        holders: dict[tuple[Any, ...], list[int]] = {}
        for rank, block in mine.items():
            if block.kind == kind:
                holders.setdefault((block.offsets, block.sizes), []).append(rank)
        known: dict[tuple[bytes, ...], int] = {}
        for i in range(max(map(len, holders.values()))):
            ranks = [row[min(i, len(row) - 1)] for row in holders.values()]
            content = tuple(mine[rank].digest for rank in ranks)
            if content not in known:
                known[content] = len(sources)
                sources.append(ranks)
            of_rank |= {row[i]: known[content] for row in holders.values() if i < len(row)}
    return of_rank, sources


# The planners of torch.distributed.checkpoint for blocks and packed objects.


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
        weights_only: whether to refuse objects that are more than plain data.
    """

    def __init__(
        self, wanted: dict[str, Shard | Any], contents: Metadata, *, weights_only: bool
    ) -> None:
        super().__init__()
        self.wanted = wanted
        self._weights_only = weights_only
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
        self.wanted[read_item.dest_index.fqn] = unpacked(value, weights_only=self._weights_only)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the block that waits for this tensor."""
        return self.wanted[index.fqn].tensor
