"""The buffers between a net and its updater: hidden states and deltas, as flat arrays."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.bayes.arrays import ArrayLike, to_array, to_tensor
from unisono.bayes.moments import Delta, Moments
from unisono.errors import PartitionError


class _Buffer:
    """Flat tensors of one length, and the number of samples they belong to."""

    fields: tuple[str, ...] = ()

    def __init__(self, size: int | None = None, block_size: int | None = None) -> None:
        self.block_size = block_size or 0
        """Samples."""
        self.live: dict[str, Tensor] = {}
        self._resize(size or 0)

    def _resize(self, size: int) -> None:
        self.live = {name: torch.zeros(size) for name in self.fields}

    @property
    def size(self) -> int:
        """Numbers held."""
        return next(iter(self.live.values())).numel()

    @property
    def actual_size(self) -> int:
        """Numbers of one sample."""
        return self.size // self.block_size if self.block_size else self.size

    def get_name(self) -> str:
        """Return the name of the class."""
        return type(self).__name__

    def set_size(self, new_size: int, new_block_size: int) -> str:
        """Become zeros of another size; returns the name."""
        self.block_size = new_block_size
        self._resize(new_size)
        return self.get_name()

    def _write(self, name: str, values: ArrayLike) -> None:
        like = self.live[name]
        self.live[name] = to_tensor(values, like.device, like.dtype).reshape(-1)


class BaseHiddenStates(_Buffer):
    """Means, variances and slopes of units, flat; reading copies, assigning writes.

    Args:
        size: numbers.
        block_size: samples.
    """

    fields = ("mean", "var", "slope")

    def hold(self, x: Moments) -> None:
        """Hold these moments."""
        ones = torch.ones_like(x.mean) if x.slope is None else x.slope
        kept = (x.mean, x.spread(), ones)
        self.live = {n: t.reshape(-1) for n, t in zip(self.fields, kept, strict=True)}
        self.block_size = x.mean.shape[0]

    @property
    def mu_a(self) -> NDArray[Any]:
        """Means."""
        return to_array(self.live["mean"])

    @mu_a.setter
    def mu_a(self, values: ArrayLike) -> None:
        self._write("mean", values)

    @property
    def var_a(self) -> NDArray[Any]:
        """Variances."""
        return to_array(self.live["var"])

    @var_a.setter
    def var_a(self, values: ArrayLike) -> None:
        self._write("var", values)

    @property
    def jcb(self) -> NDArray[Any]:
        """Slopes of the activations before."""
        return to_array(self.live["slope"])

    @jcb.setter
    def jcb(self, values: ArrayLike) -> None:
        self._write("slope", values)

    def set_input_x(self, mu_x: ArrayLike, var_x: ArrayLike | None, block_size: int) -> None:
        """Become the input of a net: slopes are 1, variances 0 unless given."""
        self._write("mean", mu_x)
        mean = self.live["mean"]
        if var_x is None:
            self.live["var"] = torch.zeros_like(mean)
        else:
            self._write("var", var_x)
        self.live["slope"] = torch.ones_like(mean)
        self.block_size = block_size


class BaseDeltaStates(_Buffer):
    """Deltas of units, flat; reading copies, assigning writes.

    Args:
        size: numbers.
        block_size: samples.
    """

    fields = ("mean", "var")

    def __init__(self, size: int | None = None, block_size: int | None = None) -> None:
        super().__init__(size, block_size)
        self.is_written = False
        """Whether somebody wrote since the net's last forward."""

    def hold(self, delta: Delta, block_size: int | None = None) -> None:
        """Hold these deltas."""
        self.live = {"mean": delta.mean.reshape(-1), "var": delta.var.reshape(-1)}
        self.block_size = delta.mean.shape[0] if block_size is None else block_size
        self.is_written = True

    def expect(self, like: Tensor, block_size: int) -> None:
        """Become zeros that await the updater; `like` has the device and dtype."""
        zeros = like.new_zeros(()).expand(like.numel())
        self.live = {"mean": zeros, "var": zeros}
        self.block_size, self.is_written = block_size, False

    @property
    def delta_mu(self) -> NDArray[Any]:
        """Deltas of means."""
        return to_array(self.live["mean"])

    @delta_mu.setter
    def delta_mu(self, values: ArrayLike) -> None:
        self._write("mean", values)
        self.is_written = True

    @property
    def delta_var(self) -> NDArray[Any]:
        """Deltas of variances."""
        return to_array(self.live["var"])

    @delta_var.setter
    def delta_var(self, values: ArrayLike) -> None:
        self._write("var", values)
        self.is_written = True

    def reset_zeros(self) -> None:
        """Set all deltas to zero."""
        self.live = {name: torch.zeros_like(t) for name, t in self.live.items()}
        self.is_written = True

    def copy_from(self, source: BaseDeltaStates, num_data: int = -1) -> None:
        """Take the first `num_data` deltas of another buffer; -1 takes all."""
        count = source.size if num_data == -1 else num_data
        if not 0 <= count <= source.size:
            raise PartitionError.because(
                f"copy_from(source, num_data={num_data})",
                f"a source of {source.size}",
                f"{num_data} > {source.size}",
                f"num_data={source.size}",
            )
        self.live = {name: source.live[name][:count].clone() for name in self.fields}
        self.block_size, self.is_written = source.block_size, True
