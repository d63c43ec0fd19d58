"""`Dataset`: this rank's rows of a larger set, which ranks can shuffle among each other."""

from __future__ import annotations

from typing import Any

from unisono.data_parallel.arrays import home_of, local_rows
from unisono.data_parallel.rows import RankRows, Transforms
from unisono.data_parallel.shuffle import RingExchange, dataset_ishuffle, dataset_shuffle
from unisono.expect import expect, expect_int

__all__ = ["Dataset"]


class Dataset(RankRows):
    """This rank's rows of an array, with shuffles over all ranks. Collective over `comm`.

    All ranks keep equally many rows, as many as the shortest shard has: `data` holds them. A
    subclass may add `targets` (rows in step with `data`); both are then shuffled alike.

    Args:
        array: this rank's rows: tensor, numpy array, or an object with `.larray`. Never written to.
        transforms: a callable, or several applied in order, for each row.
        ishuffle: let the loader exchange rows in the background of an epoch.
        test_set: never shuffled.
        comm: the ranks; default the array's own, else the world.
        seed: of the shuffles' own generator.

    >>> import torch
    >>> rows = Dataset(torch.arange(4.0), transforms=lambda row: row * 2)
    >>> len(rows), rows[3].item()
    (4, 6.0)
    """

    def __init__(
        self,
        array: Any,
        transforms: Transforms = None,
        ishuffle: bool = False,
        test_set: bool = False,
        *,
        comm: object = None,
        seed: int = 0,
    ) -> None:
        rows = local_rows(array, "Dataset")
        expect("ishuffle", ishuffle, bool)
        expect("test_set", test_set, bool)
        self.seed = expect_int("seed", seed, 0)
        super().__init__(rows, transforms, home_of(array, comm))
        self.comm = self.communicator if comm is None else comm
        self.ishuffle = ishuffle
        self.test_set = test_set
        self.htdata = array
        shortest = min(n for (n,) in self.communicator.all_gather_ints([rows.shape[0]]))
        self._cut_slice = slice(0, shortest)
        self.lcl_half = shortest // 2
        self.data = rows[self._cut_slice]
        self.shuffles = 0
        self.exchange: RingExchange | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Rows under way, and the array they came from, are no matter of a worker process."""
        return {**super().__getstate__(), "exchange": None, "htdata": None}

    def Shuffle(self) -> None:
        """Pass half of the rows on to the next rank and mix the rest. Collective over `comm`."""
        if not self.test_set:
            dataset_shuffle(self, self._attributes())

    def Ishuffle(self) -> None:
        """Start `Shuffle` in the background; `dataset_irecv` completes it. Collective."""
        if not self.test_set:
            dataset_ishuffle(self, self._attributes())

    def _attributes(self) -> list[list[str | None]]:
        names = ["data", "targets"] if hasattr(self, "targets") else ["data"]
        return [[name, None] for name in names]
