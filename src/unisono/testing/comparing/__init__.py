"""Why one rank and two differ: run a program in several forms, and name what differs first.

`compare(fn, ranks=(1, 2))` and `unisono compare --ranks 1,2 train.py` are the ways in. `probe`
records one rank, `forms` aligns ranks and forms, `causes` names what the first difference shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.errors import PlatformError
from unisono.expect import expect_int
from unisono.launch import Logs
from unisono.launch.request import is_in_world
from unisono.testing.comparing import causes
from unisono.testing.comparing.causes import Cause
from unisono.testing.comparing.forms import Difference, ProgramForm, differences
from unisono.testing.comparing.probe import Key, Note, record

__all__ = ["Cause", "Comparison", "FormResult", "compare", "judge"]

STEPS = 50
"""Number of optimizer steps that are followed by default."""
_SHOWN = 6
"""Number of steps of a growing difference that are shown."""
_CURVES = ("loss", "gradient", "parameter", "buffer")
_PRELOAD = ("torch._dynamo", "unisono.data_parallel")
"""What the first optimizer step of each run would spend seconds on."""


@dataclass(frozen=True)
class FormResult:
    """One form of a program, against the first one."""

    ranks: int
    steps: int
    cause: Cause
    """Why it differs; its name is "equal up to rounding" where it does not."""
    first: Difference | None = None
    """The first difference that rounding does not explain."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """For `loss`, `gradient`, `parameter` and `buffer` the largest distance in each step."""
    modules: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """For each module its class, and the first step in which its result differs."""
    detail: str = ""
    """Where in the first tensor the difference is largest."""

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains all differences."""
        return self.cause.name == causes.EQUAL

    def as_data(self) -> dict[str, Any]:
        """Return what the report draws of it."""
        return {
            "ranks": self.ranks,
            "steps": self.steps,
            "cause": self.cause.name,
            "curves": {
                kind: [x if math.isfinite(x) else None for x in curve]
                for kind, curve in self.curves.items()
            },
            "modules": [
                {"name": name, "kind": kind, "step": step}
                for name, (kind, step) in sorted(
                    self.modules.items(), key=lambda item: item[0].split(".")
                )
            ],
        }


@dataclass(frozen=True)
class Comparison:
    """What `compare` has found; its text is a table."""

    name: str
    base: FormResult
    """The first form against a second run of itself."""
    forms: list[FormResult]
    """The others."""

    @property
    def is_equal(self) -> bool:
        """Whether all forms give the same result, up to rounding."""
        return self.base.is_equal and all(form.is_equal for form in self.forms)

    @property
    def cause(self) -> Cause:
        """The first cause that was found."""
        results = (self.base, *self.forms)
        return next((r.cause for r in results if not r.is_equal), results[-1].cause)

    def __str__(self) -> str:
        return _as_text(self)

    def record(self, name: str) -> Path:
        """Write a record `runs/<name>` with a report of it; return its page."""
        from unisono.train.recording.directory import COMPARISON, begin_run, write_json
        from unisono.train.recording.report import conclude

        directory = Path(begin_run(name)[0])
        forms = [form.as_data() for form in self.forms]
        write_json(directory / COMPARISON, {"text": str(self), "forms": forms})
        return conclude(directory)


def compare(
    fn: Callable[..., Any],
    /,
    *args: Any,
    ranks: Sequence[int] = (1, 2),
    on: Any = None,
    steps: int = STEPS,
    timeout_s: float | None = None,
    name: str | None = None,
    is_script: bool = False,
    **kwargs: Any,
) -> Comparison:
    """Run `fn` in several forms and say what differs first, and why.

    The first form runs twice, to tell randomness from rank. Each rank notes its batches, the
    results of all modules, losses, gradients, parameters, buffers and optimizer states by step; a
    few numbers of each tensor. A second pass keeps the first tensor that differs whole. It does not
    matter what wraps the model: `DataParallel`, torch's DDP or FSDP2, `split`, or nothing.

    Args:
        fn: trains a model with a torch optimizer; called on each rank as by `unisono.run`.
        args: its positional arguments.
        ranks: numbers of ranks; all others are compared with the first.
        on: where ranks run, as in `unisono.run`.
        steps: end the program after this number of optimizer steps.
        timeout_s: deadline of each run.
        name: what to call the program.
        is_script: whether it joins its world without help.
        kwargs: keyword arguments of `fn`.

    Raises:
        PlatformError: fewer than two forms, or called on a rank.
        RankFailed: the program fails in one of the forms.

    >>> def train():
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     model(torch.ones(4, 2)).mean().backward()
    ...     optimizer.step()
    >>> compare(train, ranks=(1, 2)).is_equal
    True
    """
    if len(ranks) < 2 or is_in_world():
        problem = "this process is a rank" if is_in_world() else f"{len(ranks)} numbers of ranks"
        raise PlatformError.because(
            f"compare(..., ranks={tuple(ranks)})", problem, hint="compare(fn, ranks=(1, 2))"
        )
    for number in ranks:
        expect_int("ranks", number, 1, error=PlatformError)
    expect_int("steps", steps, 1, error=PlatformError)
    title = name or getattr(fn, "__name__", type(fn).__name__)

    def run_form(number: int, focus: Sequence[Key] = ()) -> ProgramForm:
        from unisono.launch.api import execute
        from unisono.launch.request import checked_request

        request = checked_request(
            record,
            (fn, args, kwargs, focus, steps),
            {},
            on=on,
            ranks=number,
            timeout_s=timeout_s,
            logs=Logs(console="none"),
            title=title,
            is_script=is_script,
        )
        return ProgramForm(execute(replace(request, preload=_PRELOAD)))

    first, *others = ranks
    base, again = run_form(first), run_form(first)
    if not base.order():
        raise PlatformError.because(
            f"compare({title})",
            "no training step was seen: no module in train mode, no optimizer step",
            hint="a function that calls loss.backward() and optimizer.step()",
        )
    forms = {number: run_form(number) for number in others}
    comparison = judge(title, base, again, forms)
    if not comparison.base.is_equal:
        return comparison
    results = [_with_detail(result, base, run_form) for result in comparison.forms]
    return Comparison(title, comparison.base, results)


def judge(
    name: str, base: ProgramForm, again: ProgramForm, forms: dict[int, ProgramForm]
) -> Comparison:
    """Return what recordings say: the first form, a second run of it, and others by their ranks."""
    random = causes.nondeterminism(base, again)
    repeated = _result(base, again, random or Cause(causes.EQUAL, "two runs have the same bits"))
    results: list[FormResult] = []
    for form in forms.values():
        cause = causes.explain(base, form)
        if random is not None and cause.name != causes.EQUAL:
            cause = random  # what differs without another rank says nothing of ranks
        results.append(_result(base, form, cause))
    return Comparison(name, repeated, results)


def _result(base: ProgramForm, form: ProgramForm, cause: Cause) -> FormResult:
    all_differences = list(differences(base, form))
    steps = min(base.steps, form.steps)
    curves = {kind: [0.0] * steps for kind in _CURVES}
    modules: dict[str, tuple[str, int | None]] = {}
    for one in all_differences:
        key = one.key
        if key.kind in curves and key.step < steps:
            curves[key.kind][key.step] = max(curves[key.kind][key.step], one.distance)
        if key.kind == "output":
            kind, step = modules.get(key.name, (base.of(key)[0].module, None))
            modules[key.name] = kind, key.step if step is None and one.is_real else step
    first = None
    if cause.name != causes.EQUAL:
        first = next((one for one in all_differences if one.is_real), None)
    curves = {kind: values for kind, values in curves.items() if any(values)}
    return FormResult(form.size, form.steps, cause, first, curves, modules)


# -- the second pass ------------------------------------------------------------------------------


def _with_detail(
    result: FormResult, base: ProgramForm, run_form: Callable[..., ProgramForm]
) -> FormResult:
    """Run both forms again with whole tensors around the first difference."""
    if result.first is None:
        return result
    focus = [result.first.key]
    ours, theirs = (run_form(size, focus).of(focus[0]) for size in (base.size, result.ranks))
    return replace(result, detail=_largest(ours, theirs))


def _largest(ours: Sequence[Note], theirs: Sequence[Note]) -> str:
    """Say where two tensors differ most: replicas one by one, blocks joined along the rows."""
    whole = ours[0].whole
    parts = [note.whole for note in theirs if note.whole is not None]
    if whole is None or not parts or len(ours) > 1 or not whole.numel():
        return ""
    if all(part.shape == whole.shape for part in parts):
        rank = max(range(len(parts)), key=lambda r: _gap(whole, parts[r]))
        return f"{_place(whole, parts[rank])} on rank {rank}"
    if all(part.dim() and part.shape[1:] == whole.shape[1:] for part in parts):
        joined = torch.cat(parts)
        if joined.shape == whole.shape:
            interleaved = torch.empty_like(joined)
            for rank, part in enumerate(parts):
                if len(part) == len(interleaved[rank :: len(parts)]):
                    interleaved[rank :: len(parts)] = part
            best = min((joined, interleaved), key=lambda x: _gap(whole, x))
            return _place(whole, best)
    return f"shapes {[list(part.shape) for part in parts]}, not {list(whole.shape)}"


def _gap(a: Tensor, b: Tensor) -> float:
    gap = float((a.double() - b.double()).abs().max())
    return math.inf if math.isnan(gap) else gap


def _place(a: Tensor, b: Tensor) -> str:
    gaps = (a.double() - b.double()).abs().nan_to_num(math.inf)
    at = [int(i) for i in torch.unravel_index(gaps.argmax(), gaps.shape)] if a.dim() else []
    share = int((gaps > 0).sum())
    return (
        f"largest at {at}: {a[tuple(at)].item():.6g} and {b[tuple(at)].item():.6g}; "
        f"{share} of {a.numel()} elements differ"
    )


# -- as text ---------------------------------------------------------------------------------------


def _as_text(comparison: Comparison) -> str:
    """Return a line for each form, then what was found and how it grows."""
    base = comparison.base
    rows = [("ranks", "steps", "first difference", "distance", "cause")]
    rows.append(_row(base, f"{base.ranks}, again"))
    rows += [_row(form, str(form.ranks)) for form in comparison.forms]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [f"{comparison.name}: {base.ranks} rank{'s' * (base.ranks > 1)} and others"]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {'  '.join(cells)}".rstrip())
    shown: set[str] = set()
    for result in (base, *comparison.forms):
        if result.cause.evidence in shown:
            continue
        shown.add(result.cause.evidence)
        lines += _differences(result, is_again=result is base)
    return "\n".join(lines)


def _row(result: FormResult, ranks: str) -> tuple[str, str, str, str, str]:
    first = result.first
    where = "none" if first is None else f"step {first.key.step}, {first.key}"
    distance = f"{first.distance:.2g}" if first is not None else "0" if result.is_equal else ""
    return ranks, str(result.steps), where, distance, result.cause.name


def _differences(result: FormResult, *, is_again: bool) -> list[str]:
    who = f"{result.ranks} rank{'s' * (result.ranks > 1)}{', again' * is_again}"
    lines = [f"{who}: {result.cause.name}", f"  found: {result.cause.evidence}"]
    if result.detail:
        lines.append(f"  {result.detail}")
    if not result.is_equal:
        for kind in ("loss", "parameter"):
            if kind in result.curves:
                lines.append(f"  {kind} by step: {_growth(result.curves[kind])}")
    if result.cause.hint:
        lines.append(f"  HINT: {result.cause.hint}")
    return lines


def _growth(curve: Sequence[float]) -> str:
    """Return a curve in a few numbers: at the beginning, in between, at the end."""
    count = min(_SHOWN, len(curve))
    places = sorted({round(i * (len(curve) - 1) / max(1, count - 1)) for i in range(count)})
    return ", ".join(f"{step}: {curve[step]:.1e}" for step in places)
