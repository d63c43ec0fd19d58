"""A picture of a partition: who holds which block, and who sends how much to whom.

Plain text, and an image where a file is named. Everything is computed from shapes, so a layout can
be looked at before any process is started. No torch here; matplotlib (extra `plot`) is loaded when
an image is made.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import MissingExtra, PartitionError
from unisono.topology import halo as halos
from unisono.topology.decompose import flat_index, grid_index, split_cuts
from unisono.topology.fanout import Layout
from unisono.topology.halo import HaloPlan, Message, Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

SUFFIXES = (".png", ".svg", ".pdf")
_TIMES = " \u00d7 "
_INK, _FAINT, _PADDING = "#1f2937", "#6b7280", "#9ca3af"
Colour = tuple[float, float, float]
_CELL = (2.5, 1.8)
"""Inches of a block, across and down."""
_RIM, _MARGIN, _WRAP_MARGIN = 0.07, 0.14, 0.3
"""In block sizes: what stands beyond the ends of the tensor, and the room around it, with words."""
_PANELS = 3
"""Grids beside each other, when more than two dims are split."""


def draw(
    partition: Layout,
    global_shape: Sequence[int] | None = None,
    halo: Mapping[str, Any] | Sequence[tuple[int, int]] | None = None,
    *,
    itemsize: int = 4,
    file: str | Path | None = None,
) -> str:
    """Return a picture of a partition as text; with `file`, write it as an image too.

    The last two dims that are split make the rows and columns of a grid; for every index of the
    other dims there is one grid. Each cell shows rank, index and, if known, block and halo widths
    (points needed left/right of the block; negative: own points not needed; "wraps": points that
    a circular padding takes from the other end). A list of messages with their bytes follows.

    Args:
        partition: a `Partition`, a `Mesh`, or anything with `shape` and `ranks`.
        global_shape: shape of the whole tensor, cut into balanced blocks.
        halo: arguments of `halo.plan` after the index, such as `{"kernel_size": (3, 3)}`, or
            `(left, right)` widths for the last dims. Needs `global_shape`.
        itemsize: bytes of one element.
        file: name of an image to write: .png, .svg or .pdf. Needs matplotlib
            (`pip install "unisono[plot]"`).
    """
    path = None if file is None else Path(file)
    if path is not None and path.suffix.lower() not in SUFFIXES:
        raise PartitionError.because(
            f"draw(..., file={str(file)!r})",
            f"pictures end in {', '.join(SUFFIXES)}",
            hint=f"file={path.stem + '.png'!r}",
        )
    if halo is not None and global_shape is None:
        raise PartitionError.because(
            "draw(partition, halo=...)",
            "no global_shape",
            hint="draw(partition, global_shape, halo=...): halos depend on the sizes",
        )
    grid = tuple(partition.shape)
    if global_shape is not None and len(global_shape) != len(grid):
        raise PartitionError.because(
            f"draw with global_shape {list(global_shape)}",
            f"a partition of shape {list(grid)}",
            f"{len(global_shape)} dims != {len(grid)} dims",
            "partition and tensor of equal length; write 1 where a dim is not split",
        )
    title, cuts, plans = f"partition {_sizes(grid)}", None, None
    if global_shape is not None:
        title += f" of a tensor {_sizes(global_shape)}"
        cuts = tuple(split_cuts(n, parts) for n, parts in zip(global_shape, grid, strict=True))
        if halo is not None:
            plans = {
                index: halos.plan(cuts, index, **halo)
                if isinstance(halo, Mapping)
                else halos.plan_widths(cuts, index, list(halo))
                for index in product(*map(range, grid))
            }
    picture = Picture(
        title, grid, tuple(partition.ranks), cuts, plans, *_arrange(grid), itemsize=itemsize
    )
    if path is not None:
        _save(picture, path)
    lines = [title]
    width = max(len(line) for i in product(*map(range, grid)) for line in _cell(picture, i)) + 2
    for fixed in picture.panels():
        lines += [picture.where(fixed)] if picture.where(fixed) else []
        lines += _table(picture, fixed, width)
    return "\n".join(lines if plans is None else lines + _traffic(picture, plans))


def _sizes(values: Sequence[int], times: str = " x ") -> str:
    return times.join(map(str, values))


def _arrange(grid: Sequence[int]) -> tuple[int | None, int | None, tuple[int, ...]]:
    """Return the dims drawn as rows and as columns, and the others."""
    split = [dim for dim, size in enumerate(grid) if size > 1]
    column = split[-1] if split else (len(grid) - 1 if grid else None)
    row = split[-2] if len(split) > 1 else None
    if len(split) == 1 and len(grid) > 1 and column != len(grid) - 1:
        row, column = column, None
    return row, column, tuple(dim for dim in range(len(grid)) if dim not in (row, column))


def _cell(picture: Picture, index: tuple[int, ...]) -> list[str]:
    """Return the lines of one block."""
    text = [f"rank {picture.rank(index)}", f"({', '.join(map(str, index))})"]
    if picture.cuts is not None:
        text.append(_sizes(picture.block(index)))
    if picture.plans is not None:
        plan, plans = picture.plans[index], picture.plans.values()
        for dim in range(len(picture.grid)):
            if any(any(p.widths[dim]) for p in plans):
                text.append("halo dim {}: {}/{}".format(dim, *plan.widths[dim]))
        for dim in range(len(picture.grid)):
            if picture.wraps(dim):
                text.append("wraps dim {}: {}/{}".format(dim, *plan.wraps[dim]))
    return text


def _table(picture: Picture, fixed: Mapping[int, int], width: int) -> list[str]:
    """Return the lines of one grid of cells."""
    columns = range(picture.size(picture.columns))
    rule = "+" + "+".join("-" * width for _ in columns) + "+"
    lines = [rule]
    for row in range(picture.size(picture.rows)):
        texts = [_cell(picture, picture.index(fixed, row, column)) for column in columns]
        for parts in zip(*texts, strict=True):
            lines.append("|" + "|".join(part.center(width) for part in parts) + "|")
        lines.append(rule)
    return lines


def _traffic(picture: Picture, plans: Mapping[tuple[int, ...], HaloPlan]) -> list[str]:
    """Return one line for each rank that sends something."""
    lines: list[str] = []
    readers = list(plans.values())  # row-major, so that a rank is its place
    for plan in readers:
        if plan.sends:
            sent = ", ".join(
                f"{message.numel * picture.itemsize} bytes to {picture.ranks[message.peer]}"
                + _round(message, readers[message.peer], picture.itemsize)
                for message in plan.sends
            )
            lines.append(f"rank {picture.ranks[plan.rank]} sends {sent}")
    return lines or ["no messages"]


def _round(message: Message, reader: HaloPlan, itemsize: int) -> str:
    """Return how much of a message goes round an end of the tensor."""
    count = sum(
        piece.numel
        for piece in message.pieces
        if any(reader.is_wrapped(piece, dim) for dim in range(len(piece.dest)))
    )
    if not count:
        return ""
    return " (wraps)" if count == message.numel else f" ({count * itemsize} of them wrap)"


@dataclass(frozen=True)
class Picture:
    """What is drawn, all of it computed before."""

    title: str
    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...] | None
    plans: Mapping[tuple[int, ...], HaloPlan] | None
    rows: int | None
    """Dim that runs down; None: one row."""
    columns: int | None
    """Dim that runs across; None: one column."""
    outer: tuple[int, ...]
    """Dims that make one grid for each of their indices."""
    itemsize: int

    def rank(self, index: Sequence[int]) -> int:
        """Return the rank at an index."""
        return self.ranks[flat_index(self.grid, index)]

    def block(self, index: Sequence[int]) -> list[int]:
        """Return the sizes of a block."""
        return [own[i + 1] - own[i] for own, i in zip(self.cuts or (), index, strict=True)]

    def panels(self) -> list[dict[int, int]]:
        """Return where the outer dims stand in each grid of blocks."""
        places = product(*(range(self.grid[dim]) for dim in self.outer))
        return [dict(zip(self.outer, place, strict=True)) for place in places]

    def where(self, fixed: Mapping[int, int]) -> str:
        """Return the same in words; nothing where there is one grid."""
        return ", ".join(f"dim {dim} = {i}" for dim, i in fixed.items() if self.grid[dim] > 1)

    def size(self, dim: int | None) -> int:
        """Return how many ranks a drawn dim has."""
        return 1 if dim is None else self.grid[dim]

    def index(self, fixed: Mapping[int, int], row: int, column: int) -> tuple[int, ...]:
        """Return the index of a cell of the grid at `fixed` of the outer dims."""
        places = dict(fixed)
        if self.rows is not None:
            places[self.rows] = row
        if self.columns is not None:
            places[self.columns] = column
        return tuple(places[dim] for dim in range(len(self.grid)))

    def between(self, a: tuple[int, ...], b: tuple[int, ...], dim: int | None) -> int:
        """Return the bytes between neighbours in a dim, but for those that go round its ends."""
        if self.plans is None or dim is None:
            return 0
        total = 0
        for mine, other in ((a, b), (b, a)):
            reader = self.plans[other]
            for message in self.plans[mine].sends:
                if message.peer == reader.rank:
                    straight = (p for p in message.pieces if not reader.is_wrapped(p, dim))
                    total += sum(piece.numel for piece in straight)
        return total * self.itemsize

    def wraps(self, dim: int | None) -> bool:
        """Return whether some window goes round the ends of a drawn dim."""
        if dim is None or self.plans is None:
            return False
        return any(plan.wraps and any(plan.wraps[dim]) for plan in self.plans.values())

    def wrapped(self, index: tuple[int, ...], dim: int, side: int) -> list[Piece]:
        """Return what the rank at `index` reads round the left or right end of `dim`.

        Only what comes straight across: from ranks that differ in this dim alone.
        """
        plan = None if self.plans is None else self.plans[index]
        if plan is None or not plan.wraps or not plan.wraps[dim][side]:
            return []
        pieces = [*plan.local, *(piece for message in plan.recvs for piece in message.pieces)]
        others = [d for d in range(len(index)) if d != dim]
        found: list[Piece] = []
        for piece in pieces:
            owner = grid_index(self.grid, piece.owner)
            is_left = piece.dest[dim][1] <= plan.wraps[dim][0]
            is_straight = all(
                owner[d] == index[d] and not plan.is_wrapped(piece, d) for d in others
            )
            if plan.is_wrapped(piece, dim) and is_left == (side == 0) and is_straight:
                found.append(piece)
        return found


def _save(picture: Picture, path: Path) -> None:
    """Write the image; its kind follows from the name."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra.of("plot", f"draw(..., file={path.name!r})", str(error)) from error

    title = picture.title.replace(" x ", _TIMES).capitalize()
    panels = picture.panels()
    across = min(len(panels), _PANELS)
    down = -(-len(panels) // across)
    words = max(0.112 * len(title), 0.068 * len(_footnote(picture)))
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
        for panel in axes.flat[len(panels) :]:
            panel.set_axis_off()
        for fixed, panel in zip(panels, axes.flat, strict=False):
            _Panel(picture, fixed, panel).draw()
        figure.text(left, 1 - 0.34 / height, title, size=12, weight="bold", color=_INK)
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
                tint = (*edge, 0.16)
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
                    self._rim(self._box(row, column), is_row, side, None)
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
        colour = _colours(owners[0])[1]
        self._rim(box, is_row, side, colour)
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
            color=colour, ha="center", va="center", rotation=0 if is_row else 90,
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
        self, box: tuple[float, float, float, float], is_row: bool, side: int, colour: Colour | None
    ) -> None:
        """Draw what stands beyond an end of the tensor: a rank's colour, or hatched as padding."""
        from matplotlib.patches import Rectangle

        x0, y0, x1, y1 = box
        if is_row:
            corner = (x0, y0 - _RIM if side == 0 else y1)
            size = (x1 - x0, _RIM)
        else:
            corner = (x0 - _RIM if side == 0 else x1, y0)
            size = (_RIM, y1 - y0)
        look: dict[str, Any] = {"facecolor": "none", "edgecolor": _PADDING, "hatch": "/////"}
        if colour is not None:
            look = {"facecolor": (*colour, 0.45)}
        self.axes.add_patch(Rectangle(corner, *size, linewidth=0.0, **look))

    def _words(self, row: int, column: int) -> None:
        index = self._index(row, column)
        x0, y0, x1, y1 = self._box(row, column)
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        lines = [(f"({', '.join(map(str, index))})", 8, _FAINT)]
        if self.picture.cuts is not None:
            lines.insert(0, (_sizes(self.picture.block(index), _TIMES), 9, _INK))
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
            x, top, f"rank {self.picture.rank(index)}", size=12, weight="bold", color=edge,
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
        if where := picture.where(self.fixed):
            axes.set_title(where, fontsize=9, color=_INK, loc="left", pad=16)


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


def _colours(place: int) -> tuple[Colour, Colour]:
    """Return the colours of a block and of its edge: a light and a dark tone of one hue."""
    hue = (0.58 + place * (math.sqrt(5) - 1) / 2) % 1.0
    return colorsys.hls_to_rgb(hue, 0.93, 0.62), colorsys.hls_to_rgb(hue, 0.38, 0.52)


def _bytes(count: int) -> str:
    """Return a number of bytes as people write it.

    >>> _bytes(120), _bytes(2048), _bytes(5 << 20)
    ('120 B', '2 KB', '5 MB')
    """
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
