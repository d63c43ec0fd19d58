"""A picture of a partition: who holds which block, and who sends how much to whom.

Plain text, and an image where a file is named. Everything is computed from shapes, so a layout can
be looked at before any process is started. No torch here; matplotlib (extra `plot`) is loaded when
an image is made.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Mapping, Sequence
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


SUFFIXES = (".png", ".svg", ".pdf")
_TIMES = " \u00d7 "
_INK, _FAINT, _PADDING = "#1f2937", "#6b7280", "#9ca3af"
Colour = tuple[float, float, float]
Cell = tuple[int, int]
Index = tuple[int, ...]
_CELL = (2.5, 1.8)
"""Inches of a block, across and down."""
_RIM, _MARGIN, _WRAP_MARGIN = 0.07, 0.14, 0.3
"""In block sizes: what stands beyond the ends of the tensor, and the room around it, with words."""
_ACROSS, _DOWN = 0, 1
"""The two axes of a grid of blocks; a cell is its places along them."""
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
    picture = Picture(title, grid, tuple(partition.ranks), cuts, plans, _arrange(grid), itemsize)
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


def _arrange(grid: Sequence[int]) -> tuple[int | None, int | None]:
    """Return the dims drawn across and down."""
    split = [dim for dim, size in enumerate(grid) if size > 1]
    across = split[-1] if split else (len(grid) - 1 if grid else None)
    down = split[-2] if len(split) > 1 else None
    if len(split) == 1 and across != len(grid) - 1:
        across, down = None, across
    return across, down


@dataclass(frozen=True)
class Picture:
    """What is drawn, all of it computed before."""

    title: str
    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...] | None
    plans: Mapping[Index, HaloPlan] | None
    dims: tuple[int | None, int | None]
    """Those that run across and down; None: one column, one row."""
    itemsize: int

    def block(self, index: Index) -> list[int]:
        """Return the sizes of a block."""
        return [own[i + 1] - own[i] for own, i in zip(self.cuts or (), index, strict=True)]

    def panels(self) -> list[dict[int, int]]:
        """Return where the dims that are not drawn stand in each grid of blocks."""
        outer = [dim for dim in range(len(self.grid)) if dim not in self.dims]
        places = product(*(range(self.grid[dim]) for dim in outer))
        return [dict(zip(outer, place, strict=True)) for place in places]

    def where(self, fixed: Mapping[int, int]) -> str:
        """Return the same in words; nothing where there is one grid."""
        return ", ".join(f"dim {dim} = {i}" for dim, i in fixed.items() if self.grid[dim] > 1)

    def size(self, axis: int) -> int:
        """Return how many blocks there are along an axis."""
        dim = self.dims[axis]
        return 1 if dim is None else self.grid[dim]

    def index(self, fixed: Mapping[int, int], cell: Cell) -> Index:
        """Return the index of a cell of the grid at `fixed` of the other dims."""
        places = {**fixed, **dict(zip(self.dims, cell, strict=True))}
        return tuple(places[dim] for dim in range(len(self.grid)))

    def bytes_of(self, pieces: Iterable[Piece | Message]) -> int:
        """Return the bytes that travel."""
        return sum(piece.numel for piece in pieces) * self.itemsize

    def between(self, a: Index, b: Index, dim: int) -> int:
        """Return the bytes between neighbours in a dim, but for those that go round its ends."""
        if self.plans is None:
            return 0
        total = 0
        for mine, other in ((a, b), (b, a)):
            reader = self.plans[other]
            for message in self.plans[mine].sends:
                if message.peer == reader.rank:
                    total += self.bytes_of(
                        piece for piece in message.pieces if not reader.is_wrapped(piece, dim)
                    )
        return total

    def wraps(self, dim: int | None) -> bool:
        """Return whether some window goes round the ends of a drawn dim."""
        if dim is None or self.plans is None:
            return False
        return any(plan.wraps and any(plan.wraps[dim]) for plan in self.plans.values())

    def wrapped(self, index: Index, dim: int, side: int) -> list[Piece]:
        """Return what the rank at `index` reads round the left or right end of `dim`.

        Only what comes straight across: from ranks that differ in this dim alone.
        """
        plan = None if self.plans is None else self.plans[index]
        if plan is None or not plan.wraps or not plan.wraps[dim][side]:
            return []
        found: list[Piece] = []
        for piece in [*plan.local, *(piece for message in plan.recvs for piece in message.pieces)]:
            owner = grid_index(self.grid, piece.owner)
            is_left = piece.dest[dim][1] <= plan.wraps[dim][0]
            is_straight = all(
                owner[d] == i and not plan.is_wrapped(piece, d)
                for d, i in enumerate(index)
                if d != dim
            )
            if plan.is_wrapped(piece, dim) and is_left == (side == 0) and is_straight:
                found.append(piece)
        return found


# -- text -----------------------------------------------------------------------------------------


def _cell(picture: Picture, index: Index) -> list[str]:
    """Return the lines of one block."""
    rank = picture.ranks[flat_index(picture.grid, index)]
    text = [f"rank {rank}", f"({', '.join(map(str, index))})"]
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
    columns = range(picture.size(_ACROSS))
    rule = "+" + "+".join("-" * width for _ in columns) + "+"
    lines = [rule]
    for row in range(picture.size(_DOWN)):
        texts = [_cell(picture, picture.index(fixed, (column, row))) for column in columns]
        for parts in zip(*texts, strict=True):
            lines.append("|" + "|".join(part.center(width) for part in parts) + "|")
        lines.append(rule)
    return lines


def _traffic(picture: Picture, plans: Mapping[Index, HaloPlan]) -> list[str]:
    """Return one line for each rank that sends something."""
    lines: list[str] = []
    readers = list(plans.values())  # row-major, so that a rank is its place
    for plan in readers:
        if plan.sends:
            sent = ", ".join(
                f"{picture.bytes_of([message])} bytes to {picture.ranks[message.peer]}"
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


# -- image ----------------------------------------------------------------------------------------


def _save(picture: Picture, path: Path) -> None:
    """Write the image; its kind follows from the name."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra.of("plot", f"draw(..., file={path.name!r})", str(error)) from error

    title, note = picture.title.replace(" x ", _TIMES).capitalize(), _footnote(picture)
    panels = picture.panels()
    across = min(len(panels), _PANELS)
    down = -(-len(panels) // across)
    words = max(0.112 * len(title), 0.068 * len(note))
    width = max(across * (_CELL[0] * picture.size(_ACROSS) + 0.9), 0.8 + words)
    height = down * (_CELL[1] * picture.size(_DOWN) + 0.9) + 1.0
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
        figure.text(left, 0.16 / height, note, size=8, color=_FAINT)
        figure.savefig(path, dpi=150)


class _Panel:
    """One grid of blocks, in coordinates where every block is large enough for its text."""

    def __init__(self, picture: Picture, fixed: Mapping[int, int], axes: Axes) -> None:
        self.picture = picture
        self.fixed = fixed
        self.axes = axes
        self.edges = [self._edges_along(axis) for axis in (_ACROSS, _DOWN)]

    def _edges_along(self, axis: int) -> list[float]:
        """Return where blocks begin and end: by their sizes, but none vanishes."""
        dim = self.picture.dims[axis]
        if dim is None or self.picture.cuts is None:
            return [float(i) for i in range(self.picture.size(axis) + 1)]
        sizes = [b - a for a, b in pairwise(self.picture.cuts[dim])]
        least = 0.6 * max(1, sum(sizes)) / len(sizes)
        shown = [max(size, least) for size in sizes]
        return [0.0, *accumulate(size * len(sizes) / sum(shown) for size in shown)]

    def draw(self) -> None:
        """Draw blocks, then what they borrow, then words."""
        axes, picture = self.axes, self.picture
        aside, above = (_WRAP_MARGIN if picture.wraps(dim) else _MARGIN for dim in picture.dims)
        axes.set_xlim(-aside, self.edges[_ACROSS][-1] + aside)
        axes.set_ylim(self.edges[_DOWN][-1] + above, -above)
        for side in axes.spines.values():
            side.set_visible(False)
        cells = [(c, r) for r in range(picture.size(_DOWN)) for c in range(picture.size(_ACROSS))]
        for cell in cells:
            fill, edge = self._colours(cell)
            self._rectangle(*self._box(cell), facecolor=fill, edgecolor=edge, linewidth=1.4)
        for cell in cells:
            self._borrowed(cell)
        for axis, dim in enumerate(picture.dims):
            if dim is not None:
                self._ends(axis, dim)
        for cell in cells:
            self._words(cell)
            self._seams(cell)
        self._ruler()

    def _index(self, cell: Cell) -> Index:
        return self.picture.index(self.fixed, cell)

    def _colours(self, cell: Cell) -> tuple[Colour, Colour]:
        return _colours(flat_index(self.picture.grid, self._index(cell)))

    def _box(self, cell: Cell) -> tuple[list[float], list[float]]:
        """Return the upper left and the lower right corner of a block."""
        pairs = list(zip(self.edges, cell, strict=True))
        return [edges[i] for edges, i in pairs], [edges[i + 1] for edges, i in pairs]

    def _rectangle(self, low: Sequence[float], high: Sequence[float], **look: Any) -> None:
        from matplotlib.patches import Rectangle

        size = (high[_ACROSS] - low[_ACROSS], high[_DOWN] - low[_DOWN])
        self.axes.add_patch(Rectangle((low[_ACROSS], low[_DOWN]), *size, **look))

    def _text(self, at: Sequence[float], text: str, **look: Any) -> None:
        self.axes.text(at[_ACROSS], at[_DOWN], text, ha="center", va="center", **look)

    def _borrowed(self, cell: Cell) -> None:
        """Frame the points that a rank reads, where they go beyond its block."""
        plan = None if self.picture.plans is None else self.picture.plans[self._index(cell)]
        if plan is None or self.picture.cuts is None or 0 in plan.output_shape:
            return
        low, high = self._box(cell)
        before = [*low, *high]
        for axis, dim in enumerate(self.picture.dims):
            if dim is None:
                continue
            for side, width in enumerate(plan.widths[dim]):
                if width <= 0:
                    continue
                beside = cell[axis] + (1 if side else -1)
                points = self.picture.cuts[dim][beside + 1] - self.picture.cuts[dim][beside]
                room = self.edges[axis][beside + 1] - self.edges[axis][beside]
                # Thin halos would be invisible, and wide ones hide the neighbour.
                reach = room * min(max(width / points if points else 1.0, 0.07), 0.9)
                if side:
                    high[axis] += reach
                else:
                    low[axis] -= reach
        if [*low, *high] != before:
            edge = self._colours(cell)[1]
            self._rectangle(low, high, facecolor=(*edge, 0.1), linewidth=0)
            dashed: dict[str, Any] = {"linewidth": 1.0, "linestyle": (0, (3, 2))}
            self._rectangle(low, high, facecolor="none", edgecolor=edge, **dashed)

    def _ends(self, axis: int, dim: int) -> None:
        """Draw what stands beyond the ends of a dim: padding, or the points of its other end."""
        picture, plans = self.picture, self.picture.plans
        for line, side in product(range(picture.size(1 - axis)), (0, 1)):
            places = range(picture.size(axis))
            cells = [(i, line) if axis == _ACROSS else (line, i) for i in places]
            cells = cells[::-1] if side else cells  # the outermost first
            if plans is None:
                continue
            low, high = self._box(cells[0])
            at = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
            low[axis], high[axis] = (
                (high[axis], high[axis] + _RIM) if side else (low[axis] - _RIM, low[axis])
            )
            if plans[self._index(cells[0])].fills[dim][side]:
                hatched = {"facecolor": "none", "edgecolor": _PADDING, "hatch": "/////"}
                self._rectangle(low, high, linewidth=0.0, **hatched)
            # With large paddings several ranks read there; the outermost is drawn.
            for index in map(self._index, cells):
                pieces = picture.wrapped(index, dim, side)
                if pieces:
                    break
            else:
                continue
            owners = sorted({piece.owner for piece in pieces})
            colour = _colours(owners[0])[1]
            self._rectangle(low, high, linewidth=0.0, facecolor=(*colour, 0.45))
            me = flat_index(picture.grid, index)
            sent = picture.bytes_of(piece for piece in pieces if piece.owner != me)
            named = ", ".join(str(picture.ranks[owner]) for owner in owners)
            text = f"rank{'s' if len(owners) > 1 else ''} {named}"
            text = f"{text}: {_bytes(sent)}" if sent else text
            apart = (_WRAP_MARGIN - _RIM) / 2
            at[axis] = high[axis] + apart if side else low[axis] - apart
            turned = 90 if axis == _ACROSS else 0
            self._text(at, text, size=7.5, color=colour, rotation=turned)

    def _words(self, cell: Cell) -> None:
        index, picture = self._index(cell), self.picture
        rank = picture.ranks[flat_index(picture.grid, index)]
        (x0, y0), (x1, y1) = self._box(cell)
        fill, edge = self._colours(cell)
        lines: list[tuple[str, dict[str, Any]]] = []
        if picture.cuts is not None:
            sizes = _sizes(picture.block(index), _TIMES)
            lines.append((sizes, {"size": 9, "color": _INK}))
        lines.append((f"({', '.join(map(str, index))})", {"size": 8, "color": _FAINT}))
        if picture.plans is not None:
            plan = picture.plans[index]
            widths = [
                "{} {}/{}".format(arrow, *plan.widths[dim])
                for dim, arrow in zip(reversed(picture.dims), "\u2195\u2194", strict=True)
                if dim is not None
            ]
            lines.append((f"halo {'  '.join(widths)}", {"size": 8, "color": _INK}))
            sent = f"sends {_bytes(picture.bytes_of(plan.sends))}"
            lines.append((sent, {"size": 8, "color": _FAINT}))
        x, top = (x0 + x1) / 2, (y0 + y1) / 2 - (0.04 + 0.125 * len(lines)) / 2
        # Lines of halos may run below the text.
        plate = {"facecolor": fill, "edgecolor": "none", "alpha": 0.75, "pad": 1.2}
        self._text((x, top), f"rank {rank}", size=12, weight="bold", color=edge, bbox=plate)
        for i, (text, look) in enumerate(lines, 1):
            self._text((x, top + 0.04 + 0.125 * i), text, bbox=plate, **look)

    def _seams(self, cell: Cell) -> None:
        """Write on the seams to the right and below how many bytes cross them, both ways."""
        plate = {"facecolor": "white", "edgecolor": "#d1d5db", "linewidth": 0.8}
        for axis, dim in enumerate(self.picture.dims):
            beside = (cell[0] + (axis == _ACROSS), cell[1] + (axis == _DOWN))
            if dim is None or beside[axis] >= self.picture.size(axis):
                continue
            crossing = self.picture.between(self._index(cell), self._index(beside), dim)
            if crossing:
                low, high = self._box(cell)
                at = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
                at[axis] = high[axis]
                text = f"\u21c4 {_bytes(crossing)}" if axis == _ACROSS else _bytes(crossing)
                box = {"boxstyle": "round,pad=0.25", **plate}
                self._text(at, text, size=7.5, color=_INK, bbox=box)

    def _ruler(self) -> None:
        """Name the dims, and number their cuts."""
        axes, picture = self.axes, self.picture
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.tick_params(length=0, labelsize=8, labelcolor=_FAINT, pad=1)
        setters = (axes.set_xticks, axes.set_xlabel), (axes.set_yticks, axes.set_ylabel)
        for dim, edges, (ticks, name) in zip(picture.dims, self.edges, setters, strict=True):
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
    messages = [message for plan in plans for message in plan.sends]
    if not messages:
        return "no messages"
    sent = _bytes(picture.bytes_of(messages))
    words = f"{len(messages)} messages, {sent} in all; dashed: the points each rank reads"
    words += "; hatched: padding" if any(plan.has_fill for plan in plans) else ""
    around = any(map(picture.wraps, picture.dims))
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
