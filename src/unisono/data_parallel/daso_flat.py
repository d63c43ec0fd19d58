"""The trainable parameters of a module as flat tensors, one for each device and dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

__all__ = ["FlatParameters", "flatten", "is_finite", "write_back"]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Return the real values of tensors of one dtype behind each other, as a new tensor."""
    return torch.cat([_real(x.detach()).reshape(-1) for x in tensors])


@torch.no_grad()
def write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with the values that `flatten` would take from them."""
    targets = [_real(x.detach()) for x in tensors]
    for target, part in zip(targets, flat.split([x.numel() for x in targets]), strict=True):
        target.copy_(part.view(target.shape))


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


class FlatParameters:
    """Packs trainable parameters, in the order of `named_parameters`, and writes them back.

    Args:
        module: frozen parameters are left out, shared ones count once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.named = _trainable(module)
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
        for name, param in self.named:
            kinds[param.device, param.dtype].append((name, param))
        self._kinds = list(kinds.values())
        self._keys = [_key(param) for _, param in self.named]

    @property
    def numel(self) -> int:
        """Number of trainable elements."""
        return sum(param.numel() for _, param in self.named)

    def still_fits(self, module: nn.Module) -> bool:
        """Whether the module's trainable parameters are those packed here."""
        now = _trainable(module)
        return [_key(param) for _, param in now] == self._keys

    def pack(self) -> list[Tensor]:
        """Return the values as new flat tensors, one for each kind."""
        return [flatten(param for _, param in kind) for kind in self._kinds]

    def blank(self) -> list[Tensor]:
        """Return tensors like those of `pack`, with nothing in them yet."""
        return [
            torch.empty(
                sum(_real(param).numel() for _, param in kind),
                dtype=_real(kind[0][1]).dtype,
                device=kind[0][1].device,
            )
            for kind in self._kinds
        ]

    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the parameters with these values."""
        for kind, flat in zip(self._kinds, flats, strict=True):
            write_back(flat, [param for _, param in kind])

    def name_at(self, kind: int, offset: int) -> str:
        """Return the name of the parameter at an offset of a flat tensor."""
        sizes = [_real(param).numel() for _, param in self._kinds[kind]]
        ends = accumulate(sizes)
        return next(
            name for (name, _), end in zip(self._kinds[kind], ends, strict=True) if offset < end
        )

    def first_non_finite(self) -> int:
        """Return the place in `named` of the first parameter with a nan or inf, or -1."""
        for place, (_, param) in enumerate(self.named):
            if not is_finite(_real(param.detach())):
                return place
        return -1


def is_finite(x: Tensor) -> bool:
    """Whether all values are finite; one pass, no copy."""
    if x.numel() == 0:
        return True
    low, high = x.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _trainable(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


def _key(param: Tensor) -> tuple[object, ...]:
    return id(param), param.device, param.dtype, param.shape
