"""The part of `Sequential` that knows recurrent layers: carried states and the smoother."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from unisono.bayes.arrays import check_finite, to_array, to_tensor
from unisono.bayes.base_layer import BaseLayer
from unisono.bayes.blocks import LayerBlock, forward_through
from unisono.bayes.lstm import LSTM
from unisono.bayes.lstm_cell import State
from unisono.bayes.moments import Moments
from unisono.bayes.slstm import SLSTM
from unisono.bayes.stack import LayerStack
from unisono.errors import PartitionError

FlatState = tuple[list[float], list[float], list[float], list[float]]
"""mu_h, var_h, mu_c, var_c."""
Place = int | str
"""Index of a layer in the net; its path for one inside a block: `"1.0"`, `"main.1.0"`."""


class RecurrentStates(LayerStack):
    """States of LSTM layers by their index in the net, or by their path inside blocks."""

    _smoothed: tuple[NDArray[Any], NDArray[Any]] | None = None

    def _recurrent(self) -> dict[Place, LSTM]:
        return {_place(key): leaf for key, leaf in self.leaves() if isinstance(leaf, LSTM)}

    def _smoothable(self) -> dict[Place, SLSTM]:
        return {_place(key): leaf for key, leaf in self.leaves() if isinstance(leaf, SLSTM)}

    @property
    def num_samples(self) -> int:
        """Time steps allowed between two smoothings; 0 is any number."""
        return next((layer.num_samples for layer in self._smoothable().values()), 0)

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        for layer in self._smoothable().values():
            layer.num_samples = value

    def reset_lstm_states(self) -> None:
        """Let all LSTM layers start at zero; SLSTM layers forget their history."""
        for layer in self._recurrent().values():
            layer.reset_state()

    def get_lstm_states(self, time_step: int = -1) -> dict[Place, FlatState]:
        """Return the states of all LSTM layers that have one, by layer index.

        Layers inside blocks go by the path that their keys in state dicts have: `"main.1.0"`.

        Args:
            time_step: -1 for the state after the last step (its posterior, once backward ran);
                t >= 0 for the smoothed state of SLSTM layers at step t.
        """
        if time_step < 0:
            states = {n: layer.state for n, layer in self._recurrent().items()}
        else:
            states = {n: _at(layer, time_step) for n, layer in self._smoothable().items()}
        return {n: _flat(state) for n, state in states.items() if state is not None}

    def carried_lstm_states(self) -> dict[Place, FlatState]:
        """Return the states that the next call starts from; layers that start at zero have none."""
        states = {n: layer.carried for n, layer in self._recurrent().items()}
        return {n: _flat(state) for n, state in states.items() if state is not None}

    def lstm_histories(self) -> dict[Place, dict[str, torch.Tensor]]:
        """Return what SLSTM layers remember for the smoother, by layer index."""
        return {n: layer.history_tensors() for n, layer in self._smoothable().items()}

    def set_lstm_histories(self, histories: Mapping[Any, dict[str, torch.Tensor]]) -> None:
        """Let SLSTM layers remember what `lstm_histories` gave."""
        for n, layer in self._smoothable().items():
            if n in histories:
                layer.set_history(histories[n])

    def set_lstm_states(self, states: Mapping[Any, FlatState]) -> None:
        """Let the next call start from these states, as `get_lstm_states` gives them."""
        layers = self._recurrent()
        read: dict[Place, State] = {}
        for n, state in states.items():
            layer = layers.get(n)
            if layer is None:
                raise PartitionError.because(
                    f"the state of layer {n}",
                    f"LSTM layers are {list(layers)}",
                    None,
                    "the keys that get_lstm_states() gives",
                )
            rows = [to_tensor(part, self._device, self._dtype).reshape(-1) for part in state]
            sizes = [row.numel() for row in rows]
            units = layer.output_size
            if len(rows) != 4 or len(set(sizes)) != 1 or sizes[0] % units:
                raise PartitionError.because(
                    f"the state of layer {n}, {layer.get_layer_info()}",
                    f"parts of {sizes} numbers",
                    f"four parts of batch*{units}",
                    "(mu_h, var_h, mu_c, var_c) as get_lstm_states() gives them",
                )
            for name, row in zip(("mu_h", "var_h", "mu_c", "var_c"), rows, strict=True):
                # variances may be negative: the posterior of several observations can be
                check_finite(row, f"{name} of layer {n}", "states as get_lstm_states() gives them")
            # units in rows, as a layer leaves its state: products then round alike
            read[n] = State(*(row.view(-1, units).t().contiguous().t() for row in rows))
        for n, state in read.items():
            layers[n].set_state(state)

    @torch.no_grad()
    def smoother(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Smooth all time steps since the last reset; return the net's output at each, flat.

        Afterwards histories are empty and states zero; `get_lstm_states(t)` has the smoothed ones.
        """
        layers = self._smoothable()
        steps = {n: len(layer.history) for n, layer in layers.items()}
        if not layers or not all(steps.values()):
            raise PartitionError.because(
                "smoother()",
                f"{len(layers)} SLSTM layers with {list(steps.values())} time steps",
                None,
                "SLSTM layers, and forward, update, backward, step for each time step before",
            )
        behind = _behind_the_last(self.layers)
        smoothed = torch.empty(0)
        for layer in layers.values():
            smoothed = layer.smooth()
        self._remembers = False  # there is no step left to go back through
        with self._all_or_nothing(keep=False):
            self.eval()
            out = forward_through(behind, Moments(smoothed[0], smoothed[1]))
        self._smoothed = (to_array(out.mean), to_array(out.spread()))
        return self.get_outputs_smoother()

    def get_outputs_smoother(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return what the last `smoother()` returned."""
        if self._smoothed is None:
            raise PartitionError.because(
                "get_outputs_smoother()", "smoother() has not run yet", None, "net.smoother()"
            )
        mean, var = self._smoothed
        return mean.copy(), var.copy()


def _place(key: str) -> Place:
    """Return where the layer with that key of a state dict stands."""
    path = key.partition(".")[2]
    return int(path) if path.isdigit() else path


def _behind_the_last(layers: Sequence[BaseLayer]) -> list[BaseLayer]:
    """Return the layers that the output of the last SLSTM goes through."""

    def holds_one(layer: BaseLayer) -> bool:
        return any(isinstance(leaf, SLSTM) for _, leaf in layer.leaves(""))

    last = max(n for n, layer in enumerate(layers) if holds_one(layer))
    layer, rest = layers[last], list(layers[last + 1 :])
    if isinstance(layer, LayerBlock):
        return _behind_the_last(layer.layers) + rest
    if not isinstance(layer, SLSTM):
        raise PartitionError.because(
            "smoother()",
            f"the last SLSTM is a branch of {layer.get_layer_info()}",
            "what the other branch added at each time step is not known any more",
            "an SLSTM behind the block, or SLSTM layers in a row",
        )
    return rest


def _flat(state: State) -> FlatState:
    h, vh, c, vc = (to_array(part).tolist() for part in state)
    return h, vh, c, vc


def _at(layer: SLSTM, step: int) -> State:
    if step >= len(layer.smoothed):
        raise PartitionError.because(
            f"the smoothed state at step {step}",
            f"{len(layer.smoothed)} smoothed steps",
            f"{step} >= {len(layer.smoothed)}",
            "net.smoother() first; steps count from 0",
        )
    return layer.smoothed[step]
