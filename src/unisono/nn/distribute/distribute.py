"""`distribute`: an ordinary network becomes a split one, with the same weights and names.

Layers that look at neighbours are replaced, elementwise ones are kept. At the first layer that
needs whole samples the tensor is gathered (or re-cut by batch) and the rest runs as it is.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import CollectiveMismatch, PartitionError, an, name_ranks
from unisono.expect import expect_choice
from unisono.nn.distribute.chain import DistributedSequential, Join, children_of
from unisono.nn.distribute.following import Layer, Trust, trust, trusted
from unisono.nn.distribute.rules import WHOLE, Cut
from unisono.nn.distribute.twins import (
    ELEMENTWISE,
    NORMS,
    SPATIAL,
    check_carries_nothing,
    check_copies,
    check_keeps_samples_apart,
    check_takes_samples,
    refuse,
    torch_base,
    torch_kind,
    twin_of,
)
from unisono.nn.gradients import sum_gradients
from unisono.nn.layers.dropout import EqualDraws, OwnChannelDropout, OwnDropout, may_draw
from unisono.nn.layers.norm import DistributedLayerNorm
from unisono.nn.layers.pooling import GlobalAvgPool
from unisono.nn.module import Module
from unisono.nn.state import own_block
from unisono.topology import Partition

__all__ = ["DistributedSequential", "distribute"]

Head = Literal["replicate", "batch"]
_TRUSTED_BASES = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.PReLU, *ELEMENTWISE)
"""What a forward of its own may be written on: nothing of these looks at neighbours by itself."""
_TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_FLATTENING = (nn.Flatten, nn.Linear)
_SEEN_THROUGH = (*ELEMENTWISE, nn.Softmax, nn.LogSoftmax, nn.ModuleList, nn.ModuleDict)
"""Kept as they are: a forward that is followed may call them on any order of dims."""
_CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass
class _Walk:
    """Where the walk over the network stands."""

    everyone: Partition
    partition: Partition
    """How the tensor is split at this point: as by `everyone`, or in its batch alone."""
    head: Head
    custom: str
    is_split: bool = True
    """False once the tensor has been gathered."""
    seen: dict[tuple[int, bool, Partition], nn.Module] = field(default_factory=dict)
    """What stands for a module of the source at a stage: what was shared stays shared."""
    blocks: dict[int, Tensor] = field(default_factory=dict)
    """Own blocks of parameters of the source that this rank does not hold whole."""
    uses: set[tuple[int, bool]] = field(default_factory=set)
    """Parameters of the source, and whether they are cut over ranks."""

    @property
    def stage(self) -> tuple[bool, Partition]:
        """What changes when samples are gathered, wholly or in space."""
        return self.is_split, self.partition

    @property
    def cut(self) -> Cut:
        """The dims of which ranks hold different parts at this point."""
        if self.is_split:
            return frozenset(d for d, parts in enumerate(self.partition.shape) if parts > 1)
        return frozenset({0}) if self.head == "batch" and self.everyone.size > 1 else WHOLE

    @property
    def place(self) -> int:
        """A number that ranks share where they hold the same points."""
        at = self.everyone
        if not at.active or at.index is None or (not self.is_split and self.head == "replicate"):
            return 0
        if self.is_split and self.partition != at:
            return at.index[0]
        return at.rank or 0

    @property
    def samples(self) -> int:
        """A number that ranks of the split part share where they hold parts of the same samples."""
        at = self.everyone
        return at.index[0] if at.active and at.index is not None else 0

    def keeps(self, parameters: Iterable[Tensor | None]) -> None:
        """Note parameters of the source that are used whole."""
        self.uses |= {(id(p), False) for p in parameters}

    def leave_space(self) -> None:
        """Go on behind a mean over space: ranks that shared a sample hold the same values."""
        P = self.everyone
        self.partition = P.sub(0, rank=P.rank or 0)
        self.is_split = self.partition.size > 1 or self.head == "batch"


def distribute(
    module: nn.Module,
    partition: Partition,
    *,
    head: Head = "replicate",
    custom: Literal["refuse", "recurse"] = "refuse",
) -> nn.Module:
    """Return a split copy of a torch module with the weights of rank 0. Collective.

    Shared layers and tied parameters stay so. Work that the class of a layer does not tell is
    refused in the split part: hooks, parametrizations, a forward replaced on the object.
    `torch.compile` leaves what is split as it is and compiles around it.

    Args:
        module: a tree of torch layers, and of layers on `unisono.nn.Module`, which are kept; it is
            not changed.
        partition: `[batch, 1, space...]`: how the input `(N, C, ...)` is cut.
        head: what happens at the first Flatten or Linear: "replicate" gathers the tensor on every
            rank, and every rank computes the rest; "batch" re-cuts it by samples.
        custom: "recurse" replaces the children of modules with a forward of their own and runs that
            forward on own blocks: it may call its children, treat points one by one, and look along
            dims that are not split. What looks along a split dim (`x.mean((2, 3))`,
            `F.interpolate`, a crop) is refused when it is called. "refuse" raises.

    Raises:
        PartitionError: a layer that cannot be split, with its path and the reason.
    """
    expect_choice("head", head, ("replicate", "batch"), error=PartitionError)
    expect_choice("custom", custom, ("refuse", "recurse"), error=PartitionError)
    if not isinstance(module, nn.Module):
        raise PartitionError.because(
            "distribute(module, partition)",
            an(type(module).__name__),
            None,
            "a torch.nn.Module",
        )
    if not isinstance(partition, Partition):
        sizes = list(partition) if isinstance(partition, tuple | list) else [1, 1, 2, 1]
        raise PartitionError.because(
            f"distribute(module, {partition!r})",
            f"{an(type(partition).__name__)} for the partition",
            None,
            f"distribute(module, unisono.Partition({sizes}))",
        )
    if partition.dim < 3 or partition.shape[1] != 1:
        raise PartitionError.because(
            f"distribute(module, {partition!r})",
            f"{partition.dim} dims",
            "needs batch, 1 for channels, and one size for each spatial dim",
            "Partition([1, 1, 2, 2])",
        )
    check_copies(module)
    source = copy.deepcopy(module)
    _share_weights(source, partition)
    walk = _Walk(partition, partition, head, custom)
    with torch.random.fork_rng(devices=[]):  # layers draw weights that are then replaced
        made = _converted(source, "", walk, in_chain=True)
    _check_ties(source, walk)
    return made


def _converted(
    module: nn.Module, path: str, walk: _Walk, *, in_chain: bool = False, dims: int = 0
) -> nn.Module:
    """Return what stands for `module`, remembering what was met before.

    The head keeps the modules of the source; in the split part others take their place, with the
    same parameters. `in_chain`: its result goes to the next module of a chain, and nowhere else.
    `dims`: how many dims its input has, where that is known.
    """
    key = (id(module), *walk.stage)
    if key in walk.seen:
        return walk.seen[key]
    before, is_split = walk.cut, walk.is_split
    if is_split:
        check_carries_nothing(module, path)
        check_takes_samples(module, path, walk.partition.dim)
        made = _replacement(module, path, walk)
    else:
        if walk.head == "batch":
            trusts = walk.custom == "recurse"
            check_keeps_samples_apart(module, path, trusts=trusts, dim=dims)
        walk.keeps(module.parameters())
        made = _fit_for_head(module, walk, {})
        if walk.head == "batch":
            sum_gradients(made, walk.everyone)
        elif may_draw(made):
            EqualDraws(made, walk.everyone)
    if isinstance(made, GlobalAvgPool) and not in_chain:
        _refuse_gathering(f"{path} is {an(type(module).__name__)}")
    made.training = module.training
    if walk.custom == "recurse" and walk.everyone.active and walk.everyone.size > 1:
        own = trusted(made)
        if own is not None:
            trust(made, replace(own, is_chained=in_chain and path != ""))
        elif not is_split or torch_kind(module) not in _SEEN_THROUGH:
            _look_away(made, path, before, walk, is_own=made is module)
    walk.seen[key] = made
    return made


def _look_away(made: nn.Module, path: str, before: Cut, walk: _Walk, *, is_own: bool) -> None:
    """Let forwards that are followed take a layer's work for granted, and check what it is given.

    `is_own`: it is a layer of the source, kept as it is.
    """
    takes: Cut | None = before
    gives: Cut | None = walk.cut
    if type(made) is OwnDropout:  # point by point, whatever the order of dims
        takes = gives = None
    elif is_own and isinstance(made, Module):
        takes = None
        after = getattr(made, "P_y", None)
        if isinstance(after, Partition) and after.dim == walk.everyone.dim:
            gives = frozenset(d for d, parts in enumerate(after.shape) if parts > 1)
    Layer(path, takes, gives, walk.everyone.dim).attach(made)


def _replacement(module: nn.Module, path: str, walk: _Walk) -> nn.Module:
    kind, P = torch_kind(module), walk.partition
    if isinstance(module, Module) or kind in ELEMENTWISE:
        return module
    if kind is nn.Sequential:
        return _chain(cast("nn.Sequential", module), path, walk)
    if kind in (nn.ModuleList, nn.ModuleDict):
        made = _shell(module)
        for name, child in children_of(module):
            made._modules[name] = _converted(child, f"{path}.{name}".lstrip("."), walk)
        return made
    if kind is nn.PReLU:
        walk.keeps(module.parameters())
        made = _shell(module)
        sum_gradients(made, P)
        return made
    if kind in (nn.Softmax, nn.LogSoftmax):
        return _kept_softmax(module, path, P)
    if kind is nn.Dropout:
        return OwnDropout(cast("nn.Dropout", module).p, walk.everyone, walk.place)
    if kind in _CHANNEL_DROPOUTS:
        return OwnChannelDropout(cast("nn.Dropout2d", module).p, walk.everyone, walk.samples)
    made = twin_of(module, P)
    return _custom(module, path, walk) if made is None else _like(module, made, walk)


def _shell(module: nn.Module) -> nn.Module:
    """Return a module with the same parameters, for other children and hooks."""
    made = copy.copy(module)
    for name in _TABLES:
        made.__dict__[name] = vars(module)[name].copy()
    return made


def _like(module: nn.Module, made: nn.Module, walk: _Walk) -> nn.Module:
    """Return the split twin with the very parameters of a layer, or own blocks of them."""
    is_cut = isinstance(made, DistributedLayerNorm) and not made._is_unsplit
    walk.uses |= {(id(p), is_cut) for p in module._parameters.values()}
    for table in ("_parameters", "_buffers"):
        mine, theirs = vars(made)[table], vars(module)[table]
        for name, value in theirs.items():
            if value is not None and mine[name].shape != value.shape:
                block = walk.blocks.setdefault(id(value), _block(value, made, name))
                mine[name] = block
            else:
                mine[name] = value
    made.training = module.training
    return made


def _block(value: Tensor, made: nn.Module, name: str) -> Tensor:
    """Return what this rank holds of a parameter or buffer."""
    block = own_block(value.detach(), cast("Any", made)._holdings[name], name).clone()
    return nn.Parameter(block, value.requires_grad) if isinstance(value, nn.Parameter) else block


def _check_ties(source: nn.Module, walk: _Walk) -> None:
    """Refuse a parameter that is cut for one layer and whole for another."""
    for path, layer in source.named_modules():
        for name, p in layer._parameters.items():
            if p is not None and {(id(p), True), (id(p), False)} <= walk.uses:
                reason = f"its {name}, cut here, is needed whole by another layer that shares it"
                refuse(path, layer, reason, "parameters of their own: copy.deepcopy(layer)")


def _chain(module: nn.Sequential, path: str, walk: _Walk) -> DistributedSequential:
    layers: dict[str, nn.Module] = {}
    join_before: str | None = None
    join: tuple[Join, ...] = ()
    for name, child in children_of(module):
        where = f"{path}.{name}".lstrip(".")
        if walk.is_split and isinstance(child, _FLATTENING):
            walk.is_split = False
            join_before = name
            join = (Join(walk.partition, walk.everyone, cuts_batch=walk.head == "batch"),)
        dims = walk.everyone.dim if name == join_before else 0
        layers[name] = _converted(child, where, walk, in_chain=True, dims=dims)
        if walk.is_split and isinstance(layers[name], GlobalAvgPool):
            walk.leave_space()
    made = DistributedSequential(walk.everyone, layers)
    made._join_before, made._join = join_before, join
    return made


def _custom(module: nn.Module, path: str, walk: _Walk) -> nn.Module:
    """Replace the children of a module with a forward of its own, if that is asked for."""
    base = torch_base(module)
    if torch_kind(module) is not None and base is not nn.Module:
        hint = "write a layer on unisono.nn.Module, or move it behind the Flatten"
        refuse(path, module, "no split twin of it is known", hint)
    if base not in _TRUSTED_BASES:
        hint = f"hold {an(base.__name__)} and call it, in a class that is derived from nn.Module"
        refuse(path, module, f"its forward is written on that of {base.__name__}", hint)
    if walk.custom == "refuse":
        hint = 'custom="recurse": what its forward calls is then looked at, call by call'
        refuse(path, module, "it has a forward of its own", hint)
    made = _shell(module)
    about = Trust(path, type(module).__name__, walk.cut, walk.partition.dim)
    gathered: str | None = None
    for name, child in children_of(module):
        where, before = f"{path}.{name}".lstrip("."), walk.stage
        if gathered is not None:
            _check_behind(child, where, gathered)
        made.add_module(name, _converted(child, where, walk))
        if walk.stage != before:
            gathered = where
            if path:  # what it returns may go anywhere, to split layers too
                _refuse_gathering(f"{where} gathers whole samples")
    if made._parameters:  # used on own points alone
        if gathered is not None:
            reason = f"it has parameters of its own, for before or behind {gathered}, which gathers"
            refuse(path, module, reason, "give them to a module that stands on one side")
        walk.keeps(made._parameters.values())
        sum_gradients(made, walk.partition, deep=False)
    if about.cut and walk.everyone.active:
        trust(made, about)
    return made


def _check_behind(child: nn.Module, where: str, gathered: str) -> None:
    """Refuse layers that look at space, where `forward` may call them on either kind of tensor."""
    if any(torch_kind(layer) in SPATIAL for layer in child.modules()):
        _refuse_gathering(f"{where} stands behind {gathered}, which gathers whole samples")


def _refuse_gathering(what: str) -> NoReturn:
    raise PartitionError.because(
        f"distribute: {what}",
        "in a module with a forward of its own: nobody knows what that does with a value that is "
        "whole on every rank",
        None,
        "call them one after the other, in an nn.Sequential",
    )


def _kept_softmax(module: nn.Module, path: str, P: Partition) -> nn.Module:
    dim = cast("Any", module).dim
    at = dim if dim is None or dim >= 0 else dim + P.dim
    if at is None or P.shape[at] != 1:
        raise PartitionError.because(
            f"distribute: {path or 'the module'} is {an(type(module).__name__)} over dim {dim}",
            f"{P!r} splits that dim" if at is not None else "no dim is given",
            None,
            "softmax over an unsplit dim, such as dim=1",
        )
    return module


def _fit_for_head(module: nn.Module, walk: _Walk, done: dict[int, nn.Module]) -> nn.Module:
    """Return a layer of the head with masks, and statistics, that suit what each rank holds."""
    if id(module) in done:
        return done[id(module)]
    made, kind = module, torch_kind(module)
    if kind is nn.Dropout:
        made = OwnDropout(cast("nn.Dropout", module).p, walk.everyone, walk.place)
        made.training = module.training
    elif walk.head == "batch" and kind in NORMS:
        space = {nn.BatchNorm1d: 0, nn.BatchNorm3d: 3}.get(kind, 2)
        rows = walk.everyone.reshape((walk.everyone.size, 1, *(1,) * space))
        made = _like(module, cast("nn.Module", twin_of(module, rows)), walk)
    else:
        for name, child in children_of(module):
            module._modules[name] = _fit_for_head(child, walk, done)
    done[id(module)] = made
    return made


def _share_weights(module: nn.Module, P: Partition) -> None:
    """Give every rank the values of rank 0 of the partition's root."""
    comm = P.root
    if comm.size == 1:
        return
    _check_same_network(module, comm, "distribute(module, partition)")
    split = {
        id(value)
        for layer in module.modules()
        if isinstance(layer, Module)
        for value in (*layer.parameters(), *layer.buffers())
    }
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel() and id(tensor) not in split:
                tensor.copy_(comm.broadcast(tensor.detach(), 0))


def _check_same_network(module: nn.Module, comm: Communicator, asked: str) -> None:
    """Raise on all ranks if layers, their arguments or their tensors differ. Collective.

    Values do not count, only what the network is made of.

    Args:
        module: this rank's network.
        comm: the ranks.
        asked: the call that needs it, for the error.
    """
    mine = _lines_of(module)
    digest = hashlib.blake2b("\n".join(mine).encode(), digest_size=7).digest()
    found = comm.all_gather_ints([int.from_bytes(digest)])
    odd = [rank for rank, said in enumerate(found) if said != found[0]]
    if not odd:
        return
    every = comm.all_gather_object(mine)
    first, other = every[0], every[odd[0]]
    pairs = zip_longest(first, other, fillvalue="nothing more")
    ours, theirs = next((a, b) for a, b in pairs if a != b)
    raise CollectiveMismatch.because(
        asked,
        f"rank {comm.ranks[0]}: {ours}\nrank {comm.ranks[odd[0]]}: {theirs}",
        f"networks that differ from rank {comm.ranks[0]}'s: "
        f"{name_ranks([comm.ranks[rank] for rank in odd])}",
        "build the same network on every rank; its values may differ",
    )


def _lines_of(module: nn.Module) -> list[str]:
    """Return one line for each layer and each tensor of a network."""
    lines: list[str] = []
    for path, layer in module.named_modules(remove_duplicate=False):
        kind = type(layer)  # arguments of the user's own layers may be anything, an address too
        arguments = layer.extra_repr() if kind.__module__.startswith("torch.nn.") else "..."
        lines.append(f"{path or 'the module'} is {kind.__name__}({arguments})")
        held = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
        for name, tensor in held:
            shape = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            lines.append(f"{path}.{name}".lstrip(".") + f" of shape {shape}")
    return lines
