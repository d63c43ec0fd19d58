"""What is planned: a model, a batch of one rank and how it is trained; presets to begin with."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from unisono import bayes
from unisono.bayes import Sequential
from unisono.errors import PlatformError
from unisono.plan.workload import GraphInput


def _momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1e-3, momentum=0.9)


def _square(output: Any) -> Tensor:
    return output.square().mean()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and what a rank does with it in a step."""

    model: nn.Module | Sequential
    batch: tuple[Tensor, ...]
    """Arguments of forward; the first dim of each counts samples."""
    name: str = "model"
    loss: Callable[[Any], Tensor] = _square
    """From the output to a number."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = _momentum
    """From the parameters to an optimizer."""
    graph: GraphInput | None = None

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return self.batch[0].shape[0]


def load_subject(word: str) -> Subject:
    """Return what `--model` means: a preset, `file.py:function` or `package.module:function`.

    The function takes no argument and returns a `Subject`, or a model and its batch.
    """
    if word in PRESETS:
        return PRESETS[word]()
    place, colon, name = word.rpartition(":")
    if not colon:
        raise PlatformError.because(
            f"--model {word}",
            f"no preset of that name; there are {', '.join(PRESETS)}",
            hint="--model cnn, or --model train.py:make for a function of yours",
        )
    try:
        subject = as_subject(getattr(_module(place), name)(), name=name)
        _check(subject)
    except PlatformError:
        raise
    except Exception as error:
        raise PlatformError.because(
            f"--model {word}",
            f"{type(error).__name__}: {error}",
            hint="file.py:function or package.module:function, which takes no argument and returns "
            "model, batch such that model(batch) works; for a loss of your own: "
            "unisono.plan.Subject(model=, batch=, loss=)",
        ) from error
    return subject


def _check(subject: Subject) -> None:
    """Raise for a batch that the model cannot take, and where there is nothing to time."""
    if not subject.batch[0].dim() or not subject.samples:
        raise ValueError(f"a batch of shape {list(subject.batch[0].shape)} has no samples to time")
    if isinstance(subject.model, Sequential):
        return
    if not any(p.requires_grad for p in subject.model.parameters()):
        raise ValueError(f"{type(subject.model).__name__} has no parameter that is trained")
    with torch.no_grad():
        subject.loss(subject.model(*(x[:2] for x in subject.batch)))


def as_subject(made: Any, name: str = "model") -> Subject:
    """Return a `Subject` from a model and its batch, or the subject itself."""
    if isinstance(made, Subject):
        return made
    try:
        model, batch = made
    except (TypeError, ValueError):
        model, batch = None, None
    batch = (batch,) if isinstance(batch, Tensor) else batch
    tensors = isinstance(batch, tuple) and batch and all(isinstance(x, Tensor) for x in batch)
    if not isinstance(model, nn.Module | Sequential) or not isinstance(batch, tuple) or not tensors:
        raise PlatformError.because(
            f"a model to plan from {name}",
            f"{type(made).__name__}",
            hint="return model, batch  (a module and a tensor, or a tuple of tensors)",
        )
    return Subject(model=model, batch=batch, name=name)


def _module(place: str) -> Any:
    """Return a module by its name, or by its file, which finds its neighbours as a script does."""
    if not place.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place).resolve(strict=True)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- presets: sizes that a laptop trains in milliseconds ---------------------------------------


def mlp() -> Subject:
    """Return three wide linear layers: much to send, little to compute."""
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)
    )
    return Subject(name="mlp", model=model, batch=(torch.randn(64, 512),))


def cnn() -> Subject:
    """Return four convolutions over 64 x 64 pictures: little to send, much to compute."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32 * 64, 64),
    )  # fmt: skip
    return Subject(name="cnn", model=model, batch=(torch.randn(16, 3, 64, 64),))


def transformer() -> Subject:
    """Return four encoder layers of width 256 over sequences of 32."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return Subject(name="transformer", model=model, batch=(torch.randn(8, 32, 256),))


SIDE, FEATURES = 48, 16


class GridNetwork(nn.Module):
    """Three rounds of messages between the four neighbours of each point of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(2 * FEATURES, FEATURES) for _ in range(3))
        self.edges = nn.Buffer(_grid_edges(SIDE))

    def forward(self, x: Tensor) -> Tensor:
        """Return new features of the nodes `x`, `[B, N, F]`."""
        source, target = self.edges
        for layer in self.rounds:
            heard = torch.zeros_like(x).index_add(1, target, x[:, source])
            x = torch.relu(layer(torch.cat([x, heard], -1)))
        return x


def graph() -> Subject:
    """Return message passing on a grid of 48 x 48 nodes."""
    rows = torch.arange(SIDE * SIDE)
    points = torch.stack([rows // SIDE, rows % SIDE], 1).double()
    return Subject(
        name="graph",
        model=GridNetwork(),
        batch=(torch.randn(4, SIDE * SIDE, FEATURES),),
        graph=GraphInput(
            edge_index=_grid_edges(SIDE),
            nodes=SIDE * SIDE,
            row_bytes=4 * FEATURES,
            exchanges=3,
            pos=points,
        ),
    )


def bayesian() -> Subject:
    """Return a net of means and variances, 256-512-512-10."""
    model = bayes.Sequential(
        bayes.Linear(256, 512), bayes.ReLU(), bayes.Linear(512, 512), bayes.ReLU(),
        bayes.Linear(512, 10),
    )  # fmt: skip
    return Subject(name="bayes", model=model, batch=(torch.randn(64, 256),))


def _grid_edges(side: int) -> Tensor:
    """Return both directions of all edges of a square grid, `[2, E]`."""
    rows = torch.arange(side * side).view(side, side)
    pairs = [(rows[:, :-1], rows[:, 1:]), (rows[:-1], rows[1:])]
    one = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    return torch.cat([one, one.flip(0)], 1)


PRESETS = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "graph": graph,
    "bayes": bayesian,
}
"""By the name that `--model` takes."""
