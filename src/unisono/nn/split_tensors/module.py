"""`split`: an ordinary network, unchanged, on a tensor of which each rank holds a block."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError
from unisono.expect import expect
from unisono.nn.split_tensors.tensor import (
    Cut,
    Gathered,
    Run,
    Split,
    refuse_passed_by,
    splits_in,
)
from unisono.operators import slice_replicated, sum_to_replicated
from unisono.topology import Partition

_BUCKET_BYTES = 25 * 2**20
"""Gradients of this many bytes are summed at a time."""


class SplitModule(nn.Module):
    """A network whose input is cut over ranks; see `split`."""

    def __init__(self, module: nn.Module, partition: Partition, strict: bool) -> None:
        super().__init__()
        self.module = module
        self.partition = partition
        self.strict = strict
        self._gathered: Counter[Gathered] = Counter()
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network; its first tensor is this rank's block, other tensors are replicated.

        Collective over the partition.
        """
        partition = self.partition
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if first is None:
            raise UnisonoError.because(
                f"a split {type(self.module).__name__} called without a tensor",
                hint="the own block of its input first; other tensors, equal on all ranks, after it",
            )
        if isinstance(first, Split):
            raise UnisonoError.because(
                f"a split {type(self.module).__name__} called with {first!r}",
                "its input is cut here, so it takes the own block",
                hint="x.local, or the plain module for a tensor that is split already",
            )
        run = Run(partition.comm, self.module, self.strict)
        draws_alike, entry = _entered(first, partition, run)
        if not isinstance(entry, Split):
            return self.module(*args, **kwargs)
        swap = {id(first): entry}
        args = tuple(swap.get(id(x), x) for x in args)
        kwargs = {key: swap.get(id(x), x) for key, x in kwargs.items()}
        self._copy_parameters(run, tuple(entry.cuts.values()))
        try:
            with _one_stream(draws_alike, run):
                result = self.module(*args, **kwargs)
        finally:
            self._gathered = run.gathered
            run.copies = {}
        run.check_views()
        for x in splits_in(result):
            refuse_passed_by(x)
        return result

    def _copy_parameters(self, run: Run, cuts: tuple[Cut, ...]) -> None:
        """Copy all parameters for own work, so that their gradients are summed in buckets."""
        if not torch.is_grad_enabled():
            return
        comms = tuple(cut.comm for cut in cuts)
        buckets: list[list[nn.Parameter]] = []
        size = 0
        for p in reversed([p for p in self.module.parameters() if p.requires_grad]):
            if not buckets or size > _BUCKET_BYTES or buckets[-1][0].dtype != p.dtype:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += p.numel() * p.element_size()
        for bucket in buckets:
            for p, own in zip(bucket, _CopyBucket.apply(run.comm, *bucket), strict=True):
                run.copies[id(p), comms] = own

    def report(self) -> list[tuple[Gathered, int]]:
        """Return what had to be gathered in the latest forward, and how often."""
        return list(self._gathered.items())

    def extra_repr(self) -> str:
        """Show the partition."""
        return f"partition={list(self.partition.shape)}, strict={self.strict}"


def split(module: nn.Module, partition: Partition, *, strict: bool = False) -> SplitModule:
    """Return a network that runs unchanged on an input of which each rank holds a block.

    Nothing in `module` is replaced: its parameters, its states and its `forward` stay what they
    are, and every torch function in it works on blocks. Halos, statistics and attention talk to
    other ranks where they must; what cannot be done with blocks is gathered and reported.

    Args:
        module: any network made of torch functions, equal on all ranks.
        partition: how its input is cut, e.g. `Partition([1, 1, 2, 2])` for height and width.
        strict: refuse instead of gathering.

    Returns:
        A module. `net(x_own)` takes this rank's block; `y.whole()`, `y.local` and `y.layout` are
        what its results have. A loss of them is a plain number; `backward()` on every rank gives
        complete gradients. `net.report()` lists what was gathered.

    Raises:
        PartitionError: the blocks of the ranks do not fit each other.
        UnisonoError: something passes by the rules, such as an autograd.Function.

    >>> import torch
    >>> from unisono import Partition
    >>> net = split(torch.nn.Conv2d(1, 1, 3, padding=1), Partition([1, 1, 1, 1]))
    >>> net(torch.zeros(1, 1, 4, 4)).shape
    torch.Size([1, 1, 4, 4])
    """
    expect("module", module, nn.Module, "a torch.nn.Module")
    expect("partition", partition, Partition, "Partition([1, 1, 2, 1])")
    return SplitModule(module, partition, strict)


class _CopyBucket(torch.autograd.Function):
    """Copies of replicated parameters for own work; their gradients are summed in one call."""

    @staticmethod
    def forward(ctx: Any, comm: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        given = [g for g in grads if g is not None]
        if not given:
            return (None, *grads)
        flat = torch.cat([g.reshape(-1) for g in given])
        total = sum_to_replicated(flat, comm=ctx.comm)
        parts = iter(total.split([g.numel() for g in given]))
        return (None, *[None if g is None else next(parts).view_as(g) for g in grads])


def _entered(x: Tensor, partition: Partition, run: Run) -> tuple[bool, Tensor]:
    """Return whether all ranks draw alike, and the own block as a `Split`."""
    if x.ndim != partition.dim:
        raise PartitionError.because(
            f"an input of shape {list(x.shape)} for {partition}",
            arithmetic=f"{x.ndim} dims != {partition.dim}",
            hint=f"Partition({[1] * x.ndim}) with the ranks of the dims that are cut",
        )
    comm = partition.comm
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    needs = int(x.requires_grad and torch.is_grad_enabled())
    records = comm.all_gather_ints([*x.shape, _code(x.dtype), needs, state])
    shapes = [record[: x.ndim] for record in records]
    if len({record[x.ndim : x.ndim + 2] for record in map(tuple, records)}) > 1:
        raise CollectiveMismatch(
            "inputs of a split network: dtype and requires_grad must be equal on all ranks",
            {r: f"dtype number {rec[x.ndim]}, requires_grad {bool(rec[x.ndim + 1])}"
             for r, rec in enumerate(records)},
        )  # fmt: skip
    cuts: dict[int, Cut] = {}
    places = [partition.index_of(partition.ranks[r]) for r in range(comm.size)]
    for dim, parts in enumerate(partition.shape):
        sizes = [shapes[next(r for r in range(comm.size) if places[r][dim] == i)][dim] for i in range(parts)]
        wrong = [r for r in range(comm.size) if shapes[r][dim] != sizes[places[r][dim]]]
        if wrong:
            raise PartitionError.because(
                f"blocks of an input over {partition}",
                f"rank {wrong[0]} has shape {list(shapes[wrong[0]])}",
                f"dim {dim}: {shapes[wrong[0]][dim]} != {sizes[places[wrong[0]][dim]]}, which ranks at the "
                f"same place along dim {dim} have",
                "blocks that follow from one cut per dim: Split.cut(x, partition).local",
            )
        if min(sizes) == 0:
            raise PartitionError.because(
                f"blocks of an input over {partition}", f"sizes {sizes} along dim {dim}",
                f"{sum(sizes)} points for {parts} ranks", "fewer ranks, or a larger input",
            )  # fmt: skip
        if parts > 1:
            cuts[dim] = Cut(tuple(sizes), partition.sub(dim).comm)
    alike = len({record[-1] for record in records}) == 1
    return alike, Split(x, cuts, run) if cuts else x


def _code(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


@contextmanager
def _one_stream(draws_alike: bool, run: Run) -> Iterator[None]:
    """Let all ranks draw the same random numbers inside, where their generators differ."""
    if draws_alike:
        yield
        return
    seed = run.comm.all_gather_ints([int(torch.randint(2**31, ()))])[0][0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}module.")]:
        state[prefix + key[len(prefix) + len("module.") :]] = state.pop(key)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)


def of(local: Tensor, partition: Partition, strict: bool = False) -> Tensor:
    """Return own blocks as a `Split`, outside of a network. Collective over the partition."""
    return _entered(local, partition, Run(partition.comm, None, strict))[1]


def cut(whole: Tensor, partition: Partition) -> Tensor:
    """Return the own block of a tensor that all ranks hold equal, as a `Split`. Collective."""
    local = whole
    for dim, parts in enumerate(partition.shape):
        if parts > 1:
            local = slice_replicated(local, dim, comm=partition.sub(dim).comm)
    return of(local, partition)


Split.of = staticmethod(of)  # type: ignore[attr-defined]
Split.cut = staticmethod(cut)  # type: ignore[attr-defined]
