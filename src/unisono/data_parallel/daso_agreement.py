"""What ranks under DASO compare before a batch: models, numbers of batches, exchanges in flight."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from unisono.errors import explain

if TYPE_CHECKING:
    from unisono.data_parallel.daso import DASO

__all__ = ["agree"]


def agree(daso: DASO) -> None:
    """Compare what must be the same on all ranks, and take up what has changed. Collective.

    Raises:
        ValueError: on all ranks, where a model is missing or numbers of batches differ.
    """
    exchange, module = daso.exchange, daso.module
    begins = daso.batches_done == 0
    changed = begins and module is not None and exchange.has_changed(module)
    mine = [daso.last_batch or 0, module is not None, daso.is_foreign, changed]
    everybody = daso.communicator.all_gather_ints([int(x) for x in mine])
    lengths, models, foreign, changes = zip(*everybody, strict=True)
    if not all(models):
        raise ValueError(
            explain(
                "DASO.step()",
                f"no model on rank {models.index(0)}",
                None,
                "DataParallelMultiGPU(module, daso), or daso.set_model(module)",
            )
        )
    if min(lengths) == 0 or min(lengths) != max(lengths):
        raise ValueError(
            explain(
                "DASO.step()",
                f"last_batch on ranks 0 to {daso.communicator.size - 1}: "
                f"{[n or None for n in lengths]}",
                None,
                "daso.last_batch = len(loader), the same number on all ranks",
            )
        )
    if any(foreign):
        exchange.drop()
        daso.sent_at = None
        daso.is_foreign = False
        warnings.warn(
            "DASO: one rank's checkpoint serves all: the exchange that was in flight is left out",
            UserWarning,
            stacklevel=4,
        )
    if module is not None and any(changes):
        exchange.bind(module)
    daso.must_agree = False
