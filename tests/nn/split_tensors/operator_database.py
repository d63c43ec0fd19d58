"""Torch's own operator database on split tensors: a verdict for every operator.

    python tests/nn/split_tensors/operator_database.py [--ranks 2 3] [--only softmax] [--samples 3]
    python tests/nn/split_tensors/operator_database.py --ranks 2 --table   # which stay cut

Every sample is cut along every dim and called as function, method, in place and with `out=`, with
gradients and second derivatives; then result and input are changed in place, to see who shows
whose memory. Samples that torch refuses (its own, and good ones spoiled) have to be refused.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import types
import unittest
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from unisono import Partition
from unisono.comm import world
from unisono.errors import UnisonoError
from unisono.nn import Split
from unisono.nn.split_tensors.tensor import SMALLER

DEADLINE_S = 20.0
"""Silence of all ranks after which they are taken for hung."""


DIES_WHEN_SPOILED = frozenset(
    "lu_unpack native_batch_norm _native_batch_norm_legit _batch_norm_with_update".split()  # noqa: SIM905
)
"""Operators of which torch itself reads or writes beyond arguments that do not fit each other."""


class Verdict(enum.IntEnum):
    """What became of a call, from good to bad."""

    RAISES = 0
    """Raises where torch raises."""
    CUT = 1
    """Right, and the result is cut or one that all ranks have by a rule; the largest argument has
    not been gathered."""
    GATHERED = 2
    """Right, after a gather."""
    REFUSED = 3
    """A `UnisonoError` where torch does not raise."""
    TAKES = 4
    """Returns where torch raises."""
    CRASH = 5
    """Another error than `UnisonoError` where torch does not raise."""
    UNLIKE = 6
    """Ranks disagree: one raises and another does not."""
    HUNG = 7
    """Ranks waited for each other, or died."""
    WRONG = 8
    """Another value, shape, dtype, gradient or alias than torch's."""


BAD = Verdict.TAKES
"""The first verdict that should not be."""


@dataclass(frozen=True)
class Case:
    """One call: an operator, its arguments, and how they are cut."""

    operator: str
    sample: int
    form: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cut: tuple[int, ...] = ()
    """Dim along which each tensor of the arguments is cut, in their order; -1 for a whole one."""

    def __str__(self) -> str:
        shapes = [list(x.shape) for x in tensors_of((self.args, self.kwargs))]
        rest = [x for x in tree_flatten((self.args, self.kwargs))[0] if not isinstance(x, Tensor)]
        return f"{self.operator}[{self.sample}] {self.form} {shapes} cut {self.cut} {rest}"[:240]


@dataclass(frozen=True)
class Extent:
    """How much of the database is tried."""

    samples: int = 3
    """Of each operator."""
    is_plain: bool = False
    """Only calls of functions, without derivatives: a tenth of the time, enough for the table."""


def database() -> list[Any]:
    """Return torch's database of operators, those that a CPU has."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:  # a base class of torch's own test cases, none of which is run here
            stand_in = types.ModuleType("expecttest")
            setattr(stand_in, "TestCase", unittest.TestCase)  # noqa: B010
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supported_dtypes("cpu")]


def full_name(op: Any) -> str:
    """Return the name of an operator, with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


# -- cases ----------------------------------------------------------------------------------------


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, in their order."""
    return [x for x in tree_flatten(values)[0] if isinstance(x, Tensor)]


def dtype_of(op: Any) -> torch.dtype:
    """Return the dtype in which an operator is tried: doubles if it takes them."""
    supported = op.supported_dtypes("cpu")
    ranked = (torch.float64, torch.complex128, torch.float32, torch.int64, torch.bool)
    return next((d for d in ranked if d in supported), next(iter(supported)))


def spoiled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield arguments with one number out of range, or one tensor a point shorter."""
    leaves, spec = tree_flatten((args, kwargs))
    for i, leaf in enumerate(leaves):
        others: list[Any] = []
        if isinstance(leaf, int) and not isinstance(leaf, bool):
            others = [leaf + 7, leaf - 9]
        elif isinstance(leaf, Tensor):
            others = [leaf.narrow(d, 0, n - 1) for d, n in enumerate(leaf.shape) if n > 1]
        for other in others:
            yield tree_unflatten([*leaves[:i], other, *leaves[i + 1 :]], spec)


def cuts_of(values: Any, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield ways to cut arguments: the first tensor alone, all along one dim, the second alone."""
    tensors = tensors_of(values)
    seen: set[tuple[int, ...]] = set()
    for dim in range(max((x.ndim for x in tensors), default=0)):
        fits = [
            dim if x.ndim > dim and x.shape[dim] >= ranks and x.numel() else -1 for x in tensors
        ]
        none = [-1] * len(tensors)
        for way in ([*fits[:1], *none[1:]], fits, [*none[:1], *fits[1:2], *none[2:]]):
            if max(way) >= 0 and tuple(way) not in seen:
                seen.add(tuple(way))
                yield tuple(way)


def forms_of(op: Any) -> dict[str, Callable[..., Any]]:
    """Return the ways to call an operator."""
    forms: dict[str, Callable[..., Any]] = {"function": op.op}
    if op.method_variant is not None and op.method_variant is not op.op:
        forms["method"] = op.method_variant
    if op.inplace_variant is not None:
        forms["in place"] = op.inplace_variant
    return forms


def usable(values: Any) -> bool:
    """Whether all tensors are dense, of a CPU and not large, and there is one."""
    tensors = tensors_of(values)
    return bool(tensors) and all(
        (x.layout, x.device.type, x.is_quantized) == (torch.strided, "cpu", False)
        and x.numel() < 20_000
        for x in tensors
    )


def cases_of(op: Any, ranks: int, extent: Extent) -> Iterator[tuple[Case, Callable[..., Any]]]:
    """Yield the calls to be tried of an operator. Equal on all ranks."""
    torch.manual_seed(3)
    found = []
    for sample in op.sample_inputs("cpu", dtype_of(op), requires_grad=False):
        call = (sample.input, *sample.args), dict(sample.kwargs)
        if usable(call) and next(cuts_of(call, ranks), None):
            found.append(call)
        if len(found) >= 60:
            break
    step = max(1, len(found) // extent.samples)
    calls = [("", *call) for call in found[::step][: extent.samples]]
    if extent.is_plain:
        for number, (_, args, kwargs) in enumerate(calls):
            for way in cuts_of((args, kwargs), ranks):
                yield Case(full_name(op), number, "function", args, kwargs, way), op.op
        return
    for _, args, kwargs in list(calls) if op.name not in DIES_WHEN_SPOILED else ():
        calls += [("spoiled ", *call) for call in spoiled(args, kwargs)]
    if op.error_inputs_func is not None:
        for error in op.error_inputs("cpu"):
            sample = error.sample_input
            call = (sample.input, *sample.args), dict(sample.kwargs)
            calls += [("refused ", *call)] if usable(call) else []
    name = full_name(op)
    for number, (kind, args, kwargs) in enumerate(calls):
        ways = list(cuts_of((args, kwargs), ranks))
        for way in ways[:1] if kind == "spoiled " else ways:
            for form, call in forms_of(op).items():
                yield Case(name, number, kind + form, args, kwargs, way), call
            if not kind:
                yield Case(name, number, "aliases", args, kwargs, way), op.op
                if op.supports_out:
                    yield Case(name, number, "out=", args, kwargs, way), op.op


# -- one case -------------------------------------------------------------------------------------


def examine(
    case: Case, call: Callable[..., Any], op: Any, with_slopes: bool = True
) -> tuple[Verdict, str]:
    """Call an operator whole and on blocks, and compare."""
    is_good = not case.form.startswith(("spoiled", "refused"))
    needs_grad = with_slopes and is_good and op.supports_autograd and "place" not in case.form
    needs_grad = needs_grad and case.form not in ("aliases", "out=")
    whole = plain_copy((case.args, case.kwargs), needs_grad)
    torch.manual_seed(11)
    try:
        expected = attempt(case, call, whole)
    except Exception as error:
        expected = error
    if is_good and isinstance(expected, Exception):
        return Verdict.RAISES, ""  # a form that torch does not have
    if not is_good and not isinstance(expected, Exception):
        return Verdict.RAISES, ""  # spoiled, and good nevertheless
    leaves = plain_copy((case.args, case.kwargs), needs_grad)
    torch.manual_seed(11)
    blocks = cut_along(leaves, case.cut)
    run = next(x.run for x in tensors_of(blocks) if isinstance(x, Split))
    try:
        found = attempt(case, call, blocks)
    except UnisonoError as error:
        refused = Verdict.RAISES if isinstance(expected, Exception) else Verdict.REFUSED
        return refused, str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(expected, type(error)):
            return Verdict.RAISES, ""
        if isinstance(expected, Exception):
            return Verdict.RAISES, f"{text} instead of {type(expected).__name__}: {expected}"
        return Verdict.CRASH, text
    if isinstance(expected, Exception):
        return Verdict.TAKES, f"torch: {type(expected).__name__}: {expected}"
    torch.manual_seed(12)
    again = attempt(case, call, plain_copy((case.args, case.kwargs), False))
    is_random = "empty" in op.name or difference(again, expected) != ""
    wrong = difference(joined(found), joined(expected), only_shapes=is_random)
    if not wrong and not is_random and case.form == "in place":
        wrong = difference(joined(blocks), whole)
    if not wrong and not is_random and needs_grad:
        try:
            wrong = compare_gradients(op, expected, found, whole, leaves)
        except UnisonoError as error:
            return Verdict.REFUSED, f"gradient: {error}"
        except Exception as error:
            return Verdict.CRASH, f"gradient: {type(error).__name__}: {error}"
    if wrong:
        return Verdict.WRONG, wrong
    why = "; ".join(sorted({gathered.reason for gathered in run.gathered}))
    gathered = any(of.reason != SMALLER for of in run.gathered)
    return (Verdict.GATHERED if gathered else Verdict.CUT), why


def attempt(case: Case, call: Callable[..., Any], values: Any) -> Any:
    """Do what the form of a case asks for; return what can be compared."""
    args, kwargs = values
    if case.form == "aliases":
        return changed_results(call, args, kwargs)
    if case.form == "out=":
        with torch.no_grad():
            shapes = call(*plain_copy(joined(args), False), **plain_copy(joined(kwargs), False))
            outs = tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, shapes)
            call(*args, **kwargs, out=outs)
        return outs
    return call(*args, **kwargs)


def changed_results(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Change the result in place, then the first argument; return both after each change."""
    with torch.no_grad():
        results = tensors_of(call(*args, **kwargs))
        inputs = tensors_of((args, kwargs))
        shown = []
        for changed in (results[:1], inputs[:1]):
            for x in changed:
                if not any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
                    x.zero_()
            # Clones: what comes later must not show.
            shown.append([x.clone() for x in joined((results, inputs))[0] + joined(inputs)])
    return shown


def plain_copy(values: Any, needs_grad: bool) -> Any:
    """Return arguments with fresh plain tensors; leaves that require grad if asked."""

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().clone()
        return x.requires_grad_(needs_grad and (x.is_floating_point() or x.is_complex()))

    return tree_map(copied, values)


def cut_along(values: Any, cut: Sequence[int]) -> Any:
    """Return arguments with each tensor cut along its dim."""
    dims = iter(cut)

    def of(x: Any) -> Any:
        if not isinstance(x, Tensor) or (dim := next(dims)) < 0:
            return x
        return Split.cut(x, Partition([world().size if d == dim else 1 for d in range(x.ndim)]))

    return tree_map(of, values)


def joined(values: Any) -> Any:
    """Return values with every split tensor whole."""
    return tree_map(lambda x: x.whole() if isinstance(x, Split) else x, values)


def difference(found: Any, expected: Any, only_shapes: bool = False) -> str:
    """Return how two results differ; empty if they do not."""
    a, b = tree_flatten(found)[0], tree_flatten(expected)[0]
    if len(a) != len(b):
        return f"{len(a)} results, not {len(b)}"
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if isinstance(x, Tensor) != isinstance(y, Tensor):
                return f"{type(x).__name__}, not {type(y).__name__}"
            if not only_shapes and isinstance(y, (int, float, complex, str)) and x != y and y == y:
                return f"{x}, not {y}"
            continue
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{x.dtype} {list(x.shape)}, not {y.dtype} {list(y.shape)}"
        if only_shapes:
            continue
        p, q = (t.detach() if t.layout == torch.strided else t.detach().to_dense() for t in (x, y))
        p, q = (t.resolve_conj().resolve_neg() for t in (p, q))
        if q.is_floating_point() and q.itemsize == 1:
            p, q = p.float(), q.float()
        scale = float(q.abs().nan_to_num(0, 0, 0).max()) if q.numel() and is_number(q) else 0.0
        near = 1e-3 if q.dtype in (torch.float16, torch.bfloat16) else 1e-7
        near = 1e-4 if q.dtype == torch.float32 else near
        if not torch.allclose(p, q, near, near * max(scale, 1.0), equal_nan=True):
            few = [str(t.flatten()[:6].tolist())[:90] for t in (p, q)]
            return f"values {few[0]}, not {few[1]}"
    return ""


def is_number(x: Tensor) -> bool:
    """Whether a tensor holds numbers with a derivative."""
    return x.is_floating_point() or x.is_complex()


def compare_gradients(op: Any, expected: Any, found: Any, whole: Any, leaves: Any) -> str:
    """Compare first and, where torch has them, second derivatives."""
    first = second = None
    for is_twice in (op.supports_gradgrad, False):
        with contextlib.suppress(RuntimeError):  # torch has no derivative of this sample
            first, second = derivatives(expected, whole, is_twice)
            break
    if first is None or second is None:
        return ""
    is_twice = bool(second)
    slopes, bends = derivatives(found, leaves, is_twice)
    wrong = difference(slopes, first)
    if not wrong and is_twice:  # a second derivative that is not there is zero
        wrong = difference(bends or [torch.zeros_like(x) for x in second], second)
    return f"gradient: {wrong}" if wrong else ""


def derivatives(results: Any, inputs: Any, is_twice: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return first and second derivatives of a score of the results; empty where there are none."""
    x = [t for t in tensors_of(inputs) if t.requires_grad]
    y = [t for t in tensors_of(results) if is_number(t) and t.requires_grad]
    if not x or not y:
        return [], []
    first = torch.autograd.grad(score(y), x, create_graph=is_twice, allow_unused=True)
    slopes = [zeros_for(g, t) for g, t in zip(first, x, strict=True)]
    of = [g for g in first if g is not None and g.requires_grad]
    if not is_twice or not of:
        return slopes, []
    second = torch.autograd.grad(score(of), x, allow_unused=True)
    return slopes, [zeros_for(g, t) for g, t in zip(second, x, strict=True)]


def zeros_for(slope: Tensor | None, x: Tensor) -> Tensor:
    """Return a gradient; zeros where there is none."""
    return torch.zeros_like(x) if slope is None else slope


def score(results: Sequence[Tensor]) -> Tensor:
    """Return a real number that all points of the results have a part in, each another one."""
    total = torch.zeros((), dtype=torch.float64)
    for y in results:
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)
        parts = torch.view_as_real(y.resolve_conj()).sum(-1) if y.is_complex() else y
        total = total + (parts.to(torch.float64) * weights).sum()
    return total


def is_free(case: Case, call: Callable[..., Any], ranks: int) -> bool:
    """Whether an operator, called on blocks alone, gives the blocks of its result."""
    leaves, spec = tree_flatten((case.args, case.kwargs))
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    dim = max(case.cut)
    length = next(leaves[i].shape[dim] for i, d in zip(tensors, case.cut, strict=True) if d >= 0)
    alike = [leaves[i].ndim > dim and leaves[i].shape[dim] == length for i in tensors]
    for along in ([d >= 0 for d in case.cut], alike):
        results = []
        try:
            for r in range(ranks):
                block = list(leaves)
                for i, here in zip(tensors, along, strict=True):
                    if here:
                        block[i] = leaves[i].tensor_split(ranks, dim)[r]
                args, kwargs = tree_unflatten(block, spec)
                results.append(tensors_of(call(*args, **kwargs)))
            whole = tensors_of(call(*case.args, **case.kwargs))
        except Exception:  # blocks that do not fit
            continue
        if whole and all(map(are_blocks, zip(*results, strict=True), whole)):
            return True
    return False


def are_blocks(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether tensors are the blocks of another one, along any dim."""
    for dim in range(whole.ndim):
        with contextlib.suppress(RuntimeError, IndexError):
            if not difference(torch.cat(list(parts), dim), whole):
                return True
    return False


FAMILIES = {"fft.": "fft", "linalg.": "linalg", "special.": "special", "masked.": "masked",
            "nn.functional.": "nn.functional", "signal.": "signal"}  # fmt: skip


def family_of(op: Any) -> str:
    """Return the group of an operator in the table."""
    known = next((name for start, name in FAMILIES.items() if op.name.startswith(start)), None)
    packet = getattr(torch.ops.aten, op.name, None)
    if known is not None or not hasattr(packet, "overloads"):
        return known or "others"
    first = getattr(packet, packet.overloads()[0])
    if torch.Tag.pointwise in first.tags:
        return "pointwise"
    return "views" if first.is_view else "others"


def table(kinds: dict[tuple[str, str], Verdict]) -> str:
    """Return how many operators of each family are kept cut, by what they do with the cut dim."""
    families = {full_name(op): family_of(op) for op in database()}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for (name, kind), verdict in kinds.items():
        for row in (families[name], "all"):
            counts[row][kind] += 1
            counts[row][f"{kind} cut"] += verdict <= Verdict.CUT
    lines = ["| family | not along the cut dim: kept cut | along it: kept cut |", "|---|---|---|"]
    for row in sorted(counts, key=lambda row: (row == "all", row)):
        n = counts[row]
        lines.append(
            f"| {row} | {n['free cut']} of {n['free']} | {n['along cut']} of {n['along']} |"
        )
    return "\n".join(lines)


# -- all of them, on ranks ------------------------------------------------------------------------


def all_verdicts(
    op: Any, extent: Extent, skip: int = 0, tells_dims: bool = False
) -> Iterator[tuple[Case, Verdict | None, str]]:
    """Yield every case of an operator, and then the verdict, on which ranks agree. Collective.

    With `tells_dims`, the reason of a good verdict on a plain call begins with whether the operator
    acts along the cut dim.
    """
    for case, call in itertools.islice(cases_of(op, world().size, extent), skip, None):
        yield case, None, ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict, why = examine(case, call, op, not extent.is_plain)
        of_ranks = [row[0] for row in world().all_gather_ints([int(verdict)])]
        if max(of_ranks) != min(of_ranks):
            is_wrong = max(of_ranks) == Verdict.WRONG
            verdict = Verdict.WRONG if is_wrong else Verdict.UNLIKE
            why = why or f"verdicts {of_ranks}"
        if tells_dims and case.form == "function" and verdict in (Verdict.CUT, Verdict.GATHERED):
            why = f"{'free' if is_free(case, call, world().size) else 'along'}: {why}"
        yield case, verdict, why


def on_rank(
    rank: int,
    ranks: int,
    folder: str,
    names: Sequence[str],
    skip: int,
    extent: Extent,
    to: Connection,
) -> None:
    """Try operators on one rank; tell the parent of each case before and after it."""
    os.environ.update(UNISONO_TIMEOUT_S=str(DEADLINE_S / 2), GLOO_SOCKET_IFNAME="lo")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    ops = {full_name(op): op for op in database()}
    for name in names:
        count = skip
        for case, verdict, why in all_verdicts(
            ops[name], extent, skip, name not in DIES_WHEN_SPOILED
        ):
            count += verdict is None
            to.send((name, count, str(case), verdict, why))
        skip = 0
    to.send(("", 0, "", None, ""))
    world().barrier()
    os._exit(0)


Row = tuple[str, str, Verdict, str]
"""Operator, case, verdict, reason."""


def verdicts_on(ranks: int, names: Sequence[str], extent: Extent) -> Iterator[Row]:
    """Yield all verdicts on this many ranks; replace ranks that hang or die."""
    fork, left, skip = multiprocessing.get_context("fork"), list(names), 0
    while left:
        with tempfile.TemporaryDirectory() as folder:
            pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
            processes = [
                fork.Process(target=on_rank,
                             args=(r, ranks, folder, left, skip, extent, pipes[r][1]))
                for r in range(ranks)
            ]  # fmt: skip
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            at: tuple[str, int, str] | None = (left[0], skip, "")
            senders: list[Connection] = [reader for reader, _ in pipes]
            patience = DEADLINE_S
            while at is not None:
                ready = wait(senders, patience)
                if not ready or senders[0] is not pipes[0][0]:
                    why = "no rank went on" if len(senders) == ranks else "a rank died"
                    yield at[0], at[2], Verdict.HUNG, why
                    break
                for reader in [reader for reader in senders if reader in ready]:
                    try:
                        name, count, case, verdict, why = reader.recv()
                    except EOFError:
                        senders.remove(reader)
                        patience = 1.0
                        continue
                    if reader is not pipes[0][0]:
                        continue
                    at = (name, count, case) if name else None
                    if verdict is not None:
                        yield name, case, verdict, why
            for process in processes:
                if process.pid is not None and process.is_alive() and at is not None:
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
            for reader, _ in pipes:
                reader.close()
            if at is None:
                return
            if (left[0], skip) == at[:2]:  # no case was begun
                at = left[1] if len(left) > 1 else "", 0, ""
            left, skip = left[left.index(at[0]) :] if at[0] else [], at[1]


def main() -> None:
    """Try all operators and print how many have which verdict."""
    parser = argparse.ArgumentParser(description="Verdicts on torch's operators on split tensors.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", help="operators whose name contains this")
    parser.add_argument("--samples", type=int, default=3, help="samples of each operator")
    parser.add_argument("--table", action="store_true", help="plain calls alone: which stay cut")
    parser.add_argument("--all", action="store_true", help="print gathered and refused ones too")
    options = parser.parse_args()
    names = [full_name(op) for op in database() if (options.only or "") in full_name(op)]
    extent = Extent(options.samples, options.table)
    worst: dict[str, Verdict] = dict.fromkeys(names, Verdict.RAISES)
    cases: Counter[Verdict] = Counter()
    reasons: dict[tuple[str, Verdict], list[str]] = defaultdict(list)
    kinds: dict[tuple[str, str], Verdict] = {}
    for ranks in options.ranks:
        for name, case, verdict, why in verdicts_on(ranks, names, extent):
            cases[verdict] += 1
            worst[name] = max(worst[name], verdict)
            kind = why.partition(":")[0]
            if kind in ("free", "along"):
                kinds[name, kind] = max(kinds.get((name, kind), verdict), verdict)
            reasons[name, verdict].append(
                f"{ranks} ranks: {case}: {why.splitlines()[0][:300] if why else ''}"
            )
    least = Verdict.GATHERED if options.all else BAD
    for (name, verdict), lines in sorted(reasons.items(), key=lambda item: -item[0][1]):
        if verdict >= least:
            print(f"{verdict.name:9} {name}: {len(lines)} cases, e.g.")
            for line in lines[:: max(1, len(lines) // 3)][:3]:
                print(f"          {line}")
    operators = Counter(worst.values())
    print(f"{'verdict':10} operators    cases")
    for verdict in Verdict:
        print(f"{verdict.name:10} {operators[verdict]:9} {cases[verdict]:8}")
    print(table(kinds))


if __name__ == "__main__":
    main()
