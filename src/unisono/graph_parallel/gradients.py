"""`GraphParallel`, `sync_gradients`: parameter gradients over the dp x gp matrix of ranks.

Parameters of the partitioned part of a model hold one term on each rank of a row: sum over gp.
Parameters used after the last reduce or gather hold the whole: mean over gp. Both: mean over dp.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.comm import Communicator
from unisono.comm.claims import check_unclaimed, claim, is_claimed
from unisono.comm.health import check as checking
from unisono.errors import CollectiveMismatch, LayoutError, PartitionError
from unisono.expect import expect, expect_float
from unisono.graph_parallel.groups import GraphGroups, alone, current_groups, graph_groups
from unisono.graph_parallel.regions import difference_over_ranks
from unisono.operators.gradients import (
    BackwardWatch,
    EarlierGradients,
    GradientPolicy,
    reduce_gradients,
)


class GraphParallel(nn.Module):
    """A model on parts of graphs whose replicas stay equal: gradients are whole after `backward()`.

    The constructor gives all ranks the parameters and buffers of the first one. Each backward ends
    with what `sync_gradients` does, which then can no longer be forgotten. The names in
    `state_dict()` are those of the model. Collective over the matrix of ranks: the constructor, and
    every backward outside of `no_sync()`.

    Args:
        module: the model; `forward` is passed on to it.
        replicated: as in `sync_gradients`.
        groups: the matrix; default the current one.
        bucket_mb: as in `sync_gradients`.

    >>> net = GraphParallel(nn.Linear(2, 1))  # a world of one rank
    >>> net(torch.ones(3, 2)).sum().backward()
    >>> net.module.weight.grad.tolist()
    [[3.0, 3.0]]
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        replicated: nn.Module | Iterable[Tensor] = (),
        groups: GraphGroups | None = None,
        bucket_mb: float = 25.0,
    ) -> None:
        super().__init__()
        expect("module", module, nn.Module)
        expect_float("bucket_mb", bucket_mb, 0, error=PartitionError)
        self.module = module
        self._replicated, self._bucket_mb = _listed(replicated), bucket_mb
        self._groups = _matrix(groups)
        self._watched = WeakIdKeyDictionary()
        self._is_local = False
        self._holds_terms = False
        """Whether `.grad` holds terms of backwards in `no_sync`, not yet summed."""
        self._backward = BackwardWatch()
        self._earlier: EarlierGradients | None = None
        """Gradients of earlier backwards, while the terms of this one are summed."""
        check_unclaimed(module.parameters(), self, self._ranks)
        self._share()
        self._watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        if not self._is_running():  # else a checkpoint repeats its forward
            self._watch()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients as they are in backwards inside; the next one outside sums them all."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of a model, wrapped or not."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    @torch.no_grad()
    def _share(self) -> None:
        """Give all ranks the values of the first one."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        kinds = [(name, tuple(t.shape), str(t.dtype)) for name, t in named]
        for comm in (self._groups.gp, self._groups.dp):
            if comm.size == 1:
                continue
            if not comm.all_equal(kinds):
                raise CollectiveMismatch.because(
                    f"GraphParallel over {comm.size} ranks",
                    "names, shapes or dtypes of parameters and buffers differ",
                    None,
                    "build the same model on all ranks",
                )
            for _, tensor in named:
                tensor.copy_(comm.broadcast(tensor.detach(), 0))

    @property
    def _ranks(self) -> frozenset[int]:
        return GradientPolicy(mean_over=(self._groups.gp, self._groups.dp)).ranks

    def _watch(self) -> None:
        """Look at every trained parameter: new ones, and those of a copy, too."""
        new = [p for p in self._trained() if p not in self._watched]
        if not new:
            return
        claim(new, self, self._ranks)
        itself = weakref.ref(self)

        def begin(grad: Tensor) -> None:
            if (wrapper := itself()) is not None:
                wrapper._begin(grad)

        for p in new:
            self._watched[p] = None
            weakref.finalize(self, p.register_hook(begin).remove).atexit = False

    def _is_running(self) -> bool:
        """Whether a backward goes on. What one that raised has left is no gradient, and is undone.

        Not where gradients were cleared since: then those before it are to be forgotten, too.
        """
        if self._backward.is_open and not self._backward.is_running:
            if self._earlier is not None and _any_gradient(self._trained()):
                self._earlier.put_back()
            self._backward.close()
            self._earlier = None
        return self._backward.is_open

    def _begin(self, _: Tensor) -> None:
        """Get ready before the first gradient of a backward is added to `.grad`."""
        if self._is_running():
            return
        if self._is_local and not self._holds_terms:
            if _any_gradient(self._trained()):
                raise LayoutError.because(
                    "backward() in GraphParallel.no_sync()",
                    "gradients that are summed over ranks already would be summed again",
                    None,
                    "zero_grad() first, or no_sync() around all backwards of a step but the last",
                )
            self._holds_terms = True
        elif not self._holds_terms:
            self._earlier = EarlierGradients(self._trained())
        self._backward.begin(self._end)

    def _end(self) -> None:
        self._backward.close()
        if self._is_local:
            return
        _sync(_listed(self.module), self._replicated, self._groups, self._bucket_mb)
        self._holds_terms = False
        if self._earlier is not None:
            self._earlier.add()
            self._earlier = None

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def __getstate__(self) -> dict[str, Any]:
        """A copy is in no backward."""
        return self.__dict__ | {"_backward": BackwardWatch(), "_earlier": None, "_watched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy looks after its own parameters."""
        super().__setstate__(state)
        self._watched = WeakIdKeyDictionary()
        self._watch()


def sync_gradients(
    parameters: nn.Module | Iterable[Tensor],
    *,
    replicated: nn.Module | Iterable[Tensor] = (),
    groups: GraphGroups | None = None,
    bucket_mb: float = 25.0,
) -> None:
    """Replace each `.grad` by that of the whole batch. Collective over the matrix of ranks.

    A rank without a gradient counts as zero; a parameter without one anywhere keeps None.

    Args:
        parameters: all parameters of the model (or the model), in the same order on every rank.
        replicated: those of them that are used only after the last `reduce(grad="identity")` or
            `gather(grad="slice")`. Check mode compares them over the row.
        groups: the matrix; default the current one.
        bucket_mb: gradients travel joined in buckets of this size.
    """
    expect_float("bucket_mb", bucket_mb, 0, error=PartitionError)
    listed = _listed(parameters)
    if any(is_claimed(p, GraphParallel) for p in listed):
        raise LayoutError.because(
            "sync_gradients of a model in GraphParallel",
            "its gradients are summed over ranks at the end of every backward",
            None,
            "leave sync_gradients out; net.no_sync() for backwards that only accumulate",
        )
    _sync(listed, _listed(replicated), _matrix(groups), bucket_mb)


def _sync(
    parameters: list[Tensor], replicated: list[Tensor], groups: GraphGroups, bucket_mb: float
) -> None:
    whole = {id(p) for p in replicated}
    strangers = whole - {id(p) for p in parameters}
    if strangers:
        raise LayoutError.because(
            "sync_gradients(parameters, replicated=...)",
            f"{len(strangers)} of the replicated ones are not among the parameters",
            "they would keep the gradients of this rank alone",
            "sync_gradients(model, replicated=model.head)",
        )
    if checking.active and groups.gp.size > 1:
        trained = [p for p in parameters if id(p) in whole and p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        _compare(grads, groups.gp)
    of_terms = GradientPolicy(sum_over=(groups.gp,), mean_over=(groups.dp,))
    of_whole = GradientPolicy(mean_over=(groups.gp, groups.dp))
    policies = [(p, of_whole if id(p) in whole else of_terms) for p in parameters]
    reduce_gradients(policies, bucket_mb)


def _any_gradient(parameters: Iterable[Tensor]) -> bool:
    """Whether a gradient is not zero. The host waits for the device, once for all of them."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return bool(grads) and bool(torch.stack([g.any() for g in grads]).any())


def _matrix(groups: GraphGroups | None) -> GraphGroups:
    matrix = current_groups() if groups is None else groups
    if matrix is not None:
        return matrix
    return graph_groups(1, comm=alone("sync_gradients", "groups=graph_groups(2)"))


def _listed(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    tensors: Iterable[object]
    if isinstance(parameters, nn.Module):
        tensors = parameters.parameters()
    else:  # a tensor by itself would be taken apart into its rows
        several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
        tensors = parameters if several else (parameters,)
    listed: dict[int, Any] = {}
    for p in tensors:
        expect("a parameter", p, Tensor, "sync_gradients(model), or model.parameters()")
        listed[id(p)] = p
    return list(listed.values())


def _compare(grads: list[Tensor], comm: Communicator) -> None:
    """Raise on all ranks unless gradients of replicated parameters are equal over the row."""
    for number, grad in enumerate(grads):
        found = difference_over_ranks(grad, comm)
        if found is not None:
            raise LayoutError.because(
                "sync_gradients(replicated=...)",
                f"gradient {number} of them, shape {list(grad.shape)}: {found}",
                None,
                "leave it out of replicated, or wrap its use in the partitioned part in copy(w)",
            )
