"""The one meeting in which ranks tell each other shapes: at the entry of a network."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.accelerator import generator_state, is_accelerator
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError
from unisono.nn.agreement import block_digest, cuts_of_blocks, report_equal_blocks
from unisono.nn.split_tensors.cuts import Cut, Run
from unisono.nn.split_tensors.tensor import Split, in_run, plainly
from unisono.topology import Partition


@dataclass(frozen=True)
class Entry:
    """What ranks have told each other at the entry of a network."""

    tensor: Tensor
    """The own block as a `Split`; as it is if nothing is cut."""
    draws_alike: bool
    """Whether the default generators of all ranks stand alike."""
    alike: bool
    """Whether all ranks have given the same further numbers."""


def _device_state(x: Tensor | None) -> bytes:
    """Return the state of the generator of a tensor's accelerator; nothing on a CPU."""
    if x is None or not is_accelerator(x.device):
        return b""
    return generator_state(x.device).numpy().tobytes()


def entered(x: Tensor | None, partition: Partition, run: Run, numbers: Sequence[int] = ()) -> Entry:
    """Return the own block as a `Split`, and what else ranks agree on.

    The one meeting in which ranks tell each other shapes; all later ones follow by arithmetic.

    Args:
        x: own block; a `Split` stays as it is. None is refused, on all ranks alike.
        partition: how it is cut.
        run: the forward to come.
        numbers: what should be equal on all ranks; 0 is equal to anything.
    """
    comm, is_split, dims = partition.comm, isinstance(x, Split), partition.dim
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes() + _device_state(x))
    shape, numbers_of_block = [0] * dims, [-1, 0, 0, 0]
    block = 0 if x is None or is_split else block_digest(x, comm)
    if x is not None:
        with plainly():
            shape = list(x.shape) if x.ndim == dims and not is_split else shape
        local = x.local if isinstance(x, Split) else x
        needs = int(local.requires_grad and torch.is_grad_enabled())
        numbers_of_block = [local.ndim, zlib.crc32(str(local.dtype).encode()), needs, int(is_split)]
    records = comm.all_gather_ints([*shape, *numbers_of_block, state, block, *numbers])
    if len({record[dims : dims + 4] for record in map(tuple, records)}) > 1:
        raise CollectiveMismatch(
            "inputs of a split network: dims, dtype and requires_grad must be equal on all ranks",
            {r: "no tensor" if rec[dims] < 0 else
                f"{rec[dims]} dims, dtype number {rec[dims + 1]}, "
                f"requires_grad {bool(rec[dims + 2])}, split already {bool(rec[dims + 3])}"
             for r, rec in enumerate(records)},
        )  # fmt: skip
    if x is None:
        raise UnisonoError.because(
            "a split network called without a tensor",
            hint="the own block of its input first, then tensors that all ranks hold equal",
        )
    further = zip(*[record[dims + 6 :] for record in records], strict=True)
    draws_alike = len({record[dims + 4] for record in records}) == 1
    alike = all(len(set(column)) == 1 or 0 in column for column in further)
    if isinstance(x, Split):
        return Entry(in_run(x, run), draws_alike, alike)
    if x.ndim != dims:
        raise PartitionError.because(
            f"an input of shape {list(x.shape)} for {partition}",
            arithmetic=f"{x.ndim} dims != {dims}",
            hint=f"Partition({[1] * x.ndim}) with the ranks of the dims that are cut",
        )
    cuts = agreed_cuts([record[:dims] for record in records], partition)
    report_equal_blocks([record[dims + 5] for record in records], x.shape, partition)
    return Entry(Split(x, cuts, run) if cuts else x, draws_alike, alike)


def agreed_cuts(shapes: Sequence[Sequence[int]], partition: Partition) -> dict[int, Cut]:
    """Return the cuts that follow from the blocks of all ranks."""
    cuts: dict[int, Cut] = {}
    for dim, bounds in enumerate(cuts_of_blocks(shapes, partition)):
        sizes = tuple(b - a for a, b in itertools.pairwise(bounds))
        if min(sizes) == 0:
            raise PartitionError.because(
                f"blocks of an input over {partition}", f"sizes {list(sizes)} along dim {dim}",
                f"{bounds[-1]} points for {len(sizes)} ranks", "fewer ranks, or a larger input",
            )  # fmt: skip
        if len(sizes) > 1:
            cuts[dim] = Cut(sizes, partition.sub(dim).comm)
    return cuts
