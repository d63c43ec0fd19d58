"""The table of a set-up: one small all-gather tells every rank what all ranks hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.blocks import pack_shape, unpack_shape
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError, name_ranks
from unisono.nn.agreement import raise_together, refuse_mixed_grad_mode
from unisono.nn.structure import Structure, Table, current_mode

_MODES = ("always", "on_change", "off")
_DEVICES = ("cpu", "cuda", "mps", "meta")
_FIELDS = len(pack_shape((), torch.float32)) + 1
_MOST_INPUTS = 2
"""Tensors that a layer takes at most; a record has room for as many."""
_ALIKE = {
    1: ("structure_check mode", "structure_check(...) alike on every rank"),
    2: ("arguments of the layer", "build the layer alike on every rank"),
    3: ("number of inputs", "call it with as many tensors on every rank"),
}
"""Fields of a record that must be equal on all ranks: what they are, and what to do."""


def gather_tables(
    comm: Communicator | None,
    tensors: Sequence[Tensor],
    arguments: tuple[object, ...],
    problem: UnisonoError | None,
    gradients: int,
    ranks: Sequence[int],
) -> tuple[list[Table], int]:
    """Return one table for each input, and whose gradients some rank needs.

    Collective over `comm`, in one message. Ranks that have a problem, other arguments or another
    check mode make all ranks raise.

    Args:
        comm: all ranks of the layer, or None for one process alone.
        tensors: own inputs; equally many on all ranks.
        arguments: name and description of the layer, which must be equal on all ranks.
        problem: an error this rank has found in its input.
        gradients: whose gradients this rank needs.
        ranks: for each rank of `comm`, its rank in the root communicator.
    """
    own = [Structure.of(x) for x in tensors]
    if problem is None and len(own) > _MOST_INPUTS:
        problem = PartitionError.because(
            f"forward of {arguments[0]}", f"{len(own)} tensors", f"{len(own)} > {_MOST_INPUTS}"
        )
    if comm is None:
        if problem is not None:
            raise problem
        return [Table(tuple(ranks), (structure,)) for structure in own], gradients
    digest = int.from_bytes(hashlib.blake2b(repr(arguments).encode(), digest_size=7).digest())
    grad_on = int(torch.is_grad_enabled())
    head = [
        int(problem is not None),
        _MODES.index(current_mode()),
        digest,
        len(own),
        gradients,
        grad_on,
    ]
    structures = [n for structure in own[:_MOST_INPUTS] for n in _packed(structure)]
    room = [0] * (_MOST_INPUTS * _FIELDS - len(structures))
    records = comm.all_gather_ints([*head, *structures, *room])
    if any(record[0] for record in records):
        raise_together(comm, problem)
    _check_alike(comm, records, arguments)
    if any(record[5] != grad_on for record in records):
        refuse_mixed_grad_mode(comm, grad_on)
    tables: list[Table] = []
    for i in range(len(own)):
        first = len(head) + i * _FIELDS
        entries = tuple(_unpacked(record[first : first + _FIELDS]) for record in records)
        tables.append(Table(tuple(ranks), entries))
    return tables, max(record[4] for record in records)


def _check_alike(
    comm: Communicator, records: Sequence[tuple[int, ...]], arguments: tuple[object, ...]
) -> None:
    for field, (name, hint) in _ALIKE.items():
        values = [record[field] for record in records]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if not odd:
            continue
        said = [f"{value} tensor{'s' * (value != 1)}" for value in values]
        if field == 1:
            said = [_MODES[value] for value in values]
        elif field == 2:
            said = comm.all_gather_object(repr(arguments))
        raise CollectiveMismatch.because(
            f"set-up of {arguments[0]}",
            "\n".join(f"rank {comm.ranks[rank]}: {said[rank]}" for rank in (0, odd[0])),
            f"{name}: not equal on {name_ranks([comm.ranks[rank] for rank in odd])}",
            hint,
        )


def _packed(structure: Structure) -> tuple[int, ...]:
    return (*pack_shape(structure.shape, structure.dtype), _DEVICES.index(structure.device))


def _unpacked(record: Sequence[int]) -> Structure:
    shape, dtype = unpack_shape(record[:-1])
    return Structure(shape, dtype, _DEVICES[record[-1]])
