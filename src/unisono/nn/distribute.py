"""`distribute`: an ordinary network becomes a split one, with the same weights and names.

Layers that look at neighbours are replaced, elementwise ones are kept. At the first layer that
needs whole samples the tensor is gathered (or re-cut by batch) and the rest runs as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from unisono.errors import PartitionError, UnisonoError
from unisono.nn.agreement import INPUTS, NO_GRAD, PARAMETERS, ask, chained
from unisono.nn.batch_norm import DistributedBatchNorm
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
from unisono.nn.joining import Join
from unisono.nn.layer_norm import DistributedLayerNorm
from unisono.nn.parameters import summed_gradients
from unisono.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from unisono.nn.structure import Structure
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


@dataclass
class _Walk:
    """Where the walk over the network stands."""

    partition: Partition
    head: Head
    custom: str
    is_split: bool = True
    """False once the tensor has been gathered."""
    seen: dict[int, nn.Module] = field(default_factory=dict)
    """Modules and parameters that were met already: what was shared stays shared."""


class DistributedSequential(nn.Sequential):
    """A chain of layers that agrees once for all of them whether an input has changed."""

    def __init__(self, partition: Partition, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._partition = partition
        self._structure: Structure | None = None
        self._join_before: str | None = None
        self._join: tuple[Join, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        """Run the chain on this rank's block."""
        comm = self._partition.comm if self._partition.active else None
        is_tensor = isinstance(input, Tensor)
        found = Structure.of(input) if is_tensor else None
        question = ask(
            comm if comm is not None and comm.size > 1 else None,
            changed=found != self._structure,
            gradients=self._wanted_gradients(input) if is_tensor else NO_GRAD,
            problem=None if is_tensor else _no_tensor(input),
        )
        known, self._structure = self._structure, None  # and so it stays if the call fails
        if known is None:
            question.answer()  # layers that are not set up do not ask
        x, is_head = input, False
        if found is None and known is not None:  # take part once more before all raise
            x = known.zeros()
        with chained(question):
            for name, layer in _children(self):
                if name == self._join_before:
                    x, is_head = self._join[0](x), True
                sums = is_head and self._join[0].cuts_batch
                x = self._in_head(layer, x) if sums else layer(x)
        self._structure = found
        return x

    def _in_head(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Run a layer on this rank's samples; gradients of its parameters are summed over ranks."""
        held = dict(layer.named_parameters())
        if not held:
            return layer(x)
        summed = summed_gradients(self._partition.comm, *held.values())
        return torch.func.functional_call(layer, dict(zip(held, summed, strict=True)), (x,))

    def _wanted_gradients(self, x: Tensor) -> int:
        if not torch.is_grad_enabled():
            return NO_GRAD
        if x.requires_grad:
            return INPUTS
        return PARAMETERS if any(p.requires_grad for p in self.parameters()) else NO_GRAD


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
        return _converted(source, "", _Walk(partition, head, custom))


def _converted(module: nn.Module, path: str, walk: _Walk) -> nn.Module:
    """Return what stands for `module`, remembering what was met before."""
    if id(module) in walk.seen:
        return walk.seen[id(module)]
    made = _replacement(module, path, walk) if walk.is_split else copy.deepcopy(module)
    if not walk.is_split:
        _own_dropouts(made, walk.partition)
    made.train(module.training)
    walk.seen[id(module)] = made
    return made


def _replacement(module: nn.Module, path: str, walk: _Walk) -> nn.Module:
    kind, P = type(module), walk.partition
    if isinstance(module, nn.Sequential):
        return _chain(module, path, walk)
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList(
            _converted(child, f"{path}.{name}".lstrip("."), walk)
            for name, child in _children(module)
        )
    if isinstance(module, nn.ModuleDict):
        return nn.ModuleDict(
            {
                name: _converted(c, f"{path}.{name}".lstrip("."), walk)
                for name, c in _children(module)
            }
        )
    if isinstance(module, _ELEMENTWISE):
        return copy.deepcopy(module)
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        return copy.deepcopy(module)
    if isinstance(module, nn.Softmax | nn.LogSoftmax):
        return _kept_softmax(module, path, P)
    if kind is nn.Dropout:
        return OwnDropout(cast("nn.Dropout", module).p, P, apart=True)
    made = _layer(module, P)
    if made is None:
        return _custom(module, path, walk)
    made.load_state_dict(module.state_dict())
    for (_, new), (_, old) in zip(made.named_parameters(), module.named_parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
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
    for name, child in _children(module):
        where = f"{path}.{name}".lstrip(".")
        if walk.is_split and isinstance(child, _FLATTENING):
            walk.is_split = False
            join_before = name
        layers[name] = _converted(child, where, walk)
        if isinstance(layers[name], GlobalAvgPool):
            walk.is_split = walk.is_split and walk.partition.shape[0] > 1
    made = DistributedSequential(walk.partition, layers)
    if join_before is not None:
        made._join_before = join_before
        made._join = (Join(walk.partition, cuts_batch=walk.head == "batch"),)
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
    for name, child in _children(module):
        made.add_module(name, _converted(child, f"{path}.{name}".lstrip("."), walk))
    return made


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


def _own_dropouts(module: nn.Module, P: Partition) -> None:
    """Give dropouts of the replicated part one generator state on all ranks."""
    for child in list(module.modules()):
        for name, part in child.named_children():
            if type(part) is nn.Dropout:
                setattr(child, name, OwnDropout(part.p, P, apart=False))


def _share_weights(module: nn.Module, P: Partition) -> None:
    """Give every rank the values of rank 0 of the partition's root."""
    comm = P.root
    if comm.size == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                tensor.copy_(comm.broadcast(tensor.detach(), 0))


def _no_tensor(found: object) -> UnisonoError:
    return PartitionError.because(
        "forward of a split network", f"a {type(found).__name__}", None, "call it with tensors"
    )


def _is_one(size: object) -> bool:
    return size == 1 or (isinstance(size, tuple | list) and all(n == 1 for n in size))


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children with their names; one that stands in two places, twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]
