"""How the ranks of a layer agree on a call: one record from each, gathered before anything else.

A rank sees only its own block. So each call begins with one small all-gather of what every rank
holds: shapes, dtypes and devices of its inputs, whose gradients it needs, whether its input is bad.
All ranks then know the same and decide alike: go on with the current plan, make another, or raise.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from unisono import errors
from unisono.comm import Communicator
from unisono.comm.arguments import pack_shape, unpack_shape
from unisono.comm.digest import digest_of
from unisono.comm.health.check import report
from unisono.errors import (
    CollectiveMismatch,
    PartitionError,
    UnisonoError,
    name_ranks,
)
from unisono.expect import expect_choice
from unisono.topology import Partition

Mode = Literal["always", "on_change", "off"]
_MODES: tuple[str, ...] = get_args(Mode)
NO_GRAD, PARAMETERS, INPUTS = 0, 1, 2
"""Which gradients are needed: none, only of parameters, of inputs too."""
Cuts = tuple[tuple[int, ...], ...]
"""For each dim, the cuts of a tensor's blocks."""


class structure_check:
    """Say how layers notice that a shape has changed: at once, or for a `with` block.

    `"always"` (default): ranks agree in every forward, so a change that only some ranks see is
    planned again on all. `"off"`: nothing is compared, and the first plan is final. `"on_change"`
    is another word for "always": agreeing has become too cheap to have a mode between the two.

    >>> with structure_check("off"):
    ...     current_mode()
    'off'
    """

    def __init__(self, mode: Mode) -> None:
        global _mode
        self._before: Mode | None = _mode
        _mode = _checked(mode)

    def __enter__(self) -> None:
        """The mode is set already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        global _mode
        _mode = self._before


def current_mode() -> Mode:
    """Return the mode in force: set by `structure_check`, else `UNISONO_STRUCTURE_CHECK`."""
    if _mode is not None:
        return _mode
    outside = os.environ.get("UNISONO_STRUCTURE_CHECK")
    return "always" if outside is None else _checked(outside)


def _checked(mode: str) -> Mode:
    return cast("Mode", expect_choice("structure_check", mode, _MODES, error=PartitionError))


_mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class BlockStructure:
    """What a plan depends on in one tensor of one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: Tensor) -> BlockStructure:
        """Return the structure of a tensor."""
        return cls(tuple(x.shape), x.dtype, x.device.type)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    def packed(self) -> tuple[int, ...]:
        """Return it as a fixed number of ints."""
        kind = int.from_bytes(self.device.encode()[:7])  # seven letters fit into 64 bits
        return (*pack_shape(self.shape, self.dtype), kind)

    @classmethod
    def unpacked(cls, record: Sequence[int]) -> BlockStructure:
        """Undo `packed`."""
        kind = record[-1].to_bytes(7).lstrip(b"\0").decode()
        return cls(*unpack_shape(record[:-1]), kind)


@dataclass(frozen=True)
class Table:
    """The structures of one input on all ranks of a layer."""

    ranks: tuple[int, ...]
    """Ranks of the root communicator, ascending."""
    entries: tuple[BlockStructure, ...]

    def of(self, rank: int) -> BlockStructure:
        """Return the structure on a rank of the root communicator."""
        return self.entries[self.ranks.index(rank)]

    def shapes(self, partition: Partition) -> list[tuple[int, ...]]:
        """Return the shapes of the blocks of a partition, row-major."""
        return [self.of(rank).shape for rank in partition.ranks]

    def dtype(self, partition: Partition) -> torch.dtype:
        """Return the one dtype of the blocks of a partition."""
        dtypes = {rank: self.of(rank).dtype for rank in partition.ranks}
        first = dtypes[partition.ranks[0]]
        if any(dtype != first for dtype in dtypes.values()):
            raise CollectiveMismatch.because(
                f"blocks of {partition!r}",
                "\n".join(f"rank {rank}: {dtype}" for rank, dtype in dtypes.items()),
                "their dtypes differ",
                f"x.to({first}) on every rank",
            )
        return first

    def one_shape(self, ranks: Sequence[int], action: str, hint: str) -> tuple[int, ...]:
        """Return the shape of the blocks of some ranks, which must be equal."""
        shapes = {rank: self.of(rank).shape for rank in ranks}
        if len(set(shapes.values())) > 1:
            raise PartitionError.because(
                action,
                "\n".join(f"rank {rank}: {list(shape)}" for rank, shape in shapes.items()),
                "their shapes differ",
                hint,
            )
        return shapes[ranks[0]]

    def cuts(self, partition: Partition) -> Cuts:
        """Return the cuts of the blocks of a partition; they must form a grid."""
        return cuts_of_blocks(self.shapes(partition), partition)

    def global_shape(self, partition: Partition) -> tuple[int, ...]:
        """Return the shape of the whole tensor that the blocks of a partition make up."""
        return tuple(bounds[-1] for bounds in self.cuts(partition))


def cuts_of_blocks(shapes: Sequence[Sequence[int]], partition: Partition) -> Cuts:
    """Return the cuts of blocks of these shapes, row-major; they must form a grid."""
    listed = "\n".join(
        f"rank {rank}: {list(shape)}" for rank, shape in zip(partition.ranks, shapes, strict=True)
    )
    wrong = next((shape for shape in shapes if len(shape) != partition.dim), None)
    if wrong is not None:
        raise PartitionError.because(
            f"a block of shape {list(wrong)} on {partition!r}",
            listed,
            f"{len(wrong)} tensor dims, {partition.dim} partition dims",
            "one partition size for each tensor dim; write 1 where a dim is not split",
        )
    cuts: list[tuple[int, ...]] = []
    for dim, parts in enumerate(partition.shape):
        sizes: dict[int, int] = {}
        for place, shape in enumerate(shapes):
            i = partition.index_of(place)[dim]
            if sizes.setdefault(i, shape[dim]) != shape[dim]:
                raise PartitionError.because(
                    f"blocks of {partition!r}",
                    listed,
                    f"dim {dim}, index {i}: {sizes[i]} and {shape[dim]} points",
                    "ranks with the same index in a dim must hold equally much of it",
                )
        cuts.append((0, *accumulate(sizes[i] for i in range(parts))))
    return tuple(cuts)


_COMPARED = 4
"""Number of calls whose blocks are compared, for each group of ranks."""
_COMPARED_ON_DEVICE = 1
"""Of blocks on an accelerator: the host waits for the digest, as it does for the first plans."""
_calls: Counter[tuple[int, ...]] = Counter()


def block_digest(x: Tensor, comm: Communicator) -> int:
    """Return a digest of this rank's block in the first calls on these ranks, later 0. Local.

    0 also for a block in which all values are equal: such blocks are equal without a mistake.
    """
    limit = _COMPARED if x.device.type == "cpu" else _COMPARED_ON_DEVICE
    if comm.size == 1 or _calls[comm.ranks] >= limit:
        return 0
    _calls[comm.ranks] += 1
    if x.is_meta or x.numel() < 2 or type(x) is not Tensor or x.layout != torch.strided:
        return 0
    some = x.detach().reshape(-1)[:: x.numel() // 4096 + 1]
    is_constant = (some == some[0]).all()
    return int(torch.where(is_constant, 0, digest_of(x, 4096) | 1))  # one wait, not two


def report_equal_blocks(digests: Sequence[int], shape: Sequence[int], partition: Partition) -> None:
    """Warn on the first rank if all ranks hold the same block: is it the whole tensor? Local."""
    if 0 in digests or len(set(digests)) > 1 or len(digests) == 1 or partition.comm.rank != 0:
        return
    whole = [n * parts for n, parts in zip(shape, partition.shape, strict=True)]
    report(
        f"blocks of a tensor that is cut by {partition}",
        f"the same block {list(shape)} on all {len(digests)} ranks: is it the whole tensor?",
        "Split.cut(x, partition) takes this rank's block of a tensor that all ranks hold",
        arithmetic=f"blocks of {list(shape)} are joined to {whole}",
    )


# A record: _HEAD numbers, then the structures of up to _MOST_INPUTS tensors.
_BAD, _MODE, _ARGUMENTS, _COUNT, _GRAD_ON, _GRADIENTS, _HEAD = range(7)
_FIELDS = len(BlockStructure((), torch.float32, "cpu").packed())
_MOST_INPUTS = 2
_ALIKE = {
    _MODE: ("structure_check mode", "structure_check(...) alike on every rank"),
    _ARGUMENTS: ("arguments of the layer", "build the layer alike on every rank"),
    _COUNT: ("number of inputs", "call it with as many tensors on every rank"),
}
"""Fields that must be equal on all ranks: what they are, and what to do."""


class Agreements:
    """The calls of one layer, as its ranks agree on them."""

    def __init__(self) -> None:
        self.tables: tuple[Table, ...] = ()
        """What all ranks hold, for each input; the same object while nothing changes."""
        self.gradients = NO_GRAD
        """`NO_GRAD`, `PARAMETERS` or `INPUTS`, the most that some rank needs."""
        self._key: tuple[object, ...] = ()
        self._record: list[int] = []
        self._records: list[tuple[int, ...]] = []
        self._structures: tuple[BlockStructure, ...] = ()
        self._needed = NO_GRAD

    def agree(
        self,
        comm: Communicator | None,
        ranks: tuple[int, ...],
        structures: tuple[BlockStructure, ...],
        gradients: int,
        problem: UnisonoError | None,
        arguments: Callable[[], tuple[object, ...]],
    ) -> None:
        """Learn what all ranks hold and need. Collective over `comm` unless the check is off.

        Args:
            comm: all ranks of the layer; None for one rank alone.
            ranks: for each rank of `comm`, its rank in the root communicator.
            structures: of the own inputs.
            gradients: whose gradients this rank needs.
            problem: an error that this rank has found in its input.
            arguments: gives name and description of the layer, equal on all ranks.

        Raises:
            UnisonoError: the problem of some rank, on all ranks.
            CollectiveMismatch: ranks differ in arguments, check mode, grad mode, or number of
                inputs.
        """
        mode = current_mode()
        if self._records and mode == "off":
            if problem is not None:
                raise problem
            if structures != self._structures:
                raise final_plan(arguments()[0], listed(self._structures), listed(structures))
            needed = INPUTS if torch.is_grad_enabled() else NO_GRAD  # other ranks are not asked
            self.gradients = gradients if comm is None else needed
            return
        key = (structures, gradients, torch.is_grad_enabled(), mode)
        if problem is not None or key != self._key:
            problem = problem or _too_many(structures, arguments)
            self._record = _record(structures, gradients, problem, arguments)
            self._key = key if problem is None else ()
        records = [tuple(self._record)] if comm is None else comm.all_gather_ints(self._record)
        if records != self._records:
            if any(record[_BAD] for record in records):
                raise_together(comm, problem)
            if comm is not None:
                _check_alike(comm, records, arguments)
                refuse_mixed_grad_mode(comm, [record[_GRAD_ON] for record in records])
            tables = _tables(ranks, records)
            if tables != self.tables:
                self.tables = tables
            self._records, self._structures = records, structures
            self._needed = max(record[_GRADIENTS] for record in records)
        self.gradients = self._needed


def _record(
    structures: tuple[BlockStructure, ...],
    gradients: int,
    problem: UnisonoError | None,
    arguments: Callable[[], tuple[object, ...]],
) -> list[int]:
    digest = hashlib.blake2b(repr(arguments()).encode(), digest_size=7).digest()
    record = [0] * (_HEAD + _MOST_INPUTS * _FIELDS)
    record[:_HEAD] = (
        int(problem is not None),
        _MODES.index(current_mode()),
        int.from_bytes(digest),
        len(structures),
        int(torch.is_grad_enabled()),
        gradients,
    )
    for i, structure in enumerate(structures[:_MOST_INPUTS]):
        record[_HEAD + i * _FIELDS : _HEAD + (i + 1) * _FIELDS] = structure.packed()
    return record


def final_plan(layer: object, before: str, after: str) -> UnisonoError:
    """Return the error of a changed input where the first plan is final."""
    return CollectiveMismatch.because(
        f"{layer} with structure_check off",
        f"{before} -> {after}",
        "the first plan is final",
        'unisono.nn.structure_check("always")',
    )


def listed(structures: Sequence[BlockStructure]) -> str:
    """Return structures as a message shows them."""
    return ", ".join(map(str, structures))


def _too_many(
    structures: tuple[BlockStructure, ...], arguments: Callable[[], tuple[object, ...]]
) -> UnisonoError | None:
    if len(structures) <= _MOST_INPUTS:
        return None
    return PartitionError.because(
        f"forward of {arguments()[0]}",
        f"{len(structures)} tensors",
        f"{len(structures)} > {_MOST_INPUTS}",
    )


def _tables(ranks: tuple[int, ...], records: Sequence[tuple[int, ...]]) -> tuple[Table, ...]:
    tables: list[Table] = []
    for i in range(records[0][_COUNT]):
        start = _HEAD + i * _FIELDS
        entries = (BlockStructure.unpacked(record[start : start + _FIELDS]) for record in records)
        tables.append(Table(ranks, tuple(entries)))
    return tuple(tables)


def _check_alike(
    comm: Communicator,
    records: Sequence[tuple[int, ...]],
    arguments: Callable[[], tuple[object, ...]],
) -> None:
    for number, (name, hint) in _ALIKE.items():
        values = [record[number] for record in records]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if not odd:
            continue
        said = [f"{value} tensor{'s' * (value != 1)}" for value in values]
        if number == _MODE:
            said = [_MODES[value] for value in values]
        elif number == _ARGUMENTS:
            said = comm.all_gather_object(repr(arguments()))
        raise CollectiveMismatch.because(
            f"set-up of {arguments()[0]}",
            "\n".join(f"rank {comm.ranks[rank]}: {said[rank]}" for rank in (0, odd[0])),
            f"{name}: not equal on {name_ranks([comm.ranks[rank] for rank in odd])}",
            hint,
        )


def refuse_mixed_grad_mode(comm: Communicator, grad_on: Sequence[int]) -> None:
    """Raise if some ranks are in grad mode and others are not, naming them."""
    if len(set(grad_on)) == 1:
        return
    with_grad = [rank for rank, on in zip(comm.ranks, grad_on, strict=True) if on]
    without = [rank for rank, on in zip(comm.ranks, grad_on, strict=True) if not on]
    raise CollectiveMismatch.because(
        "a distributed layer called in different grad modes",
        f"grad on: {name_ranks(with_grad)}; off: {name_ranks(without)}",
        None,
        "torch.no_grad() on all ranks or on none",
    )


def raise_together(comm: Communicator | None, problem: UnisonoError | None) -> None:
    """Raise the first problem of any rank on all ranks, if there is one. Collective."""
    if comm is None:
        if problem is not None:
            raise problem
        return
    said = comm.all_gather_object(
        None if problem is None else (type(problem).__name__, str(problem))
    )
    at = next((rank for rank, report_of in enumerate(said) if report_of is not None), None)
    if at is None:
        return
    if problem is not None and at == comm.rank:
        raise problem
    name, text = said[at]
    kind = getattr(errors, name, PartitionError)
    raise kind(f"{text}\n  on rank {comm.ranks[at]}, so the call is refused on all ranks")
