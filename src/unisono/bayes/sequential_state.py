"""The part of `Sequential` that goes in and out of dicts and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.bayes import csv_files, pytagi_files, torch_files
from unisono.bayes.arrays import ArrayLike, check_variance, to_array, to_tensor
from unisono.bayes.base_layer import BaseLayer
from unisono.bayes.normalization import BatchNorm2d
from unisono.bayes.stack import LayerStack
from unisono.errors import PartitionError

Values = tuple[Any, Any, Any, Any]
"""mu_w, var_w, mu_b, var_b of one layer: lists, or tensors."""
_RUNNING = ".running"


class StoredState(LayerStack):
    """State dicts and the three kinds of files."""

    def parameters(self) -> list[Values]:
        """Return (mu_w, var_w, mu_b, var_b) of all layers that have them, in walk order."""
        return list(self.state_dict().values())

    def state_dict(self, *, tensors: bool = False, running: bool = False) -> dict[str, Values]:
        """Return the parameters by layer; two dicts of lists compare with `==`.

        Args:
            tensors: copies as tensors in place of Python lists.
            running: add `<key>.running` with the running mean and variance of batch norms. Without
                it a batch norm that loads the dict keeps the running values it has.
        """

        def given(t: Tensor) -> Any:
            return t.detach().clone() if tensors else to_array(t).tolist()

        found: dict[str, Values] = {}
        for key, layer in self.leaves():
            if layer.params is not None:
                mean_w, var_w, mean_b, var_b = layer.params.values
                found[key] = (given(mean_w), given(var_w), given(mean_b), given(var_b))
            if running and isinstance(layer, BatchNorm2d):
                found[key + _RUNNING] = (
                    given(layer.running_mean),
                    given(layer.running_var),
                    [],
                    [],
                )
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Sequence[ArrayLike]]) -> None:
        """Write the parameters of a dict; every key and length is checked before anything is.

        Args:
            state: lists, arrays or tensors under the keys of `state_dict`.
        """
        layers = dict(self.leaves())
        wanted = {key for key, layer in layers.items() if layer.params is not None}
        norms = {key + _RUNNING for key, layer in layers.items() if isinstance(layer, BatchNorm2d)}
        missing, extra = sorted(wanted - set(state)), sorted(set(state) - wanted - norms)
        if missing or extra:
            raise PartitionError.because(
                "load_state_dict of another architecture",
                f"missing {', '.join(missing) or 'nothing'}; too many {', '.join(extra) or 'none'}",
                f"{len(wanted)} layers here, {len(set(state) - norms)} in the dict",
                f"a dict with the keys {', '.join(sorted(wanted))}",
            )
        read: list[tuple[Tensor, Tensor]] = []
        wrong: list[str] = []
        for key, values in state.items():
            targets = _targets(layers, key)
            if len(values) not in (4, len(targets)):
                wrong.append(f"{key}: {len(values)} parts for mu_w, var_w, mu_b, var_b")
            for n, (live, value) in enumerate(zip(targets, values, strict=False)):
                flat = to_tensor(value, live.device, live.dtype).reshape(-1)
                if flat.numel() != live.numel():
                    wrong.append(f"{key}: {flat.numel()} numbers for {live.numel()}")
                elif n % 2:
                    check_variance(flat, f"{key} part {n}")
                read.append((live, flat))
        if wrong:
            raise PartitionError.because(
                "load_state_dict with sizes of another net",
                "\n".join(wrong),
                None,
                f"the dict of a net like this one: {' '.join(self._infos())}",
            )
        for live, flat in read:
            live.copy_(flat.view(live.shape))
        for key in norms & set(state):
            norm = layers[key.removesuffix(_RUNNING)]
            if isinstance(norm, BatchNorm2d):
                norm.note_loaded_statistics()

    def params_from(self, other: StoredState) -> None:
        """Take parameters and running values of another net of the same architecture."""
        self.load_state_dict(other.state_dict(tensors=True, running=True))

    def save(self, path: str | Path) -> None:
        """Write the net: `.pt` and `.pth` as a torch file, anything else as pytagi's binary.

        Missing directories are made; the file appears whole or not at all.
        """
        (torch_files if Path(path).suffix in (".pt", ".pth") else pytagi_files).save(self, path)

    def load(self, path: str | Path) -> None:
        """Read a file that `save`, or pytagi, wrote; the architecture must be the same."""
        (torch_files if Path(path).suffix in (".pt", ".pth") else pytagi_files).load(self, path)

    def save_csv(self, prefix: str | Path) -> None:
        """Write `<prefix>_1_mw.csv`, `_2_Sw.csv`, `_3_mb.csv`, `_4_Sb.csv`, one value a line.

        Nets with batch norms also get `_5_mra.csv`, `_6_Sra.csv`: their running values.
        """
        csv_files.save(self, prefix)

    def load_csv(self, prefix: str | Path) -> None:
        """Read the files of `save_csv`; warns if running values are wanted and not there."""
        csv_files.load(self, prefix)

    def _infos(self) -> list[str]:
        return [layer.get_layer_info() for _, layer in self.leaves()]


def _targets(layers: dict[str, BaseLayer], key: str) -> tuple[Tensor, ...]:
    layer = layers[key.removesuffix(_RUNNING)]
    if key.endswith(_RUNNING) and isinstance(layer, BatchNorm2d):
        return layer.running_mean, layer.running_var
    return () if layer.params is None else layer.params.values
