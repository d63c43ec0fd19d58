"""Encoded images in an HDF5 file that is larger than the memory, written for HeAT."""

from __future__ import annotations

import base64
import sys

import heat as ht
import torch
from heat.utils.data.partial_dataset import PartialH5Dataset


class Images(PartialH5Dataset):
    def __init__(self, file, transforms, **options):
        super().__init__(
            file, dataset_names=["images", "metadata"], transforms=transforms, **options
        )
        self.seen = set()

    def __getitem__(self, index):
        row = self.metadata[index]
        raw = bytearray(base64.binascii.a2b_base64(bytes(self.images[index].numpy())))
        image = torch.frombuffer(raw, dtype=torch.uint8).reshape(1, int(row[0]), int(row[1]))
        self.seen.add(int(row[4]))
        return image.float() / 255, torch.as_tensor(int(row[3]) - 1)


def main(file):
    torch.manual_seed(1)
    rank, size = ht.MPI_WORLD.rank, ht.MPI_WORLD.size
    transforms = [lambda image: (image - 0.5) / 0.3, None]
    dataset = Images(file, transforms, initial_load=40, load_length=24)
    loader = ht.utils.data.DataLoader(dataset, batch_size=8, pin_memory=False, drop_last=False)
    unseen = Images(file, transforms, validate_set=True)
    model = ht.nn.Sequential(
        ht.nn.Flatten(), ht.nn.Linear(64, 48), ht.nn.ReLU(), ht.nn.Linear(48, 10)
    )
    optimizer = ht.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dp_optimizer = ht.optim.DataParallelOptimizer(optimizer, blocking=True)
    model = ht.nn.DataParallel(model, ht.MPI_WORLD, dp_optimizer, blocking_parameter_updates=True)
    criterion = ht.nn.CrossEntropyLoss()
    for _ in range(5):
        dataset.seen.clear()
        batches = 0
        for image, label in loader:
            dp_optimizer.zero_grad()
            criterion(model(image), label).backward()
            dp_optimizer.step()
            batches += 1
        assert batches == len(loader)
        assert len(dataset.seen) == len(dataset), "every row, once"
        assert len(dataset.images) < len(dataset), "a window at a time"
    right = [(model(x).argmax(1) == y).float() for x, y in ht.utils.data.DataLoader(unseen, 50)]
    own = ht.array(torch.cat(right).mean().reshape(1), is_split=0)
    print(f"RIGHT {own.numpy().mean():.3f} with {size} of {own.shape}", flush=True)
    ht.MPI_WORLD.Barrier()
    if rank == 0:
        ht.core.communication.MPI.Finalize()


main(sys.argv[1])
