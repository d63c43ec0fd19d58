"""A training script in DistDL's style; only the import lines are not DistDL's.

python examples/distdl_script.py            one process
mpiexec -n 2 python examples/distdl_script.py
python examples/distdl_script.py --ranks 2  ranks started by unisono

Rank 0 reads images and labels. Images are scattered in strips, convolved and pooled there, cut anew
by channels, and a linear layer split by its input features sums the logits up on rank 0. The losses
equal those of the plain network that rank 0 trains beside it.
"""

# Some modules are made from a table when they are imported.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import unisono
import unisono.compat.distdl as distdl
from unisono.compat.distdl.functional import ZeroVolumeCorrectorFunction
from unisono.compat.distdl.utilities.torch import zero_volume_tensor

try:
    from mpi4py import MPI
except ImportError:  # the same verbs over torch.distributed
    from unisono.comm.mpi_style import MPI


EPOCHS = 3  # after as many, four of five digits are right


def networks():
    """Return the partition of all ranks, the split network, and the plain one with its weights."""
    P_world = distdl.backend.backend.Partition(MPI.COMM_WORLD)
    P_world._comm.Barrier()
    P_0 = P_world.create_partition_inclusive([0])
    P_root = P_0.create_cartesian_topology_partition([1, 1, 1, 1])
    P_out = P_0.create_cartesian_topology_partition([1, 1])
    P_strip = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1])
    P_channel = P_world.create_cartesian_topology_partition([1, P_world.size, 1, 1])
    P_feature = P_world.create_cartesian_topology_partition([1, P_world.size])
    P_0.deactivate()
    torch.manual_seed(0)
    split = nn.Sequential(
        distdl.nn.Repartition(P_root, P_strip),
        distdl.nn.DistributedConv2d(
            P_strip, in_channels=1, out_channels=8, kernel_size=(3, 3), padding=(1, 1), bias=False
        ),
        distdl.nn.DistributedBatchNorm(P_strip, 8),
        nn.ReLU(),
        distdl.nn.DistributedMaxPool2d(P_strip, kernel_size=(2, 2), stride=(2, 2)),
        distdl.nn.Repartition(P_strip, P_channel),
        nn.Flatten(),
        distdl.nn.DistributedLinear(P_feature, P_out, P_feature, 128, 10),
    )
    plain = nn.Sequential(
        nn.Identity(),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Identity(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    plain.load_state_dict(split.state_dict())  # states do not know how many ranks there are
    return P_world, split, plain


def main(epochs):
    P_world, split, plain = networks()
    digits = load_digits()
    images = torch.tensor(digits["images"], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits["target"])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(split.parameters(), lr=1e-2)
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
    largest, hits = 0.0, 0
    for epoch in range(epochs):
        for batch in torch.arange(1500).split(128):  # the last one is smaller
            x = images[batch] if P_world.rank == 0 else zero_volume_tensor(len(batch))
            output = split(x)
            if P_world.rank == 0:
                loss = criterion(output, labels[batch])
            else:
                loss = ZeroVolumeCorrectorFunction.apply(output)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if P_world.rank == 0:
                expected = criterion(plain(x), labels[batch])
                reference.zero_grad()
                expected.backward()
                reference.step()
                largest = max(largest, abs(loss.item() - expected.item()))
        split.eval()
        test = images[1500:]
        output = split(test if P_world.rank == 0 else zero_volume_tensor(len(test)))
        split.train()
        if P_world.rank == 0:
            hits = (output.argmax(1) == labels[1500:]).float().mean().item()
            print(f"epoch {epoch}: {hits:.1%} right with ranks={P_world.size}", flush=True)
    if P_world.rank == 0:
        print(f"largest difference of a loss from one process: {largest:.1e}", flush=True)
        assert largest < 1e-2
        assert hits > 0.8 or epochs < EPOCHS


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=None, help="start so many ranks here")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parser.parse_args()
    if arguments.ranks is None:
        main(arguments.epochs)
    else:
        unisono.run(main, arguments.epochs, ranks=arguments.ranks)
