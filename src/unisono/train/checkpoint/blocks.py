"""Tensors of a state as blocks of whole tensors: uncut, cut by our layers, or by DTensor."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.comm.blocks import bytes_of
from unisono.nn import Shard
from unisono.train.checkpoint.arrangement import Held


def is_leaf(value: object) -> bool:
    """Return whether a value of a state is stored as a tensor, not inside of an object."""
    if isinstance(value, Shard):
        return True
    is_plain = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor)
    return is_plain and isinstance(value, Tensor) and value.layout == torch.strided


def shard_of(value: Any) -> Shard:
    """Return this rank's block of a tensor, with its place in the whole. Local."""
    if isinstance(value, Shard):
        inner = shard_of(value.tensor)  # a block may be cut again, by FSDP2 on another axis
        offsets = tuple(a + b for a, b in zip(value.offsets, inner.offsets, strict=True))
        return Shard(inner.tensor, value.global_shape, offsets)
    if isinstance(value, DTensor):
        (chunk,) = value.__create_chunk_list__()
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
    return shard.tensor.numel() == 0 and torch.Size(shard.global_shape).numel() > 0


def copied(shard: Shard) -> Shard:
    """Return the block in memory that training does not write to."""
    own = shard.tensor.detach().to("cpu", copy=True)
    return Shard(own, shard.global_shape, shard.offsets)


def packed(value: object) -> bytes:
    """Return an object as bytes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


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
