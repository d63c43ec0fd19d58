"""`split`: an ordinary network, unchanged, on a tensor of which each rank holds a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.expect import expect
from unisono.nn.parameters import summed_gradients
from unisono.nn.split_tensors.tensor import (
    Cut,
    Gathered,
    Run,
    Split,
    entered,
    refuse_passed_by,
    splits_in,
)
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
        self._unsummed: dict[nn.Parameter, Tensor] | None = None
        """In `no_sync`: leaves that stand for parameters in own work, and keep its gradients."""
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network; its first tensor is this rank's block, other tensors are replicated.

        Collective over the partition. torch.compile leaves it out.
        """
        return self._run(*args, **kwargs)

    @torch.compiler.disable
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        partition = self.partition
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        run = Run(partition.comm, self.module, self.strict)
        draws_alike, entry = entered(first, partition, run)
        if not isinstance(entry, Split):
            return self.module(*args, **kwargs)
        swap = {id(first): entry}
        args = tuple(swap.get(id(x), x) for x in args)
        kwargs = {key: swap.get(id(x), x) for key, x in kwargs.items()}
        with _one_stream(draws_alike, run):
            return self.run(entry, *args, **kwargs)

    def run(self, entry: Split, *args: Any, **kwargs: Any) -> Any:
        """Call the network with arguments among which `entry` is, and which are cut as they are."""
        run = entry.run
        self._copy_parameters(run, tuple(entry.cuts.values()))
        try:
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
        for bucket in _buckets(p for p in self.module.parameters() if p.requires_grad):
            if self._unsummed is None:
                copies = summed_gradients(run.comm, *bucket)
            else:
                copies = [self._unsummed.setdefault(p, _leaf_like(p)) for p in bucket]
            for p, own in zip(bucket, copies, strict=True):
                run.copies[id(p), comms] = own

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of own work unsummed inside the block; sum them once at its end.

        For accumulation over several backwards. Collective at its end.
        """
        before, self._unsummed = self._unsummed, {}
        try:
            yield
            held = self._unsummed
        finally:
            self._unsummed = before
        for bucket in _buckets(held):
            grads = [torch.zeros_like(p) if held[p].grad is None else held[p].grad for p in bucket]
            flat = torch.cat([g.reshape(-1) for g in grads])  # type: ignore[union-attr]
            total = self.partition.comm.all_reduce_(flat)
            for p, part in zip(bucket, total.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p) if p.grad is None else p.grad + part.view_as(p)

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


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters whose gradients travel together, last ones first: backward has them so."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for p in reversed(list(parameters)):
        if not buckets or size > _BUCKET_BYTES or buckets[-1][0].dtype != p.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.numel() * p.element_size()
    return buckets


def _leaf_like(p: nn.Parameter) -> Tensor:
    return p.detach().requires_grad_()


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


def _without_prefix(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}module.")]:
        state[prefix + key[len(prefix) + len("module.") :]] = state.pop(key)


def _with_prefix(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
