"""Train a convolutional network whose images are split over ranks, and get one process's accuracy.

Every rank holds a strip of each digit. `split` turns an ordinary network into a split one with
the same weights; losses and accuracy equal those of the plain network trained beside it.
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unisono
from unisono.nn import full_state_dict, split
from unisono.topology import Partition


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data["images"], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data["target"])


def train(epochs: int) -> tuple[float, float, float]:
    """Return accuracy of the split and of the plain network, and the largest loss difference."""
    comm = unisono.world()
    images, labels = digits()
    strip = Partition([1, 1, comm.size, 1])  # cut along the height
    torch.manual_seed(0)
    plain = network()
    reference = copy.deepcopy(plain)
    net = split(plain, strip, blocks=True)
    ours = torch.optim.Adam(net.parameters(), lr=3e-3)
    theirs = torch.optim.Adam(reference.parameters(), lr=3e-3)
    largest = 0.0
    order = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for batch in torch.randperm(1500, generator=order).split(100):
            x, t = images[batch], labels[batch]
            loss = cross_entropy(net(x[strip.local_slices(x.shape)]), t)
            other = cross_entropy(reference(x), t)
            for optimizer, value in ((ours, loss), (theirs, other)):
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
            largest = max(largest, abs(loss.item() - other.item()))
    net.eval()
    reference.eval()
    x, t = images[1500:], labels[1500:]
    with torch.no_grad():
        right = (net(x[strip.local_slices(x.shape)]).argmax(1) == t).float().mean().item()
        expected = (reference(x).argmax(1) == t).float().mean().item()
    network().load_state_dict(full_state_dict(net))  # loads back into plain torch
    return right, expected, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    right, expected, largest = unisono.run(train, options.epochs, ranks=options.ranks)[0]
    print(f"accuracy {right:.1%} split over {options.ranks} ranks, {expected:.1%} in one process")
    print(f"largest difference of a loss: {largest:.1e}")
    if largest > 1e-2 or abs(right - expected) > 0.02:
        raise SystemExit("the split network does not equal the plain one")


if __name__ == "__main__":
    main()
