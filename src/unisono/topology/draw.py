"""A picture of a partition: who holds which block, and who sends how much to whom.

Plain text, and an image where a file is named (`picture.py`). Everything is computed from shapes,
so a layout can be looked at before any process is started. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from unisono.errors import PartitionError
from unisono.topology import halo as halos
from unisono.topology.decompose import flat_index, split_cuts
from unisono.topology.fanout import Layout
from unisono.topology.halo_plan import HaloPlan, Message
from unisono.topology.picture import check_file, save
from unisono.topology.scene import Picture

__all__ = ["draw"]


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
    path = None if file is None else check_file(file)
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
    cuts = None
    if global_shape is not None:
        cuts = [split_cuts(n, parts) for n, parts in zip(global_shape, grid, strict=True)]
    plans = _plans(grid, cuts, halo) if cuts is not None and halo is not None else None

    cells = {
        index: _cell(partition.ranks[flat_index(grid, index)], index, cuts, plans)
        for index in product(*map(range, grid))
    }
    lines = [_title(grid, global_shape)]
    row_dim, column_dim, outer = _arrange(grid)
    if path is not None:
        title = _title(grid, global_shape).replace(" x ", " \u00d7 ").capitalize()
        ranks, held = tuple(partition.ranks), None if cuts is None else tuple(cuts)
        save(
            Picture(title, grid, ranks, held, plans, row_dim, column_dim, tuple(outer), itemsize),
            path,
        )
    for place in product(*(range(grid[dim]) for dim in outer)):
        fixed = dict(zip(outer, place, strict=True))
        where = [f"dim {dim} = {i}" for dim, i in fixed.items() if grid[dim] > 1]
        if where:
            lines.append(", ".join(where))
        lines += _table(cells, grid, row_dim, column_dim, fixed)
    if plans is not None:
        lines += _traffic(partition, plans, itemsize)
    return "\n".join(lines)


def _title(grid: Sequence[int], global_shape: Sequence[int] | None) -> str:
    of = "" if global_shape is None else f" of a tensor {_sizes(global_shape)}"
    return f"partition {_sizes(grid)}{of}"


def _sizes(values: Sequence[int]) -> str:
    return " x ".join(map(str, values))


def _plans(
    grid: Sequence[int],
    cuts: Sequence[Sequence[int]],
    halo: Mapping[str, Any] | Sequence[tuple[int, int]],
) -> dict[tuple[int, ...], HaloPlan]:
    plans: dict[tuple[int, ...], HaloPlan] = {}
    for index in product(*map(range, grid)):
        if isinstance(halo, Mapping):
            plans[index] = halos.plan(cuts, index, **halo)
        else:
            plans[index] = halos.plan_widths(cuts, index, list(halo))
    return plans


def _arrange(grid: Sequence[int]) -> tuple[int | None, int | None, list[int]]:
    """Return the dims drawn as rows and as columns, and the others."""
    split = [dim for dim, size in enumerate(grid) if size > 1]
    column = split[-1] if split else (len(grid) - 1 if grid else None)
    row = split[-2] if len(split) > 1 else None
    if len(split) == 1 and len(grid) > 1 and column != len(grid) - 1:
        row, column = column, None
    return row, column, [dim for dim in range(len(grid)) if dim not in (row, column)]


def _cell(
    rank: int,
    index: tuple[int, ...],
    cuts: Sequence[Sequence[int]] | None,
    plans: Mapping[tuple[int, ...], HaloPlan] | None,
) -> list[str]:
    text = [f"rank {rank}", f"({', '.join(map(str, index))})"]
    if cuts is not None:
        sizes = [c[i + 1] - c[i] for c, i in zip(cuts, index, strict=True)]
        text.append(_sizes(sizes))
    if plans is not None:
        shown = sorted({d for p in plans.values() for d, w in enumerate(p.widths) if any(w)})
        widths = plans[index].widths
        text += [f"halo dim {dim}: {widths[dim][0]}/{widths[dim][1]}" for dim in shown]
        round_ = sorted({d for p in plans.values() for d, w in enumerate(p.wraps) if any(w)})
        wraps = plans[index].wraps
        text += [f"wraps dim {dim}: {wraps[dim][0]}/{wraps[dim][1]}" for dim in round_]
    return text


def _table(
    cells: Mapping[tuple[int, ...], list[str]],
    grid: Sequence[int],
    row_dim: int | None,
    column_dim: int | None,
    fixed: Mapping[int, int],
) -> list[str]:
    """Return the lines of one grid of cells."""
    rows = range(grid[row_dim]) if row_dim is not None else range(1)
    columns = range(grid[column_dim]) if column_dim is not None else range(1)

    def at(row: int, column: int) -> list[str]:
        places = {**fixed}
        if row_dim is not None:
            places[row_dim] = row
        if column_dim is not None:
            places[column_dim] = column
        return cells[tuple(places[dim] for dim in range(len(grid)))]

    width = max(len(line) for text in cells.values() for line in text) + 2
    rule = "+" + "+".join("-" * width for _ in columns) + "+"
    lines = [rule]
    for row in rows:
        texts = [at(row, column) for column in columns]
        for parts in zip(*texts, strict=True):
            lines.append("|" + "|".join(part.center(width) for part in parts) + "|")
        lines.append(rule)
    return lines


def _traffic(
    partition: Layout, plans: Mapping[tuple[int, ...], HaloPlan], itemsize: int
) -> list[str]:
    """Return one line for each rank that sends something."""
    lines: list[str] = []
    readers = list(plans.values())  # row-major, so that a rank is its place
    for plan in readers:
        if plan.sends:
            sent = ", ".join(
                f"{message.numel * itemsize} bytes to {partition.ranks[message.peer]}"
                + _round(message, readers[message.peer], itemsize)
                for message in plan.sends
            )
            lines.append(f"rank {partition.ranks[plan.rank]} sends {sent}")
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
