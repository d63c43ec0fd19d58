"""`distribute`: an ordinary network becomes a split one, with the same weights and names.

Layers that look at neighbours are replaced, elementwise ones are kept. At the first layer that
needs whole samples the tensor is gathered (or re-cut by batch) and the rest runs as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

import torch
from torch import nn

from unisono.errors import PartitionError
from unisono.nn.batch_norm import DistributedBatchNorm
from unisono.nn.chain import DistributedSequential, children_of
from unisono.nn.conv_feature import (
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
)
from unisono.nn.conv_transpose import (
    DistributedFeatureConvTranspose1d,
    DistributedFeatureConvTranspose2d,
    DistributedFeatureConvTranspose3d,
)
from unisono.nn.dropout import OwnDropout
from unisono.nn.global_pool import GlobalAvgPool
from unisono.nn.gradient_sums import sum_gradients
from unisono.nn.joining import Join
from unisono.nn.layer_norm import DistributedLayerNorm
from unisono.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from unisono.nn.upsampling import DistributedUpsample
from unisono.topology import Partition

__all__ = ["DistributedSequential", "distribute"]

Head = Literal["replicate", "batch"]
_CONVS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv1d: DistributedFeatureConv1d,
    nn.Conv2d: DistributedFeatureConv2d,
    nn.Conv3d: DistributedFeatureConv3d,
}
_TRANSPOSED: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.ConvTranspose1d: DistributedFeatureConvTranspose1d,
    nn.ConvTranspose2d: DistributedFeatureConvTranspose2d,
    nn.ConvTranspose3d: DistributedFeatureConvTranspose3d,
}
_MAX_POOLS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.MaxPool1d: DistributedMaxPool1d,
    nn.MaxPool2d: DistributedMaxPool2d,
    nn.MaxPool3d: DistributedMaxPool3d,
}
_AVG_POOLS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.AvgPool1d: DistributedAvgPool1d,
    nn.AvgPool2d: DistributedAvgPool2d,
    nn.AvgPool3d: DistributedAvgPool3d,
}
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.Hardshrink, nn.Softshrink, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
_FLATTENING = (nn.Flatten, nn.Linear)
_SPATIAL: frozenset[type[nn.Module]] = frozenset(
    {*_CONVS, *_TRANSPOSED, *_MAX_POOLS, *_AVG_POOLS, *_ADAPTIVE, *_NORMS, nn.Upsample}
) - {nn.BatchNorm1d}


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
    seen: dict[int, nn.Module] = field(default_factory=dict)
    """Modules and parameters that were met already: what was shared stays shared."""

    @property
    def stage(self) -> tuple[bool, Partition]:
        """What changes when samples are gathered, wholly or in space."""
        return self.is_split, self.partition

    @property
    def place(self) -> int:
        """A number that ranks share where they hold the same points."""
        at = self.everyone
        if not at.active or at.index is None or (not self.is_split and self.head == "replicate"):
            return 0
        if self.is_split and self.partition != at:
            return at.index[0]
        return at.rank or 0

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

    Args:
        module: a tree of torch layers; it is not changed.
        partition: `[batch, 1, space...]`: how the input `(N, C, ...)` is cut.
        head: what happens at the first Flatten or Linear: "replicate" gathers the tensor on every
            rank, and every rank computes the rest; "batch" re-cuts it by samples.
        custom: "recurse" replaces the children of modules with a forward of their own and trusts
            that forward; "refuse" raises.

    Raises:
        PartitionError: a layer that cannot be split, with its path and the reason.
    """
    if head not in ("replicate", "batch"):
        raise PartitionError.because(
            f"distribute(head={head!r})", 'choices: "replicate", "batch"', None, 'head="replicate"'
        )
    if custom not in ("refuse", "recurse"):
        raise PartitionError.because(
            f"distribute(custom={custom!r})", 'choices: "refuse", "recurse"', None, '"refuse"'
        )
    if partition.dim < 3 or partition.shape[1] != 1:
        raise PartitionError.because(
            f"distribute(module, {partition!r})",
            f"{partition.dim} dims",
            "needs batch, 1 for channels, and one size for each spatial dim",
            "Partition([1, 1, 2, 2])",
        )
    source = copy.deepcopy(module)
    _share_weights(source, partition)
    with torch.random.fork_rng(devices=[]):  # layers draw weights that are then replaced
        return _converted(source, "", _Walk(partition, partition, head, custom), in_chain=True)


def _converted(module: nn.Module, path: str, walk: _Walk, *, in_chain: bool = False) -> nn.Module:
    """Return what stands for `module`, remembering what was met before.

    `in_chain`: its result goes to the next module of a chain, and nowhere else.
    """
    if id(module) in walk.seen:
        return walk.seen[id(module)]
    if walk.is_split:
        made = _replacement(module, path, walk)
    else:
        made = _fit_for_head(copy.deepcopy(module), walk, {})
        if walk.head == "batch":
            sum_gradients(made, walk.everyone)
    if isinstance(made, GlobalAvgPool) and not in_chain:
        _refuse_gathering(f"{path} is a {type(module).__name__}")
    made.training = module.training
    walk.seen[id(module)] = made
    return made


def _replacement(module: nn.Module, path: str, walk: _Walk) -> nn.Module:
    kind, P = type(module), walk.partition
    if isinstance(module, nn.Sequential):
        return _chain(module, path, walk)
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList(
            _converted(child, f"{path}.{name}".lstrip("."), walk)
            for name, child in children_of(module)
        )
    if isinstance(module, nn.ModuleDict):
        return nn.ModuleDict(
            {
                name: _converted(c, f"{path}.{name}".lstrip("."), walk)
                for name, c in children_of(module)
            }
        )
    if isinstance(module, _ELEMENTWISE):
        return copy.deepcopy(module)
    if isinstance(module, nn.PReLU):
        made = copy.deepcopy(module)
        sum_gradients(made, P)
        return made
    if isinstance(module, nn.Softmax | nn.LogSoftmax):
        return _kept_softmax(module, path, P)
    if kind is nn.Dropout:
        return OwnDropout(cast("nn.Dropout", module).p, walk.everyone, walk.place)
    made = _layer(module, P)
    return _custom(module, path, walk) if made is None else _like(module, made)


def _like(module: nn.Module, made: nn.Module) -> nn.Module:
    """Return the split twin with the values and the frozen parameters of a layer."""
    made.load_state_dict(module.state_dict())
    for (_, new), (_, old) in zip(made.named_parameters(), module.named_parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    made.training = module.training
    return made


def _layer(module: nn.Module, P: Partition) -> nn.Module | None:
    """Return the split twin of a layer, or None if there is none."""
    m = cast("Any", module)
    kind = type(module)
    parameters = next(module.parameters(), None)
    like: dict[str, Any] = {}
    if parameters is not None:
        like = {"device": parameters.device, "dtype": parameters.dtype}
    if kind in _CONVS:
        return _CONVS[kind](
            P, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding, m.padding_mode,
            m.dilation, m.groups, m.bias is not None, **like,
        )  # fmt: skip
    if kind in _TRANSPOSED:
        return _TRANSPOSED[kind](
            P, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding,
            m.output_padding, m.groups, m.bias is not None, m.dilation, **like,
        )  # fmt: skip
    if kind in _MAX_POOLS:
        return _MAX_POOLS[kind](
            P, m.kernel_size, m.stride, m.padding, m.dilation, m.return_indices, m.ceil_mode
        )
    if kind in _AVG_POOLS:
        more = {} if kind is nn.AvgPool1d else {"divisor_override": m.divisor_override}
        return _AVG_POOLS[kind](
            P, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, **more
        )
    if kind in _ADAPTIVE and _is_one(m.output_size):
        return GlobalAvgPool(P)
    if kind in _NORMS:
        return DistributedBatchNorm(
            P, m.num_features, m.eps, m.momentum, m.affine, m.track_running_stats, **like
        )
    if kind is nn.LayerNorm:
        return DistributedLayerNorm(
            P, m.normalized_shape, m.eps, m.elementwise_affine, m.bias is not None, **like
        )
    if isinstance(module, nn.Upsample):
        return DistributedUpsample(P, m.size, m.scale_factor, m.mode, m.align_corners)
    return None


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
        layers[name] = _converted(child, where, walk, in_chain=True)
        if walk.is_split and isinstance(layers[name], GlobalAvgPool):
            walk.leave_space()
    made = DistributedSequential(walk.everyone, layers)
    made._join_before, made._join = join_before, join
    return made


def _custom(module: nn.Module, path: str, walk: _Walk) -> nn.Module:
    """Replace the children of a module with a forward of its own, if that is asked for."""
    has_children = any(True for _ in module.children())
    if walk.custom == "refuse" or not has_children:
        reason = "it has a forward of its own" if has_children else "no split twin of it is known"
        hint = (
            'custom="recurse" if its forward only calls its children and elementwise functions'
            if has_children
            else "write a layer on unisono.nn.Module, or move it behind the Flatten"
        )
        raise PartitionError.because(
            f"distribute: {path or 'the module'} is a {type(module).__name__}", reason, None, hint
        )
    made = copy.copy(module)
    made._modules = {}
    made._parameters = dict(copy.deepcopy(module._parameters))
    made._buffers = dict(copy.deepcopy(module._buffers))
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
        sum_gradients(made, walk.partition, deep=False)
    return made


def _check_behind(child: nn.Module, where: str, gathered: str) -> None:
    """Refuse layers that look at space, where `forward` may call them on either kind of tensor."""
    if any(type(layer) in _SPATIAL for layer in child.modules()):
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
            f"distribute: {path or 'the module'} is a {type(module).__name__} over dim {dim}",
            f"{P!r} splits that dim" if at is not None else "no dim is given",
            None,
            "softmax over an unsplit dim, such as dim=1",
        )
    return copy.deepcopy(module)


def _fit_for_head(module: nn.Module, walk: _Walk, done: dict[int, nn.Module]) -> nn.Module:
    """Return a layer of the head with masks, and statistics, that suit what each rank holds."""
    if id(module) in done:
        return done[id(module)]
    made = module
    if type(module) is nn.Dropout:
        made = OwnDropout(module.p, walk.everyone, walk.place)
        made.training = module.training
    elif walk.head == "batch" and type(module) in _NORMS:
        space = 0 if isinstance(module, nn.BatchNorm1d) else 1 + isinstance(module, nn.BatchNorm2d)
        rows = walk.everyone.reshape((walk.everyone.size, 1, *(1,) * space))
        made = _like(module, cast("nn.Module", _layer(module, rows)))
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
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                tensor.copy_(comm.broadcast(tensor.detach(), 0))


def _is_one(size: object) -> bool:
    return size == 1 or (isinstance(size, tuple | list) and all(n == 1 for n in size))
