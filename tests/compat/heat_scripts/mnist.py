"""A convolutional network on MNIST, written for HeAT."""

from __future__ import annotations

import argparse
import hashlib

import heat as ht
import heat.nn.functional as F
import heat.optim as optim
import torch
from heat.optim.lr_scheduler import StepLR
from heat.utils import vision_transforms
from heat.utils.data.mnist import MNISTDataset


class Net(ht.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = ht.nn.Conv2d(1, 12, 3, padding=1)
        self.fc1 = ht.nn.Linear(12 * 16, 48)
        self.fc2 = ht.nn.Linear(48, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch} batch {batch} of {len(loader)} loss {loss.item():.3f}")


def test(model, device, loader):
    model.eval()
    right = torch.zeros(1)
    with torch.no_grad():
        for data, target in loader:
            right += (model(data.to(device)).argmax(1) == target.to(device)).sum()
    ht.MPI_WORLD.Allreduce(ht.MPI.IN_PLACE, right, ht.MPI.SUM)
    accuracy = right.item() / len(loader.dataset) / ht.MPI_WORLD.size
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"RIGHT {accuracy:.3f} with {ht.MPI_WORLD.size} {hashlib.sha256(raw).hexdigest()}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--log-interval", type=int, default=1000)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        ht.use_device("gpu")
        device = torch.device("cuda")
    steps = [vision_transforms.ToTensor(), vision_transforms.Normalize((0.3,), (0.4,))]
    transform = ht.utils.vision_transforms.Compose(steps)
    images = MNISTDataset("datasets", train=True, transform=transform, ishuffle=False)
    unseen = MNISTDataset("datasets", train=False, transform=transform, test_set=True)
    train_loader = ht.utils.data.datatools.DataLoader(images, batch_size=args.batch_size)
    test_loader = ht.utils.data.datatools.DataLoader(unseen, batch_size=100)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    dp_optimizer = optim.DataParallelOptimizer(optimizer, blocking=False)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    dp_model = ht.nn.DataParallel(
        model, comm=images.comm, optimizer=dp_optimizer, blocking_parameter_updates=False
    )
    for epoch in range(1, args.epochs + 1):
        train(args, dp_model, device, train_loader, dp_optimizer, epoch)
        test(dp_model, device, test_loader)
        scheduler.step()
        train_loader.last_epoch = epoch + 1 == args.epochs


if __name__ == "__main__":
    main()
