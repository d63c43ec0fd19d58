"""Other people's trainers on our ranks: Lightning, transformers' Trainer and accelerate, unchanged.

`unisono.run` has initialised torch.distributed, so they find a world and use its shared memory.
Two ranks with half of each batch end with the weights of one rank.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from importlib.util import find_spec

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import unisono


def digits():
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x[:1600] / 16, dtype=torch.float32), torch.tensor(y[:1600])
    return [{"pixels": pixels, "labels": label} for pixels, label in zip(x, y, strict=True)]


class Net(nn.Module):
    """Returns its loss, as transformers wants it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixels, labels):
        logits = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_lightning(net, batch_size, epochs):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    data = digits()
    lightning.Trainer(
        accelerator="cpu",
        devices=unisono.world().size,
        strategy=DDPStrategy(process_group_backend="shm"),
        max_epochs=epochs,
        use_distributed_sampler=False,  # which would shuffle
        logger=False,
        enable_checkpointing=False,
    ).fit(Task(), DataLoader(data, batch_size, sampler=DistributedSampler(data, shuffle=False)))


def with_transformers(net, batch_size, epochs):
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        how = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=epochs,
            per_device_train_batch_size=batch_size,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
        )
        Trainer(model=net, args=how, train_dataset=digits()).train()


def with_accelerate(net, batch_size, epochs):
    from accelerate import Accelerator

    accelerator, optimizer = Accelerator(cpu=True), torch.optim.SGD(net.parameters(), lr=0.5)
    loader = DataLoader(digits(), batch_size)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()


TRAINERS = ("accelerate", "lightning", "transformers")


def train(trainer, epochs):
    warnings.simplefilter("ignore")  # they have much to say about machines without GPUs
    torch.manual_seed(0)
    net = Net()
    trainer(net, 160 // unisono.world().size, epochs)
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trainer", choices=TRAINERS, help="by default all that are installed")
    options = parser.parse_args()
    names = [options.trainer] if options.trainer else [n for n in TRAINERS if find_spec(n)]
    for name in names:
        trainer = globals()[f"with_{name}"]
        one, *_ = unisono.run(train, trainer, 2, ranks=1)
        many = unisono.run(train, trainer, 2, ranks=options.ranks)
        apart = max((weights - one).abs().max().item() for weights in many)
        print(f"{name}: weights of {options.ranks} ranks and of one differ by {apart:.1e}")
        assert apart < 1e-5


if __name__ == "__main__":
    main()
