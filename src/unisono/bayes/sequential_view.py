"""The part of `Sequential` that shows it: infos, tables, and the trace of a training run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.bayes.arrays import Output, to_array
from unisono.bayes.attention import MultiheadAttention
from unisono.bayes.base_layer import BaseLayer
from unisono.bayes.normalization import BatchNorm2d
from unisono.bayes.parameters import Arena
from unisono.bayes.stack import LayerStack

NormValues = tuple[list[list[float]], list[list[float]], list[list[float]], list[list[float]]]


@dataclass
class Trace:
    """Per layer, how strongly the steps of a traced run pushed."""

    names: list[str]
    steps: int = 0
    push: list[float] = field(default_factory=list)
    """Sums over steps of the mean of |delta_mu| / bar."""
    floored: list[int] = field(default_factory=list)

    def table(self) -> str:
        """Return the trace as text, one layer a line.

        A mean push near 1 says that most weights move as far as they may: the observation noise
        is too small, or the data is not standardised.
        """
        width = max([len(name) for name in self.names], default=5)
        lines = [f"{'layer':<{width}}  mean |delta|/bar  floored variances"]
        for name, push, floored in zip(self.names, self.push, self.floored, strict=True):
            lines.append(f"{name:<{width}}  {push / max(self.steps, 1):>16.4f}  {floored:>17d}")
        return "\n".join(lines)


class Described(LayerStack):
    """What a net tells about itself."""

    _trace: Trace | None = None

    def get_layer_stack_info(self) -> str:
        """Return the info of each layer, each line ended."""
        return "".join(f"{layer.get_layer_info()}\n" for layer in self.layers)

    def get_neg_var_w_counter(self) -> dict[str, int]:
        """Return how many weight variances of each layer the last step floored."""
        counts: dict[str, int] = {}
        leaves = [(key, layer) for key, layer in self.leaves() if layer.params is not None]
        for (key, layer), count in zip(leaves, self._arena.floored.tolist(), strict=True):
            info, place = layer.get_layer_info(), key.partition(".")[2]
            counts[f"{info}_{place}" if info in counts else info] = count
        return counts

    def get_norm_mean_var(self) -> dict[str, NormValues]:
        """Return running and batch statistics of batch norms, by info and index of the layer.

        Each of mu_ra, var_ra, mu_batch, var_batch is a list with one inner list per norm layer.
        """
        found: dict[str, NormValues] = {}
        for n, layer in enumerate(self.layers):
            norms = [leaf for _, leaf in layer.leaves("") if isinstance(leaf, BatchNorm2d)]
            if norms:
                found[f"{layer.get_layer_info()}_{n}"] = (
                    [to_array(norm.running_mean).tolist() for norm in norms],
                    [to_array(norm.running_var).tolist() for norm in norms],
                    [to_array(norm.batch_mean).tolist() for norm in norms],
                    [to_array(norm.batch_var).tolist() for norm in norms],
                )
        return found

    def get_attention_scores(self) -> dict[int, tuple[Output, Output]]:
        """Return mean and variance of the last attention scores, `[B, heads, T, T]`, by layer."""
        return {
            n: (layer.scores[0].cpu().numpy().copy(), layer.scores[1].cpu().numpy().copy())
            for n, layer in enumerate(self.layers)
            if isinstance(layer, MultiheadAttention) and layer.scores is not None
        }

    @contextlib.contextmanager
    def trace(self, *, show: bool = True) -> Iterator[Trace]:
        """Watch the steps inside: which layers are pushed to their limits, which collapse.

        Args:
            show: whether to print the table at the end.
        """
        leaves = [(key, layer) for key, layer in self.leaves() if layer.params is not None]
        trace = Trace([key for key, _ in leaves])
        trace.push, trace.floored = [0.0] * len(leaves), [0] * len(leaves)
        self._trace = trace
        try:
            yield trace
        finally:
            self._trace = None
            if show:
                print(trace.table())

    def _watch(self, arena: Arena, cap: float) -> list[Tensor]:
        """Return the push of each layer before a step, if somebody watches."""
        if self._trace is None:
            return []
        return [
            torch.cat(
                [
                    (delta.abs() * cap / var.sqrt()).reshape(-1)
                    for delta, var in ((p.delta_mean_w, p.var_w), (p.delta_mean_b, p.var_b))
                ]
            ).mean()
            for p in arena.members
        ]

    def _watched(self, push: list[Tensor], arena: Arena) -> None:
        """Write down a step."""
        trace = self._trace
        if trace is None:
            return
        trace.steps += 1
        trace.push = [old + float(new) for old, new in zip(trace.push, push, strict=True)]
        floored = arena.floored.tolist()
        trace.floored = [old + new for old, new in zip(trace.floored, floored, strict=True)]

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for n, layer in enumerate(self.layers):
            lines += _tree(f"({n})", layer, 1)
        lines.append(f")  {self.num_parameters():,} parameters, each a mean and a variance")
        return "\n".join(lines)


def _tree(label: str, layer: BaseLayer, depth: int) -> list[str]:
    size = f"  -> {layer.output_size}" if layer.output_size else ""
    line = f"{'  ' * depth}{label} {layer.get_layer_info()}{size}"
    inner = [_tree(f"({n})", child, depth + 1) for n, child in enumerate(layer.children())]
    return [line, *(text for lines in inner for text in lines)]
