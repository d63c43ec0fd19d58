"""A state as named blocks of whole tensors, and the ranks that differ in them.

A state is a tree of plain values with tensors in it. Tensors are stored one by one as blocks of
whole tensors, each under its path; the rest of a tree is one small object.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PosixPath
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.comm.digest import digest_of
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


def empty_like(value: Any, dtype: torch.dtype) -> tuple[Shard, Any]:
    """Return memory for this rank's block of a tensor cut as `value` is, and the tensor with it."""
    inner = value.tensor if isinstance(value, Shard) else value
    made = torch.empty_like(inner, dtype=dtype, requires_grad=False)
    if isinstance(value, Shard):
        return shard_of(Shard(made, value.global_shape, value.offsets)), made
    return shard_of(made), made


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    return value.global_shape if isinstance(value, Shard) else tuple(value.shape)


def is_empty(shard: Shard) -> bool:
    """Return whether a rank has no part of a tensor that others have."""
    return shard.tensor.numel() == 0 and math.prod(shard.global_shape) > 0


def copied(shard: Shard) -> Shard:
    """Return the block in memory that training does not write to."""
    tensor = shard.tensor.detach().to("cpu", copy=True)
    return Shard(tensor, shard.global_shape, shard.offsets)


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


# Which ranks differ. What all ranks have alike is stored once. What they have differently (random
# states, running values, replicas of DASO between two exchanges) is stored in several versions,
# and the checkpoint notes which rank had which.


@dataclass(frozen=True)
class BlockFacts:
    """What a rank has under a name: a block of a tensor, or an object."""

    kind: tuple[Any, ...]
    """Shape and dtype of the whole tensor; empty for an object."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int
    digest: int
    """Equal for equal content."""


def describe(
    values: Mapping[str, Shard | bytes], compared: Collection[str]
) -> dict[str, BlockFacts]:
    """Describe what this rank has, for a comparison with other ranks.

    The digests are made where the tensors are, of all their words: a sample would take ranks whose
    tensors differ in a few rows for equal. The host waits once.

    Args:
        values: blocks and packed objects.
        compared: names of the blocks that other ranks may have, too.
    """
    digests: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in values.items():
        if isinstance(value, Shard) and name in compared and value.tensor.numel():
            of_device = digests.setdefault(value.tensor.device, {})
            of_device[name] = digest_of(value.tensor)
    numbers: dict[str, int] = {}
    for of_device in digests.values():
        numbers |= zip(of_device, torch.stack(list(of_device.values())).tolist(), strict=True)
    return {name: _piece(value, numbers.get(name, 0)) for name, value in values.items()}


def _piece(value: Shard | bytes, digest: int) -> BlockFacts:
    if isinstance(value, bytes):
        number = int.from_bytes(hashlib.sha256(value).digest()[:8], "little")
        return BlockFacts((), (), (), len(value), number)
    tensor = value.tensor
    kind = (value.global_shape, tensor.dtype)
    return BlockFacts(kind, value.offsets, tuple(tensor.shape), tensor.nbytes, digest)


@dataclass(frozen=True)
class Offers:
    """The versions of what ranks have, and the ranks that can write each of them."""

    offers: list[list[tuple[str, int]]]
    """For each rank, names and versions of what it can write."""
    versions: dict[str, list[int]]
    """For names with several versions, that of each rank."""


def compare(pieces: Sequence[Mapping[str, BlockFacts]]) -> Offers:
    """Compare what each rank has; the same answer on all ranks."""
    offers: list[list[tuple[str, int]]] = [[] for _ in pieces]
    versions: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for of_rank in pieces for name in of_rank):
        there = {rank: of_rank[name] for rank, of_rank in enumerate(pieces) if name in of_rank}
        of_rank, sources = _versions(there)
        if len(sources) > 1:
            versions[name] = [of_rank.get(rank, 0) for rank in range(len(pieces))]
        for version, ranks in enumerate(sources):
            blocks = {there[rank] for rank in ranks}
            for rank, piece in there.items():
                if piece in blocks:
                    offers[rank].append((name, version))
    return Offers(offers, versions)


def _versions(pieces: Mapping[int, BlockFacts]) -> tuple[dict[int, int], list[list[int]]]:
    """Return the version of each rank, and for each version the ranks whose blocks make it whole.

    The i-th holders of all blocks of a tensor belong together: on a mesh they are one replica.
    """
    of_rank: dict[int, int] = {}
    sources: list[list[int]] = []
    for kind in dict.fromkeys(piece.kind for piece in pieces.values()):
        holders: dict[tuple[Any, ...], list[int]] = {}
        for rank, piece in pieces.items():
            if piece.kind == kind:
                holders.setdefault((piece.offsets, piece.sizes), []).append(rank)
        rank_sets: dict[tuple[int, ...], int] = {}
        for i in range(max(map(len, holders.values()))):
            ranks = [row[min(i, len(row) - 1)] for row in holders.values()]
            content = tuple(pieces[rank].digest for rank in ranks)
            if content not in rank_sets:
                rank_sets[content] = len(sources)
                sources.append(ranks)
            of_rank |= {row[i]: rank_sets[content] for row in holders.values() if i < len(row)}
    return of_rank, sources


def stored_name(name: str, version: int) -> str:
    """Return the name under which a version is stored."""
    return f"{name}@{version}" if version else name
