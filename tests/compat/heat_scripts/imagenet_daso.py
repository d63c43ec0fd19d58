"""Several nodes with DASO, batches by a pipeline of NVIDIA's DALI, written for HeAT."""

from __future__ import annotations

import sys

import heat as ht
import torch
from heat.utils.data._utils import dali_tfrecord2idx
from nvidia.dali import HybridPipe


def main(records):
    torch.manual_seed(1)
    size = ht.MPI_WORLD.size
    dali_tfrecord2idx(f"{records}/train", "idx/train", f"{records}/val", "idx/val")
    pipe = HybridPipe(records, "idx/train", batch_size=16, shard=ht.MPI_WORLD.rank, shards=size)
    if torch.cuda.is_available():
        torch.cuda.set_device(ht.MPI_WORLD.rank % torch.cuda.device_count())
    model = ht.nn.Sequential(ht.nn.Linear(64, 48), ht.nn.ReLU(), ht.nn.Linear(48, 10))
    optimizer = ht.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    daso = ht.optim.DASO(
        local_optimizer=optimizer,
        total_epochs=6,
        max_global_skips=4,
        stability_level=0.05,
        warmup_epochs=1,
        cooldown_epochs=1,
    )
    scheduler = ht.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model = ht.nn.DataParallelMultiGPU(model, daso)
    daso.last_batch = len(pipe)
    for _ in range(6):
        total = torch.zeros(1)
        for batch in pipe:
            daso.zero_grad()
            loss = ht.nn.functional.cross_entropy(model(batch["data"]), batch["label"].squeeze(1))
            loss.backward()
            daso.step()
            total += loss.detach()
        scheduler.step()
        daso.epoch_loss_logic(total / len(pipe))
    right = sum((model(b["data"]).argmax(1) == b["label"].squeeze(1)).sum() for b in pipe)
    mean = torch.tensor([right / pipe.rows])
    ht.MPI_WORLD.Allreduce(ht.MPI.IN_PLACE, mean, op=ht.MPI.SUM)
    print(f"RIGHT {mean.item() / size:.3f} with {size} of {pipe.records}", flush=True)


main(sys.argv[1])
