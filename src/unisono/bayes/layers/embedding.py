"""`Embedding`: a table of Gaussian vectors, looked up by index."""

from __future__ import annotations

import math
import operator

import torch
from torch.nn import functional as F

from unisono.bayes.layers.base import BaseLayer, Shape, check_sizes
from unisono.bayes.moments import Delta, Moments, integers
from unisono.bayes.parameters import normal
from unisono.errors import PartitionError
from unisono.expect import expect_int


class Embedding(BaseLayer):
    """Rows of a table; the indices come as numbers in the input's means.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: numbers in a row.
        input_size: indices of one sample; 0 takes what comes.
        scale: standard deviation of the start means, and of the start uncertainty.
        padding_idx: index whose row is zero and never changes; -1 for none.

    >>> Embedding(10, 3)
    Embedding(10->3)
    """

    info = "Embedding({0.num_embeddings}->{0.embedding_dim})"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        input_size: int = 0,
        scale: float = 1.0,
        padding_idx: int = -1,
    ) -> None:
        super().__init__()
        check_sizes(self, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        check_sizes(self, 0, input_size=input_size)
        index = operator.index(padding_idx)
        expect_int("padding_idx", index, -1, num_embeddings, error=PartitionError)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.input_size, self.scale, self.padding_idx = input_size, scale, padding_idx
        self.output_size = input_size * embedding_dim
        self._declared = input_size
        self.init_weight_bias()

    def init_weight_bias(self) -> None:
        """Draw new start values."""
        shape = (self.num_embeddings, self.embedding_dim)
        self._start_from(normal(shape, self.scale), torch.full(shape, self.scale**2), None, None)

    def fixed_input(self) -> int | None:
        """`input_size`, if it was given."""
        return self._declared or None

    def plan(self, shape: Shape | None) -> Shape | None:
        """A sample of n indices becomes `n * embedding_dim` numbers."""
        if self._declared:
            if shape is not None:
                self._check_size(shape, self._declared)
            shape = (self._declared,)
        if shape is None:
            return None
        return self._set_shapes(shape, (math.prod(shape) * self.embedding_dim,))

    def forward(self, x: Moments) -> Moments:
        """Look the rows up."""
        p = self._live
        batch = x.mean.shape[0]
        index = integers(x.mean.reshape(-1), f"indices of {self.get_layer_info()}")
        wrong = (index < 0) | (index >= self.num_embeddings)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise PartitionError.because(
                f"{self.get_layer_info()} of index {int(index[first])}",
                f"indices are 0 to {self.num_embeddings - 1}; entry {first} of the input is "
                f"{int(index[first])}",
                f"{int(wrong.sum())} of {index.numel()} are out of range",
                f"num_embeddings={int(index.max()) + 1}",
            )
        mean, var = F.embedding(index, p.mean_w), F.embedding(index, p.var_w)
        if self.padding_idx >= 0:
            kept = (index != self.padding_idx).to(mean.dtype).unsqueeze(1)
            mean, var = mean * kept, var * kept
        self._remember(index, x.mean)
        return Moments(mean, var).reshaped(
            batch, index.numel() // max(batch, 1) * self.embedding_dim
        )

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Add up the deltas of each row; indices get none."""
        p = self._live
        index, given = self._memory
        delta = delta.reshaped(index.numel(), self.embedding_dim)
        p.delta_mean_w.zero_().index_add_(0, index, delta.mean)
        p.delta_var_w.zero_().index_add_(0, index, delta.var)
        if self.padding_idx >= 0:
            p.delta_mean_w[self.padding_idx] = 0
            p.delta_var_w[self.padding_idx] = 0
        return Delta(torch.zeros_like(given), torch.zeros_like(given)) if to_input else None
