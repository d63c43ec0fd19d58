"""Checks of what a user hands to `DataParallel`: on all ranks alike, before any collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn, optim
from torch.nn.parameter import is_lazy

from unisono.data_parallel.compression import check_compression
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.optimizer import DataParallelOptimizer
from unisono.data_parallel.partial_step import is_per_parameter
from unisono.errors import an, explain
from unisono.expect import expect, one_line


def check_options(
    module: object,
    bucket_mb: float | None,
    compression: object,
    blocking: object,
    **switches: object,
) -> None:
    """Check everything but the optimizers; `switches` are true or false."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            explain(
                f"DataParallel({one_line(module)})",
                f"{type(module).__name__}, expected a torch.nn.Module",
                None,
                "DataParallel(torch.nn.Linear(4, 2))",
            )
        )
    check_module(module, "DataParallel")
    expect("blocking_parameter_updates", blocking, bool)
    check_bucket_mb(bucket_mb)
    check_compression(compression)
    check_switches(**switches)


def check_switches(**switches: object) -> None:
    """Check arguments that are true or false."""
    for name, value in switches.items():
        expect(name, value, bool)


def check_module(module: nn.Module, wrapper: str) -> None:
    """Check that every parameter and buffer has values, and that nobody averages gradients yet."""
    for name, part in module.named_modules():
        if isinstance(part.__dict__.get("_engine"), GradientEngine):
            kind = type(part).__name__
            raise ValueError(
                explain(
                    f"{wrapper} of a module with {an(kind)} in it",
                    f"{name or 'the module itself'}, which averages its gradients already",
                    None,
                    f"{wrapper}(model.module)" if not name else f"use {name}.module in its place",
                )
            )
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(x):
            found, hint = "has no shape yet", "run one forward first: module(example_batch)"
        elif x.is_meta:
            found = "is on meta, without values"
            hint = "module.to_empty(device='cpu'), then load or initialise its values"
        else:
            continue
        raise ValueError(
            explain(f"{wrapper}({type(module).__name__})", f"{name} {found}", None, hint)
        )


def check_max_norm(max_norm: float | Tensor) -> None:
    """Check the norm to clip to; infinity clips nothing."""
    if not max_norm >= 0:
        raise ValueError(
            explain(f"clip_grad_norm({max_norm})", None, None, "clip_grad_norm(1.0), at least 0")
        )


def check_bucket_mb(bucket_mb: float | None) -> None:
    """Check the largest size of a bucket."""
    if bucket_mb is None:
        return
    expect("bucket_mb", bucket_mb, (int, float))
    if not bucket_mb > 0:
        raise ValueError(
            explain(
                f"bucket_mb={bucket_mb}",
                None,
                f"{bucket_mb} <= 0",
                "bucket_mb=25, any number above 0, or None for a size chosen by transport",
            )
        )


def checked_optimizers(optimizer: object, module: nn.Module) -> list[DataParallelOptimizer]:
    """Return the optimizers as a list, each with at least one parameter of the module."""
    given: Sequence[object]
    if optimizer is None:
        given = []
    elif isinstance(optimizer, list | tuple):
        given = optimizer
    else:
        given = [optimizer]
    own = {id(p) for p in module.parameters()}
    checked: list[DataParallelOptimizer] = []
    for one in given:
        if not isinstance(one, DataParallelOptimizer):
            raise TypeError(_not_one_of_ours(one))
        params = one.params_ref
        if not any(id(p) in own for p in params):
            raise ValueError(
                explain(
                    f"an optimizer with {len(params)} parameters",
                    f"none of them is one of the module's {len(own)} parameters",
                    None,
                    "build the optimizer from the parameters of this very module",
                )
            )
        checked.append(one)
    return checked


def _not_one_of_ours(found: object) -> str:
    kind = type(found).__name__
    if kind == "DASO":
        hint = "DataParallelMultiGPU(module, daso)"
    elif isinstance(found, optim.Optimizer):
        hint = f"DataParallelOptimizer(optimizer), with your {kind} inside"
    else:
        hint = "optimizer=DataParallelOptimizer(torch_optimizer), a list of such, or None"
    return explain(f"optimizer={kind}", "not a DataParallelOptimizer", None, hint)


def fallback_reason(optimizers: Sequence[DataParallelOptimizer], module: nn.Module) -> str | None:
    """Return why updates cannot be deferred; None if they can, or if nobody asked for it."""
    if not optimizers:
        return None
    if len(optimizers) > 1:
        return f"{len(optimizers)} optimizers share the module"
    optimizer = optimizers[0]
    if not is_per_parameter(optimizer.torch_optimizer):
        # The same answer on every rank: it depends on the class alone, never on what has arrived.
        kind = type(optimizer.torch_optimizer).__name__
        return f"{kind} is not known to treat each parameter on its own"
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    updated = {id(p) for p in optimizer.params_ref if p.requires_grad}
    if trainable != updated:
        both = len(trainable & updated)
        return (
            f"the optimizer holds {len(updated)} trainable parameters and the module "
            f"{len(trainable)}, {both} in common"
        )
    return None
