"""Nets as files: torch's, pytagi's binary, and text of one number per line.

Every file appears whole or not at all, and nothing of a net changes before all of a file fits it.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unisono.bayes.layers.base import BaseLayer, same_info
from unisono.bayes.layers.normalization import BatchNorm2d, LayerNorm
from unisono.bayes.moments import check_variance, to_array
from unisono.errors import PartitionError, UnisonoError, explain
from unisono.launch.job_files import appearing_whole

if TYPE_CHECKING:
    from unisono.bayes.sequential import Sequential

FORMAT = "unisono.bayes/1"
RUNNING = ".running"
"""Ending of the keys of running values in a state dict."""
ENDINGS = ("_1_mw.csv", "_2_Sw.csv", "_3_mb.csv", "_4_Sb.csv")
"""The four text files, which are pytagi's."""
RUNNING_ENDINGS = ("_5_mra.csv", "_6_Sra.csv")
"""Two more for running values of batch norms, which pytagi does not read."""

Columns = dict[str, tuple[Any, ...]]
"""Lists of numbers for each text file, by layer."""


def _appearing_whole(path: str | Path) -> AbstractContextManager[Path]:
    """As `appearing_whole`, in a directory that is made if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return appearing_whole(Path(path))


# torch files: parameters, running values, LSTM states, layers and dtype


def is_torch(path: str | Path) -> bool:
    """Whether a file of that name is one of torch's."""
    return Path(path).suffix in (".pt", ".pth")


def save_torch(net: Sequential, path: str | Path) -> None:
    """Write `net` as a torch file."""
    state = net.state_dict(tensors=True, running=True)
    content = {
        "format": FORMAT,
        "state": {key: value for key, value in state.items() if not key.endswith(RUNNING)},
        "running": {key: value for key, value in state.items() if key.endswith(RUNNING)},
        "lstm": net.recurrent_state()["lstm"],
        "layers": net.infos(),
        "dtype": str(net._dtype).removeprefix("torch."),
    }
    with _appearing_whole(path) as draft:
        torch.save(content, draft)


def load_torch(net: Sequential, path: str | Path) -> None:
    """Read a file of `save_torch` into `net`."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # damaged files end torch's reader in many ways
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PartitionError.because(
            f"load({str(path)!r})", f"not a file of format {FORMAT}", hint="a file of net.save()"
        )
    here, there = net.infos(), content["layers"]
    mine, theirs = _sizes(net.state_dict(tensors=True)), _sizes(content["state"])
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    # names alone: an image layer whose size is not known yet matches one whose size is
    if keys or [info.split("(")[0] for info in here] != [info.split("(")[0] for info in there]:
        told = [
            f"{key}: {theirs.get(key, 'nothing')} numbers, {mine.get(key, 'nothing')} here"
            for key in keys
        ]
        raise PartitionError.because(
            f"load({str(path)!r}) of another architecture",
            "\n".join([f"the file has {' '.join(there)}", *told]),
            f"this net has {' '.join(here)}",
            "the same layers in the same order",
        )
    net.load_state_dict({**content["state"], **content["running"]})
    net.set_recurrent_state(content)


def _sizes(state: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
    """Return the numbers of mu_w, var_w, mu_b, var_b of each layer."""
    return {key: " + ".join(str(part.numel()) for part in v) for key, v in state.items()}


# pytagi's binary: for each plain layer, activations too, the length of its info as uint64, the
# info, then float32 mu_w, var_w, mu_b, var_b; batch norms also their running mean and variance.
# Little-endian.


def save_binary(net: Sequential, path: str | Path) -> None:
    """Write `net` as pytagi does."""
    parts: list[bytes] = []
    for _, layer in net.leaves():
        parts.append(_header(layer))
        parts += [to_array(tensor).astype("<f4").tobytes() for tensor in _content(layer)]
    with _appearing_whole(path) as draft:
        draft.write_bytes(b"".join(parts))


@torch.no_grad()
def load_binary(net: Sequential, path: str | Path) -> None:
    """Read a file of `save_binary` or of pytagi."""
    raw = Path(path).read_bytes()
    layers = [layer for _, layer in net.leaves()]
    read: list[tuple[Tensor, np.ndarray]] = []
    at = 0
    for n, layer in enumerate(layers):
        at = _behind_header(raw, at, layer, path)
        for n_part, tensor in enumerate(_content(layer)):
            values = np.frombuffer(raw, "<f4", min(tensor.numel(), (len(raw) - at) // 4), at)
            if len(values) != tensor.numel():
                raise _unlike(path, layer, f"{len(values)} of {tensor.numel()} numbers")
            if n_part % 2:
                what = f"{path}: {layer.get_layer_info()} part {n_part}"
                check_variance(torch.tensor(values), what)
            read.append((tensor, values))
            at += values.nbytes
        if isinstance(layer, LayerNorm):  # pytagi leaves statistics of its last batch here
            following = _header(layers[n + 1]).lower() if n + 1 < len(layers) else None
            at = len(raw) if following is None else max(at, raw.lower().find(following, at))
    if at != len(raw):
        raise _unlike(path, layers[-1] if layers else None, f"{len(raw) - at} bytes more")
    for tensor, values in read:
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))
    for layer in layers:
        if isinstance(layer, BatchNorm2d):
            layer.note_loaded_statistics()


def _content(layer: BaseLayer) -> list[Tensor]:
    tensors = [] if layer.params is None else list(layer.params.values)
    if isinstance(layer, BatchNorm2d):
        tensors += [layer.running_mean, layer.running_var]
    return tensors


def _header(layer: BaseLayer) -> bytes:
    info = layer.get_layer_info().encode()
    return struct.pack("<Q", len(info)) + info


def _behind_header(raw: bytes, at: int, layer: BaseLayer, path: str | Path) -> int:
    """Return where the numbers behind the header of `layer` start."""
    length = struct.unpack_from("<Q", raw, at)[0] if len(raw) >= at + 8 else 0
    info = raw[at + 8 : at + 8 + length].decode(errors="replace") if length < 1000 else "no header"
    if not same_info(info, layer.get_layer_info()):
        raise _unlike(path, layer, repr(info) if info else "the end of the file")
    return at + 8 + length


def _unlike(path: str | Path, layer: BaseLayer | None, found: str) -> UnisonoError:
    wanted = "the end" if layer is None else layer.get_layer_info()
    return PartitionError.because(
        f"load({str(path)!r}): {wanted} expected",
        f"{found} in the file",
        hint="a file of a net with the same layers in the same order",
    )


# text files: one number per line, layers in walk order


def save_csv(net: Sequential, prefix: str | Path) -> None:
    """Write the four files, and two more if there are batch norms."""
    _write_columns(prefix, ENDINGS, net.state_dict())
    if norms := _running(net):
        _write_columns(prefix, RUNNING_ENDINGS, norms)


def load_csv(net: Sequential, prefix: str | Path) -> None:
    """Read the files of `save_csv`."""
    state, norms = _read_columns(net, prefix, ENDINGS, net.state_dict()), _running(net)
    if norms and all(Path(f"{prefix}{ending}").exists() for ending in RUNNING_ENDINGS):
        state |= _read_columns(net, prefix, RUNNING_ENDINGS, norms)
    elif norms:
        missing = f"{prefix}{RUNNING_ENDINGS[0]}"
        warnings.warn(
            explain(
                f"load_csv({str(prefix)!r})",
                f"no {missing}: the {len(norms)} batch norms keep their running values",
                hint="net.save_csv writes them too; or a training batch before net.eval()",
            ),
            stacklevel=3,
        )
    net.load_state_dict(state)


def _running(net: Sequential) -> Columns:
    """Return running mean and variance of each batch norm."""
    state = net.state_dict(running=True)
    return {key: values[:2] for key, values in state.items() if key.endswith(RUNNING)}


def _write_columns(prefix: str | Path, endings: tuple[str, ...], columns: Columns) -> None:
    for kind, ending in enumerate(endings):
        text = "".join(f"{value!r}\n" for values in columns.values() for value in values[kind])
        with _appearing_whole(f"{prefix}{ending}") as draft:
            draft.write_text(text)


def _read_columns(
    net: Sequential, prefix: str | Path, endings: tuple[str, ...], now: Columns
) -> Columns:
    """Return what the files hold, cut as the columns of `now`."""
    found: list[list[list[float]]] = []
    for kind, ending in enumerate(endings):
        path = f"{prefix}{ending}"
        lines = enumerate(Path(path).read_text().splitlines(), 1)
        values = [_number(word, path, n) for n, line in lines for word in line.split()]
        sizes = [len(values_of[kind]) for values_of in now.values()]
        if len(values) != sum(sizes):
            raise PartitionError.because(
                f"load_csv: {path}",
                f"{len(values)} numbers for layers {' '.join(net.infos())}",
                f"{len(values)} != {' + '.join(map(str, sizes))} = {sum(sizes)}",
                "files of a net with the same layers",
            )
        rest = iter(values)
        found.append([[next(rest) for _ in range(size)] for size in sizes])
    return dict(zip(now, zip(*found, strict=True), strict=True))


def _number(word: str, path: str, line: int) -> float:
    try:
        return float(word)
    except ValueError:
        raise PartitionError.because(
            f"load_csv: {path}",
            f"{word!r} in line {line}",
            hint="one number per line, as net.save_csv writes them; no header",
        ) from None
