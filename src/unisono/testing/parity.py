"""Compare a parallel function or module with the same computation in one process.

Outputs and gradients of inputs and parameters must agree. Every rank runs the whole computation by
itself too, so keep the sizes of a test small. A `Layout` says how a whole tensor lies on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import PartitionError, an
from unisono.testing.report import name_of, raise_together
from unisono.topology import Partition


@dataclass(frozen=True)
class Layout:
    """A pair of functions between a whole tensor and the part each rank holds."""

    split: Callable[[Tensor], Tensor]
    """Own part of a whole tensor."""
    join: Callable[[Tensor], Tensor]
    """Whole tensor from the parts, on every rank. Collective."""
    split_like: Callable[[Tensor, Tensor], Tensor] | None = None
    """Own part of a whole tensor, in the sizes in which a second one is spread. Collective."""

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Own part of a whole tensor that is spread as `like` is."""
        return self.split(whole) if self.split_like is None else self.split_like(whole, like)


Spread = Partition | Layout | None
"""How a tensor lies on the ranks; None is replicated."""


def check_parity(
    parallel: Callable[..., Tensor | Sequence[Tensor]],
    serial: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Tensor | Sequence[Tensor] | Sequence[int],
    partition: Spread | list[Spread] = None,
    *,
    out_partition: Spread | list[Spread] | str = "same",
    comm: Communicator | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check that `parallel` on many ranks equals `serial` on one. Collective over `comm`.

    Args:
        parallel: called on each rank with its parts of the inputs.
        serial: called on each rank, without communication, with the whole inputs.
        inputs: whole tensors, the same on all ranks; or one shape, for a random tensor.
        partition: how inputs lie on the ranks: a `Partition`, a `Layout`, None for replicated; a
            list has one for each input.
        out_partition: the same for outputs; `"same"` takes that of the (first) input.
        comm: the ranks; default the world.
        dtype: of a random input.
        seed: of random inputs and of the direction in which gradients are taken.
        rtol: relative tolerance; default by dtype, as in `torch.testing.assert_close`.
        atol: absolute tolerance; given together with `rtol`.

    Raises:
        AssertionError: on all ranks alike: what differs, where, by how much.

    Example:
        >>> check_parity(nn.Tanh(), torch.tanh, [3, 4])
    """
    __tracebackhide__ = True
    comm = Communicator.of(comm)
    generator = torch.Generator().manual_seed(seed)
    whole = _whole_inputs(inputs, dtype, generator)
    layouts = [as_layout(p, comm) for p in _one_each(partition, len(whole))]
    problems: list[str] = []
    if rtol is not None and atol is None:
        atol = 0.0

    def compare(name: str, actual: Tensor, expected: Tensor) -> None:
        try:
            actual, expected = actual.detach(), expected.detach()
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            problems.append(f"{name}: {error}")

    own_inputs = [
        layout.split(x.detach()).clone().requires_grad_(_has_gradient(x))
        for layout, x in zip(layouts, whole, strict=True)
    ]
    before = [x.detach().clone() for x in own_inputs]
    outs = _several(parallel(*own_inputs))
    whole_inputs = [x.detach().clone().requires_grad_(_has_gradient(x)) for x in whole]
    expected = _several(serial(*whole_inputs))
    title = f"{name_of(parallel)} on {comm.size} ranks differs from {name_of(serial)} on one"
    if len(outs) != len(expected):
        count = f"{len(outs)} outputs, but {len(expected)} on one"
        raise_together(title, [count], comm=comm)
    if out_partition == "same":
        out_layouts = [layouts[0]] * len(outs)
    else:
        out_layouts = [as_layout(p, comm) for p in _one_each(out_partition, len(outs))]

    for i, (out, want) in enumerate(zip(outs, expected, strict=True)):
        compare(f"output {i}", out_layouts[i].join(out), want)
    for i, (x, kept) in enumerate(zip(own_inputs, before, strict=True)):
        compare(f"input {i} after the call (it was changed)", x, kept)
    raise_together(title, problems, comm=comm)

    toward = [_direction(e, generator) for e in expected]
    own_toward = [
        layout.part(g, out) for layout, g, out in zip(out_layouts, toward, outs, strict=True)
    ]
    with _gradients_kept(parallel), _gradients_kept(serial):
        _backward(outs, own_toward)
        _backward(expected, toward)
        for i, (layout, x, want) in enumerate(zip(layouts, own_inputs, whole_inputs, strict=True)):
            if want.requires_grad:
                actual, reference = (
                    t.grad if t.grad is not None else torch.zeros_like(t) for t in (x, want)
                )
                compare(f"gradient of input {i}", layout.join(actual), reference)
        grads = _own_grads(parallel)
        for name, want in _own_grads(serial).items():
            if name not in grads or want is None:
                continue
            if (grad := grads[name]) is None:
                problems.append(f"gradient of {name}: missing")
            elif grad.numel() or not want.numel():
                compare(f"gradient of {name}", grad, want)
        raise_together(title, problems, comm=comm)


def _own_grads(module: object) -> dict[str, Tensor | None]:
    """Gradients by name; a parameter without elements has an empty one."""
    if not isinstance(module, nn.Module):
        return {}
    return {
        name: p.grad if p.grad is not None or p.numel() else torch.zeros_like(p)
        for name, p in module.named_parameters()
    }


@contextmanager
def _gradients_kept(module: object) -> Iterator[None]:
    """Give parameters fresh gradients for a while and put the old ones back."""
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _backward(outs: Sequence[Tensor], toward: Sequence[Tensor]) -> None:
    pairs = [(out, g) for out, g in zip(outs, toward, strict=True) if out.requires_grad]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])


def _whole_inputs(
    inputs: Tensor | Sequence[Tensor] | Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    values = list(inputs)
    if values and all(isinstance(x, Tensor) for x in values):
        return [x for x in values if isinstance(x, Tensor)]
    sizes = [n for n in values if isinstance(n, int)]
    if len(sizes) != len(values):
        raise PartitionError.because(
            "check_parity(..., inputs)",
            f"a sequence of {sorted({type(x).__name__ for x in values})}",
            hint="give tensors, or one shape such as [2, 3, 8, 8]",
        )
    return [torch.randn(sizes, dtype=dtype, generator=generator)]


def _one_each(spreads: object, count: int) -> list[Spread]:
    """Spread one layout over `count` tensors, or check that a list has that many."""
    if isinstance(spreads, list):
        if len(spreads) != count:
            raise PartitionError.because(
                "check_parity(..., partition=[...])",
                f"{len(spreads)} layouts for {count} tensors",
                hint="one for each, or a single one for all",
            )
        return spreads
    if spreads is None or isinstance(spreads, (Partition, Layout)):
        return [spreads] * count
    raise PartitionError.because(
        "check_parity(..., partition)",
        an(type(spreads).__name__),
        hint="a Partition, a Layout, None (replicated), or a list of them",
    )


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _direction(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers in which to take a gradient; an output of integers has none."""
    if not _has_gradient(like):
        return torch.zeros_like(like)
    return torch.randn(like.shape, dtype=like.dtype, generator=generator).to(like.device)


def _several(out: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def blocks(partition: Partition, comm: Communicator) -> Layout:
    """Rank r holds block r of a partition; a rank outside it holds an empty tensor.

    Args:
        partition: the grid of ranks; blocks need not be balanced if they are outputs.
        comm: all ranks, those outside the partition too.
    """

    def split(whole: Tensor) -> Tensor:
        if not partition.active:
            return whole.new_zeros(0)
        return whole[partition.local_slices(whole.shape)].contiguous()

    def join(part: Tensor) -> Tensor:
        parts: list[Tensor] = comm.all_gather_object(part.detach().cpu())
        return _assembled(partition, parts, ()).to(part.device)

    def split_like(whole: Tensor, like: Tensor) -> Tensor:
        owner = join(torch.full(like.shape, comm.rank))
        return whole[owner == comm.rank].reshape(like.shape)

    return Layout(split=split, join=join, split_like=split_like)


def as_layout(spread: Partition | Layout | None, comm: Communicator) -> Layout:
    """Turn what a user may give into a layout; None is replicated."""
    if spread is None:
        return Layout(split=lambda whole: whole, join=lambda part: part)
    return blocks(spread, comm) if isinstance(spread, Partition) else spread


def _assembled(partition: Partition, parts: Sequence[Tensor], index: tuple[int, ...]) -> Tensor:
    """Join the blocks whose grid index begins with `index`."""
    if len(index) == partition.dim:
        return parts[partition.rank_at(index)]
    along = partition.shape[len(index)]
    pieces = [_assembled(partition, parts, (*index, i)) for i in range(along)]
    return torch.cat(pieces, dim=len(index))
