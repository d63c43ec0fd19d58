"""A comparison as a page: the difference by step, and the modules coloured by their first one."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.testing.comparing import Comparison, FormResult

_WIDTH, _HEIGHT, _MARGIN = 640, 240, 48
_COLOURS = {
    "loss": "#c2410c",
    "gradient": "#1d4ed8",
    "parameter": "#047857",
    "buffer": "#7c3aed",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{style}
.tree {{ font-family: ui-monospace, monospace; line-height: 1.7 }}
.tree span {{ padding: 0 .4em; border-radius: 3px }}
</style></head><body><main>
<h1>{title}</h1>
<pre>{text}</pre>
{parts}
</main></body></html>
"""


def page_of(comparison: Comparison) -> str:
    """Return the page, complete in itself."""
    style = resources.files("unisono.train.recording").joinpath("assets", "style.css")
    parts = "\n".join(_part(form) for form in comparison.forms)
    return _PAGE.format(
        title=html.escape(f"{comparison.name}, compared"),
        style=style.read_text(encoding="utf-8"),
        text=html.escape(str(comparison)),
        parts=parts,
    )


def _part(form: FormResult) -> str:
    lines = [f"<h2>{form.ranks} ranks: {html.escape(form.cause.name)}</h2>"]
    if form.curves:
        lines.append(curves(form.curves))
    if form.modules:
        lines.append(tree(form.modules, form.steps))
    return "\n".join(lines)


def curves(values: Mapping[str, Sequence[float]]) -> str:
    """Return a picture of distances by step, on a logarithmic scale."""
    positive = [x for curve in values.values() for x in curve if 0 < x < math.inf]
    if not positive:
        return ""
    low = math.floor(math.log10(min(positive)))
    high = max(low + 1, math.ceil(math.log10(max(positive))))
    steps = max(len(curve) for curve in values.values())

    def x_of(step: int) -> float:
        return _MARGIN + (_WIDTH - 2 * _MARGIN) * step / max(1, steps - 1)

    def y_of(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * share

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">']
    parts.append("<title>relative difference by step</title>")
    for exponent in {low, (low + high) // 2, high}:
        y = y_of(10.0**exponent)
        parts.append(
            f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#8884"/><text x="4" y="{y + 4:.1f}" font-size="11" fill="currentColor">'
            f"1e{exponent}</text>"
        )
    for place, (kind, curve) in enumerate(values.items()):
        colour = _COLOURS.get(kind, "#555")
        points = [(x_of(s), y_of(v)) for s, v in enumerate(curve) if 0 < v < math.inf]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
        at = _MARGIN + 110 * place
        parts.append(f'<text x="{at}" y="16" font-size="12" fill="{colour}">{kind}</text>')
    parts.append(
        f'<text x="{_MARGIN}" y="{_HEIGHT - 8}" font-size="11" fill="currentColor">step 0 to '
        f"{steps - 1}; relative difference from the first form</text></svg>"
    )
    return "".join(parts)


def tree(modules: Mapping[str, tuple[str, int | None]], steps: int) -> str:
    """Return the modules as a tree; the earlier a result differs, the redder it is."""
    lines = ['<div class="tree">']
    for name, (kind, step) in sorted(modules.items(), key=lambda item: item[0].split(".")):
        depth = 0 if not name else 1 + name.count(".")
        colour, said = "#0a03", "equal up to rounding"
        if step is not None:
            strength = 0.85 - 0.55 * step / max(1, steps - 1)
            colour, said = f"rgba(220, 38, 38, {strength:.2f})", f"differs from step {step} on"
        label = html.escape(f"{name or 'model'} ({kind})")
        lines.append(
            f'<div style="margin-left: {2 * depth}em"><span style="background: {colour}" '
            f'title="{said}">{label}</span> {said}</div>'
        )
    return "\n".join([*lines, "</div>"])
