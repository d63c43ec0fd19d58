"""Nets as torch files: parameters, running values, LSTM states, layers and dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.bayes.writing import write_whole
from unisono.errors import PartitionError

if TYPE_CHECKING:
    from unisono.bayes.sequential_state import StoredState

FORMAT = "unisono.bayes/1"


def save(net: StoredState, path: str | Path) -> None:
    """Write `net`."""
    state = net.state_dict(tensors=True, running=True)
    recurrent = getattr(net, "carried_lstm_states", dict)()
    content = {
        "format": FORMAT,
        "state": {key: value for key, value in state.items() if not key.endswith(".running")},
        "running": {key: value for key, value in state.items() if key.endswith(".running")},
        "lstm": recurrent,
        "layers": net._infos(),
        "dtype": str(net._dtype).removeprefix("torch."),
    }
    write_whole(path, lambda partial: torch.save(content, partial))


def load(net: StoredState, path: str | Path) -> None:
    """Read a file of `save` into `net`."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # damaged files end torch's reader in many ways
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PartitionError.because(
            f"load({str(path)!r})", f"not a file of format {FORMAT}", None, "a file of net.save()"
        )
    here, there = net._infos(), content["layers"]
    mine, theirs = _sizes(net.state_dict(tensors=True)), _sizes(content["state"])
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if keys or [_short(info) for info in here] != [_short(info) for info in there]:
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
    if hasattr(net, "set_lstm_states"):
        net.reset_lstm_states()  # type: ignore[attr-defined]
        net.set_lstm_states(content["lstm"])  # type: ignore[attr-defined]


def _sizes(state: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
    """Return the numbers of mu_w, var_w, mu_b, var_b of each layer."""
    return {key: " + ".join(str(len(part.flatten())) for part in v) for key, v in state.items()}


def _short(info: str) -> str:
    """An image layer whose size is not known yet matches one whose size is."""
    return info.split("(")[0]
