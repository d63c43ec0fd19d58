"""`batches`: this rank's share of the data, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.errors import PartitionError


def batches(
    x: Any,
    y: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    comm: Communicator | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield `(x, y)` of `batch_size` rows a rank. Local.

    All ranks use one permutation and yield the same number of batches; together they see every row
    once. The last batch is shared out evenly, so it may be smaller, or empty on some ranks.

    Args:
        x: rows of inputs, array or tensor.
        y: rows of observations.
        batch_size: rows of this rank; a step of all ranks has `batch_size * world size`.
        shuffle: whether to permute the rows.
        seed: of the permutation, together with `epoch`.
        epoch: number of the pass over the data.
        drop_last: leave out a last batch that is not full on all ranks.
        comm: the ranks that share the data; default: the running world.

    >>> [len(rows) for rows, _ in batches(np.arange(10), np.arange(10), 4)]
    [4, 4, 2]
    """
    ranks = world() if comm is None else comm
    x, y = (t if isinstance(t, Tensor) else np.asarray(t) for t in (x, y))
    if len(x) != len(y) or batch_size < 1:
        raise PartitionError.because(
            f"batches of {batch_size} rows",
            f"{len(x)} rows of x, {len(y)} rows of y",
            f"{len(x)} != {len(y)}" if len(x) != len(y) else f"{batch_size} < 1",
            "as many rows of x as of y, and batch_size of 1 or more",
        )
    order = np.arange(len(x))
    if shuffle:
        order = np.random.default_rng([seed, epoch]).permutation(len(x))
    together = batch_size * ranks.size
    for start in range(0, len(x), together):
        rows = order[start : start + together]
        if drop_last and len(rows) < together:
            return
        mine = np.array_split(rows, ranks.size)[ranks.rank]
        yield _taken(x, mine), _taken(y, mine)


def _taken(data: Any, rows: np.ndarray) -> Any:
    return data[torch.from_numpy(rows)] if isinstance(data, Tensor) else data[rows]
