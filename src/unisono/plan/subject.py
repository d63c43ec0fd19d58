"""What is planned: a model, a batch of one rank and how it is trained."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from unisono.bayes import Sequential
from unisono.errors import PlatformError

__all__ = ["GraphInput", "Subject", "as_subject", "load_subject"]


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """The graph that each sample lives on."""

    edge_index: Tensor
    """Source and target of each edge, `[2, E]`."""
    nodes: int
    row_bytes: int
    """Bytes of a node's features in the layers that read neighbours."""
    exchanges: int
    """How many layers do."""
    pos: Tensor | None = None
    """Coordinates, `[N, D]`; with them a split keeps neighbours together."""


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
    from unisono.plan.presets import PRESETS

    if word in PRESETS:
        return PRESETS[word]()
    place, colon, name = word.rpartition(":")
    if not colon:
        raise PlatformError.because(
            f"--model {word}",
            f"no preset of that name; there are {', '.join(PRESETS)}",
            hint="--model cnn, or --model train.py:make for a function of yours",
        )
    module = _module(place, word)
    make = getattr(module, name, None)
    if not callable(make):
        raise PlatformError.because(
            f"--model {word}", f"no function {name!r} in {place}", hint=_near(module, place, name)
        )
    needed = _arguments(make)
    if needed:
        raise PlatformError.because(
            f"--model {word}",
            f"{name}() needs {', '.join(needed)}, and is called without arguments",
            hint=f"def plan(): return {name}({', '.join(f'{each}=...' for each in needed)}), "
            f"then --model {place}:plan",
        )
    subject = as_subject(make(), name=name)
    _check_batch(subject, word)
    return subject


def _near(module: Any, place: str, name: str) -> str:
    """Say which functions of the module could have been meant."""
    own = [
        each
        for each, value in vars(module).items()
        if callable(value)
        and not each.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    if not own:
        return f"def {name}(): return model, batch"
    nearest = (difflib.get_close_matches(name, own, n=1, cutoff=0.4) or own)[0]
    others = [each for each in own if each != nearest]
    return f"--model {place}:{nearest}" + (f"; also there: {', '.join(others)}" if others else "")


def _arguments(make: Callable[..., Any]) -> list[str]:
    """Return the arguments that a call needs."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return []
    named = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        each.name
        for each in parameters
        if each.default is inspect.Parameter.empty and each.kind not in named
    ]


def _check_batch(subject: Subject, word: str) -> None:
    """Refuse a batch that the model cannot take, or an output that gives no loss."""
    if not subject.batch[0].dim() or not subject.samples:
        raise PlatformError.because(
            f"--model {word}",
            f"a batch of shape {list(subject.batch[0].shape)}, which has no samples to time",
            hint="a batch of one rank, [samples, ...]",
        )
    if isinstance(subject.model, Sequential):
        return
    if not any(p.requires_grad for p in subject.model.parameters()):
        raise PlatformError.because(
            f"--model {word}",
            f"{type(subject.model).__name__} has no parameter that is trained",
            hint="return the model that you train, and its batch",
        )
    try:
        with torch.no_grad():
            subject.loss(subject.model(*(x[:2] for x in subject.batch)))
    except Exception as error:
        shapes = ", ".join(str(list(x.shape)) for x in subject.batch)
        raise PlatformError.because(
            f"--model {word}",
            f"forward and loss of a batch of {shapes} end in {type(error).__name__}: {error}",
            hint="return model, batch such that model(batch) works (a tuple for several "
            "arguments); for a loss of your own: unisono.plan.Subject(model=, batch=, loss=)",
        ) from error


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


def _module(place: str, word: str) -> Any:
    try:
        if not place.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        path = Path(place).resolve(strict=True)
        if str(path.parent) not in sys.path:  # its neighbours, as for a script
            sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (ImportError, FileNotFoundError) as error:
        raise PlatformError.because(
            f"--model {word}", str(error), hint="file.py:function or package.module:function"
        ) from error
