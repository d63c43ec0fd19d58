"""What a network must not carry when it is split: work that nobody would see, or see on a part.

A split network does what the classes of its layers say. Hooks, replaced forwards and computed
weights do more than that, so they are refused with their path instead of being lost.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from unisono.errors import PartitionError, an
from unisono.nn.module import Module

_CALL_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_STATE_HOOKS = {
    "_state_dict_pre_hooks": "state_dict pre-hook",
    "_state_dict_hooks": "state_dict hook",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}
_HARMLESS = frozenset({"extra_repr", "reset_parameters"})
_SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin)
INSTANCE_NORMS: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}
"""With the dims of an input of several samples."""


def refuse(path: str, module: nn.Module, reason: str, hint: str) -> NoReturn:
    """Refuse a module of a network, by its path."""
    where = f"distribute: {path or 'the module'} is {an(type(module).__name__)}"
    raise PartitionError.because(where, reason, None, hint)


def torch_base(module: nn.Module) -> type[nn.Module]:
    """Return the class of torch that a module is, or is derived from."""
    return next(kind for kind in type(module).__mro__ if _is_of_torch(kind))


def torch_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch whose work a module does; None if it does some work of its own.

    A subclass that only fills in arguments does the work of its base.
    """
    base = torch_base(module)
    ours = type(module).__mro__[: type(module).__mro__.index(base)]
    written = {name for kind in ours for name in vars(kind)}
    inner = {name for name in written if not name.startswith("__") or name == "__call__"}
    return None if (inner & set(dir(base))) - _HARMLESS else base


def check_copies(module: nn.Module) -> None:
    """Refuse what a copy of a network would lose."""
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                hint = "torch.nn.utils.parametrizations, behind the Flatten; or the plain layer"
                refuse(path, layer, f"its {name} is computed before each call", hint)
        for name, p in layer.named_parameters(recurse=False):
            if is_lazy(p):
                refuse(path, layer, f"its {name} has no shape yet", "call the network once, before")
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                hint = "register it on the parameters of the network that distribute returns"
                refuse(path, layer, f"its {name} has a hook, which a copy does not have", hint)


def check_carries_nothing(module: nn.Module, path: str) -> None:
    """Refuse work that is attached to a module of the split part and not said by its class."""
    if isinstance(module, Module):
        return
    if is_parametrized(module):
        hint = "torch.nn.utils.parametrize.remove_parametrizations before, or behind the Flatten"
        refuse(path, module, "its parameters are computed by parametrizations", hint)
    if "forward" in vars(module):
        hint = "distribute the plain network first; write a class with that forward"
        refuse(path, module, "its forward has been replaced on the object (torch.compile?)", hint)
    _check_hooks(module, path, _CALL_HOOKS | _STATE_HOOKS)


def check_takes_samples(module: nn.Module, path: str, dims: int) -> None:
    """Refuse a layer that takes a tensor of so many dims for a single sample, or not at all."""
    kind = torch_kind(module) or nn.Module
    wanted = 5 if kind is nn.Dropout3d and dims == 4 else INSTANCE_NORMS.get(kind, dims)
    if wanted != dims:
        reason = f"it takes samples of {wanted} dims, batch and channels too, and {dims} are cut"
        hint = f"{torch_base(module).__name__[:-2]}{dims - 2}d, or a partition of {wanted} dims"
        refuse(path, module, reason, hint)


def _check_hooks(module: nn.Module, path: str, hooks: dict[str, str]) -> None:
    for attribute, kind in hooks.items():
        if getattr(module, attribute, None):
            hint = "register it on the module that distribute returns, where it sees own blocks"
            why = f"it has {an(kind)}, and nobody knows whether that may be cut"
            refuse(path, module, why, hint)


def check_keeps_samples_apart(module: nn.Module, path: str, *, trusts: bool, dim: int) -> None:
    """Refuse layers of a head on own samples that look at other samples too.

    Args:
        module: of the head.
        path: of the module.
        trusts: whether forwards of their own, and what they call, may do what they like.
        dim: how many dims the input has, 0 if nobody knows.
    """
    _check_hooks(module, path, _CALL_HOOKS)
    if torch_kind(module) is nn.Sequential:
        for name, child in module._modules.items():
            if child is not None:
                where = f"{path}.{name}".lstrip(".")
                check_keeps_samples_apart(child, where, trusts=trusts, dim=dim)
                dim = 0
        return
    is_written = torch_kind(module) is None and not is_parametrized(module)
    if is_written or "forward" in vars(module):
        if trusts:
            return
        hint = 'custom="recurse" if its forward keeps samples apart, or head="replicate"'
        refuse(path, module, "it has a forward of its own", hint)
    reason = _mixing(module, dim)
    if reason is not None:
        refuse(path, module, f'{reason}; head="batch" gives a rank some', 'head="replicate"')


def _mixing(module: nn.Module, dim: int) -> str | None:
    """Return why a layer of torch needs all samples at once, or None."""
    m = cast("Any", module)
    if isinstance(module, _SOFTMAXES):
        at = m.dim
        return None if at is not None and (at >= 1 or at == -1) else f"dim {at} may be the samples"
    if isinstance(module, nn.Flatten):
        start = m.start_dim + dim if m.start_dim < 0 else m.start_dim
        return None if start >= 1 or m.start_dim == -1 else "it joins the samples"
    if isinstance(module, nn.Unflatten):
        known = isinstance(m.dim, int) and (m.dim >= 1 or m.dim == -1)
        return None if known else f"dim {m.dim} may be the samples"
    if isinstance(module, tuple(INSTANCE_NORMS)) and m.track_running_stats:
        return "its running statistics are those of all samples"
    for layer in module.modules():
        if getattr(layer, "batch_first", True) is False:
            return "its samples are in dim 1 (batch_first=False)"
    return None


def _is_of_torch(kind: type) -> bool:
    return issubclass(kind, nn.Module) and kind.__module__.startswith("torch.nn.modules.")
