"""What layers with parameters share here: each block is stored once, on its first rank.

Other ranks hold parameters without elements; they get gradients without elements, so optimizers and
loops over parameters need not know where a rank stands.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from unisono.operators import attach


@dataclass(frozen=True)
class LocalLayer:
    """The parameters that this rank stores."""

    weight: Tensor
    bias: Tensor | None


class StoredParameters(nn.Module):
    """Give every parameter a gradient on every rank. Stands before a layer of `unisono.nn`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result, tied to the parameters without elements."""
        y: Tensor = super().forward(input)
        if torch.is_grad_enabled():
            for p in self.parameters(recurse=False):
                if p.requires_grad and not p.numel():
                    y = attach(y, p)
        return y


def refuse_unknown(layer: nn.Module, unknown: dict[str, Any]) -> None:
    """Raise `TypeError` for keywords that only a fork of DistDL has, naming those of the layer."""
    if unknown:
        _refuse(type(layer), sorted(unknown))


def _refuse(kind: type[nn.Module], unknown: list[str]) -> NoReturn:
    known = inspect.signature(kind).parameters.values()
    names = [p.name for p in known if p.kind is not inspect.Parameter.VAR_KEYWORD]
    raise TypeError(
        f"{kind.__name__} has no argument {', '.join(unknown)}\n  HINT: one of {', '.join(names)}"
    )
