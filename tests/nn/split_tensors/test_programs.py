"""Random programs of torch functions: on blocks they do what they do in one process, or refuse.

A program is a list of steps on a few variables: arithmetic, views, changes in place (also of views
of other variables), joins, reductions over several dims, windows, norms, products. It runs whole
first; steps that torch itself refuses there are left out. Then it runs on blocks, with one or two
dims cut. All variables and the gradient of a sum of them must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono import Partition
from unisono.errors import UnisonoError
from unisono.nn import Split

Numbers = Sequence[int]
"""Four numbers that decide the arguments of a step."""
Step = tuple[str, int, int, Numbers]
"""Name, variable, another variable, numbers."""
LARGEST, MOST_POINTS = 1e6, 4000
REFUSED = (
    "in-place change",
    "custom Function",
    "more than one element of the written-to tensor",
    "modified by an inplace operation",
)
"""Changed in place: a view that had to be moved, an expanded tensor, what a backward needs."""


def param(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.rand(shape, dtype=torch.float64, generator=generator) - 0.4


def dim_of(x: Tensor, n: int) -> int:
    return n % (2 * x.ndim) - x.ndim


def some_dims(x: Tensor, n: Numbers) -> list[int]:
    dims = [d for d in range(x.ndim) if n[0] >> d & 1]
    return dims or [n[1] % x.ndim]


def part_of(x: Tensor, dim: int, n: Numbers) -> slice:
    size = x.shape[dim]
    start = n[1] % size
    return slice(start - size if n[3] % 3 == 0 else start, start + 1 + n[2] % size, 1 + n[3] % 2)


def index_of(x: Tensor, n: Numbers) -> tuple:
    dim = n[0] % x.ndim
    entry = (n[1] % x.shape[dim] - x.shape[dim] * (n[3] % 2)) if n[2] % 3 == 0 else None
    entries = [slice(None)] * dim + [part_of(x, dim, n) if entry is None else entry]
    if n[3] % 5 == 0:
        entries.append(None)
    if n[3] % 7 == 0:
        entries = [..., *entries, *[slice(None)] * (x.ndim - dim - 1)]
    return tuple(entries)


def factors(size: int, n: int) -> tuple[int, int]:
    options = [d for d in range(1, size + 1) if size % d == 0]
    first = options[n % len(options)]
    return first, size // first


def reshaped(x: Tensor, n: Numbers) -> Tensor:
    dim = n[0] % x.ndim
    a, b = factors(x.shape[dim], n[1])
    shape = [*x.shape[:dim], a, b, *x.shape[dim + 1 :]]
    at = n[2] % (len(shape) - 1)
    shape[at : at + 2] = [shape[at] * shape[at + 1]]
    if n[3] % 2:
        shape[n[3] % len(shape)] = -1
    return x.reshape(shape) if n[3] % 3 else x.view(shape)


def spatial(x: Tensor) -> Tensor:
    """Return a view with four dims."""
    while x.ndim < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, x.ndim - 4) if x.ndim > 4 else x


def conv(x: Tensor, _: Tensor, n: Numbers) -> Tensor:
    x = spatial(x)
    weight = param(1 + n[0] % 3, x.shape[1], 1 + n[1] % 3, 1 + n[2] % 3)
    return F.conv2d(x, weight, None, 1 + n[3] % 2, (n[1] % 3, 1))


def transposed(x: Tensor, _: Tensor, n: Numbers) -> Tensor:
    x = spatial(x)
    weight = param(x.shape[1], 2, 1 + n[1] % 3, 1 + n[2] % 3)
    return F.conv_transpose2d(x, weight, param(2), 1 + n[3] % 2, (n[1] % 2, 0))


def layer_norm(x: Tensor, _: Tensor, n: Numbers) -> Tensor:
    shape = x.shape[n[0] % x.ndim :]
    return F.layer_norm(x, shape, param(*shape) if n[1] % 2 else None)


def attend(x: Tensor, _: Tensor, n: Numbers) -> Tensor:
    tokens = spatial(x).flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens * 2, tokens, is_causal=bool(n[0] % 2))


def set_part(x: Tensor, y: Tensor, n: Numbers) -> Tensor:
    x[index_of(x, n)] = 0.5 if n[0] % 2 else y.mean()
    return x


def add_to_part(x: Tensor, _: Tensor, n: Numbers) -> Tensor:
    x[index_of(x, n)] += 1.5
    return x


def joined(x: Tensor, y: Tensor, n: Numbers) -> Tensor:
    dim = dim_of(x, n[0])
    return torch.cat([x, x.mul(2) if x.shape != y.shape and x.ndim != y.ndim else y], dim)


def branch(x: Tensor, _: Tensor, n: Numbers) -> Tensor:
    return x * 2 if x.detach().sum().item() > n[0] else x + 1


STEPS: dict[str, Callable[[Tensor, Tensor, Numbers], Tensor]] = {
    "add": lambda x, y, n: x + y,
    "mul": lambda x, y, n: x * y.tanh(),
    "sub scalar": lambda x, y, n: n[0] - x,
    "where": lambda x, y, n: torch.where(x > 0, x, y),
    "maximum": lambda x, y, n: torch.maximum(x, y),
    "gelu": lambda x, y, n: F.gelu(x),
    "held": lambda x, y, n: x * param(*x.shape),
    "held last": lambda x, y, n: x + param(x.shape[-1]),
    "clone": lambda x, y, n: x.clone(),
    "contiguous": lambda x, y, n: x.contiguous(),
    "detach": lambda x, y, n: x.detach() + x,
    "item": branch,
    # views
    "transpose": lambda x, y, n: x.transpose(dim_of(x, n[0]), dim_of(x, n[1])),
    "permute": lambda x, y, n: x.permute([(d + n[0]) % x.ndim for d in range(x.ndim)]),
    "movedim": lambda x, y, n: x.movedim(dim_of(x, n[0]), dim_of(x, n[1])),
    "unsqueeze": lambda x, y, n: x.unsqueeze(n[0] % (x.ndim + 1)),
    "squeeze": lambda x, y, n: x.squeeze(),
    "flatten": lambda x, y, n: x.flatten(*sorted((n[0] % x.ndim, n[1] % x.ndim))),
    "unflatten": lambda x, y, n: x.unflatten(n[0] % x.ndim, factors(x.shape[n[0] % x.ndim], n[1])),
    "reshape": lambda x, y, n: reshaped(x, n),
    "view as": lambda x, y, n: y.reshape(x.shape) if x.numel() == y.numel() else y.view_as(y),
    "index": lambda x, y, n: x[index_of(x, n)],
    "narrow": lambda x, y, n: x.narrow(n[0] % x.ndim, 0, 1 + n[1] % x.shape[n[0] % x.ndim]),
    "select": lambda x, y, n: x.select(n[0] % x.ndim, n[1] % x.shape[n[0] % x.ndim]),
    "chunk": lambda x, y, n: x.chunk(1 + n[0] % 3, dim_of(x, n[1]))[-1],
    "split": lambda x, y, n: x.split(1 + n[0] % 3, dim_of(x, n[1]))[0],
    "unbind": lambda x, y, n: x.unbind(dim_of(x, n[0]))[-1],
    "expand": lambda x, y, n: x.unsqueeze(0).expand(2, *[-1] * x.ndim),
    # in place
    "add_": lambda x, y, n: x.add_(y),
    "mul_": lambda x, y, n: x.mul_(0.5),
    "relu_": lambda x, y, n: x.relu_(),
    "clamp_": lambda x, y, n: x.clamp_(-1, 2),
    "iadd": lambda x, y, n: x.__iadd__(n[0] % 3),
    "copy_": lambda x, y, n: x.copy_(y.tanh()),
    "masked_fill_": lambda x, y, n: x.masked_fill_(param(*x.shape) > 0.2, 0.25),
    "zero_": lambda x, y, n: x.zero_(),
    "set": set_part,
    "add to part": add_to_part,
    # joins
    "cat": joined,
    "cat three": lambda x, y, n: torch.cat([param(*x.shape), x, x * y.mean()], n[0] % x.ndim),
    "stack": lambda x, y, n: torch.stack([x, x + 1, y.sum() + x], n[0] % (x.ndim + 1)),
    "repeat": lambda x, y, n: x.repeat([2 if d == n[0] % x.ndim else 1 for d in range(x.ndim)]),
    # reductions
    "sum": lambda x, y, n: x.sum(some_dims(x, n), keepdim=bool(n[2] % 2)),
    "mean": lambda x, y, n: x.mean(some_dims(x, n), keepdim=bool(n[2] % 2)),
    "var": lambda x, y, n: x.var(some_dims(x, n), unbiased=False, keepdim=bool(n[2] % 2)),
    "amax": lambda x, y, n: x.amax(some_dims(x, n), keepdim=bool(n[2] % 2)),
    "centred": lambda x, y, n: x - x.mean(some_dims(x, n), keepdim=True),
    "logsumexp": lambda x, y, n: x.logsumexp(some_dims(x, n)),
    "max": lambda x, y, n: x.max(dim_of(x, n[0])).values,
    "norm": lambda x, y, n: x.norm(dim=some_dims(x, n), keepdim=True) + x,
    "softmax": lambda x, y, n: x.softmax(dim_of(x, n[0])),
    "log_softmax": lambda x, y, n: F.log_softmax(x, dim=dim_of(x, n[0])),
    "cumsum": lambda x, y, n: x.cumsum(dim_of(x, n[0])),
    "sort": lambda x, y, n: x.sort(dim_of(x, n[0])).values,
    # windows
    "conv": conv,
    "transposed": transposed,
    "max_pool": lambda x, y, n: F.max_pool2d(spatial(x), 2, 1 + n[0] % 2, n[1] % 2),
    "avg_pool": lambda x, y, n: F.avg_pool2d(spatial(x), (1 + n[0] % 2, 2), ceil_mode=n[1] % 2 > 0),
    "pad": lambda x, y, n: F.pad(x, [n[0] % 3, n[1] % 3 - 1, n[2] % 2, 1][: 2 * min(2, x.ndim)]),
    "circular": lambda x, y, n: F.pad(spatial(x), (1, 0, n[0] % 2, 1), mode="circular"),
    "interpolate": lambda x, y, n: F.interpolate(
        spatial(x), scale_factor=1.5 if n[0] % 2 else 2, mode="bilinear"
    ),
    "nearest": lambda x, y, n: F.interpolate(spatial(x), size=(1 + n[0] % 7, 1 + n[1] % 7)),
    "adaptive": lambda x, y, n: F.adaptive_avg_pool2d(spatial(x), 1 + n[0] % 3),
    "roll": lambda x, y, n: x.roll(n[0] % 5 - 2, dim_of(x, n[1])),
    "flip": lambda x, y, n: x.flip(some_dims(x, n)),
    # norms
    "layer_norm": layer_norm,
    "batch_norm": lambda x, y, n: F.batch_norm(spatial(x), None, None, training=True),
    "instance_norm": lambda x, y, n: F.instance_norm(spatial(x)),
    "group_norm": lambda x, y, n: F.group_norm(spatial(x), 1),
    # products
    "linear": lambda x, y, n: F.linear(x, param(3, x.shape[-1]), param(3)),
    "matmul": lambda x, y, n: x @ param(x.shape[-1], 2),
    "gram": lambda x, y, n: x @ x.transpose(-2, -1),
    "mixed": lambda x, y, n: x @ y.transpose(-2, -1) if x.ndim > 1 < y.ndim else x,
    "einsum": lambda x, y, n: (
        torch.einsum("...i,...i->...", x, x * 2)
        if n[0] % 2
        else torch.einsum("nchw,nchw->nhc", spatial(x), spatial(x))
    ),
    "attend": attend,
}


class Wrong(AssertionError):
    """A program has other numbers on blocks than in one process."""


def run(steps: Sequence[Step], x: Tensor, keep: list[Step] | None = None) -> list[Tensor]:
    """Run a program; with `keep`, leave out what torch refuses and write down what is left."""
    variables = [x * 1.0, x.tanh()]
    for step in steps:
        name, i, j, numbers = step
        first, second = variables[i % len(variables)], variables[j % len(variables)]
        if keep is not None:
            try:  # as a trial, on copies: a step that fails half-way must leave nothing behind
                trial = STEPS[name](first.detach().clone(), second.detach().clone(), numbers)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            if not 0 < trial.numel() <= MOST_POINTS or not trial.ndim or trial.ndim > 6:
                continue
            if not trial.isfinite().all() or trial.abs().max() > LARGEST:
                continue
        try:
            result = STEPS[name](first, second, numbers)
        except RuntimeError:
            if keep is None:
                raise
            continue  # a change in place that autograd does not allow
        if keep is not None:
            keep.append(step)
        variables = [*variables, result][-4:]
    return variables


def compare(steps: Sequence[Step], shape: Sequence[int], cuts: dict[int, int]) -> str:
    """Compare a program on blocks with one process; return "agreed" or "refused"."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tuple(shape), dtype=torch.float64, generator=generator).requires_grad_()
    kept: list[Step] = []
    try:
        wanted = run(steps, x, kept)
        (slope,) = torch.autograd.grad(score(wanted), x)
    except RuntimeError:
        return "impossible"  # a change in place of what backward needs
    if not all(y.isfinite().all() for y in (*wanted, slope)):
        return "impossible"
    partition = Partition([cuts.get(d, 1) for d in range(len(shape))])
    if not partition.active:
        return "elsewhere"
    own = partition.local_slices(tuple(shape))
    block = x.detach()[own].clone().requires_grad_()
    entry = Split.of(block, partition)
    try:
        found = run(kept, entry)
        wholes = [y.whole() if isinstance(y, Split) else y for y in found]
        (grad,) = torch.autograd.grad(score(found), block)
    except (UnisonoError, RuntimeError) as error:
        if any(words in str(error) for words in REFUSED):
            return "refused"
        raise
    for y, z in zip(wholes, wanted, strict=True):
        agree(y, z, kept, cuts)
    agree(grad, slope[own], kept, cuts, slope)
    return "agreed"


def score(variables: list[Tensor]) -> Tensor:
    """Return a number that all variables have a part in."""
    total = torch.zeros((), dtype=torch.float64)
    for y in variables:
        total = total + (y.tanh() * math.sqrt(2)).sum() + (y * 0.1).square().mean()
    return total


def agree(
    found: Tensor, wanted: Tensor, kept: list[Step], cuts: object, scale: Tensor | None = None
) -> None:
    found, wanted = found.detach(), wanted.detach()
    largest = max(1.0, (wanted if scale is None else scale).abs().max().item())
    if found.shape != wanted.shape or (found - wanted).abs().max().item() > 1e-8 * largest:
        raise Wrong(f"{kept} cut {cuts}: {found} where {wanted} is wanted")


SHAPES = st.tuples(st.integers(2, 4), st.integers(2, 4), st.integers(3, 9), st.integers(3, 9))
NUMBERS = st.tuples(*[st.integers(0, 60)] * 4)
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3), st.integers(0, 3), NUMBERS),
    min_size=1,
    max_size=8,
)
CUTS = st.sampled_from(
    [
        {0: 2},
        {1: 2},
        {2: 2},
        {3: 2},
        {2: 3},
        {3: 3},
        {2: 4},
        {2: 2, 3: 2},
        {0: 2, 2: 2},
        {1: 2, 3: 2},
    ]
)


@pytest.mark.ranks(4, backend="shm", timeout=60)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=PROGRAMS, shape=SHAPES, cuts=CUTS)
def test_random_programs_are_those_of_one_process(steps, shape, cuts):
    assume(all(shape[dim] >= parts for dim, parts in cuts.items()))
    assert compare(steps, shape, cuts) in ("agreed", "refused", "impossible", "elsewhere")
