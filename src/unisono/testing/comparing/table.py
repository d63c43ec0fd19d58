"""A comparison as text: one line for each form, then what was found and how it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.testing.comparing import Comparison, FormResult

_SHOWN = 6
"""Number of steps of a growing difference that are shown."""


def as_text(comparison: Comparison) -> str:
    """Return the table of a comparison."""
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
