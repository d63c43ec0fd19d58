"""What `Checkpoint` adds to torch.distributed.checkpoint: time and memory of save and restore.

    python benchmarks/checkpoint.py [--quick] [--gigabytes 2]

Both write the same model in turns, from the same two ranks, into the same file system. Removing
old checkpoints is not timed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from harness import Row, markdown, parser_for, peak_bytes, publish, take_turns
from torch import nn

import unisono
from unisono.train import Checkpoint

RANKS = 2
SLOWER, LARGER = 1.2, 1.05
"""Largest ratio of times, and of memory: model and extra memory over those with torch alone."""


def compare(directory: str, gigabytes: float, rounds: int) -> list[Row]:
    """Measure on this rank, with the others."""
    comm = unisono.world()
    width = 2048
    layers = max(1, round(gigabytes * 1e9 / (4 * width * width)))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    ours, torchs = Path(directory, "ours"), Path(directory, "torch")
    checkpoint = Checkpoint(ours, keep=None)
    steps = iter(range(1, 1000))

    def save_by_torch() -> None:
        dcp.save({"model": model.state_dict()}, checkpoint_id=torchs)

    def load_by_torch() -> None:
        dcp.load({"model": model.state_dict()}, checkpoint_id=torchs)

    def clear() -> None:
        if comm.rank == 0:
            shutil.rmtree(torchs, ignore_errors=True)
            for path in ours.glob("step-*"):
                shutil.rmtree(path)

    cases = {
        "save": (lambda: checkpoint.save(next(steps), model=model), save_by_torch),
        "restore": (lambda: checkpoint.restore(model=model), load_by_torch),
    }
    rows: list[Row] = []
    size = sum(p.nbytes for p in model.parameters())
    for name, (by_us, by_torch) in cases.items():
        by_us()
        by_torch()
        turns = {"ours": by_us, "torch": by_torch}
        before = dict.fromkeys(turns, clear) if name == "save" else None
        times = take_turns(comm, turns, rounds=rounds, warm_up=1, before=before)
        case = f"{name}, {size / 1e9:.1f} GB on {comm.size} ranks"
        rows.append(times["ours"].row(case, times["torch"], "dcp", SLOWER))
        extra = [max(comm.all_gather_object(peak_bytes(run))) for run in (by_us, by_torch)]
        note = f"{extra[0] / 1e6:.0f} MB and {extra[1] / 1e6:.0f} MB beside the model"
        ours_over, torchs_over = ((size + bytes_) / size for bytes_ in extra)
        case = f"{name}, memory over model"
        rows.append(Row(case, ours_over, torchs_over, "dcp", LARGER, note))
    return rows


def main() -> int:
    """Measure, and print the table."""
    parser = parser_for(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model")
    options = parser.parse_args()
    gigabytes = min(options.gigabytes, 0.2) if options.quick else options.gigabytes
    with tempfile.TemporaryDirectory() as directory:
        rounds = 3 if options.quick else 5
        rows = unisono.run(compare, directory, gigabytes, rounds, ranks=RANKS, timeout_s=600)[0]
    publish("Checkpoints", markdown(rows), write=not options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
