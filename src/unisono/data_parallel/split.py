"""`create_train_val_split`: a random part of the rows of all ranks for training, the rest not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.data_parallel.arrays import home_of, local_rows
from unisono.data_parallel.reorder import reorder_rows
from unisono.data_parallel.seeding import agreed_seed
from unisono.errors import PartitionError, explain
from unisono.expect import expect
from unisono.topology import decompose

__all__ = ["create_train_val_split"]


def create_train_val_split(
    X: Any, y: Any, p: float = 0.95, seed: int | None = None, *, comm: object = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (X_train, y_train, X_val, y_val), this rank's rows of each. Collective over `comm`.

    Rows of all ranks are mixed by one seed; of its `n` rows each rank then takes `int(p * n)` for
    training. X and y stay in step and are not written to.

    Args:
        X: this rank's rows of the data: tensor, numpy array, or an object with `.larray`.
        y: this rank's rows of the labels, equally many.
        p: part for training, between 0 and 1.
        seed: of the mix; None: rank 0 draws one.
        comm: the ranks; default those of `X`, else the world.
    """
    rows, labels = local_rows(X, "create_train_val_split"), local_rows(y, "create_train_val_split")
    expect("p", p, (float, int))
    expect("seed", seed, (int, type(None)))
    if not 0 < p < 1:
        raise ValueError(explain(f"p={p}", None, f"not 0 < {p} < 1", "p=0.95"))
    home = home_of(X, comm)
    lengths = home.all_gather_ints([rows.shape[0], labels.shape[0]])
    unlike = [(rank, a, b) for rank, (a, b) in enumerate(lengths) if a != b]
    if unlike:
        rank, a, b = unlike[0]
        raise PartitionError.because(
            "create_train_val_split(X, y)",
            f"on rank {rank} X has {a} rows and y has {b}",
            f"{a} != {b}",
            "give every row of X its label on the same rank",
        )
    common = agreed_seed(seed, home)
    cuts = decompose.bounds([n for n, _ in lengths])
    places = torch.randperm(cuts[-1], generator=torch.Generator().manual_seed(common))
    n_local = rows.shape[0]
    local = torch.randperm(n_local, generator=torch.Generator().manual_seed(common))
    n_train = int(p * n_local)
    mixed = [
        reorder_rows(part, places, cuts, comm=home)[local.to(part.device)]
        for part in (rows, labels)
    ]
    return mixed[0][:n_train], mixed[1][:n_train], mixed[0][n_train:], mixed[1][n_train:]
