"""A partition as an image: blocks with their ranks, the points each rank borrows, bytes at seams.

Called by `draw(..., file=...)`. Needs matplotlib (extra `plot`), which is loaded when a picture is
made; no torch here.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import MissingExtra, PartitionError
from unisono.topology.decompose import flat_index
from unisono.topology.halo_plan import HaloPlan
from unisono.topology.scene import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
_INK, _FAINT, _PADDING = "#1f2937", "#6b7280", "#9ca3af"
_CELL = (2.5, 1.8)
"""Inches of a block, across and down."""
_RIM, _MARGIN, _WRAP_MARGIN = 0.07, 0.14, 0.3
"""In block sizes: what stands beyond the ends of the tensor, and the room around it, with words."""
_PANELS = 3
"""Grids beside each other, when more than two dims are split."""


def check_file(file: str | Path) -> Path:
    """Return the path of an image that can be written, or say what can."""
    path = Path(file)
    if path.suffix.lower() not in SUFFIXES:
        raise PartitionError.because(
            f"draw(..., file={str(file)!r})",
            f"pictures end in {', '.join(SUFFIXES)}",
            hint=f"file={path.stem + '.png'!r}",
        )
    return path


def save(picture: Picture, path: Path) -> None:
    """Write the image; its kind follows from the name.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra.of("plot", f"draw(..., file={path.name!r})", str(error)) from error

    places = list(product(*(range(picture.grid[dim]) for dim in picture.outer)))
    across = min(len(places), _PANELS)
    down = -(-len(places) // across)
    words = max(0.112 * len(picture.title), 0.068 * len(_footnote(picture)))
    width = max(across * (_CELL[0] * picture.size(picture.columns) + 0.9), 0.8 + words)
    height = down * (_CELL[1] * picture.size(picture.rows) + 0.9) + 1.0
    # A letter is a letter in an SVG, so that text can be found and copied.
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(width, height), facecolor="white")
        left = 0.55 / width
        figure.subplots_adjust(
            left=left, right=1 - 0.25 / width, top=1 - 1.04 / height, bottom=0.5 / height,
            wspace=0.22, hspace=0.34,
        )  # fmt: skip
        axes = figure.subplots(down, across, squeeze=False)
        for i, panel in enumerate(axes.flat):
            if i < len(places):
                _Panel(picture, dict(zip(picture.outer, places[i], strict=True)), panel).draw()
            else:
                panel.set_axis_off()
        figure.text(left, 1 - 0.34 / height, picture.title, size=12, weight="bold", color=_INK)
        figure.text(left, 0.16 / height, _footnote(picture), size=8, color=_FAINT)
        figure.savefig(path, dpi=150)


class _Panel:
    """One grid of blocks, in coordinates where every block is large enough for its text."""

    def __init__(self, picture: Picture, fixed: Mapping[int, int], axes: Axes) -> None:
        self.picture = picture
        self.fixed = fixed
        self.axes = axes
        self.x = self._edges(picture.columns)
        self.y = self._edges(picture.rows)

    def _edges(self, dim: int | None) -> list[float]:
        """Return where blocks begin and end: by their sizes, but none vanishes."""
        if dim is None:
            return [0.0, 1.0]
        if self.picture.cuts is None:
            return [float(i) for i in range(self.picture.grid[dim] + 1)]
        cuts = self.picture.cuts[dim]
        sizes = [b - a for a, b in pairwise(cuts)]
        least = 0.6 * max(1, sum(sizes)) / len(sizes)
        shown = [max(size, least) for size in sizes]
        return [0.0, *accumulate(size * len(sizes) / sum(shown) for size in shown)]

    def draw(self) -> None:
        """Draw blocks, then what they borrow, then words."""
        axes = self.axes
        aside, above = (
            _WRAP_MARGIN if self.picture.wraps(dim) else _MARGIN
            for dim in (self.picture.columns, self.picture.rows)
        )
        axes.set_xlim(-aside, self.x[-1] + aside)
        axes.set_ylim(self.y[-1] + above, -above)
        for side in axes.spines.values():
            side.set_visible(False)
        cells = [(r, c) for r in range(len(self.y) - 1) for c in range(len(self.x) - 1)]
        for row, column in cells:
            self._block(row, column)
        for row, column in cells:
            self._borrowed(row, column)
        for row, column in cells:
            self._words(row, column)
            self._seams(row, column)
        self._ruler()

    def _index(self, row: int, column: int) -> tuple[int, ...]:
        return self.picture.index(self.fixed, row, column)

    def _rank(self, index: Sequence[int]) -> int:
        return self.picture.ranks[flat_index(self.picture.grid, index)]

    def _box(self, row: int, column: int) -> tuple[float, float, float, float]:
        return self.x[column], self.y[row], self.x[column + 1], self.y[row + 1]

    def _block(self, row: int, column: int) -> None:
        from matplotlib.patches import Rectangle

        x0, y0, x1, y1 = self._box(row, column)
        fill, edge = _colours(flat_index(self.picture.grid, self._index(row, column)))
        self.axes.add_patch(
            Rectangle((x0, y0), x1 - x0, y1 - y0, facecolor=fill, edgecolor=edge, linewidth=1.4)
        )

    def _borrowed(self, row: int, column: int) -> None:
        """Draw what a rank reads outside of its block: others' points, and padding."""
        from matplotlib.patches import Rectangle

        if self.picture.plans is None:
            return
        index = self._index(row, column)
        plan = self.picture.plans[index]
        _, edge = _colours(flat_index(self.picture.grid, index))
        x0, y0, x1, y1 = self._box(row, column)
        left, right = self._reach(plan, self.picture.columns, self.x, column)
        up, down = self._reach(plan, self.picture.rows, self.y, row)
        if max(left, right, up, down) > 0 and 0 not in plan.output_shape:
            width, height = x1 - x0, y1 - y0
            tall = height + up + down
            strips = [
                (x0 - left, y0 - up, left, tall), (x1, y0 - up, right, tall),
                (x0, y0 - up, width, up), (x0, y1, width, down),
            ]  # fmt: skip
            for x, y, across, along in strips:
                tint = (*_rgb(edge), 0.16)
                self.axes.add_patch(Rectangle((x, y), across, along, facecolor=tint, linewidth=0))
            self.axes.add_patch(
                Rectangle(
                    (x0 - left, y0 - up), width + left + right, tall,
                    facecolor="none", edgecolor=edge, linewidth=1.0, linestyle=(0, (3, 2)),
                )
            )  # fmt: skip
        for dim, edges, place, is_row in (
            (self.picture.columns, self.x, column, False),
            (self.picture.rows, self.y, row, True),
        ):
            if dim is None:
                continue
            for side, width in enumerate(plan.fills[dim]):
                at_end = place == (0 if side == 0 else len(edges) - 2)
                if width and at_end:
                    self._rim(self._box(row, column), is_row, side, _PADDING)
            for side in (0, 1):
                self._wrapped(index, (row, column), dim, is_row, side)

    def _wrapped(
        self, index: tuple[int, ...], cell: tuple[int, int], dim: int, is_row: bool, side: int
    ) -> None:
        """Draw beyond an end of the tensor the points of its other end, and say whose they are."""
        pieces = self.picture.wrapped(index, dim, side)
        own, size = index[dim], self.picture.grid[dim]
        nearer = range(own) if side == 0 else range(own + 1, size)
        beside = ((*index[:dim], i, *index[dim + 1 :]) for i in nearer)
        if not pieces or any(self.picture.wrapped(other, dim, side) for other in beside):
            return  # with large paddings several ranks read there; the outermost is drawn
        end = 0 if side == 0 else size - 1
        row, column = (end, cell[1]) if is_row else (cell[0], end)
        owners = sorted({piece.owner for piece in pieces})
        x0, y0, x1, y1 = box = self._box(row, column)
        self._rim(box, is_row, side, _colours(owners[0])[1], is_solid=True)
        me = flat_index(self.picture.grid, index)
        sent = sum(piece.numel for piece in pieces if piece.owner != me) * self.picture.itemsize
        named = ", ".join(str(self.picture.ranks[owner]) for owner in owners)
        text = f"rank{'s' if len(owners) > 1 else ''} {named}"
        out = (_RIM + _WRAP_MARGIN) / 2
        x, y = (x0 - out if side == 0 else x1 + out), (y0 + y1) / 2
        if is_row:
            x, y = (x0 + x1) / 2, (y0 - out if side == 0 else y1 + out)
        self.axes.text(
            x, y, f"{text}: {_bytes(sent)}" if sent else text, size=7.5,
            color=_colours(owners[0])[1], ha="center", va="center", rotation=0 if is_row else 90,
        )  # fmt: skip

    def _reach(
        self, plan: HaloPlan, dim: int | None, edges: Sequence[float], place: int
    ) -> tuple[float, float]:
        """Return how far a window reaches over the block in one dim, in the drawing's units."""
        if dim is None or self.picture.cuts is None:
            return 0.0, 0.0
        cuts = self.picture.cuts[dim]
        found: list[float] = []
        for side, width in enumerate(plan.widths[dim]):
            if width <= 0:
                found.append(0.0)
                continue
            beside = place - 1 if side == 0 else place + 1
            points = cuts[beside + 1] - cuts[beside]
            room = edges[beside + 1] - edges[beside]
            share = width / points if points else 1.0
            # Thin halos would be invisible, and wide ones hide the neighbour.
            found.append(room * min(max(share, 0.07), 0.9))
        return found[0], found[1]

    def _rim(
        self, box: tuple[float, float, float, float], is_row: bool, side: int, colour: str,
        *, is_solid: bool = False,
    ) -> None:  # fmt: skip
        """Draw what stands beyond an end of the tensor: hatched, or in a rank's colour."""
        from matplotlib.patches import Rectangle

        x0, y0, x1, y1 = box
        if is_row:
            corner = (x0, y0 - _RIM if side == 0 else y1)
            size = (x1 - x0, _RIM)
        else:
            corner = (x0 - _RIM if side == 0 else x1, y0)
            size = (_RIM, y1 - y0)
        face = (*_rgb(colour), 0.45) if is_solid else "none"
        hatch = None if is_solid else "/////"
        self.axes.add_patch(
            Rectangle(corner, *size, facecolor=face, edgecolor=colour, hatch=hatch, linewidth=0.0)
        )

    def _words(self, row: int, column: int) -> None:
        index = self._index(row, column)
        x0, y0, x1, y1 = self._box(row, column)
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        lines = [(f"({', '.join(map(str, index))})", 8, _FAINT)]
        if self.picture.cuts is not None:
            sizes = [own[i + 1] - own[i] for own, i in zip(self.picture.cuts, index, strict=True)]
            lines.insert(0, (_sizes(sizes), 9, _INK))
        if self.picture.plans is not None:
            plan = self.picture.plans[index]
            widths = [
                f"{arrow} {plan.widths[dim][0]}/{plan.widths[dim][1]}"
                for dim, arrow in ((self.picture.rows, "\u2195"), (self.picture.columns, "\u2194"))
                if dim is not None
            ]
            lines.append((f"halo {'  '.join(widths)}", 8, _INK))
            sent = sum(message.numel for message in plan.sends) * self.picture.itemsize
            lines.append((f"sends {_bytes(sent)}", 8, _FAINT))
        top = y - (0.04 + 0.125 * len(lines)) / 2
        fill, edge = _colours(flat_index(self.picture.grid, index))
        # Lines of halos may run below the text.
        plate = {"facecolor": fill, "edgecolor": "none", "alpha": 0.75, "pad": 1.2}
        self.axes.text(
            x, top, f"rank {self._rank(index)}", size=12, weight="bold", color=edge,
            ha="center", va="center", bbox=plate,
        )  # fmt: skip
        for i, (text, size, colour) in enumerate(lines):
            self.axes.text(
                x, top + 0.04 + 0.125 * (i + 1), text, size=size, color=colour,
                ha="center", va="center", bbox=plate,
            )  # fmt: skip

    def _seams(self, row: int, column: int) -> None:
        """Write on the seams to the right and below how many bytes cross them, both ways."""
        for to, (x, y) in (
            ((row, column + 1), (self.x[column + 1], (self.y[row] + self.y[row + 1]) / 2)),
            ((row + 1, column), ((self.x[column] + self.x[column + 1]) / 2, self.y[row + 1])),
        ):
            if to[0] >= len(self.y) - 1 or to[1] >= len(self.x) - 1:
                continue
            dim = self.picture.columns if to[0] == row else self.picture.rows
            crossing = self.picture.between(self._index(row, column), self._index(*to), dim)
            if crossing:
                self.axes.text(
                    x, y, f"\u21c4 {_bytes(crossing)}" if to[0] == row else _bytes(crossing),
                    size=7.5, color=_INK, ha="center", va="center",
                    bbox={"boxstyle": "round,pad=0.25", "facecolor": "white",
                          "edgecolor": "#d1d5db", "linewidth": 0.8},
                )  # fmt: skip

    def _ruler(self) -> None:
        """Name the dims, and number their cuts."""
        axes, picture = self.axes, self.picture
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.tick_params(length=0, labelsize=8, labelcolor=_FAINT, pad=1)
        for dim, edges, ticks, name in (
            (picture.columns, self.x, axes.set_xticks, axes.set_xlabel),
            (picture.rows, self.y, axes.set_yticks, axes.set_ylabel),
        ):
            if dim is None or picture.cuts is None:
                ticks([])
            else:
                ticks(edges, [str(cut) for cut in picture.cuts[dim]])
            if dim is not None:
                name(f"dim {dim}", fontsize=9, color=_INK)
        where = [f"dim {dim} = {i}" for dim, i in self.fixed.items() if picture.grid[dim] > 1]
        if where:
            axes.set_title(", ".join(where), fontsize=9, color=_INK, loc="left", pad=16)


def _footnote(picture: Picture) -> str:
    if picture.plans is None:
        return ""
    plans = picture.plans.values()
    sent = sum(message.numel for plan in plans for message in plan.sends) * picture.itemsize
    messages = sum(len(plan.sends) for plan in plans)
    if not messages:
        return "no messages"
    words = f"{messages} messages, {_bytes(sent)} in all; dashed: the points each rank reads"
    words += "; hatched: padding" if any(plan.has_fill for plan in plans) else ""
    around = picture.wraps(picture.rows) or picture.wraps(picture.columns)
    return words + ("; coloured rims: points of the other end" if around else "")


def _colours(place: int) -> tuple[str, str]:
    """Return the colours of a block and of its edge: a light and a dark tone of one hue."""
    hue = (0.58 + place * (math.sqrt(5) - 1) / 2) % 1.0
    return _hex(colorsys.hls_to_rgb(hue, 0.93, 0.62)), _hex(colorsys.hls_to_rgb(hue, 0.38, 0.52))


def _hex(rgb: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _sizes(values: Sequence[int]) -> str:
    return " \u00d7 ".join(map(str, values))


def _bytes(count: int) -> str:
    """Return a number of bytes as people write it.

    >>> _bytes(120), _bytes(2048), _bytes(5 << 20)
    ('120 B', '2 KB', '5 MB')
    """
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
