"""`MultiheadAttention`: attention between Gaussian queries, keys and values.

Scores pass through Remax, the normalisation for which Gaussian moments are known in closed form.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.bayes.layers.activation import Remax
from unisono.bayes.layers.base import BaseLayer, Shape
from unisono.bayes.layers.linear import Linear
from unisono.bayes.moments import Delta, Moments
from unisono.errors import PartitionError


class _Gaussian(NamedTuple):
    mean: Tensor
    var: Tensor


class MultiheadAttention(BaseLayer):
    """Self-attention of a sequence of `embed_dim` units per token; no projection of the output.

    Args:
        embed_dim: units of a token.
        num_heads: query heads, each of `embed_dim / num_heads` units.
        num_kv_heads: key and value heads, shared by groups of query heads; default `num_heads`.
        bias: whether the projection to queries, keys and values has biases.
        gain_weight: factor on the start standard deviation of weights.
        gain_bias: factor on the start standard deviation of biases.
        init_method: `"He"` or `"Xavier"`.
        seq_len: tokens of a sample; None takes what comes.
        causal: whether a token sees only itself and those before it.
        use_rope: whether to rotate queries and keys by their positions.
        rope_theta: base of the rotation's wave lengths.

    The weights are the rows of one projection: queries, keys, values, head by head.
    """

    keeps_shape = True
    info = "SelfAttention(heads={0.num_heads}, kv_heads={0.num_kv_heads}, emb_size={0.embed_dim})"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        gain_weight: float = 1.0,
        gain_bias: float = 1.0,
        init_method: str = "Xavier",
        *,
        seq_len: int | None = None,
        causal: bool = True,
        use_rope: bool = False,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_division(embed_dim, num_heads, "embed_dim", "num_heads")
        _check_division(num_heads, kv_heads, "num_heads", "num_kv_heads")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.piece, self.head_dim = embed_dim, embed_dim // num_heads
        if use_rope:
            _check_division(self.head_dim, 2, "the units of a head", "the pairs that rotate")
        self.seq_len, self.causal = seq_len, causal
        self.use_rope, self.rope_theta = use_rope, rope_theta
        rows = (num_heads + 2 * kv_heads) * self.head_dim
        self.projection = Linear(embed_dim, rows, bias, gain_weight, gain_bias, init_method)
        """To queries, keys and values; its parameters are this layer's."""
        self.bias, self.params = bias, self.projection.params
        self.num_weights, self.num_biases = self.projection.num_weights, self.projection.num_biases
        self.scores: tuple[Tensor, Tensor] | None = None
        """Mean and variance of the last attention scores, `[batch, heads, tokens, tokens]`."""

    def inner(self, path: str = "") -> list[tuple[str, BaseLayer]]:
        """Return the projection."""
        return [(path, self.projection)]

    def fixed_input(self) -> int | None:
        """All tokens, if their number was given."""
        return None if self.seq_len is None else self.seq_len * self.embed_dim

    def plan(self, shape: Shape | None) -> Shape | None:
        """A sample is a sequence of tokens, in and out."""
        if self.seq_len is not None:
            if shape is not None:
                self._check_size(shape, self.seq_len * self.embed_dim)
            shape = (self.seq_len * self.embed_dim,)
        if shape is None:
            return None
        _check_division(math.prod(shape), self.embed_dim, "the numbers of a sample", "embed_dim")
        return self._set_shapes(shape, (math.prod(shape),))

    def forward(self, x: Moments) -> Moments:
        """Project, score, normalise, mix."""
        batch = x.mean.shape[0]
        rows = self.projection.forward(x)
        tokens = math.prod(x.mean.shape[1:]) // self.embed_dim  # known without rows too
        q, k, v = self._heads(rows, batch, tokens)
        if self.use_rope:
            q, k = self._rotated(q, tokens), self._rotated(k, tokens)
        scale = 1 / math.sqrt(self.head_dim)
        score = _product(q, _Gaussian(k.mean.mT, k.var.mT))
        allowed = None
        if self.causal:
            allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=x.mean.device).tril()
        mean, var, slope = Remax._moments(score.mean * scale, score.var * scale**2, allowed)
        share = _Gaussian(mean, var)
        self.scores = (mean.flatten(1, 2), var.flatten(1, 2))
        out = _product(share, v)
        self._remember(q, k, v, share, slope, batch, tokens)
        size = tokens * self.embed_dim
        return Moments(*(t.flatten(1, 2).transpose(1, 2).reshape(batch, size) for t in out))

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Carry the correction through the mix, the scores and the projection."""
        q, k, v, share, slope, batch, tokens = self._memory
        mean, var = (self._split(d, batch, tokens, self._group) for d in delta)
        scale = 1 / math.sqrt(self.head_dim)
        to_share = _Gaussian(mean @ v.mean.mT, var @ v.mean.square().mT)
        to_v = _Gaussian(share.mean.mT @ mean, share.mean.square().mT @ var)
        score = _Gaussian(to_share.mean * slope * scale, to_share.var * (slope * scale).square())
        to_q = _Gaussian(score.mean @ k.mean, score.var @ k.mean.square())
        to_k = _Gaussian(score.mean.mT @ q.mean, score.var.mT @ q.mean.square())
        to_k, to_v = (_Gaussian(*(t.sum(2, keepdim=True) for t in g)) for g in (to_k, to_v))
        if self.use_rope:
            to_q, to_k = self._rotated(to_q, tokens, -1), self._rotated(to_k, tokens, -1)
        rows = (
            torch.cat([h.flatten(1, 2).transpose(1, 2).flatten(2) for h in heads], 2)
            for heads in zip(to_q, to_k, to_v, strict=True)
        )
        back = self.projection.backward(Delta(*(t.flatten(0, 1) for t in rows)), to_input=to_input)
        return None if back is None else back.reshaped(batch, tokens * self.embed_dim)

    @property
    def _group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    def _split(self, t: Tensor, batch: int, tokens: int, group: int) -> Tensor:
        """Return rows of tokens as `[batch, kv heads, group, tokens, units]`."""
        heads = t.reshape(batch, tokens, self.num_kv_heads, group, self.head_dim)
        return heads.permute(0, 2, 3, 1, 4)

    def _heads(self, rows: Moments, batch: int, tokens: int) -> list[_Gaussian]:
        """Split projected rows into queries, keys and values."""
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        parts = zip(rows.mean.split(sizes, 1), rows.spread().split(sizes, 1), strict=True)
        return [
            _Gaussian(*(self._split(t, batch, tokens, group) for t in pair))
            for pair, group in zip(parts, (self._group, 1, 1), strict=True)
        ]

    def _rotated(self, x: _Gaussian, tokens: int, direction: int = 1) -> _Gaussian:
        """Rotate pairs of units by their position, or back."""
        pair = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
        position = torch.arange(tokens, dtype=torch.float64)
        angle = position[:, None] * self.rope_theta ** (-pair / self.head_dim)
        cos, sin = (t.to(x.mean.dtype).to(x.mean.device) for t in (angle.cos(), angle.sin()))
        sin = direction * sin

        def turned(t: Tensor, c: Tensor, s: Tensor, sign: int) -> Tensor:
            first, second = t[..., 0::2], t[..., 1::2]
            pairs = (first * c + sign * second * s, second * c + first * s)
            return torch.stack(pairs, -1).flatten(-2)

        return _Gaussian(turned(x.mean, cos, sin, -1), turned(x.var, cos**2, sin**2, 1))


def _product(a: _Gaussian, b: _Gaussian) -> _Gaussian:
    """Matrix product of independent Gaussians."""
    var = a.var @ (b.var + b.mean.square()) + a.mean.square() @ b.var
    return _Gaussian(a.mean @ b.mean, var)


def _check_division(whole: int, parts: int, whole_name: str, parts_name: str) -> None:
    if parts < 1 or whole % parts:
        left = whole % parts if parts else whole
        raise PartitionError.because(
            f"{whole_name} = {whole} over {parts_name} = {parts}",
            f"{left} left over",
            f"{whole} / {parts} is not whole",
            f"{whole_name} a multiple of {parts}",
        )
