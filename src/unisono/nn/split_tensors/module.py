"""`split`: an ordinary network, unchanged, on a tensor of which each rank holds a block."""

from __future__ import annotations

import itertools
import math
import sys
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from unisono.accelerator import forked_generators, generator_state, is_accelerator
from unisono.comm import Communicator
from unisono.comm.digest import digest
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError, explain
from unisono.expect import expect, expect_choice
from unisono.nn.agreement import block_digest, current_mode, cuts_of_blocks, report_equal_blocks
from unisono.nn.split_tensors.blocks import cut_along
from unisono.nn.split_tensors.functions import prepare_hooks
from unisono.nn.split_tensors.tensor import (
    Cut,
    Gathered,
    Run,
    Split,
    in_run,
    innermost,
    mapped,
    plainly,
    refuse_passed_by,
    splits_in,
)
from unisono.operators.gradients import (
    BUCKET_MB,
    GradientPolicy,
    plan_buckets,
    reduce_gradients,
    summed_gradients,
)
from unisono.topology import Partition

_LARGE_GATHER = 2**18
"""Points from which on a gathered tensor is warned of."""


class SplitModule(nn.Module):
    """A network whose input is cut over ranks; see `split`."""

    reads_all_parameters = True
    """For optimizers that step late: all parameters are read when the forward begins."""

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        strict: bool,
        attention: str = "auto",
        blocks: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.partition = partition
        self.strict = strict
        self.attention = attention
        self.blocks = blocks
        self._gathered: Counter[Gathered] = Counter()
        self._is_compared = False
        self._unsummed: dict[nn.Parameter, Tensor] | None = None
        """In `no_sync`: leaves that stand for parameters in own work, and keep its gradients."""
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network; its first tensor is this rank's block.

        Other tensors are equal on all ranks, or made by `Split.of` from own blocks. Ranks compare
        what they hold before anything else is done. Collective over the partition. torch.compile
        leaves it out, and compiled modules inside run as they are written.
        """
        result = self._run(*args, **kwargs)
        return mapped(self._block, result) if self.blocks else result

    def _block(self, x: Split) -> Tensor:
        """Return this rank's block of a result that is cut along dims of the input, else all."""
        axes = self._axes()
        if x.ndim == self.partition.dim:
            x = cut_along(x, axes)
        return x.local if x.cuts.keys() <= axes.keys() else x.whole()

    @torch.compiler.disable
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_lazy()
        prepare_hooks()
        run = Run(self.partition, self.module, self.strict, self.attention)
        first, others = self._told_apart(args, kwargs)
        checked = current_mode() != "off"
        summary = [*self._modes(), *_described(others)] if checked else []
        numbers = [_digest(summary), 0 if self._is_compared else _digest(self._states_once())]
        tensor, draws_alike, is_alike = entered(first, self.partition, run, numbers)
        if not is_alike:
            self._refuse_unlike(summary)
        self._is_compared = True
        if not isinstance(tensor, Split):
            return self.module(*args, **kwargs)

        def inside(x: Split) -> Split:
            return in_run(x, run)

        if isinstance(first, Split):
            args, kwargs = mapped(inside, (args, kwargs))
        else:
            swap = {id(first): tensor}
            args = tuple(swap.get(id(x), mapped(inside, x)) for x in args)
            kwargs = {key: swap.get(id(x), mapped(inside, x)) for key, x in kwargs.items()}
        with _one_stream(draws_alike, run):
            return self._computed(tensor, *args, **kwargs)

    def _refuse_lazy(self) -> None:
        """Raise for parameters that a first forward makes: it would read the shape of a block."""
        states = [*self.module.named_parameters(), *self.module.named_buffers()]
        for name, state in states if not self._is_compared else ():
            if isinstance(state, (UninitializedParameter, UninitializedBuffer)):
                raise UnisonoError.because(
                    f"a split {type(self.module).__name__}",
                    f"{name}, of a lazy module, has no shape yet",
                    None,
                    "one forward of the plain module on all ranks, e.g. "
                    "module(torch.zeros(1, 3, 8, 8)), before the network is used",
                )

    def _computed(self, entry: Split, *args: Any, **kwargs: Any) -> Any:
        """Call the network with arguments among which `entry` is, and which are cut as they are."""
        run = entry.run
        self._copy_parameters(run, tuple(entry.cuts.values()))
        try:
            with _uncompiled():
                result = self.module(*args, **kwargs)
        except Exception as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            path, kind = innermost(self.module, frames[::-1])
            where = f"{path} ({kind})" if path else kind
            error.add_note(f"in the forward of {where}, split over ranks")
            raise
        finally:
            self._gathered = run.gathered
            run.copies = {}
        for x in splits_in(result):
            refuse_passed_by(x)
        self._warn_of_gathers(run)
        return result

    def _warn_of_gathers(self, run: Run) -> None:
        """Warn of large gathers, on the first rank: each of them costs memory on every rank."""
        large = [of for of in run.gathered if math.prod(of.shape) >= _LARGE_GATHER]
        if not large or run.comm.rank != 0:
            return
        large.sort(key=lambda of: -math.prod(of.shape))
        lines = [
            f"{of.function} of {list(of.shape)}{f' in {of.module}' if of.module else ''}: "
            f"{of.reason}"
            for of in large[:3]
        ]
        warnings.warn(
            f"a split {type(self.module).__name__} has gathered {len(large)} large tensors on "
            "every rank, the largest ones:\n"
            + "\n".join(lines)
            + "\nHINT: net.report() lists all; "
            "split(..., strict=True) refuses them",
            UserWarning,
            stacklevel=2,
        )

    def _told_apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the own block, None if there is none, and all other arguments by name."""
        arguments = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
        for x in splits_in(arguments):
            axes = set(self._axes().values())
            if not {axis for cut in x.cuts.values() for axis in cut.axes} <= axes:
                raise UnisonoError.because(
                    f"{type(self.module).__name__}, split by {self.partition}, called with {x!r}",
                    "cut over other ranks than those of the partition",
                    hint="Split.of(own_block, partition), by a partition of the same ranks",
                )
        first = next((x for x in arguments.values() if isinstance(x, Tensor)), None)
        return first, {key: x for key, x in arguments.items() if first is None or x is not first}

    def _axes(self) -> dict[int, Communicator]:
        """Return the ranks along each dim that is cut."""
        P = self.partition
        return {d: P.sub(d).comm for d, n in enumerate(P.shape) if n > 1}

    def _modes(self) -> list[str]:
        """Describe in which modes the network runs."""
        train = sum(module.training for module in self.module.modules())
        return [f"modules in train mode: {train}", f"gradients: {torch.is_grad_enabled()}"]

    def _states_once(self) -> list[str]:
        """Describe the parameters and buffers, before the first forward."""
        if self._is_compared or current_mode() == "off":
            return []
        return _described(dict([*self.module.named_parameters(), *self.module.named_buffers()]))

    def _refuse_unlike(self, summary: list[str]) -> NoReturn:
        """Raise for arguments or parameters that are not equal on all ranks. Collective."""
        lists = self.partition.comm.all_gather_object([*summary, *self._states_once()])
        calls = {
            rank: "; ".join(line for line in lines if any(line not in other for other in lists))
            for rank, lines in enumerate(lists)
        }
        raise CollectiveMismatch(
            explain(
                f"a split {type(self.module).__name__} on {len(lists)} ranks",
                "tensors beside its first input, or parameters, that are not equal on all ranks:\n"
                + "\n".join(
                    f"rank {rank}: {text or 'nothing of it'}" for rank, text in calls.items()
                ),
                None,
                "Split.of(own_block, partition) for a second input that is cut; the same values on "
                "all ranks for one that is not; one torch.manual_seed before the network is made",
            ),
            calls,
        )

    def _copy_parameters(self, run: Run, cuts: tuple[Cut, ...]) -> None:
        """Copy all parameters for own work, so that their gradients are summed in buckets."""
        if not torch.is_grad_enabled():
            return
        axes = frozenset(axis for cut in cuts for axis in cut.axes)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        whole = [p for p in trained if not _is_sharded(p)]
        sizes, largest = [(p.nbytes, p.dtype) for p in whole], BUCKET_MB * 2**20
        for members in plan_buckets(sizes, largest, largest):
            bucket = [whole[i] for i in members]
            if self._unsummed is None:
                copies = summed_gradients(run.comm, *bucket)
            else:
                copies = [self._unsummed.setdefault(p, _leaf_like(p)) for p in bucket]
            for p, copied in zip(bucket, copies, strict=True):
                run.copies[id(p), axes] = p._version, copied

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of own work unsummed inside the block; sum them once at its end.

        For accumulation over several backwards. Collective at its end.
        """
        before, self._unsummed = self._unsummed, {}
        try:
            yield
            leaves = self._unsummed
        finally:
            self._unsummed = before
        policy = GradientPolicy(sum_over=(self.partition.comm,))
        reduce_gradients((leaf, policy) for leaf in leaves.values())
        for p, leaf in leaves.items():
            if leaf.grad is not None:
                p.grad = leaf.grad if p.grad is None else p.grad + leaf.grad

    def report(self) -> list[tuple[Gathered, int]]:
        """Return what had to be gathered in the latest forward, and how often."""
        return list(self._gathered.items())

    def extra_repr(self) -> str:
        """Show the partition."""
        return f"partition={list(self.partition.shape)}, strict={self.strict}"


def split(
    module: nn.Module,
    partition: Partition,
    *,
    strict: bool = False,
    attention: str = "auto",
    blocks: bool = False,
) -> SplitModule:
    """Return a network that runs unchanged on an input of which each rank holds a block.

    Nothing in `module` is replaced: its parameters, its states and its `forward` stay what they
    are, and every torch function in it works on blocks. Halos, statistics and attention talk to
    other ranks where they must; what cannot be done with blocks is gathered and reported.

    Args:
        module: any network made of torch functions, equal on all ranks.
        partition: how its input is cut, e.g. `Partition([1, 1, 2, 2])` for height and width.
        strict: refuse instead of gathering.
        attention: how `scaled_dot_product_attention` works where the tokens are cut. `"ulysses"`
            gives each rank all tokens of its share of the heads, which sends and keeps least;
            `"ring"` sends keys and values around, for memory linear in the own tokens;
            `"gathered"` has all keys and values on every rank. `"auto"`: ulysses where the heads
            divide by the ranks and no mask has a row per query, else gathered up to 64 MB of keys
            and values, else ring. What cannot serve is refused, unless it is `"auto"`.
        blocks: return plain tensors: this rank's block of what is cut along dims along which the
            input is cut, and the whole of everything else. The layers and losses of `unisono.nn`
            take them as they are.

    Returns:
        A module. `net(x_own)` takes this rank's block; `y.whole()`, `y.local` and `y.cuts` are
        what its results have. Further tensors are equal on all ranks, or `Split.of(own_block,
        partition)`. A loss of them is a plain number; `backward()` on every rank gives
        complete gradients. `net.report()` lists what was gathered.

    Raises:
        PartitionError: the blocks of the ranks do not fit each other.
        CollectiveMismatch: other arguments, or parameters at the first call, are not equal on all
            ranks (compared as `structure_check` says).
        UnisonoError: something passes by the rules, such as an autograd.Function.

    >>> import torch
    >>> from unisono import Partition
    >>> net = split(torch.nn.Conv2d(1, 1, 3, padding=1), Partition([1, 1, 1, 1]))
    >>> net(torch.zeros(1, 1, 4, 4)).shape
    torch.Size([1, 1, 4, 4])
    """
    expect("module", module, nn.Module, "a torch.nn.Module")
    expect("partition", partition, Partition, "Partition([1, 1, 2, 1])")
    expect_choice("attention", attention, ("auto", "gathered", "ulysses", "ring"))
    return SplitModule(module, partition, strict, attention, blocks)


def _described(values: Any, path: str = "") -> list[str]:
    """Return a line for each argument: what must be equal on all ranks of it."""
    if isinstance(values, Split):
        cuts = {dim: (cut.sizes, cut.outer) for dim, cut in values.cuts.items()}
        return [f"{path}: {values.dtype} {list(values.shape)} cut {cuts}"]
    if isinstance(values, Tensor):
        kind = f"{path}: {values.dtype} {list(values.shape)} requires_grad={values.requires_grad}"
        return [f"{kind}, bits {_bits(values):08x}"]
    if isinstance(values, dict):
        return [line for k, x in values.items() for line in _described(x, f"{path}.{k}".strip("."))]
    if isinstance(values, (list, tuple)):
        return [line for i, x in enumerate(values) for line in _described(x, f"{path}[{i}]")]
    is_plain = values is None or isinstance(values, (bool, int, float, str))
    return [f"{path}: {values!r}" if is_plain else f"{path}: {type(values).__name__}"]


def _is_sharded(x: Tensor) -> bool:
    """Whether ranks hold parts of it: a DTensor, as of FSDP; to import its class takes long."""
    return any(not placement.is_replicate() for placement in getattr(x, "placements", ()))


def _bits(x: Tensor) -> int:
    """Return a number that differs if the bits of a tensor do; 0 for what ranks hold parts of."""
    if _is_sharded(x):
        return 0
    x = x.to_local() if hasattr(x, "placements") else x  # type: ignore[attr-defined]
    is_made = not isinstance(x, (UninitializedParameter, UninitializedBuffer))
    if not is_made or x.layout != torch.strided:
        return 0
    return digest(x) % 2**32


def _digest(lines: list[str]) -> int:
    """Return a number for what is described; 0 for nothing."""
    return zlib.crc32("\n".join(lines).encode()) + 1 if lines else 0


def _leaf_like(p: nn.Parameter) -> Tensor:
    return p.detach().requires_grad_()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let compiled modules run as they are written: what is traced knows nothing of blocks."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _one_stream(draws_alike: bool, run: Run) -> Iterator[None]:
    """Let all ranks draw the same random numbers inside, where their generators differ."""
    if draws_alike:
        yield
        return
    seed = run.comm.all_gather_ints([int(torch.randint(2**31, ()))])[0][0]
    with forked_generators():
        torch.manual_seed(seed)
        yield


def _without_prefix(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}module.")]:
        state[prefix + key[len(prefix) + len("module.") :]] = state.pop(key)


def _with_prefix(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)


# -- the entry: the one meeting in which ranks tell each other shapes ------------------------------


def _device_state(x: Tensor | None) -> bytes:
    """Return the state of the generator of a tensor's accelerator; nothing on a CPU."""
    if x is None or not is_accelerator(x.device):
        return b""
    return generator_state(x.device).numpy().tobytes()


def entered(
    x: Tensor | None, partition: Partition, run: Run, numbers: Sequence[int] = ()
) -> tuple[Tensor, bool, bool]:
    """Return the own block as a `Split` (as it is if nothing is cut), and what ranks agree on.

    That is whether their default generators stand alike, and whether further numbers are equal.

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
        return in_run(x, run), draws_alike, alike
    if x.ndim != dims:
        raise PartitionError.because(
            f"an input of shape {list(x.shape)} for {partition}",
            arithmetic=f"{x.ndim} dims != {dims}",
            hint=f"Partition({[1] * x.ndim}) with the ranks of the dims that are cut",
        )
    cuts = agreed_cuts([record[:dims] for record in records], partition)
    report_equal_blocks([record[dims + 5] for record in records], x.shape, partition)
    return Split(x, cuts, run) if cuts else x, draws_alike, alike


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
