"""One permutation of rows over all ranks by a single all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.data_parallel.ranks import on_device

__all__ = ["reorder_rows"]


def reorder_rows(
    rows: Tensor, places: Tensor, cuts: Sequence[int], *, comm: Communicator
) -> Tensor:
    """Return this rank's rows of `x[places]`, where x is split over ranks. Collective over `comm`.

    Args:
        rows: local `[n_r, ...]`, rows `[cuts[r], cuts[r + 1])` of x. Unchanged.
        places: permutation `[N]` of the rows of x, the same on every rank.
        cuts: where each rank's rows begin, before and after.
        comm: the ranks.

    Returns:
        New tensor `[n_r, ...]`.
    """
    start, stop = cuts[comm.rank], cuts[comm.rank + 1]
    if comm.size == 1:
        return rows[places.to(rows.device)]
    # Rows of mine, in the order of their new places: those of one rank follow each other.
    targets = ((places >= start) & (places < stop)).nonzero().squeeze(1)
    ends = torch.searchsorted(targets, torch.tensor(cuts))
    outgoing = rows[(places[targets] - start).to(rows.device)]
    # My new rows, by the rank that has them: each sends in ascending order of place.
    mine = places[start:stop]
    by_source = [((mine >= a) & (mine < b)).nonzero().squeeze(1) for a, b in pairwise(cuts)]
    arrived = on_device(comm, rows.device).all_to_all(
        outgoing,
        send_sizes=ends.diff().tolist(),
        recv_sizes=[len(at) for at in by_source],
    )
    out = torch.empty_like(rows)
    out[torch.cat(by_source).to(rows.device)] = arrived
    return out
