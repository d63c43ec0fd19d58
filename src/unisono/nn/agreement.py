"""How the ranks of a layer agree: one word in every forward, one table at set-up.

The word is the maximum over ranks of four numbers. The table is gathered only when the word says
that somebody's input has changed; from it every rank computes its plan by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono import errors
from unisono.comm import Communicator
from unisono.comm.headers import pack_shape, unpack_shape
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError, compress_ranks
from unisono.nn.structure import Structure, Table, current_mode

SAME, CHANGED, BAD = 0, 1, 2
_MODES = ("always", "on_change", "off")
_DEVICES = ("cpu", "cuda", "mps", "meta")
_FIELDS = len(pack_shape((), torch.float32)) + 1


@dataclass(frozen=True)
class Agreement:
    """What all ranks of a layer know of this call."""

    changed: bool
    """Some rank's input has another structure than the current plan."""
    needs_grad: bool
    """Some rank needs gradients, so every rank's output must be part of the graph."""


class _Chain:
    """The agreement of an enclosing chain, which speaks for the layers inside it."""

    current: Agreement | None = None


@contextmanager
def chained(agreement: Agreement) -> Iterator[None]:
    """Let the layers called inside take this agreement as theirs."""
    before, _Chain.current = _Chain.current, agreement
    try:
        yield
    finally:
        _Chain.current = before


def agree(
    comm: Communicator | None, *, changed: bool, needs_grad: bool, problem: UnisonoError | None
) -> Agreement:
    """Return what all ranks of `comm` agree on; raise alike on all if one has a problem.

    Collective over `comm` in mode "always", unless an enclosing chain has agreed already.
    """
    if _Chain.current is not None:
        return _raised(problem) or Agreement(
            _Chain.current.changed or changed, _Chain.current.needs_grad
        )
    mode = current_mode()
    if comm is None or comm.size == 1:
        return _raised(problem) or Agreement(changed, needs_grad)
    if mode != "always":
        if mode == "off" and changed and problem is None:
            problem = CollectiveMismatch(
                "the shape of an input has changed and structure_check is off\n"
                '  HINT: unisono.nn.structure_check("always")'
            )
        return _raised(problem) or Agreement(changed, torch.is_grad_enabled())
    level = BAD if problem is not None else CHANGED if changed else SAME
    grad_on = int(torch.is_grad_enabled())
    word = torch.tensor([level, int(needs_grad), grad_on, -grad_on], dtype=torch.int32)
    top, wanted, on, off = comm.with_device("cpu").all_reduce(word, "max").tolist()
    if top == BAD:
        raise_together(comm, problem)
    if on != -off:
        _refuse_mixed_grad_mode(comm, grad_on)
    return Agreement(top == CHANGED, bool(wanted))


def gather_tables(
    comm: Communicator | None,
    tensors: Sequence[Tensor],
    arguments: object,
    problem: UnisonoError | None,
    needs_grad: bool,
    ranks: Sequence[int],
) -> tuple[list[Table], bool]:
    """Return one table for each input, and whether some rank needs gradients.

    Collective over `comm`. Ranks that have a problem, other arguments or another check mode make
    all ranks raise.

    Args:
        comm: all ranks of the layer, or None for one process alone.
        tensors: own inputs; equally many on all ranks.
        arguments: description of the layer that must be equal on all ranks.
        problem: an error this rank has found in its input.
        needs_grad: whether this rank needs gradients.
        ranks: for each rank of `comm`, its rank in the root communicator.
    """
    own = [Structure.of(x) for x in tensors]
    if comm is None or comm.size == 1:
        _raised(problem)
        return [Table(tuple(ranks), (structure,)) for structure in own], needs_grad
    digest = int.from_bytes(hashlib.blake2b(repr(arguments).encode(), digest_size=7).digest())
    grad_on = int(torch.is_grad_enabled())
    head = [
        int(problem is not None),
        _MODES.index(current_mode()),
        digest,
        len(own),
        int(needs_grad),
        grad_on,
    ]
    records = comm.with_device("cpu").all_gather_ints(head)
    if any(record[0] for record in records):
        raise_together(comm, problem)
    _check_heads(comm, records, arguments)
    if any(record[5] != grad_on for record in records):
        _refuse_mixed_grad_mode(comm, grad_on)
    mine = [number for structure in own for number in _packed(structure)]
    gathered = comm.with_device("cpu").all_gather_ints(mine)
    tables = [
        Table(
            tuple(ranks),
            tuple(_unpacked(record[i * _FIELDS : (i + 1) * _FIELDS]) for record in gathered),
        )
        for i in range(len(own))
    ]
    return tables, any(record[4] for record in records)


def raise_together(comm: Communicator, problem: UnisonoError | None) -> None:
    """Raise the first problem of any rank on all ranks, if there is one. Collective."""
    said = comm.all_gather_object(
        None if problem is None else (type(problem).__name__, str(problem))
    )
    at = next((rank for rank, word in enumerate(said) if word is not None), None)
    if at is None:
        return
    if problem is not None and at == comm.rank:
        raise problem
    name, text = said[at]
    kind = getattr(errors, name, PartitionError)
    raise kind(f"{text}\n  on rank {comm.ranks[at]}, so the call is refused on all ranks")


def _raised(problem: UnisonoError | None) -> None:
    if problem is not None:
        raise problem


def _check_heads(comm: Communicator, records: Sequence[tuple[int, ...]], arguments: object) -> None:
    names = {1: "structure_check mode", 2: "arguments of the layer", 3: "number of inputs"}
    for field, name in names.items():
        odd = [r for r, record in enumerate(records) if record[field] != records[0][field]]
        if odd:
            raise CollectiveMismatch.because(
                f"set-up of a layer with {arguments}",
                f"ranks 0 and {odd[0]} of the group differ",
                f"{name}: not equal on ranks {compress_ranks([comm.ranks[r] for r in odd])}",
                "build the layer alike on every rank",
            )


def _refuse_mixed_grad_mode(comm: Communicator, grad_on: int) -> None:
    modes = comm.with_device("cpu").all_gather_ints([grad_on])
    with_grad = [comm.ranks[r] for r, (on,) in enumerate(modes) if on]
    without = [comm.ranks[r] for r, (on,) in enumerate(modes) if not on]
    raise CollectiveMismatch.because(
        "a distributed layer called in different grad modes",
        f"grad on: ranks {compress_ranks(with_grad)}; off: ranks {compress_ranks(without)}",
        None,
        "torch.no_grad() on all ranks or on none",
    )


def _packed(structure: Structure) -> tuple[int, ...]:
    return (*pack_shape(structure.shape, structure.dtype), _DEVICES.index(structure.device))


def _unpacked(record: Sequence[int]) -> Structure:
    shape, dtype = unpack_shape(record[:-1])
    return Structure(shape, dtype, _DEVICES[record[-1]])
