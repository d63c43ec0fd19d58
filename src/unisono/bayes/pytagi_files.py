"""Nets as pytagi's binary files.

For each plain layer, activations too: the length of its info as uint64, the info, then float32
mu_w, var_w, mu_b, var_b; batch norms also their running mean and variance. Little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from unisono.bayes.arrays import check_variance, to_array
from unisono.bayes.base_layer import BaseLayer
from unisono.bayes.geometry import alike
from unisono.bayes.normalization import BatchNorm2d, LayerNorm
from unisono.bayes.writing import write_whole
from unisono.errors import PartitionError

if TYPE_CHECKING:
    from torch import Tensor

    from unisono.bayes.sequential_state import StoredState


def _content(layer: BaseLayer) -> list[Tensor]:
    tensors = [] if layer.params is None else list(layer.params.values)
    if isinstance(layer, BatchNorm2d):
        tensors += [layer.running_mean, layer.running_var]
    return tensors


def save(net: StoredState, path: str | Path) -> None:
    """Write `net`."""
    parts: list[bytes] = []
    for _, layer in net.leaves():
        info = layer.get_layer_info().encode()
        parts += [struct.pack("<Q", len(info)), info]
        parts += [to_array(tensor).astype("<f4").tobytes() for tensor in _content(layer)]
    write_whole(path, lambda partial: partial.write_bytes(b"".join(parts)))


@torch.no_grad()
def load(net: StoredState, path: str | Path) -> None:
    """Read a file of `save` or of pytagi; nothing is written before all of it fits."""
    raw = Path(path).read_bytes()
    layers = [layer for _, layer in net.leaves()]
    read: list[tuple[Tensor, np.ndarray]] = []
    at = 0
    for n, layer in enumerate(layers):
        at = _header(raw, at, layer, str(path))
        for n_part, tensor in enumerate(_content(layer)):
            values = np.frombuffer(raw, "<f4", min(tensor.numel(), (len(raw) - at) // 4), at)
            if len(values) != tensor.numel():
                raise _unlike(str(path), layer, f"{len(values)} of {tensor.numel()} numbers")
            if n_part % 2:
                what = f"{path}: {layer.get_layer_info()} part {n_part}"
                check_variance(torch.tensor(values), what)
            read.append((tensor, values))
            at += values.nbytes
        if isinstance(layer, LayerNorm):  # pytagi leaves statistics of its last batch here
            follower = layers[n + 1] if n + 1 < len(layers) else None
            at = len(raw) if follower is None else _next_header(raw, at, follower)
    if at != len(raw):
        raise _unlike(str(path), layers[-1] if layers else None, f"{len(raw) - at} bytes more")
    for tensor, values in read:
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))
    for layer in layers:
        if isinstance(layer, BatchNorm2d):
            layer.note_loaded_statistics()


def _header(raw: bytes, at: int, layer: BaseLayer, path: str) -> int:
    """Return where the numbers behind the header of `layer` start."""
    length = struct.unpack_from("<Q", raw, at)[0] if len(raw) >= at + 8 else 0
    info = raw[at + 8 : at + 8 + length].decode(errors="replace") if length < 1000 else "no header"
    if not alike(info, layer.get_layer_info()):
        raise _unlike(path, layer, repr(info) if info else "the end of the file")
    return at + 8 + length


def _next_header(raw: bytes, at: int, layer: BaseLayer) -> int:
    """Return the first place from `at` on where the header of `layer` stands."""
    info = layer.get_layer_info()
    header = struct.pack("<Q", len(info)) + info.encode()
    found = raw.lower().find(header.lower(), at)
    return at if found < 0 else found


def _unlike(path: str, layer: BaseLayer | None, found: str) -> PartitionError:
    wanted = "the end" if layer is None else layer.get_layer_info()
    return PartitionError.because(
        f"load({path!r}): {wanted} expected",
        f"{found} in the file",
        None,
        "a file of a net with the same layers in the same order",
    )  # type: ignore[return-value]
