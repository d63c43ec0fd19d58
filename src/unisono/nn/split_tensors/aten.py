"""From a torch function to aten operators, and what every operator may do with blocks.

Below torch's functions method, function, in-place form and `axis=` are one operator with one
schema. An operator runs on blocks where it does not act along the cut dims: its schema names the
dims, or the table below does, and kernels without data show where a dim goes. An operator that acts
along a cut dim runs with the cut moved to another dim; an operator made of others is taken apart.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.comm import Communicator
from unisono.errors import UnisonoError
from unisono.expect import is_integer
from unisono.nn.split_tensors.blocks import placed, pointwise
from unisono.nn.split_tensors.dispatch import (
    along_same_axes,
    applied,
    by_rule,
    gather_all,
    is_smaller,
)
from unisono.nn.split_tensors.rules import (
    RULES,
    described,
    is_pointwise_operator,
    rule,
    tensors_in,
    with_tensors,
    without_data,
)
from unisono.nn.split_tensors.tensor import (
    CALLS,
    Cut,
    NeedsWhole,
    NoRule,
    Run,
    Split,
    address,
    splits_in,
    without_cuts,
)
from unisono.torch_private import OpOverload

_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
"""Left out on the way down: operators on blocks record derivatives, those on wrappers do not."""
_LAZY = ("Conjugate", "Negative", "ZeroTensor")
"""What torch leaves to kernels of these keys (a conjugate that is only marked as one), which it
skips below a wrapper: operators on blocks need them."""

# -- what an operator does with its dims ----------------------------------------------------------

_DIM_NAMES = frozenset("dim dims axis dim0 dim1 dim2 dimension".split())  # noqa: SIM905
_NOT_ALONG = frozenset(
    """renorm _weight_norm _weight_norm_interface norm_except_dim diag_embed unique_dim
    unique_consecutive unique_dim_consecutive segment_reduce linalg_tensorsolve tile hash_tensor
    fake_quantize_per_channel_affine fake_quantize_per_channel_affine_cachemask quantize_per_channel
    stack _stack cat unsqueeze select_scatter diagonal_scatter""".split()  # noqa: SIM905
)
"""Operators whose dim is not the one that they act along, or one of the result."""

ALL, ALL_BUT_BATCH = -1, -2
_LAST_DIMS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("one_hot polar complex view_as_real".split(), (0,)),  # noqa: SIM905
    **dict.fromkeys(
        """cholesky cholesky_inverse cholesky_solve geqrf triangular_solve _cdist_forward
        col2im""".split(),  # noqa: SIM905
        (2,),
    ),
    **dict.fromkeys(["grid_sampler_2d", "grid_sampler_3d"], (ALL_BUT_BATCH,)),
    "bucketize": (0, ALL), "isin": (0, ALL), "embedding": (ALL, 0), "take": (ALL, 0),
    "searchsorted": (1, 1), "view_as_complex": (1,), "stft": (1, ALL), "im2col": (3,),
    "ormqr": (2, 1, 2), "linalg_householder_product": (2, 1), "lu_unpack": (2, 1),
    "linalg_lu_solve": (2, 1, 2), "linalg_ldl_solve": (2, 1, 2), "linalg_pinv": (2, 0, 0),
    "fractional_max_pool2d": (2, 1), "fractional_max_pool3d": (3, 1),
}  # fmt: skip
"""Dims at the end of each tensor among the arguments that an operator acts along; the last number
holds for further ones. What comes before is a batch."""
_ALONG = {"native_channel_shuffle": (1,)}
"""Dims that operators act along without naming them."""
_MATRICES = re.compile(
    r"_?linalg_(cholesky|cond|det|eig|inv|ldl|lstsq|lu|matrix_exp|matrix_power|qr|slogdet|solve|svd)"
)
_IMAGES = re.compile(r"_?(?:adaptive_|avg_|max_|reflection_|replication_|upsample_).*?([123])d")


_FURTHER: dict[str, tuple[int, ...]] = {
    "embedding": (0,), "index_select": (1,), "searchsorted": (1,), "cholesky_solve": (0,),
    "linalg_lu_solve": (2,), "_linalg_solve_ex": (1,),
    "linalg_solve_triangular": (1,), "triangular_solve": (0,),
}  # fmt: skip
"""Tensors of which the last dim is beside the others': columns of right sides, or of a table."""

_PLACED_BY_DATA = re.compile("index|gather|scatter|take|embedding|one_hot")
"""Operators that raise for some data: on a CPU, kernels look whether an index is in range."""

_WRITTEN_OTHERWISE = re.compile("native_|.*_backward$|select_scatter$|index_add$")
"""Operators which torch writes with others that have other derivatives, or that take more."""


@dataclass(frozen=True)
class _Operand:
    """A tensor among the arguments."""

    tensor: Tensor
    batch: tuple[int | None, ...]
    """Dims along which the operator does not act, the last one first: equal places go together.

    None at a place that only other tensors have."""

    def dim(self, label: int) -> int | None:
        """Return the dim at a place of the batch; None if there is none."""
        return self.batch[label] if label < len(self.batch) else None

    def length(self, label: int) -> int:
        """Return the points along a place of the batch; 0 if there is none."""
        dim = self.dim(label)
        return 0 if dim is None else self.tensor.shape[dim]


def _bound(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, with the defaults of the schema."""
    return {
        argument.name: args[i]
        if i < len(args)
        else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(op._schema.arguments)
    }


def _operands(op: OpOverload, values: Mapping[str, Any]) -> list[_Operand]:
    """Return the tensors, and the dims of each along which the operator does not act.

    Raises:
        NoRule: not known.
    """
    name = _name(op).rstrip("_")
    tensors = [x for x in values.values() if isinstance(x, Tensor)]
    if name in ("index", "_unsafe_index"):
        return _indexed(values["self"], values["indices"])
    if name in ("index_put", "_unsafe_index_put"):
        return _put(values["self"], values["indices"], values["values"])
    if len(tensors) < len(list(tensors_in(values))):
        raise NoRule(f"no rule for lists of tensors in {name}")
    last = _LAST_DIMS.get(name)
    if last is None and _MATRICES.match(name):
        last = (2,)
    if last is None and (image := _IMAGES.match(name)):
        last = (int(image[1]),)
    if last is not None:
        counts = [last[min(i, len(last) - 1)] for i in range(len(tensors))]
        return _with_further(
            name,
            [
                _Operand(x, tuple(range(_batch_dims(x, count) - 1, -1, -1)))
                for x, count in zip(tensors, counts, strict=True)
            ],
        )
    named = _DIM_NAMES & values.keys()
    lead, acted = tensors[0], set(_ALONG.get(name, ()))
    if not (named or acted) or name in _NOT_ALONG:
        raise NoRule(f"no rule for {name}")
    for key in named:
        dims = values[key]
        listed: Iterable[int] = [dims] if is_integer(dims) else dims or range(lead.ndim)
        acted.update(d % max(lead.ndim, 1) for d in listed)
    alike = [x for x in tensors if x.ndim == lead.ndim]
    acted.update(d for d in range(lead.ndim) if len({x.shape[d] for x in alike}) > 1)
    free = [d for d in range(lead.ndim - 1, -1, -1) if d not in acted]
    return _with_further(
        name, [_Operand(x, tuple(free) if x.ndim == lead.ndim else ()) for x in tensors]
    )


def _with_further(name: str, operands: list[_Operand]) -> list[_Operand]:
    """Return the tensors, the last dim of some at a place of its own."""
    count = max(len(x.batch) for x in operands)
    for i in _FURTHER.get(name, ()):
        x = operands[i]
        is_vector = name == "_linalg_solve_ex" and x.tensor.ndim < operands[0].tensor.ndim
        if x.tensor.ndim and x.tensor.ndim - 1 not in x.batch and not is_vector:
            before = (None,) * (count - len(x.batch))
            operands[i] = _Operand(x.tensor, (*x.batch, *before, x.tensor.ndim - 1))
            count += 1
    return operands


def _put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> list[_Operand]:
    """Return the last dims of `x[i, j] = values`, which no index is for."""
    first = len(indices)
    if any(i is None or i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise NoRule("data that decides how many points there are")
    dims = tuple(range(x.ndim - 1, first - 1, -1))
    of_values = tuple(range(values.ndim - 1, -1, -1))[: len(dims)]
    return [
        _Operand(x, dims),
        *[_Operand(i, ()) for i in indices if i is not None],
        _Operand(values, of_values),
    ]


def _indexed(x: Tensor, indices: Sequence[Tensor | None]) -> list[_Operand]:
    """Return the dims of `x[:, i, j]` that no index is for, or those of the indices."""
    some = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in some):
        raise NoRule("data that decides how many points there are")
    free = [d for d in range(x.ndim - 1, -1, -1) if d >= len(indices) or indices[d] is None]
    if isinstance(x, Split):
        return [_Operand(x, tuple(free)), *[_Operand(i, ()) for i in some]]
    return [_Operand(x, ()), *[_Operand(i, tuple(range(i.ndim - 1, -1, -1))) for i in some]]


def _batch_dims(x: Tensor, acted: int) -> int:
    if acted == ALL:
        return 0
    return min(1, x.ndim) if acted == ALL_BUT_BATCH else max(0, x.ndim - acted)


_PLACES: dict[Any, tuple[int | None, ...] | None] = {}
_MOST = 8192


def _places(
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[_Operand],
    label: int,
) -> tuple[int | None, ...] | None:
    """Return the dim of each result in which a dim of the batch comes out; None if not in all.

    One point more along the dim: torch's kernels without data show where it appears.
    """
    grown = {id(x.tensor): x.dim(label) for x in operands if x.length(label) > 1}
    tensors: list[Tensor] = []
    key = op, label, described((args, kwargs), tensors), torch.get_default_dtype()
    try:
        if key in _PLACES:
            return _PLACES[key]
    except TypeError:  # an argument without a hash
        return None
    if len(_PLACES) >= _MOST:
        _PLACES.clear()

    def shapes(more: int) -> list[Tensor]:
        empty = {
            id(x): without_data(x)
            if id(x) not in grown
            else torch.empty(
                [n + more * (d == grown[id(x)]) for d, n in enumerate(x.shape)],
                dtype=x.dtype,
                device="meta",
            )
            for x in tensors
        }
        call = with_tensors((args, kwargs), lambda x: empty[id(x)])
        return list(tensors_in(op(*call[0], **call[1])))

    places: list[int | None] | None = []
    try:
        with torch.no_grad():
            for one, other in zip(shapes(0), shapes(1), strict=True):
                unlike = [d for d in range(one.ndim) if one.shape[d] != other.shape[d]]
                if one.shape == other.shape and one.numel() == 0:
                    places.append(None)
                elif one.ndim == other.ndim and len(unlike) == 1:
                    places.append(unlike[0])
                else:
                    places = None
                    break
    except Exception:  # sizes that other arguments fix, or no kernel without data
        places = None
    _PLACES[key] = None if places is None else tuple(places)
    return _PLACES[key]


def _on_blocks(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on blocks, along dims on which it does not act.

    Raises:
        NeedsWhole: it acts along a dim that is cut.
    """
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NoRule(f"{_name(op)} draws for whole tensors")
    operands = _operands(op, _bound(op, args, kwargs))
    run = next(x.run for x in splits_in((args, kwargs)))
    layout: dict[int, Cut] = {}
    places: dict[int, tuple[int | None, ...]] = {}
    along: list[tuple[Split, int, _Operand]] = []
    for operand in operands:
        x = operand.tensor
        if not isinstance(x, Split):
            continue
        for dim, cut in x.cuts.items():
            if any(cut.comm == other.comm for other in layout.values()):
                continue
            label = operand.batch.index(dim) if dim in operand.batch else -1
            dims = None
            if label >= 0 and label not in layout:
                dims = _places(op, args, kwargs, operands, label)
            if dims is None:
                along.append((x, dim, operand))
            else:
                layout[label], places[label] = cut, dims
    for x, dim, operand in along:
        if all(x.cuts[dim].comm != other.comm for other in layout.values()):
            acted = {d for d in range(x.ndim) if d not in operand.batch}
            raise NeedsWhole(dim, f"{_name(op)} acts along the cut", x, acted)
    blocks = {id(x.tensor): _block(x, layout, run) for x in operands}
    call = with_tensors((args, kwargs), lambda x: blocks[id(x)])
    target = args[0] if op._schema.is_mutable else None
    if target is not None and not (
        isinstance(target, Split) and blocks[id(target)] is target.local
    ):
        raise NoRule("changed in place by a tensor that is cut in another way")
    if _PLACED_BY_DATA.search(_name(op)) and operands[0].tensor.is_cpu:
        result = _alike(lambda: op(*call[0], **call[1]), run.ranks_of(layout.values()))
    else:
        result = op(*call[0], **call[1])
    if target is not None:
        return target
    made = itertools.count()

    def whole(local: Tensor) -> Tensor:
        i = next(made)
        cuts = {d: layout[label] for label, of in places.items() if (d := of[i]) is not None}
        return Split(local, cuts, run) if cuts else local

    return with_tensors(result, whole)


def _alike(compute: Callable[[], Any], comm: Communicator | None) -> Any:
    """Return what is computed; where an index of any rank is out of range, all ranks raise."""
    error: Exception | None = None
    result = None
    try:
        result = compute()
    except (IndexError, RuntimeError) as caught:
        error = caught
    if comm is not None and any(row[0] for row in comm.all_gather_ints([error is not None])):
        texts = comm.all_gather_object(None if error is None else (type(error), str(error)))
        rank, (kind, text) = next(
            (i, error_of_rank) for i, error_of_rank in enumerate(texts) if error_of_rank is not None
        )
        raise kind(f"{text} (in the block of rank {rank})") from error
    if error is not None:
        raise error
    return result


@rule("_linalg_check_errors")
def _check_errors(func: Callable[..., Any], info: Split, api_name: str, *, is_matrix: bool) -> None:
    """Raise on all ranks for a matrix of any that could not be factorised."""
    comm = info.run.ranks_of(info.cuts.values())
    _alike(lambda: func(info.local, api_name, is_matrix=is_matrix), comm)


def _block(x: _Operand, layout: Mapping[int, Cut], run: Run) -> Tensor:
    """Return the block of an argument for work on blocks of a layout."""
    cuts, rest = dict[int, Cut](), list[Cut]()
    for label, cut in layout.items():
        dim = x.dim(label)
        if dim is None or x.tensor.shape[dim] == 1:
            rest.append(cut)
        else:
            cuts[dim] = cut
    return placed(x.tensor, cuts, rest, run)


# -- from a function to its operators -------------------------------------------------------------


class _Way(threading.local):
    """What a torch function on its way down to operators knows."""

    name: str = ""
    changed: tuple[Tensor, ...] = ()
    """Arguments that the function changes."""
    memory: frozenset[int] = frozenset()
    """Where the blocks of its arguments lie; memory that lies elsewhere is its own."""
    shows: bool = False
    """Whether an operator has made a view."""
    excluded: Any = None
    """Keys that are left out on this way only; None outside of it."""


_WAY = _Way()
_NO_MEMORY = re.compile(
    "tensor subclasses|not allocated yet|have storage|data pointer|Overloaded torch operator"
)
"""What torch says where code looks for the memory of a tensor that has none."""


def through_aten(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changed: Sequence[Tensor],
    is_previewed: bool = True,
) -> Any:
    """Return what a torch function makes of split tensors, operator by operator.

    Raises:
        NoRule: something is changed in place that no rank could change, or it is not known whether
            the result is a view (without `is_previewed`).
    """
    run = next(x.run for x in splits_in((args, kwargs)))
    before = _WAY.name, _WAY.changed, _WAY.memory, _WAY.excluded
    excluded = private.keys(*_AUTOGRAD) - private.exclude_set()
    memory = frozenset(address(x.local) for x in splits_in((args, kwargs)))

    def shown(x: Tensor) -> Tensor:
        # All that has a derivative goes through the operators below, which record it.
        return x if isinstance(x, Split) or not _has_slope(x) else without_cuts(x, run)

    args, kwargs = with_tensors((args, kwargs), shown)
    _WAY.name, _WAY.changed, _WAY.excluded = name, tuple(changed), excluded
    _WAY.memory = before[2] | memory if before[2] and before[3] is None and before[0] else memory
    if before[3] is None and not before[0]:
        _WAY.shows = False
    try:
        with private.exclude_keys(excluded):
            result = func(*args, **kwargs)
    except RuntimeError as error:
        if _NO_MEMORY.search(str(error)) is None:
            raise
        raise NoRule("a function that reads memory") from error
    finally:
        _WAY.name, _WAY.changed, _WAY.memory, _WAY.excluded = before
    if _WAY.shows and not is_previewed:
        raise NoRule("data that decides what is shown")
    return with_tensors(result, lambda x: x.local if isinstance(x, Split) and not x.cuts else x)


def _has_slope(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def on_operator(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator makes of split tensors, on the way down from a torch function."""
    run = next(x.run for x in splits_in((args, kwargs)))
    _WAY.shows = _WAY.shows or op.is_view
    way = _WAY.name, _WAY.changed, _WAY.excluded
    try:
        left_out = private.exclude_set() - way[2] - private.keys(*_LAZY)
        with private.force_keys(private.include_set(), left_out):
            _WAY.excluded = None
            result = _by_operator(op, args, kwargs)
    finally:
        _WAY.name, _WAY.changed, _WAY.excluded = way
    first = args[0] if op._schema.is_mutable and args else None
    is_plain = isinstance(first, Tensor) and not isinstance(first, Split) and _has_slope(first)
    if is_plain and not any(first is x for x in _WAY.changed):
        raise NoRule("a plain tensor inside of it that has got a derivative")
    keeps = torch.is_grad_enabled()
    return with_tensors(
        result, lambda x: x if isinstance(x, Split) or not keeps else without_cuts(x, run)
    )


def _on_any_operator(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a call from below torch's functions, but on the way down from one."""
    if _WAY.excluded is not None:
        return on_operator(op, args, kwargs)
    raise UnisonoError.because(
        f"{op} of a split tensor",
        "a call from below torch's functions (an autograd.Function, C++ code, vmap), which knows "
        "nothing of blocks",
        None,
        "x.whole() before the call, or unisono.nn.split_rule(fn) for the function around it",
    )


def _name(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


def _by_operator(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, changes = _name(op), op._schema.is_mutable
    if torch.Tag.inplace_view in op.tags:
        raise NoRule("a change of its shape in place")
    if changes and not _may_change(args[0] if args else None):
        raise NoRule(f"{name} of a part of a split tensor")
    if op.namespace == "prims":
        raise NoRule("a decomposition into operators without derivatives")
    args, kwargs = along_same_axes(_WAY.name, args, kwargs)
    if next(splits_in((args, kwargs)), None) is None:
        return op(*args, **kwargs)
    reason = f"no rule for {name}"
    for way in _ways(op, name, args, kwargs):
        try:
            return way()
        except (NoRule, NeedsWhole) as no:
            reason = str(no)
    if changes:
        raise NoRule(reason)
    return gather_all(op, _WAY.name, reason, args, kwargs, ())


def _ways(
    op: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Callable[[], Any]]:
    """Yield the ways to compute with blocks, the one that sends least first."""
    how = RULES.get(name) or RULES.get(name.removesuffix("_copy"))
    packet, caller = op.overloadpacket, _WAY.name
    if how is not None:
        yield lambda: applied(how, packet, args, kwargs)
    elif is_pointwise_operator(op) or _is_special(op, name):
        yield lambda: pointwise(op, *args, **kwargs)
    yield lambda: _on_blocks(op, *args, **kwargs)
    if how is not None:
        yield lambda: by_rule(how, packet, caller, args, kwargs)
    # Of zeros, the second derivative of what linalg_norm consists of is not that of a vector's.
    if name != "linalg_norm" and private.has_kernel(op.name(), "CompositeImplicitAutograd"):
        parts = private.kernel_of(op, "CompositeImplicitAutograd")
        yield lambda: through_aten(parts, caller, args, kwargs, _WAY.changed)
    if op._schema.is_mutable:
        return
    yield lambda: by_rule(_on_blocks, op, caller, args, kwargs, may_gather=False)
    if all(is_smaller(x, (args, kwargs)) for x in splits_in((args, kwargs))):
        yield lambda: gather_all(op, caller, "", args, kwargs, ())
    written = private.decomposition_of(op)
    is_drawn = torch.Tag.nondeterministic_seeded in op.tags
    if written is not None and not is_drawn and not _WRITTEN_OTHERWISE.match(name):
        yield lambda: through_aten(written, caller, args, kwargs, _WAY.changed)
    yield lambda: by_rule(_on_blocks, op, caller, args, kwargs)


def _may_change(x: Any) -> bool:
    """Whether an operator inside of a function may change a tensor: nothing shows parts of it."""
    if not isinstance(x, Split) or any(x is y or x.local is y for y in _WAY.changed):
        return True
    return address(x.local) not in _WAY.memory and x.memory is None and x.local._base is None


def _is_special(op: OpOverload, name: str) -> bool:
    """Whether it is a special function of points: torch tags few of them."""
    return name.startswith("special_") and all(a.name != "dim" for a in op._schema.arguments)


CALLS.through, CALLS.operator = through_aten, _on_any_operator
