"""How the ranks of a layer agree on a call, before anything else.

A rank sees only its own block. So each call begins with an all-gather of one number: a digest of
what this rank holds and needs. If these numbers are new, all ranks exchange what is behind them:
shapes, dtypes and devices of inputs, whose gradients are needed, whether an input is bad. All then
know the same and decide alike: go on with the current plan, make another, or raise.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import TracebackType
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from unisono import errors
from unisono.comm import Communicator
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

Mode = Literal["always", "off"]
_MODES: tuple[str, ...] = get_args(Mode)
NO_GRAD, PARAMETERS, INPUTS = 0, 1, 2
"""Which gradients are needed: none, only of parameters, of inputs too."""
Cuts = tuple[tuple[int, ...], ...]
"""For each dim, the cuts of a tensor's blocks."""


class structure_check:
    """Say how layers notice that a shape has changed: at once, or for a `with` block.

    `"always"` (default): ranks agree in every forward, so a change that only some ranks see is
    planned again on all. `"off"`: nothing is compared, and the first plan is final.

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

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


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


_KNOWN = 16
"""Numbers of ranks that a layer remembers the meaning of."""
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


@dataclass(frozen=True)
class CallReport:
    """What one rank says of a call."""

    structures: tuple[BlockStructure, ...]
    """Of its inputs."""
    gradients: int
    """Whose gradients it needs."""
    is_grad_on: bool
    mode: Mode
    arguments: str
    """Name and description of the layer."""
    problem: tuple[str, str] | None
    """Class and text of an error in its inputs."""
    block: int = 0
    """Digest of its block in the first call."""

    @property
    def number(self) -> int:
        """A digest of all but the block."""
        words = repr(replace(self, block=0)).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest())


_ALIKE: dict[str, tuple[Callable[[CallReport], object], str]] = {
    "structure_check mode": (lambda r: r.mode, "structure_check(...) alike on every rank"),
    "arguments of the layer": (lambda r: r.arguments, "build the layer alike on every rank"),
    "number of inputs": (
        lambda r: f"{len(r.structures)} tensor{'s' * (len(r.structures) != 1)}",
        "call it with as many tensors on every rank",
    ),
}
"""What must be equal on all ranks, and what to do."""


class Agreements:
    """The calls of one layer, as its ranks agree on them."""

    def __init__(self) -> None:
        self.tables: tuple[Table, ...] = ()
        """What all ranks hold, for each input; the same object while nothing changes."""
        self.gradients = NO_GRAD
        """`NO_GRAD`, `PARAMETERS` or `INPUTS`, the most that some rank needs."""
        self.blocks: list[int] = []
        """Digests of all blocks in the first call."""
        self._key: tuple[object, ...] = ()
        self._number = 0
        self._numbers: list[tuple[int, ...]] = []
        self._structures: tuple[BlockStructure, ...] = ()
        self._needed = NO_GRAD
        self._known: OrderedDict[tuple[tuple[int, ...], ...], tuple[tuple[Table, ...], int]]
        self._known = OrderedDict()
        """Tables and gradients behind the latest numbers, the same ones on all ranks."""

    def agree(
        self,
        comm: Communicator | None,
        ranks: tuple[int, ...],
        structures: tuple[BlockStructure, ...],
        gradients: int,
        problem: UnisonoError | None,
        arguments: Callable[[], tuple[object, ...]],
        block: Tensor | None = None,
    ) -> None:
        """Learn what all ranks hold and need. Collective over `comm` unless the check is off.

        Args:
            comm: all ranks of the layer; None for one rank alone.
            ranks: for each rank of `comm`, its rank in the root communicator.
            structures: of the own inputs.
            gradients: whose gradients this rank needs.
            problem: an error that this rank has found in its input.
            arguments: gives name and description of the layer, equal on all ranks.
            block: own block, if the blocks of all ranks must not be equal.

        Raises:
            UnisonoError: the problem of some rank, on all ranks.
            CollectiveMismatch: ranks differ in arguments, check mode, grad mode, or number of
                inputs.
        """
        mode, is_grad_on = current_mode(), torch.is_grad_enabled()
        if self._numbers and mode == "off":
            if problem is not None:
                raise problem
            if structures != self._structures:
                before, after = (
                    ", ".join(map(str, each)) for each in (self._structures, structures)
                )
                raise final_plan(arguments()[0], before, after)
            needed = INPUTS if is_grad_on else NO_GRAD  # other ranks are not asked
            self.gradients = gradients if comm is None else needed
            return
        key = (structures, gradients, is_grad_on, mode)
        said = None if problem is None else (type(problem).__name__, str(problem))
        if problem is not None or key != self._key:
            report = CallReport(*key, repr(arguments()), said)
            self._number, self._key = report.number, key if problem is None else ()
        numbers = [(self._number,)] if comm is None else comm.all_gather_ints([self._number])
        if numbers != self._numbers:
            if tuple(numbers) not in self._known:
                digest = 0 if block is None or comm is None else block_digest(block, comm)
                report = CallReport(*key, repr(arguments()), said, digest)
                reports = [report] if comm is None else comm.all_gather_object(report)
                raise_first(comm, [each.problem for each in reports], problem)
                if comm is not None:
                    _check_alike(comm, reports, arguments()[0])
                    refuse_mixed_grad_mode(comm, [each.is_grad_on for each in reports])
                columns = zip(*[r.structures for r in reports], strict=True)
                tables = tuple(Table(ranks, column) for column in columns)
                needed = max(each.gradients for each in reports)
                self.blocks = [each.block for each in reports]
                self._known[tuple(numbers)] = tables, needed
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
            tables, self._needed = self._known[tuple(numbers)]
            if tables != self.tables:
                self.tables = tables
            self._numbers, self._structures = numbers, structures
        self.gradients = self._needed


def final_plan(layer: object, before: str, after: str) -> UnisonoError:
    """Return the error of a changed input where the first plan is final."""
    return CollectiveMismatch.because(
        f"{layer} with structure_check off",
        f"{before} -> {after}",
        "the first plan is final",
        'unisono.nn.structure_check("always")',
    )


def _check_alike(comm: Communicator, reports: Sequence[CallReport], layer: object) -> None:
    for what, (value_of, hint) in _ALIKE.items():
        values = [value_of(report) for report in reports]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            raise CollectiveMismatch.because(
                f"set-up of {layer}",
                "\n".join(f"rank {comm.ranks[rank]}: {values[rank]}" for rank in (0, odd[0])),
                f"{what}: not equal on {name_ranks([comm.ranks[rank] for rank in odd])}",
                hint,
            )


def refuse_mixed_grad_mode(comm: Communicator, grad_on: Sequence[object]) -> None:
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


def raise_together(comm: Communicator, problem: UnisonoError | None) -> None:
    """Raise the first problem of any rank on all ranks, if there is one. Collective."""
    said = None if problem is None else (type(problem).__name__, str(problem))
    raise_first(comm, comm.all_gather_object(said), problem)


def raise_first(
    comm: Communicator | None,
    said: Sequence[tuple[str, str] | None],
    problem: UnisonoError | None,
) -> None:
    """Raise the first of the problems that ranks have said, and the own one as it is."""
    at = next((rank for rank, each in enumerate(said) if each is not None), None)
    if at is None:
        return
    name, text = said[at] or ("", "")
    if problem is not None and (comm is None or at == comm.rank):
        raise problem
    where = (
        "" if comm is None else f"\n  on rank {comm.ranks[at]}, so the call is refused on all ranks"
    )
    raise getattr(errors, name, PartitionError)(text + where)
