"""Checks of what a user hands to a verb; every refusal is a four-part error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.errors import MeshError, PartitionError, UnisonoError


def check_tensor(x: object, device: torch.device, verb: str) -> Tensor:
    """Return `x` if it is a dense tensor on the communicator's kind of device."""
    if not isinstance(x, Tensor):
        raise UnisonoError.because(
            f"{verb} of {type(x).__name__}", "a tensor is needed", None, f"{verb}(torch.tensor(x))"
        )
    if x.device.type != device.type:
        if x.device.type == "meta":
            raise UnisonoError.because(
                f"{verb} of a tensor on meta", "it has no data to move", None, "x.to('cpu')"
            )
        raise UnisonoError.because(
            f"{verb} of a tensor on {x.device}",
            f"the communicator works on {device}",
            None,
            f"x.to({str(device)!r}), or comm.with_device({str(x.device)!r})",
        )
    if x.layout is not torch.strided or x.is_quantized:
        kind = "a quantised" if x.is_quantized else f"a sparse ({x.layout})"
        raise UnisonoError.because(
            f"{verb} of {kind} tensor", "only dense tensors travel", None, "x.to_dense()"
        )
    return x


def check_rank(rank: int, size: int, what: str, verb: str) -> int:
    """Return `rank` if it is a rank of a group of `size`."""
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise MeshError.because(
            f"{verb}({what}={rank!r})",
            f"the group has {size} rank{'s' if size > 1 else ''}",
            f"0 <= {what} < {size} does not hold",
            f"{what} is a rank of the communicator, not of the world",
        )
    return rank


def check_dim(dim: int, x: Tensor, verb: str) -> int:
    """Return `dim` counted from the front; a tensor without dims counts as one row."""
    dims = max(x.dim(), 1)
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise PartitionError.because(
            f"{verb}(dim={dim!r}) of shape {list(x.shape)}",
            f"{x.dim()} dims",
            f"-{dims} <= dim < {dims} does not hold",
        )
    return dim % dims


def check_sizes(
    sizes: Sequence[int], size: int, verb: str, *, total: int | None = None, what: str = "sizes"
) -> tuple[int, ...]:
    """Return `sizes` as a tuple of one entry a rank, none negative, adding up to `total`."""
    values = tuple(int(n) for n in sizes)
    asked = f"{verb}({what}={list(values)})"
    if len(values) != size:
        raise PartitionError.because(
            asked, f"{len(values)} entries for {size} ranks", f"{len(values)} != {size}"
        )
    if any(n < 0 for n in values):
        raise PartitionError.because(asked, f"a negative size: {min(values)}")
    if total is not None and sum(values) != total:
        terms = " + ".join(map(str, values))
        raise PartitionError.because(
            asked,
            f"{total} rows in the tensor",
            f"{terms} = {sum(values)} != {total}",
            f"{what} must add up to the rows of the tensor",
        )
    return values


def check_timeout(timeout_s: float) -> float:
    """Return a deadline in seconds if it is positive."""
    if not timeout_s > 0:
        raise UnisonoError.because(
            f"timeout_s={timeout_s!r}", "a deadline must be positive", None, "timeout_s=30.0"
        )
    return float(timeout_s)
