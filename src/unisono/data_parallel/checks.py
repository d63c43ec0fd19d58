"""Checks of what a user hands to `DataParallel`: on all ranks alike, before any collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn, optim

from unisono.data_parallel.arguments import expect
from unisono.data_parallel.compression import check_compression
from unisono.data_parallel.optimizer import DataParallelOptimizer
from unisono.data_parallel.partial_step import needs_closure
from unisono.errors import explain


def check_options(
    module: object, bucket_mb: float | None, compression: object, blocking: object
) -> None:
    """Check everything but the optimizers."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            explain(
                f"DataParallel({module!r})",
                f"{type(module).__name__}, expected a torch.nn.Module",
                None,
                "DataParallel(torch.nn.Linear(4, 2))",
            )
        )
    expect("blocking_parameter_updates", blocking, bool)
    check_bucket_mb(bucket_mb)
    check_compression(compression)


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
    if needs_closure(optimizer.torch_optimizer):
        return f"{type(optimizer.torch_optimizer).__name__} evaluates the loss itself"
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    updated = {id(p) for p in optimizer.params_ref if p.requires_grad}
    if trainable != updated:
        both = len(trainable & updated)
        return (
            f"the optimizer holds {len(updated)} trainable parameters and the module "
            f"{len(trainable)}, {both} in common"
        )
    return None
