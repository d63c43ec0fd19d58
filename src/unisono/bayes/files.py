"""Nets as files: torch's, pytagi's binary, and text of one number per line.

Every file appears whole or not at all, and nothing of a net changes before all of a file fits it.
"""

from __future__ import annotations

import itertools
import struct
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unisono.bayes.layers.base import BaseLayer, same_info
from unisono.bayes.layers.normalization import LayerNorm
from unisono.bayes.moments import to_array
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

Columns = dict[str, tuple[Tensor, ...]]
"""A tensor for each text file, by layer."""


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
    running = {key: state.pop(key) for key in [*state] if key.endswith(RUNNING)}
    content = {
        "format": FORMAT,
        "state": state,
        "running": running,
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
    if len(here) != len(there) or not all(map(same_info, here, there)):
        raise PartitionError.because(
            f"load({str(path)!r}) of another architecture",
            f"the file has {' '.join(there)}",
            f"this net has {' '.join(here)}",
            "the same layers in the same order",
        )
    net.load_state_dict({**content["state"], **content["running"]})
    net.set_recurrent_state(content)


# pytagi's binary: for each plain layer, activations too, the length of its info as uint64, the
# info, then float32 mu_w, var_w, mu_b, var_b; batch norms also their running mean and variance.
# Little-endian.


def save_binary(net: Sequential, path: str | Path) -> None:
    """Write `net` as pytagi does."""
    live, parts = net.live_tensors(), list[bytes]()
    for key, layer in net.leaves():
        parts.append(_header(layer))
        tensors = (*live.get(key, ()), *live.get(key + RUNNING, ()))
        parts += [to_array(tensor).astype("<f4").tobytes() for tensor in tensors]
    with _appearing_whole(path) as draft:
        draft.write_bytes(b"".join(parts))


def load_binary(net: Sequential, path: str | Path) -> None:
    """Read a file of `save_binary` or of pytagi."""
    raw, live, leaves = Path(path).read_bytes(), net.live_tensors(), net.leaves()
    state: dict[str, list[np.ndarray]] = {}
    at = 0
    for key, layer in leaves:
        at = _behind_header(raw, at, layer, path)
        for name in (key, key + RUNNING):
            for tensor in live.get(name, ()):
                values = np.frombuffer(raw, "<f4", min(tensor.numel(), (len(raw) - at) // 4), at)
                if len(values) != tensor.numel():
                    raise _unlike(path, layer, f"{len(values)} of {tensor.numel()} numbers")
                state.setdefault(name, []).append(values)
                at += values.nbytes
        while isinstance(layer, LayerNorm) and at < len(raw) and not _info_at(raw, at):
            at += 8  # pytagi leaves two statistics for each sample of its last batch here
    if at != len(raw):
        raise _unlike(path, leaves[-1][1] if leaves else None, f"{len(raw) - at} bytes more")
    net.load_state_dict(state)


def _header(layer: BaseLayer) -> bytes:
    info = layer.get_layer_info().encode()
    return struct.pack("<Q", len(info)) + info


def _behind_header(raw: bytes, at: int, layer: BaseLayer, path: str | Path) -> int:
    """Return where the numbers behind the header of `layer` start."""
    info = _info_at(raw, at)
    if not same_info(info, layer.get_layer_info()):
        found = repr(info) if info else "no header" if at < len(raw) else "the end of the file"
        raise _unlike(path, layer, found)
    return at + 8 + len(info)


def _info_at(raw: bytes, at: int) -> str:
    """Return the info of the layer whose header is there; "" if none is."""
    length = struct.unpack_from("<Q", raw, at)[0] if len(raw) >= at + 8 else 0
    info = raw[at + 8 : at + 8 + length] if length < 1000 else b""
    return info.decode() if info.isascii() and info.endswith(b")") else ""


def _unlike(path: str | Path, layer: BaseLayer | None, content: str) -> UnisonoError:
    expected = "the end" if layer is None else layer.get_layer_info()
    return PartitionError.because(
        f"load({str(path)!r}): {expected} expected",
        f"{content} in the file",
        hint="a file of a net with the same layers in the same order",
    )


# text files: one number per line, layers in walk order: a file for each of mu_w, var_w, mu_b, var_b


def save_csv(net: Sequential, prefix: str | Path) -> None:
    """Write the four files, and two more if there are batch norms."""
    parameters, running = _columns(net)
    _write_columns(prefix, ENDINGS, parameters)
    if running:
        _write_columns(prefix, RUNNING_ENDINGS, running)


def load_csv(net: Sequential, prefix: str | Path) -> None:
    """Read the files of `save_csv`."""
    parameters, running = _columns(net)
    state = _read_columns(prefix, ENDINGS, parameters)
    if running and all(Path(f"{prefix}{ending}").exists() for ending in RUNNING_ENDINGS):
        state |= _read_columns(prefix, RUNNING_ENDINGS, running)
    elif running:
        missing = f"{prefix}{RUNNING_ENDINGS[0]}"
        warnings.warn(
            explain(
                f"load_csv({str(prefix)!r})",
                f"no {missing}: the {len(running)} batch norms keep their running values",
                hint="net.save_csv writes them too; or a training batch before net.eval()",
            ),
            stacklevel=3,
        )
    net.load_state_dict(state)


def _columns(net: Sequential) -> tuple[Columns, Columns]:
    """Return the live tensors of parameters, and those of running values."""
    live = net.live_tensors()
    running = {key: parts for key, parts in live.items() if key.endswith(RUNNING)}
    return {key: parts for key, parts in live.items() if key not in running}, running


def _write_columns(prefix: str | Path, endings: tuple[str, ...], columns: Columns) -> None:
    for kind, ending in enumerate(endings):
        numbers = (to_array(parts[kind]).tolist() for parts in columns.values())
        with _appearing_whole(f"{prefix}{ending}") as draft:
            draft.write_text("".join(f"{value!r}\n" for values in numbers for value in values))


def _read_columns(
    prefix: str | Path, endings: tuple[str, ...], columns: Columns
) -> dict[str, list[list[float]]]:
    """Return what the files hold, cut as `columns` are."""
    found: dict[str, list[list[float]]] = {key: [] for key in columns}
    for kind, ending in enumerate(endings):
        path = f"{prefix}{ending}"
        lines = enumerate(Path(path).read_text().splitlines(), 1)
        values = [_number(word, path, n) for n, line in lines for word in line.split()]
        sizes = [parts[kind].numel() for parts in columns.values()]
        if len(values) != sum(sizes):
            raise PartitionError.because(
                f"load_csv: {path}",
                f"{len(values)} numbers for layers {' '.join(columns)}",
                f"{len(values)} != {' + '.join(map(str, sizes))} = {sum(sizes)}",
                "files of a net with the same layers",
            )
        rest = iter(values)
        for key, size in zip(columns, sizes, strict=True):
            found[key].append(list(itertools.islice(rest, size)))
    return found


def _number(word: str, path: str, line: int) -> float:
    try:
        return float(word)
    except ValueError:
        raise PartitionError.because(
            f"load_csv: {path}",
            f"{word!r} in line {line}",
            hint="one number per line, as net.save_csv writes them; no header",
        ) from None
