"""A partition as text: which rank holds which block, and who sends how much to whom.

Everything is computed from shapes, so a layout can be looked at before any process is started. No
torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from unisono.errors import PartitionError
from unisono.topology import halo as halos
from unisono.topology.decompose import flat_index, grid_index, split_cuts
from unisono.topology.fanout import RankGrid
from unisono.topology.halo import HaloPlan


def draw(
    partition: RankGrid,
    global_shape: Sequence[int] | None = None,
    halo: Mapping[str, Any] | Sequence[tuple[int, int]] | None = None,
    *,
    itemsize: int = 4,
) -> str:
    """Return a picture of a partition as text.

    The last two dims that are split make the rows and columns of a grid; for every index of the
    other dims there is one grid. Each cell shows rank, index and, if known, block and halo widths
    (points needed left/right of the block; negative: own points not needed). A list of messages
    with their bytes follows.

    Args:
        partition: a `Partition`, a `Mesh`, or anything with `shape` and `ranks`.
        global_shape: shape of the whole tensor, cut into balanced blocks.
        halo: arguments of `halo.plan` after the index, such as `{"kernel_size": (3, 3)}`, or
            `(left, right)` widths for the last dims. Needs `global_shape`.
        itemsize: bytes of one element.
    """
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
    title, cuts = f"partition {_sizes(grid)}", None
    plans: list[HaloPlan] = []
    if global_shape is not None:
        title += f" of a tensor {_sizes(global_shape)}"
        cuts = tuple(split_cuts(n, parts) for n, parts in zip(global_shape, grid, strict=True))
        for index in product(*map(range, grid)) if halo is not None else ():
            plans.append(
                halos.plan(cuts, index, **halo)
                if isinstance(halo, Mapping)
                else halos.plan_widths(cuts, index, list(halo or ()))
            )
    cells = [_cell(grid, place, rank, cuts, plans) for place, rank in enumerate(partition.ranks)]
    lines = [title, *_grids(grid, cells)]
    if plans:
        lines += list(_messages(tuple(partition.ranks), plans, itemsize)) or ["no messages"]
    return "\n".join(lines)


def _sizes(values: Sequence[int]) -> str:
    return " x ".join(map(str, values))


def _cell(
    grid: Sequence[int],
    place: int,
    rank: int,
    cuts: Sequence[Sequence[int]] | None,
    plans: Sequence[HaloPlan],
) -> list[str]:
    """Return the words of a block: rank, index and, where they are known, its size and halos."""
    index = grid_index(grid, place)
    words = [f"rank {rank}", f"({', '.join(map(str, index))})"]
    if cuts is not None:
        words.append(_sizes([cut[i + 1] - cut[i] for cut, i in zip(cuts, index, strict=True)]))
    for dim in range(len(grid)) if plans else ():
        if any(any(plan.widths[dim]) for plan in plans):
            words.append("halo dim {}: {}/{}".format(dim, *plans[place].widths[dim]))
    return words


def _grids(grid: Sequence[int], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of all grids of blocks, each with the index of the other dims it shows."""
    across, down = _shown_dims(grid)
    width = max(len(line) for cell in cells for line in cell) + 2
    outer = [dim for dim in range(len(grid)) if dim not in (across, down)]
    columns, rows = ([0] if dim is None else range(grid[dim]) for dim in (across, down))
    rule = "+" + "+".join("-" * width for _ in columns) + "+"
    for fixed in product(*(range(grid[dim]) for dim in outer)):
        at: dict[int | None, int] = dict(zip(outer, fixed, strict=True))
        if where := ", ".join(f"dim {dim} = {at[dim]}" for dim in outer if grid[dim] > 1):
            yield where
        yield rule
        for row in rows:
            indices = [{**at, across: column, down: row} for column in columns]
            places = [flat_index(grid, [i[dim] for dim in range(len(grid))]) for i in indices]
            for words in zip(*(cells[place] for place in places), strict=True):
                yield "|" + "|".join(word.center(width) for word in words) + "|"
            yield rule


def _shown_dims(grid: Sequence[int]) -> tuple[int | None, int | None]:
    """Return the dims across and down: the last two that are split; None: one column, one row.

    A single split dim runs down, unless it is the last one.
    """
    last = len(grid) - 1
    split = [dim for dim, size in enumerate(grid) if size > 1] or [last] * (last >= 0)
    if len(split) == 1 and split[0] != last:
        return None, split[0]
    *_, down, across = None, None, *split
    return across, down


def _messages(ranks: Sequence[int], plans: Sequence[HaloPlan], itemsize: int) -> Iterator[str]:
    """Yield what each rank sends."""
    for plan in plans:
        sent = [f"{m.numel * itemsize} bytes to {ranks[m.peer]}" for m in plan.sends]
        if sent:
            yield f"rank {ranks[plan.rank]} sends {', '.join(sent)}"
