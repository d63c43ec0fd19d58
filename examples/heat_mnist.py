"""A training script in HeAT's style; only the import lines are not HeAT's.

python examples/heat_mnist.py            one process
mpiexec -n 2 python examples/heat_mnist.py
python examples/heat_mnist.py --ranks 2  ranks started by unisono

The data are 1,797 real images of handwritten digits (8 x 8 pixels), in place of a download.
"""

# Some modules are made from a table when they are imported.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

import unisono
import unisono.compat.heat as ht
import unisono.compat.heat.nn.functional as F
import unisono.compat.heat.optim as optim
from unisono.compat.heat.optim.lr_scheduler import StepLR


class Net(ht.nn.Module):
    """Two convolutions and two dense layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = ht.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = ht.nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = ht.nn.Linear(32 * 4 * 4, 64)
        self.fc2 = ht.nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


class Digits(ht.utils.data.Dataset):
    """This rank's share of the images, shuffled over ranks between epochs."""

    def __init__(self, train, ishuffle=False):
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        labels = torch.tensor(labels)
        chosen = (torch.arange(len(labels)) % 5 != 0) == train
        images, labels = images[chosen], labels[chosen]
        _, _, mine = ht.MPI_WORLD.chunk(images.shape, split=0)
        super().__init__(images[mine], ishuffle=ishuffle, test_set=not train)
        self.targets = labels[mine[0]][self._cut_slice]

    def __getitem__(self, index):
        return self.data[index], self.targets[index]


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    hits = torch.zeros(2)
    with torch.no_grad():
        for data, target in loader:
            hits += torch.tensor([(model(data).argmax(1) == target).sum(), len(target)])
    ht.MPI_WORLD.Allreduce(ht.MPI.IN_PLACE, hits, op=ht.MPI.SUM)
    return (hits[0] / hits[1]).item()


def main(epochs):
    torch.manual_seed(1)
    blocking = False
    train_loader = ht.utils.data.DataLoader(Digits(True, ishuffle=True), batch_size=16)
    test_loader = ht.utils.data.DataLoader(Digits(False), batch_size=256)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    dp_optimizer = ht.optim.DataParallelOptimizer(optimizer, blocking)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.8)
    dp_model = ht.nn.DataParallel(
        model,
        comm=ht.get_comm(),
        optimizer=dp_optimizer,
        blocking_parameter_updates=blocking,
    )
    accuracy = 0.0
    for epoch in range(epochs):
        train_loader.last_epoch = epoch + 1 == epochs
        train(dp_model, train_loader, dp_optimizer)
        accuracy = test(dp_model, test_loader)
        if ht.MPI_WORLD.rank == 0:
            print(f"epoch {epoch}: {accuracy:.1%} of the test images", flush=True)
        scheduler.step()
    assert accuracy > 0.9


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=None, help="start so many ranks here")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.ranks is None:
        main(arguments.epochs)
    else:
        unisono.run(main, arguments.epochs, ranks=arguments.ranks)
