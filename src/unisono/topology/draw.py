"""A picture of a partition: who holds which block, and who sends how much to whom.

Plain text, and an image where a file is named. Everything is computed from shapes, so a layout can
be looked at before any process is started. No torch here; matplotlib (extra `plot`) is loaded when
an image is made.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import MissingExtra, PartitionError, name_ranks
from unisono.topology import halo as halos
from unisono.topology.decompose import flat_index, grid_index, split_cuts
from unisono.topology.fanout import Layout
from unisono.topology.halo import HaloPlan, Message, Piece
from unisono.topology.window import WRAPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SUFFIXES = (".png", ".svg", ".pdf")
_TIMES = " \u00d7 "
_INK, _FAINT, _PADDING = "#1f2937", "#6b7280", "#9ca3af"
Colour = tuple[float, float, float]
Cell = tuple[int, int]
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
    title, cuts, plans = f"partition {_sizes(grid)}", None, []
    if global_shape is not None:
        title += f" of a tensor {_sizes(global_shape)}"
        cuts = tuple(split_cuts(n, parts) for n, parts in zip(global_shape, grid, strict=True))
        for index in product(*map(range, grid)) if halo is not None else ():
            plans.append(
                halos.plan(cuts, index, **halo)
                if isinstance(halo, Mapping)
                else halos.plan_widths(cuts, index, list(halo or ()))
            )
    picture = _Picture(title, grid, tuple(partition.ranks), cuts, plans, itemsize)
    if path is not None:
        _save(picture, path)
    return _text(picture)


def _sizes(values: Sequence[int], times: str = " x ") -> str:
    return times.join(map(str, values))


@dataclass(frozen=True)
class _Picture:
    """What is drawn, all of it computed before. A block is named by its row-major place."""

    title: str
    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...] | None
    plans: Sequence[HaloPlan]
    """One for each block; none without halos."""
    itemsize: int

    @cached_property
    def dims(self) -> tuple[int | None, int | None]:
        """Those that run across and down: the last two that are split; None: one column, one row.

        A single split dim runs down, unless it is the last one.
        """
        last = len(self.grid) - 1
        split = [dim for dim, size in enumerate(self.grid) if size > 1] or [last] * (last >= 0)
        if len(split) == 1 and split[0] != last:
            return None, split[0]
        *_, down, across = None, None, *split
        return across, down

    @cached_property
    def drawn(self) -> list[tuple[int, int]]:
        """The axes of the image that show a dim, and the dim."""
        return [(axis, dim) for axis, dim in enumerate(self.dims) if dim is not None]

    def panels(self) -> Iterator[tuple[str, list[list[int]]]]:
        """Yield each grid of blocks: which index of the other dims it shows, and its rows."""
        outer = [dim for dim in range(len(self.grid)) if dim not in self.dims]
        columns, rows = ([0] if dim is None else range(self.grid[dim]) for dim in self.dims)
        across, down = self.dims
        for fixed in product(*(range(self.grid[dim]) for dim in outer)):
            at: dict[int | None, int] = dict(zip(outer, fixed, strict=True))
            shown = [f"dim {dim} = {at[dim]}" for dim in outer if self.grid[dim] > 1]
            places = [
                [self._place({**at, across: column, down: row}) for column in columns]
                for row in rows
            ]
            yield ", ".join(shown), places

    def _place(self, at: Mapping[int | None, int]) -> int:
        return flat_index(self.grid, [at[dim] for dim in range(len(self.grid))])

    def words(self, place: int, times: str = " x ") -> list[str]:
        """Return rank, index and, where it is known, the size of a block."""
        index = grid_index(self.grid, place)
        words = [f"rank {self.ranks[place]}", f"({', '.join(map(str, index))})"]
        if self.cuts is not None:
            blocks = [own[i + 1] - own[i] for own, i in zip(self.cuts, index, strict=True)]
            words.append(_sizes(blocks, times))
        return words

    def bytes_of(self, pieces: Iterable[Piece | Message]) -> int:
        """Return the bytes that travel."""
        return sum(piece.numel for piece in pieces) * self.itemsize

    def between(self, a: int, b: int, dim: int) -> int:
        """Return the bytes between neighbours in a dim, but for those that go round its ends."""
        total = 0
        for reader, sender in ((a, b), (b, a)) if self.plans else ():
            plan = self.plans[reader]
            pieces = [p for message in plan.recvs if message.peer == sender for p in message.pieces]
            total += self.bytes_of(piece for piece in pieces if piece.kinds[dim] not in WRAPS)
        return total

    def wraps(self, dim: int | None) -> bool:
        """Return whether some window goes round the ends of a dim."""
        return dim is not None and any(any(plan.wraps[dim]) for plan in self.plans)

    def wrapped(self, place: int, dim: int, side: int) -> list[Piece]:
        """Return what the rank at `place` reads round the left or right end of `dim`.

        Only what comes straight across: from ranks that differ in this dim alone.
        """
        plan, index = self.plans[place], grid_index(self.grid, place)
        found: list[Piece] = []
        for piece in [*plan.local, *(piece for message in plan.recvs for piece in message.pieces)]:
            owner = grid_index(self.grid, piece.owner)
            others = [d for d in range(len(index)) if d != dim]
            is_straight = all(owner[d] == index[d] and piece.kinds[d] not in WRAPS for d in others)
            if piece.kinds[dim] == WRAPS[side] and is_straight:
                found.append(piece)
        return found


# -- text -----------------------------------------------------------------------------------------


def _text(picture: _Picture) -> str:
    dims = range(len(picture.grid))
    plans = picture.plans
    cells: list[list[str]] = []
    for place in range(len(picture.ranks)):
        lines = picture.words(place)
        for dim in dims if plans else ():
            if any(any(plan.widths[dim]) for plan in plans):
                lines.append("halo dim {}: {}/{}".format(dim, *plans[place].widths[dim]))
        for dim in dims:
            if picture.wraps(dim):
                lines.append("wraps dim {}: {}/{}".format(dim, *plans[place].wraps[dim]))
        cells.append(lines)
    width = max(len(line) for cell in cells for line in cell) + 2
    out = [picture.title]
    for where, rows in picture.panels():
        rule = "+" + "+".join("-" * width for _ in rows[0]) + "+"
        out += [where, rule] if where else [rule]
        for row in rows:
            for parts in zip(*(cells[place] for place in row), strict=True):
                out.append("|" + "|".join(part.center(width) for part in parts) + "|")
            out.append(rule)
    sends = [
        f"rank {picture.ranks[plan.rank]} sends "
        + ", ".join(_sent(picture, message) for message in plan.sends)
        for plan in plans
        if plan.sends
    ]
    return "\n".join(out + (sends or ["no messages"] if plans else []))


def _sent(picture: _Picture, message: Message) -> str:
    """Return the bytes of a message, and how many of them go round an end of the tensor."""
    whole = picture.bytes_of([message])
    wrapped = picture.bytes_of(p for p in message.pieces if not set(WRAPS).isdisjoint(p.kinds))
    text = f"{whole} bytes to {picture.ranks[message.peer]}"
    if not wrapped:
        return text
    return text + (" (wraps)" if wrapped == whole else f" ({wrapped} of them wrap)")


# -- image ----------------------------------------------------------------------------------------


def _save(picture: _Picture, path: Path) -> None:
    """Write the image; its kind follows from the name."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra.of("plot", f"draw(..., file={path.name!r})", str(error)) from error

    title, note = picture.title.replace(" x ", _TIMES).capitalize(), _footnote(picture)
    panels = list(picture.panels())
    across = min(len(panels), _PANELS)
    down = -(-len(panels) // across)
    rows = panels[0][1]
    words = max(0.112 * len(title), 0.068 * len(note))
    width = max(across * (_CELL[0] * len(rows[0]) + 0.9), 0.8 + words)
    height = down * (_CELL[1] * len(rows) + 0.9) + 1.0
    # A letter is a letter in an SVG, so that text can be found and copied.
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(width, height), facecolor="white")
        left = 0.55 / width
        figure.subplots_adjust(
            left=left, right=1 - 0.25 / width, top=1 - 1.04 / height, bottom=0.5 / height,
            wspace=0.22, hspace=0.34,
        )  # fmt: skip
        axes = figure.subplots(down, across, squeeze=False).flat
        for unused in axes[len(panels) :]:
            unused.set_axis_off()
        for (where, rows), panel in zip(panels, axes, strict=False):
            _Panel(picture, rows, panel).draw(where)
        figure.text(left, 1 - 0.34 / height, title, size=12, weight="bold", color=_INK)
        figure.text(left, 0.16 / height, note, size=8, color=_FAINT)
        figure.savefig(path, dpi=150)


class _Panel:
    """One grid of blocks, in coordinates where every block is large enough for its text."""

    def __init__(self, picture: _Picture, rows: list[list[int]], axes: Axes) -> None:
        self.picture = picture
        self.cells = {(c, r): place for r, row in enumerate(rows) for c, place in enumerate(row)}
        self.axes = axes
        self.edges = [self._edges_along(dim) for dim in picture.dims]

    def _edges_along(self, dim: int | None) -> list[float]:
        """Return where blocks begin and end: by their sizes, but none vanishes."""
        sizes = [1] * (1 if dim is None else self.picture.grid[dim])
        if dim is not None and self.picture.cuts is not None:
            sizes = [b - a for a, b in pairwise(self.picture.cuts[dim])]
        least = 0.6 * max(1, sum(sizes)) / len(sizes)
        shown = [max(size, least) for size in sizes]
        return [0.0, *accumulate(size * len(sizes) / sum(shown) for size in shown)]

    def draw(self, where: str) -> None:
        """Draw blocks, then what they borrow, then words."""
        axes, dims = self.axes, self.picture.dims
        aside, above = (_WRAP_MARGIN if self.picture.wraps(dim) else _MARGIN for dim in dims)
        axes.set_xlim(-aside, self.edges[_ACROSS][-1] + aside)
        axes.set_ylim(self.edges[_DOWN][-1] + above, -above)
        for side in axes.spines.values():
            side.set_visible(False)
        for cell, place in self.cells.items():
            fill, edge = _colours(place)
            self._rectangle(*self._box(cell), facecolor=fill, edgecolor=edge, linewidth=1.4)
        if self.picture.plans:
            for cell, place in self.cells.items():
                self._frame(cell, self.picture.plans[place])
            for axis, dim in self.picture.drawn:
                self._ends(axis, dim)
        for cell, place in self.cells.items():
            self._words(cell, place)
            self._seams(cell, place)
        self._ruler(where)

    def _box(self, cell: Cell) -> tuple[list[float], list[float]]:
        """Return the upper left and the lower right corner of a block."""
        pairs = list(zip(self.edges, cell, strict=True))
        return [edges[i] for edges, i in pairs], [edges[i + 1] for edges, i in pairs]

    def _rectangle(self, low: Sequence[float], high: Sequence[float], **look: Any) -> None:
        from matplotlib.patches import Rectangle

        size = (high[_ACROSS] - low[_ACROSS], high[_DOWN] - low[_DOWN])
        self.axes.add_patch(Rectangle((low[_ACROSS], low[_DOWN]), *size, **look))

    def _text(self, at: Sequence[float], text: str, **look: Any) -> None:
        self.axes.text(at[_ACROSS], at[_DOWN], text, ha="center", **{"va": "center", **look})

    def _frame(self, cell: Cell, plan: HaloPlan) -> None:
        """Frame the points that a rank reads, where they go beyond its block."""
        low, high = self._box(cell)
        before = [*low, *high]
        for axis, dim in self.picture.drawn:
            for side, width in enumerate(plan.widths[dim]):
                if width <= 0 or 0 in plan.output_shape:
                    continue
                beside = cell[axis] + (1 if side else -1)
                start, stop = (self.picture.cuts or ())[dim][beside : beside + 2]
                room = self.edges[axis][beside + 1] - self.edges[axis][beside]
                # Thin halos would be invisible, and wide ones hide the neighbour.
                reach = room * min(max(width / (stop - start or width), 0.07), 0.9)
                if side:
                    high[axis] += reach
                else:
                    low[axis] -= reach
        if [*low, *high] != before:
            edge = _colours(plan.rank)[1]
            look = {"facecolor": (*edge, 0.1), "edgecolor": edge, "linestyle": (0, (3, 2))}
            self._rectangle(low, high, linewidth=1.0, **look)

    def _ends(self, axis: int, dim: int) -> None:
        """Draw what stands beyond the ends of a dim: padding, or the points of its other end."""
        picture = self.picture
        lines: dict[int, list[Cell]] = {}
        for cell in self.cells:
            lines.setdefault(cell[1 - axis], []).append(cell)
        for line, side in product(lines.values(), (0, 1)):
            cells = line[::-1] if side else line  # the outermost first
            low, high = self._box(cells[0])
            at = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
            low[axis], high[axis] = (
                (high[axis], high[axis] + _RIM) if side else (low[axis] - _RIM, low[axis])
            )
            if picture.plans[self.cells[cells[0]]].fills[dim][side]:
                hatched = {"facecolor": "none", "edgecolor": _PADDING, "hatch": "/////"}
                self._rectangle(low, high, linewidth=0.0, **hatched)
            # With large paddings several ranks read there; the outermost is drawn.
            places = [self.cells[cell] for cell in cells]
            reads = [(place, picture.wrapped(place, dim, side)) for place in places]
            place, pieces = next((each for each in reads if each[1]), (0, []))
            if not pieces:
                continue
            owners = sorted({piece.owner for piece in pieces})
            colour = _colours(owners[0])[1]
            self._rectangle(low, high, linewidth=0.0, facecolor=(*colour, 0.45))
            sent = picture.bytes_of(piece for piece in pieces if piece.owner != place)
            text = name_ranks([picture.ranks[owner] for owner in owners])
            apart = (_WRAP_MARGIN - _RIM) / 2
            at[axis] = high[axis] + apart if side else low[axis] - apart
            self._text(
                at, f"{text}: {_bytes(sent)}" if sent else text,
                size=7.5, color=colour, rotation=90 if axis == _ACROSS else 0,
            )  # fmt: skip

    def _words(self, cell: Cell, place: int) -> None:
        """Name a block in its middle: the rank above, below it what is known."""
        picture = self.picture
        fill, edge = _colours(place)
        rank, *lines = picture.words(place, _TIMES)
        if picture.plans:
            plan = picture.plans[place]
            widths = [
                "{} {}/{}".format("\u2194\u2195"[axis], *plan.widths[dim])
                for axis, dim in reversed(picture.drawn)
            ]
            lines += [f"halo {'  '.join(widths)}", f"sends {_bytes(picture.bytes_of(plan.sends))}"]
        low, high = self._box(cell)
        at = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        at[_DOWN] -= 0.06 * len(lines)
        # Lines of halos may run below the text.
        plate = {"facecolor": fill, "edgecolor": "none", "alpha": 0.75, "pad": 1.2}
        self._text(at, rank, va="bottom", size=12, weight="bold", color=edge, bbox=plate)
        at[_DOWN] += 0.03
        look = {"va": "top", "size": 8.5, "color": _INK, "linespacing": 1.5}
        self._text(at, "\n".join(lines), bbox=plate, **look)

    def _seams(self, cell: Cell, place: int) -> None:
        """Write on the seams to the right and below how many bytes cross them, both ways."""
        for axis, dim in self.picture.drawn:
            beside = self.cells.get((cell[0] + (axis == _ACROSS), cell[1] + (axis == _DOWN)))
            crossing = 0 if beside is None else self.picture.between(place, beside, dim)
            if crossing:
                low, high = self._box(cell)
                at = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
                at[axis] = high[axis]
                text = f"\u21c4 {_bytes(crossing)}" if axis == _ACROSS else _bytes(crossing)
                plate = {"facecolor": "white", "edgecolor": "#d1d5db", "linewidth": 0.8}
                plate["boxstyle"] = "round,pad=0.25"
                self._text(at, text, size=7.5, color=_INK, bbox=plate)

    def _ruler(self, where: str) -> None:
        """Name the dims, and number their cuts."""
        axes, cuts = self.axes, self.picture.cuts
        axes.set(xticks=[], yticks=[])
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.tick_params(length=0, labelsize=8, labelcolor=_FAINT, pad=1)
        for axis, dim in self.picture.drawn:
            ruler = axes.yaxis if axis == _DOWN else axes.xaxis
            ruler.set_label_text(f"dim {dim}", fontsize=9, color=_INK)
            if cuts is not None:
                ruler.set_ticks(self.edges[axis], [str(cut) for cut in cuts[dim]])
        axes.set_title(where, fontsize=9, color=_INK, loc="left", pad=16)


def _footnote(picture: _Picture) -> str:
    if not picture.plans:
        return ""
    messages = [message for plan in picture.plans for message in plan.sends]
    if not messages:
        return "no messages"
    sent = _bytes(picture.bytes_of(messages))
    words = f"{len(messages)} messages, {sent} in all; dashed: the points each rank reads"
    words += "; hatched: padding" if any(plan.has_fill for plan in picture.plans) else ""
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
