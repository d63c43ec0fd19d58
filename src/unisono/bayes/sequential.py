"""`Sequential`: layers in a row, trained by conditioning on observations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from unisono.bayes.arrays import (
    ArrayLike,
    Output,
    check_finite,
    check_variance,
    to_array,
    to_tensor,
)
from unisono.bayes.base_layer import BaseLayer, Shape
from unisono.bayes.blocks import (
    backward_through,
    first_nan,
    fixed_input,
    forward_through,
    nan_in,
    not_a_number,
    plan_through,
)
from unisono.bayes.linear import Linear
from unisono.bayes.moments import Delta, Moments
from unisono.bayes.normalization import BatchNorm2d
from unisono.bayes.parameters import CAPS, cap_class
from unisono.bayes.sequential_memory import RecurrentStates
from unisono.bayes.sequential_state import StoredState
from unisono.bayes.sequential_view import Described
from unisono.bayes.states import BaseDeltaStates, BaseHiddenStates
from unisono.bayes.torch_means import to_torch
from unisono.errors import PartitionError


class Sequential(StoredState, RecurrentStates, Described):
    """A net of Gaussian weights and units: `forward`, an updater, `backward`, `step`.

    Args:
        layers: first to last; sizes that are known are checked here.

    numpy arrays give flat numpy arrays, torch tensors of two and more dims give `[batch, outputs]`.

    >>> from unisono.bayes import Linear, OutputUpdater, ReLU, manual_seed
    >>> manual_seed(0)
    >>> net = Sequential(Linear(1, 8), ReLU(), Linear(8, 1))
    >>> update = OutputUpdater(net.device)
    >>> mean, _ = net([[0.5]])
    >>> update.update(net.output_z_buffer, [2.0], 0.01, net.input_delta_z_buffer)
    >>> net.backward()
    >>> net.step()
    >>> closer, _ = net([[0.5]])
    >>> bool(abs(closer - 2.0) < abs(mean - 2.0))
    True
    """

    def __init__(self, *layers: BaseLayer) -> None:
        super().__init__(*layers)
        self.output_z_buffer = BaseHiddenStates()
        """Output of the last forward pass."""
        self.input_delta_z_buffer = BaseDeltaStates()
        """Where an updater writes the deltas of the output."""
        self.output_delta_z_buffer = BaseDeltaStates()
        """The deltas that the last backward pass ended with."""
        self.input_state_update = False
        """Whether backward computes the deltas of the input too."""
        self._input: Moments | None = None
        self._batch = 0
        self._input_delta: Delta | None = None
        self._corrected: Moments | None = None
        """The input that `_input_delta` is of."""
        self._pending = 0
        self._problem = ""
        """Where a NaN was met that nobody has been told of yet."""
        self.tells_at_step = False
        """Whether a NaN in training is told in `step`, by somebody who asks `take_problem`."""

    def __call__(self, mu_x: ArrayLike, var_x: ArrayLike | None = None) -> tuple[Output, Output]:
        """As `forward`."""
        return self.forward(mu_x, var_x)

    @torch.no_grad()
    def forward(self, mu_x: ArrayLike, var_x: ArrayLike | None = None) -> tuple[Output, Output]:
        """Return mean and variance of the output.

        Args:
            mu_x: finite means of the input, `[batch, input_size]` or flat; sequences and images in
                any shape of `batch * input_size` numbers.
            var_x: variances of the input; None: it is certain.
        """
        with self._all_or_nothing():
            x = self._read(mu_x, var_x)
            out = forward_through(self.layers, x)
            self._check_output(x, out)
        self._input, self._batch, self._remembers = x, x.mean.shape[0], self._training
        self._output_shape = tuple(out.mean.shape[1:])
        self.output_z_buffer.hold(out)
        self.input_delta_z_buffer.expect(out.mean, self._batch)
        shaped = isinstance(mu_x, Tensor) and mu_x.dim() >= 2
        return self._given_back(out, mu_x, shaped)

    def _check_output(self, x: Moments, out: Moments) -> None:
        """Refuse a NaN in the output, with the layer that it comes from.

        Later it would be taken for a missing observation, or spread to all parameters.
        """
        var = out.mean if out.var is None else out.var
        # the usual end: one product of both; infinities may make it NaN too
        product = float(torch.dot(out.mean.reshape(-1), var.reshape(-1)))
        if product == product:
            return
        if nan_in(out.mean, out.var):
            with self._all_or_nothing(keep=False), self._without_ranks():
                found = first_nan(self.layers, x)
            self._tell("forward", found or "the output of the net is NaN")

    @contextlib.contextmanager
    def _without_ranks(self) -> Iterator[None]:
        """Let batch norms look at own rows alone, whatever other ranks do meanwhile."""
        norms = [layer for layer in self.all_layers() if isinstance(layer, BatchNorm2d)]
        before = [norm.sum_over_ranks for norm in norms]
        for norm in norms:
            norm.sum_over_ranks = None
        try:
            yield
        finally:
            for norm, verb in zip(norms, before, strict=True):
                norm.sum_over_ranks = verb

    def _tell(self, where: str, found: str) -> None:
        if self.tells_at_step and self._training:
            self._problem = self._problem or f"{where}: {found}"
            return
        raise not_a_number(where, found)

    def take_problem(self) -> str:
        """Return where a NaN was met since the last call, and forget it."""
        found, self._problem = self._problem, ""
        return found

    def _given_back(self, out: Moments, like: ArrayLike, shaped: bool) -> tuple[Output, Output]:
        if isinstance(like, Tensor):
            shape = (out.mean.shape[0], math.prod(out.mean.shape[1:])) if shaped else (-1,)
            mean, var = (t.reshape(shape).clone().to(like.device) for t in (out.mean, out.spread()))
            return mean, var
        return to_array(out.mean), to_array(out.spread())

    def _read(self, mu_x: ArrayLike, var_x: ArrayLike | None) -> Moments:
        """Check the input and plan for its shape."""
        mean = to_tensor(mu_x, self._device, self._dtype)
        check_finite(mean, "mu_x", "fill or leave out such rows; a missing target may be NaN")
        var = None
        if var_x is not None:
            var = to_tensor(var_x, self._device, self._dtype)
            if var.numel() != mean.numel():
                raise PartitionError.because(
                    f"an input of {mean.numel()} means and {var.numel()} variances",
                    "they belong together one by one",
                    f"{mean.numel()} != {var.numel()}",
                    "var_x of the shape of mu_x",
                )
            check_variance(var, "var_x")
        batch, shape = self._sample_shape(mean)
        if shape != self._planned:
            plan_through(self.layers, shape)
            self._planned = shape
        return Moments(mean, var).reshaped(batch, *shape)

    def _sample_shape(self, mean: Tensor) -> tuple[int, Shape]:
        """Return the number of samples and the shape of one."""
        told = self._told_input
        if told is None and mean.dim() < 4:
            told = fixed_input(self.layers)
        own = tuple(mean.shape[1:]) if mean.dim() > 1 else (1,)
        if mean.dim() and (told is None or (mean.dim() > 1 and math.prod(own) == told)):
            return mean.shape[0], own if len(own) == 3 else (math.prod(own),)
        size = told or 1
        if mean.numel() % size:
            whole, left = divmod(mean.numel(), size)
            raise PartitionError.because(
                f"an input of {mean.numel()} numbers, shape {tuple(mean.shape)}",
                f"the net reads {size} a sample",
                f"{mean.numel()} = {whole}*{size} + {left}",
                f"shape [batch, {size}], or flat batch*{size}",
            )
        if mean.dim() == 2:
            self._check_row(mean.shape, size)
        first = self.layers[0]
        if mean.dim() == 4 and first.in_width:
            image = f"{first.in_channels}, {first.in_height}, {first.in_width}"
            raise PartitionError.because(
                f"images of shape {tuple(mean.shape)}",
                f"the net was told images of {size} numbers",
                f"{' * '.join(map(str, own))} = {math.prod(own)} != {size}",
                f"shape [batch, {image}], or flat: x.reshape(-1)",
            )
        return mean.numel() // size, (size,)

    def _check_row(self, shape: torch.Size, size: int) -> None:
        """Refuse rows that are neither samples nor whole parts of one (steps, lines of pixels)."""
        width = shape[1]
        if width and size % width == 0 and not isinstance(self.layers[0], Linear):
            return
        raise PartitionError.because(
            f"an input of shape {tuple(shape)}",
            f"{width} numbers a row, the net reads {size} a sample",
            f"{width} != {size}",
            f"shape [batch, {size}], or flat: x.reshape(-1)",
        )

    @torch.no_grad()
    def backward(self) -> None:
        """Carry the deltas in `input_delta_z_buffer` to all layers. Local."""
        delta = self._incoming()
        arena = self.arena  # parameters that moved get their deltas back before they are written
        shape = (self._batch, *(self._output_shape or ()))
        back = backward_through(
            self.layers, delta.reshaped(*shape), to_input=self.input_state_update
        )
        if arena.scale_deltas():
            self._check_deltas(delta)
        self._pending = self._batch
        self._input_delta = back if self.input_state_update else None
        self._corrected = self._input
        self.output_delta_z_buffer.hold(delta if back is None else back, self._batch)

    def _check_deltas(self, incoming: Delta) -> None:
        """Refuse NaN among the deltas; the last layer that has one met it first."""
        if nan_in(*incoming):
            self._tell("backward", "the deltas of the output hold a NaN: input_delta_z_buffer")
            return
        for key, leaf in reversed(list(self.leaves())):
            if nan_in(*leaf.deltas()):
                self._tell("backward", _of_deltas(key, leaf))
                return

    def _incoming(self) -> Delta:
        if not self._remembers:
            raise PartitionError.because(
                "backward()",
                "no forward pass in training mode to go back through",
                None,
                "net.train(), then net(x) before net.backward()",
            )
        buffer = self.input_delta_z_buffer
        if not buffer.is_written:
            raise PartitionError.because(
                "backward()",
                "no deltas were written since the last forward pass",
                None,
                "OutputUpdater(net.device).update(net.output_z_buffer, y, var_y, "
                "net.input_delta_z_buffer)",
            )
        needed = self._batch * math.prod(self._output_shape or ())
        mean, var = buffer.live["mean"], buffer.live["var"]
        if min(mean.numel(), var.numel()) < needed:
            raise PartitionError.because(
                f"backward() of {mean.numel()} deltas of means, {var.numel()} of variances",
                f"{self._batch} samples of {math.prod(self._output_shape or ())} outputs",
                f"{min(mean.numel(), var.numel())} < {needed}",
                f"{needed} deltas of each kind",
            )
        like = self.output_z_buffer.live["mean"]
        return Delta(*(t[:needed].to(device=like.device, dtype=like.dtype) for t in (mean, var)))

    def set_delta_z(self, delta_mu: ArrayLike, delta_var: ArrayLike) -> None:
        """Write the deltas of the output, as they are."""
        mean = to_tensor(delta_mu, self._device, self._dtype).reshape(-1)
        var = to_tensor(delta_var, self._device, self._dtype).reshape(-1)
        self.input_delta_z_buffer.hold(Delta(mean, var), self._batch)

    @torch.no_grad()
    def step(self) -> None:
        """Apply the deltas of the last backward pass; a second step does nothing. Local."""
        rows = self.take_pending()
        if found := self.take_problem():
            raise not_a_number("step", found)
        if rows:
            self.apply_deltas(CAPS[cap_class(rows)])

    def take_pending(self) -> int:
        """Return the rows behind the deltas that wait to be applied, and let none wait.

        Deltas that were written by hand count as those of one row at least.
        """
        rows = self._pending
        for key, leaf in self.leaves():
            if leaf.deltas_written:
                leaf.deltas_written = False
                rows = max(rows, 1)
                if not self._problem and nan_in(*leaf.deltas()):
                    self._problem = f"step: {_of_deltas(key, leaf)}"
        self._pending = 0
        return rows

    def apply_deltas(self, cap: float) -> None:
        """Apply the deltas, each at most a standard deviation over `cap`."""
        arena = self.arena
        before = self._watch(arena, cap)
        arena.step(cap)
        self._watched(before, arena)

    def get_outputs(self) -> tuple[Output, Output]:
        """Return mean and variance of the last output, flat."""
        live = self.output_z_buffer.live
        return to_array(live["mean"]), to_array(live["var"])

    def output_to_host(self) -> list[float]:
        """Return the means of the last output as a list."""
        return self.output_z_buffer.mu_a.tolist()

    def delta_z_to_host(self) -> list[float]:
        """Return the deltas of means that backward ended with as a list."""
        return self.output_delta_z_buffer.delta_mu.tolist()

    def get_input_states(self) -> tuple[Output, Output]:
        """Return the deltas of the input's means and variances, flat."""
        delta = self._known_input_delta()
        return to_array(delta.mean), to_array(delta.var)

    def input_states_posterior(self) -> tuple[Output, Output]:
        """Return mean and variance of the input given the observation, flat."""
        delta = self._known_input_delta()
        x = self._corrected
        if x is None or x.var is None:
            raise PartitionError.because(
                "input_states_posterior()",
                "the input was certain, so nothing can be learnt about it",
                None,
                "net(mu_x, var_x) with variances of the input",
            )
        mean, var = x.mean.reshape(-1), x.var.reshape(-1)
        shift = delta.mean.reshape(-1), delta.var.reshape(-1)
        return to_array(mean + var * shift[0]), to_array(var + var * var * shift[1])

    def _known_input_delta(self) -> Delta:
        if self._input_delta is None:
            raise PartitionError.because(
                "the deltas of the input",
                f"input_state_update = {self.input_state_update}, and no backward pass with True",
                None,
                "net.input_state_update = True before net.backward()",
            )
        return self._input_delta

    @torch.no_grad()
    def predict(self, x: ArrayLike, batch_size: int | None = None) -> tuple[Output, Output]:
        """Return mean and standard deviation `[samples, outputs]` in eval mode.

        Mode, carried states and buffers stay as they were.

        Args:
            x: input, as `forward` takes it.
            batch_size: samples at a time; None for all at once.
        """
        if batch_size is not None and batch_size < 1:
            raise PartitionError.because(
                f"predict(x, batch_size={batch_size})",
                "samples at a time are counted from 1",
                f"{batch_size} < 1",
                "batch_size=256, or None for all at once",
            )
        with self._all_or_nothing(keep=False):
            self.eval()
            whole = self._read(x, None)
            pieces = whole.mean.split(batch_size or max(whole.mean.shape[0], 1))
            outs: list[Moments] = []
            for piece in map(Moments, pieces):
                outs.append(forward_through(self.layers, piece))
                self._check_output(piece, outs[-1])
        mean = torch.cat([out.mean.flatten(1) for out in outs])
        std = torch.cat([out.spread().flatten(1) for out in outs]).clamp_min(0).sqrt()
        if isinstance(x, Tensor):
            return mean.to(x.device), std.to(x.device)
        return mean.cpu().numpy(), std.cpu().numpy()

    def preinit_layer(self) -> None:
        """Work out all sizes that the layers already tell. Safe at any time."""
        if self._planned is None:
            plan_through(self.layers, None)

    def params_to_device(self) -> None:
        """Do nothing: parameters always are where the net is."""

    def params_to_host(self) -> None:
        """Do nothing: properties copy parameters to the host when they are read."""

    def set_threads(self, n: int) -> None:
        """Write down `n`; results do not depend on it."""
        for _, leaf in self.leaves():
            leaf.num_threads = n

    @property
    def z_buffer_size(self) -> int:
        """Largest number of units of a layer, times the batch."""
        return self._batch * max((layer.get_max_num_states() for layer in self.layers), default=0)

    @property
    def z_buffer_block_size(self) -> int:
        """Samples of the last forward pass."""
        return self._batch

    def to_torch(self) -> nn.Sequential:
        """Return the means as a torch module in eval mode; see `unisono.bayes.to_torch`."""
        return to_torch(self)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> BaseLayer:
        return self.layers[index]

    def __iter__(self) -> Iterator[BaseLayer]:
        return iter(self.layers)


def _of_deltas(key: str, leaf: BaseLayer) -> str:
    return f"layer {key}, {leaf.get_layer_info()}: its deltas hold a NaN"
