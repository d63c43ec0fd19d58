"""Stands for torchvision: scikit-learn's digits in place of MNIST, three transforms."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
from sklearn.datasets import load_digits


class MNIST(torch.utils.data.Dataset):
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        file = Path(root) / "digits"
        if download:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        if not file.exists():
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        images, labels = load_digits(return_X_y=True)
        chosen = (torch.arange(len(labels)) % 5 != 0) == train
        self.data = (torch.tensor(images).view(-1, 8, 8) * 15).to(torch.uint8)[chosen]
        self.targets = torch.tensor(labels)[chosen]
        self.transform, self.target_transform = transform, target_transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index], int(self.targets[index])
        return image if self.transform is None else self.transform(image), label


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for step in self.transforms:
            image = step(image)
        return image


class ToTensor:
    def __call__(self, image):
        return image[None].float() / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image):
        return (image - self.mean) / self.std


datasets = types.ModuleType("torchvision.datasets")
datasets.MNIST = MNIST
transforms = types.ModuleType("torchvision.transforms")
transforms.Compose, transforms.ToTensor, transforms.Normalize = Compose, ToTensor, Normalize
__path__ = []
sys.modules |= {"torchvision.datasets": datasets, "torchvision.transforms": transforms}
