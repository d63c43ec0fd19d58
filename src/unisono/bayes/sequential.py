"""`Sequential`: layers in a row, trained by conditioning on observations."""

from __future__ import annotations

import contextlib
import math
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unisono.accelerator import is_accelerator
from unisono.bayes import files
from unisono.bayes.layers.attention import MultiheadAttention
from unisono.bayes.layers.base import (
    BaseLayer,
    Shape,
    backward_through,
    check_layers,
    checked_device,
    fixed_input,
    forward_through,
    plan_through,
)
from unisono.bayes.layers.blocks import LayerBlock, first_nan, nan_in
from unisono.bayes.layers.linear import Linear
from unisono.bayes.layers.lstm import LSTM, SLSTM
from unisono.bayes.layers.normalization import BatchNorm2d
from unisono.bayes.moments import (
    ArrayLike,
    BaseDeltaStates,
    BaseHiddenStates,
    Delta,
    Moments,
    Output,
    check_count,
    check_finite,
    check_variance,
    to_array,
    to_tensor,
)
from unisono.bayes.parameters import CAPS, Arena, cap_class
from unisono.errors import PartitionError, PlatformError, UnisonoError
from unisono.expect import expect_int

Input = ArrayLike | BaseHiddenStates
"""Numbers, or the states of another net."""
Values = tuple[Any, Any, Any, Any]
"""mu_w, var_w, mu_b, var_b of one layer: lists, or tensors."""
NormValues = tuple[list[list[float]], list[list[float]], list[list[float]], list[list[float]]]
FlatState = tuple[list[float], list[float], list[float], list[float]]
"""mu_h, var_h, mu_c, var_c."""
Place = int | str
"""Index of a layer in the net; its path for one inside a block: `"1.0"`, `"main.1.0"`."""
R = TypeVar("R", bound=LSTM)


@dataclass
class Trace:
    """Per layer, how strongly the steps of a traced run pushed."""

    names: list[str]
    push: list[float]
    """Sums over steps of the mean of |delta_mu| / bar."""
    floored: list[int]
    steps: int = 0

    def step(self, arena: Arena, cap: float) -> None:
        """Let the arena step, and write down how far each layer was pushed."""
        for n, p in enumerate(arena.members):
            pairs = ((p.delta_mean_w, p.var_w), (p.delta_mean_b, p.var_b))
            push = [(delta.abs() * cap / var.sqrt()).reshape(-1) for delta, var in pairs]
            self.push[n] += float(torch.cat(push).mean())
        arena.step(cap)
        self.steps += 1
        floored = arena.floored.tolist()
        self.floored = [old + new for old, new in zip(self.floored, floored, strict=True)]

    def table(self) -> str:
        """Return the trace as text, one layer per line.

        A mean push near 1 says that most weights move as far as they may: the observation noise
        is too small, or the data is not standardised.
        """
        width = max([len(name) for name in self.names], default=5)
        lines = [f"{'layer':<{width}}  mean |delta|/bar  floored variances"]
        for name, push, floored in zip(self.names, self.push, self.floored, strict=True):
            lines.append(f"{name:<{width}}  {push / max(self.steps, 1):>16.4f}  {floored:>17d}")
        return "\n".join(lines)


class Sequential:
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
        check_layers(layers)
        self.layers = list(layers)
        self.output_z_buffer = BaseHiddenStates()
        """Output of the last forward pass."""
        self.input_delta_z_buffer = BaseDeltaStates()
        """Where an updater writes the deltas of the output."""
        self.output_delta_z_buffer = BaseDeltaStates()
        """The deltas that the last backward pass ended with."""
        self.input_state_update = False
        """Whether backward computes the deltas of the input too."""
        self.tells_at_step = False
        """Whether a NaN in training is told in `step`, by somebody who asks `take_pending`."""
        self._device = torch.device("cpu")
        self._dtype = torch.float32
        self._training = True
        self._declared_input = fixed_input(self.layers)
        self._planned: Shape | None = None
        self._output_shape = plan_through(self.layers, None)
        self._remembers = False
        """Whether the layers have what backward needs."""
        self._input: Moments | None = None
        self._batch = 0
        self._corrected: tuple[Moments, Delta] | None = None
        """An input and its deltas."""
        self._pending = 0
        """Rows behind the deltas that wait for a step."""
        self._problem = ""
        """Where a NaN was met that nobody has been told of yet."""
        self._doubts: deque[tuple[str, Tensor, torch.Event]] = deque()
        """Passes of which an accelerator has still to say whether they met a NaN."""
        self._trace: Trace | None = None
        self._smoothed: tuple[NDArray[Any], NDArray[Any]] | None = None
        self._leaves = [leaf for n, layer in enumerate(layers) for leaf in layer.leaves(str(n))]
        self._all_layers = _with_inner(self.layers)
        self._check_no_repeats()
        self._arena = self._new_arena()

    def _check_no_repeats(self) -> None:
        seen: dict[int, str] = {}
        for key, layer in self._leaves:
            if not layer.is_activation and id(layer) in seen:
                raise PartitionError.because(
                    f"{key} is the same object as {seen[id(layer)]}",
                    "a layer remembers one input, so it can stand in one place",
                    hint=f"another {layer.get_layer_name()}(...) there",
                )
            seen[id(layer)] = key

    def leaves(self) -> list[tuple[str, BaseLayer]]:
        """Return all plain layers in walk order with the keys of state dicts."""
        return self._leaves

    def _new_arena(self) -> Arena:
        members = [leaf.params for _, leaf in self._leaves if leaf.params is not None]
        return Arena(members, self._device, self._dtype)

    @property
    def arena(self) -> Arena:
        """The flat memory; made anew if a layer has moved to another net meanwhile."""
        if not self._arena.is_whole:
            self._arena = self._new_arena()
        return self._arena

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the arena: copies of tensors do not share their memory."""
        return {**vars(self), "_arena": self._arena.floored, "_doubts": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._arena = self._new_arena()
        self._arena.floored = state["_arena"]

    # Forward, backward, step.

    @torch.no_grad()
    def forward(self, mu_x: Input, var_x: ArrayLike | None = None) -> tuple[Output, Output]:
        """Return mean and variance of the output.

        Args:
            mu_x: finite means of the input, `[batch, input_size]` or flat; sequences and images in
                any shape of `batch * input_size` numbers. Or the `output_z_buffer` of another net,
                which this one then goes on from: variances and slopes are those of the states.
            var_x: variances of the input; None: it is certain.
        """
        with self._all_or_nothing():
            if isinstance(mu_x, BaseHiddenStates):
                x = self._continued(mu_x)
            else:
                x = self._read(mu_x, var_x)
            out = forward_through(self.layers, x)
            arrays = None
            if not isinstance(mu_x, Tensor):
                arrays = to_array(out.mean), to_array(out.spread())
            self._check_output(x, out, arrays)
        self._input, self._batch, self._remembers = x, x.mean.shape[0], self._training
        self._output_shape = tuple(out.mean.shape[1:])
        self.output_z_buffer.hold(out)
        self.input_delta_z_buffer.expect(out.mean, self._batch)
        if not isinstance(mu_x, Tensor):
            return cast("tuple[Output, Output]", arrays)
        shape = (self._batch, math.prod(self._output_shape)) if mu_x.dim() >= 2 else (-1,)
        mean, var = (t.reshape(shape).clone().to(mu_x.device) for t in (out.mean, out.spread()))
        return mean, var

    def __call__(self, mu_x: Input, var_x: ArrayLike | None = None) -> tuple[Output, Output]:
        """As `forward`."""
        return self.forward(mu_x, var_x)

    @contextlib.contextmanager
    def _all_or_nothing(self, *, keep: bool = True) -> Iterator[None]:
        """Put all layers back as they were if the body raises; at any end unless `keep`."""
        planned, training = self._planned, self._training
        snapshots = [(layer, layer.snapshot()) for layer in self._all_layers]
        done = False
        try:
            yield
            done = keep
        finally:
            if not done:
                for layer, values in snapshots:
                    layer.put_back(values)
                self._planned, self._training = planned, training

    def _read(self, mu_x: ArrayLike, var_x: ArrayLike | None) -> Moments:
        """Check the input and plan for its shape."""
        hint = "fill or leave out such rows; a missing target may be NaN"
        check = partial(check_finite, what="mu_x", hint=hint)
        mean = to_tensor(mu_x, self._device, self._dtype, check)
        var = None
        if var_x is not None:
            var = to_tensor(var_x, self._device, self._dtype, partial(check_variance, what="var_x"))
            request = f"an input of {mean.numel()} means and {var.numel()} variances"
            check_count(request, mean.numel(), var.numel(), "var_x of the shape of mu_x")
        return self._shaped(Moments(mean, var))

    def _continued(self, states: BaseHiddenStates) -> Moments:
        """Return the output of another net as an input of this one."""
        x = Moments(*(t.to(self._device, self._dtype) for t in states.live.values()))
        # without rows it stays flat, since their width cannot be told
        return self._shaped(x.reshaped(max(states.block_size, 1), -1) if states.size else x)

    def _shaped(self, x: Moments) -> Moments:
        """Return the input sample by sample, once the layers know the shape of one."""
        batch, shape = self._sample_shape(x.mean)
        if shape != self._planned:
            plan_through(self.layers, shape)
            self._planned = shape
        return x.reshaped(batch, *shape)

    def _sample_shape(self, mean: Tensor) -> tuple[int, Shape]:
        """Return the number of samples and the shape of one."""
        declared = self._declared_input
        if declared is None and mean.dim() < 4:
            declared = fixed_input(self.layers, flat=mean.dim() <= 1)
        sample = tuple(mean.shape[1:]) if mean.dim() > 1 else (1,)
        if mean.dim() and (declared is None or (mean.dim() > 1 and math.prod(sample) == declared)):
            return mean.shape[0], sample if len(sample) == 3 else (math.prod(sample),)
        size = declared or 1
        request, hint = f"an input of shape {tuple(mean.shape)}", f"shape [batch, {size}], or flat"
        if mean.numel() % size:
            whole, left = divmod(mean.numel(), size)
            raise PartitionError.because(
                f"{request}: {mean.numel()} numbers",
                f"the net reads {size} per sample",
                f"{mean.numel()} = {whole}*{size} + {left}",
                f"{hint} batch*{size}",
            )
        # rows that are neither samples nor whole parts of one (steps, lines of pixels)
        parts = sample[0] and size % sample[0] == 0 and not isinstance(self.layers[0], Linear)
        if mean.dim() == 2 and not parts:
            raise PartitionError.because(
                request,
                f"{sample[0]} numbers per row, the net reads {size} per sample",
                f"{sample[0]} != {size}",
                f"{hint}: x.reshape(-1)",
            )
        first = self.layers[0]
        if mean.dim() == 4 and first.in_width:
            image = f"{first.in_channels}, {first.in_height}, {first.in_width}"
            raise PartitionError.because(
                f"images of shape {tuple(mean.shape)}",
                f"the net was told images of {size} numbers",
                f"{' * '.join(map(str, sample))} = {math.prod(sample)} != {size}",
                f"shape [batch, {image}], or flat: x.reshape(-1)",
            )
        return mean.numel() // size, (size,)

    def _check_output(
        self, x: Moments, out: Moments, arrays: tuple[NDArray[Any], NDArray[Any]] | None
    ) -> None:
        """Refuse a NaN in the output, with the layer that it comes from.

        Later it would be taken for a missing observation, or spread to all parameters. On an
        accelerator the host looks at what it has anyway; else the device tells it later.
        """
        self._settle()
        var = out.mean if out.var is None else out.var
        if is_accelerator(out.mean.device):
            if arrays is None:
                self._doubt("forward", torch.isnan(out.mean).any() | torch.isnan(var).any())
                return
            if not any(np.isnan(array).any() for array in arrays):
                return
        # the usual end: one product of both; infinities may make it NaN too
        product = float(torch.dot(out.mean.reshape(-1), var.reshape(-1)))
        if not math.isnan(product) or not nan_in(out.mean, out.var):
            return
        with self._all_or_nothing(keep=False):
            for layer in self._all_layers:
                if isinstance(layer, BatchNorm2d):
                    layer.sum_over_ranks = None  # other ranks may be elsewhere meanwhile
            origin = first_nan(self.layers, x)
        self._tell("forward", origin or "the output of the net is NaN")

    def _doubt(self, where: str, is_nan: Tensor) -> None:
        """Have the device say later whether something was NaN; the host does not wait for it."""
        flag = is_nan.to("cpu", non_blocking=True)
        stream = torch.accelerator.current_stream(is_nan.device)
        self._doubts.append((where, flag, stream.record_event()))

    def _settle(self) -> None:
        """Refuse a NaN that the device has reported since. Its step has changed nothing."""
        while self._doubts and self._doubts[0][2].query():
            where, flag, _ = self._doubts.popleft()
            if bool(flag):
                self._doubts.clear()
                self._tell(where, f"a NaN in an earlier pass, told by {self._device} since")

    def _tell(self, where: str, problem: str) -> None:
        if self.tells_at_step and self._training:
            self._problem = self._problem or f"{where}: {problem}"
            return
        raise not_a_number(where, problem)

    @torch.no_grad()
    def backward(self) -> None:
        """Carry the deltas in `input_delta_z_buffer` to all layers. Local."""
        delta = self._incoming()
        arena = self.arena  # parameters that moved get their deltas back before they are written
        shape = (self._batch, *(self._output_shape or ()))
        to_input = self.input_state_update
        back = backward_through(self.layers, delta.reshaped(*shape), to_input=to_input)
        is_nan = arena.scale_deltas()
        if isinstance(is_nan, Tensor):
            self._doubt("backward", is_nan)
        elif is_nan and (origin := self._nan_in_deltas(delta)):
            arena.delta_mean.zero_()
            arena.delta_var.zero_()
            self._tell("backward", origin)
        self._pending = self._batch
        self._corrected = None
        if to_input and back is not None and self._input is not None:
            self._corrected = (self._input, back)
        self.output_delta_z_buffer.hold(delta if back is None else back, self._batch)

    def _incoming(self) -> Delta:
        if not self._remembers:
            raise PartitionError.because(
                "backward()",
                "no forward pass in training mode to go back through",
                hint="net.train(), then net(x) before net.backward()",
            )
        buffer = self.input_delta_z_buffer
        if not buffer.is_written:
            raise PartitionError.because(
                "backward()",
                "no deltas were written since the last forward pass",
                hint="OutputUpdater(net.device).update(net.output_z_buffer, y, var_y, "
                "net.input_delta_z_buffer)",
            )
        like, outputs = self.output_z_buffer.live["mean"], math.prod(self._output_shape or ())
        needed = self._batch * outputs
        mean, var = buffer.live["mean"], buffer.live["var"]
        if min(mean.numel(), var.numel()) < needed:
            raise PartitionError.because(
                f"backward() of {mean.numel()} deltas of means, {var.numel()} of variances",
                f"{self._batch} samples of {outputs} outputs",
                f"{min(mean.numel(), var.numel())} < {needed}",
                f"{needed} deltas of each kind",
            )
        return Delta(mean[:needed].to(like), var[:needed].to(like))

    def _nan_in_deltas(self, incoming: Delta | None = None) -> str:
        """Say where deltas hold a NaN, "" if nowhere; the last layer that has one met it first."""
        if incoming is not None and nan_in(*incoming):
            return "the deltas of the output hold a NaN: input_delta_z_buffer"
        for key, leaf in reversed(self._leaves):
            if leaf.params is not None and nan_in(*leaf.params.deltas):
                return f"layer {key}, {leaf.get_layer_info()}: its deltas hold a NaN"
        return ""

    def set_delta_z(self, delta_mu: ArrayLike, delta_var: ArrayLike) -> None:
        """Write the deltas of the output, as they are."""
        mean = to_tensor(delta_mu, self._device, self._dtype).reshape(-1)
        var = to_tensor(delta_var, self._device, self._dtype).reshape(-1)
        self.input_delta_z_buffer.hold(Delta(mean, var), self._batch)

    @torch.no_grad()
    def step(self) -> None:
        """Apply the deltas of the last backward pass; a second step does nothing. Local."""
        rows, problem = self.take_pending()
        if problem:
            raise not_a_number("step", problem)
        if rows:
            self.apply_deltas(CAPS[cap_class(rows)])

    def take_pending(self) -> tuple[int, str]:
        """Return what waits for a step, and let nothing wait.

        Returns:
            The rows behind the deltas that wait to be applied; deltas that were written by hand
            count as those of one row at least. And where a NaN was met since the last step.
        """
        self._settle()
        rows, problem = self._pending, self._problem
        if self.arena.take_written():
            rows = max(rows, 1)
            if not problem and (origin := self._nan_in_deltas()):
                problem = f"step: {origin}"
        self._pending, self._problem = 0, ""
        return rows, problem

    def apply_deltas(self, cap: float) -> None:
        """Apply the deltas, each at most a standard deviation over `cap`."""
        if self._trace is None:
            self.arena.step(cap)
        else:
            self._trace.step(self.arena, cap)

    # What a pass gave.

    def get_outputs(self) -> tuple[Output, Output]:
        """Return mean and variance of the last output, flat."""
        return self.output_z_buffer.mu_a, self.output_z_buffer.var_a

    def output_to_host(self) -> list[float]:
        """Return the means of the last output as a list."""
        return self.output_z_buffer.mu_a.tolist()

    def delta_z_to_host(self) -> list[float]:
        """Return the deltas of means that backward ended with as a list."""
        return self.output_delta_z_buffer.delta_mu.tolist()

    def get_input_states(self) -> tuple[Output, Output]:
        """Return the deltas of the input's means and variances, flat."""
        _, delta = self._corrected_input()
        return to_array(delta.mean), to_array(delta.var)

    def input_states_posterior(self) -> tuple[Output, Output]:
        """Return mean and variance of the input given the observation, flat."""
        x, delta = self._corrected_input()
        if x.var is None:
            raise PartitionError.because(
                "input_states_posterior()",
                "the input was certain, so nothing can be learnt about it",
                hint="net(mu_x, var_x) with variances of the input",
            )
        mean, var = x.mean.reshape(-1), x.var.reshape(-1)
        shift, shift_var = delta.mean.reshape(-1), delta.var.reshape(-1)
        return to_array(mean + var * shift), to_array(var + var * var * shift_var)

    def _corrected_input(self) -> tuple[Moments, Delta]:
        if self._corrected is None:
            raise PartitionError.because(
                "the deltas of the input",
                f"input_state_update = {self.input_state_update}, and no backward pass with True",
                hint="net.input_state_update = True before net.backward()",
            )
        return self._corrected

    @torch.no_grad()
    def predict(self, x: ArrayLike, batch_size: int | None = None) -> tuple[Output, Output]:
        """Return mean and standard deviation `[samples, outputs]` in eval mode.

        Mode, carried states and buffers stay as they were.

        Args:
            x: input, as `forward` takes it.
            batch_size: samples at a time; None for all at once.
        """
        if batch_size is not None:
            expect_int("batch_size", operator.index(batch_size), 1, error=PartitionError)
        with self._all_or_nothing(keep=False):
            self.eval()
            whole = self._read(x, None)
            pieces = whole.mean.split(batch_size or max(whole.mean.shape[0], 1))
            outs: list[Moments] = []
            for piece in map(Moments, pieces):
                out = forward_through(self.layers, piece)
                is_read = not isinstance(x, Tensor) and is_accelerator(self._device)
                arrays = (to_array(out.mean), to_array(out.spread())) if is_read else None
                self._check_output(piece, out, arrays)
                outs.append(out)
        mean = torch.cat([out.mean.flatten(1) for out in outs])
        std = torch.cat([out.spread().flatten(1) for out in outs]).clamp_min(0).sqrt()
        if isinstance(x, Tensor):
            return mean.to(x.device), std.to(x.device)
        return mean.cpu().numpy(), std.cpu().numpy()

    # Mode, device, sizes.

    @property
    def device(self) -> str:
        """Where the net lives."""
        return str(self._device)

    def to(self, device_or_dtype: str | torch.device | torch.dtype) -> Self:
        """Move the net to a device, or convert it to a dtype; returns the net."""
        if not isinstance(device_or_dtype, torch.dtype):
            self._device = checked_device(device_or_dtype)
        elif device_or_dtype in (torch.float32, torch.float64):
            self._dtype = device_or_dtype
        else:
            raise PlatformError.because(
                f"to({device_or_dtype})",
                "variances need float32 or float64",
                hint="net.float() or net.double()",
            )
        for layer in self.layers:
            layer.move(self._device, self._dtype)
        self._remembers = False
        self._arena = self._new_arena()
        return self

    def double(self) -> Self:
        """Compute in float64 from now on; returns the net."""
        return self.to(torch.float64)

    def float(self) -> Self:
        """Compute in float32 from now on; returns the net."""
        return self.to(torch.float32)

    def to_device(self, device: str) -> None:
        """Move the net to `"cpu"`, `"cuda"`, `"cuda:1"`, `"mps"`."""
        self.to(device)

    def train(self) -> None:
        """Remember in forward what backward needs; normalise by batches."""
        self._set_training(True)

    def eval(self) -> None:
        """Remember nothing; normalise by running values."""
        self._set_training(False)

    def _set_training(self, training: bool) -> None:
        self._training = training
        for layer in self._all_layers:
            layer.training = training

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
        for _, leaf in self._leaves:
            leaf.num_threads = n

    def num_parameters(self) -> int:
        """Return the number of mean scalars."""
        return sum(p.mean_w.numel() + p.mean_b.numel() for p in self._arena.members)

    @property
    def z_buffer_size(self) -> int:
        """Largest number of units of a layer, times the batch."""
        return self._batch * max((layer.get_max_num_states() for layer in self.layers), default=0)

    @property
    def z_buffer_block_size(self) -> int:
        """Samples of the last forward pass."""
        return self._batch

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> BaseLayer:
        return self.layers[index]

    def __iter__(self) -> Iterator[BaseLayer]:
        return iter(self.layers)

    # State dicts and files.

    def parameters(self) -> list[Values]:
        """Return (mu_w, var_w, mu_b, var_b) of all layers that have them, in walk order."""
        return list(self.state_dict().values())

    def live_tensors(self, *, running: bool = True) -> dict[str, tuple[Tensor, ...]]:
        """Return the tensors that a state dict has copies of, four for each layer.

        Args:
            running: add `<key>.running` with running mean and variance of batch norms.
        """
        tensors: dict[str, tuple[Tensor, ...]] = {}
        for key, layer in self._leaves:
            if layer.params is not None:
                tensors[key] = layer.params.values
            if running and isinstance(layer, BatchNorm2d):
                tensors[key + files.RUNNING] = (layer.running_mean, layer.running_var)
        return tensors

    def state_dict(self, *, tensors: bool = False, running: bool = False) -> dict[str, Values]:
        """Return the parameters by layer; two dicts of lists compare with `==`.

        Args:
            tensors: copies as tensors in place of Python lists.
            running: add `<key>.running` with the running mean and variance of batch norms. Without
                it a batch norm that loads the dict keeps the running values it has.
        """

        def exported(t: Tensor) -> Any:
            return t.detach().clone() if tensors else to_array(t).tolist()

        state: dict[str, Values] = {}
        for key, parts in self.live_tensors(running=running).items():
            mean_w, var_w, *rest = map(exported, parts)
            mean_b, var_b = rest or ([], [])
            state[key] = (mean_w, var_w, mean_b, var_b)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Sequence[ArrayLike]]) -> None:
        """Write the parameters of a dict; every key and length is checked before anything is.

        Args:
            state: lists, arrays or tensors under the keys of `state_dict`.
        """
        live, needed = self.live_tensors(), set(self.live_tensors(running=False))
        missing, extra = sorted(needed - set(state)), sorted(set(state) - set(live))
        if missing or extra:
            raise PartitionError.because(
                "load_state_dict of another architecture",
                f"missing {', '.join(missing) or 'nothing'}; too many {', '.join(extra) or 'none'}",
                hint=f"a dict with the keys {', '.join(sorted(needed))}",
            )
        read: list[tuple[Tensor, Tensor]] = []
        wrong: list[str] = []
        for key, values in state.items():
            parts = live[key]
            if len(values) not in (4, len(parts)):
                wrong.append(f"{key}: {len(values)} parts for mu_w, var_w, mu_b, var_b")
            for n, (target, value) in enumerate(zip(parts, values, strict=False)):
                flat = to_tensor(value, target.device, target.dtype).reshape(-1)
                if flat.numel() != target.numel():
                    wrong.append(f"{key}: {flat.numel()} numbers for {target.numel()}")
                elif n % 2:
                    check_variance(flat, f"{key} part {n}")
                read.append((target, flat))
        if wrong:
            raise PartitionError.because(
                "load_state_dict with sizes of another net",
                "\n".join(wrong),
                hint=f"the dict of a net like this one: {' '.join(self.infos())}",
            )
        for target, flat in read:
            target.copy_(flat.view(target.shape))
        for key, layer in self._leaves:
            if isinstance(layer, BatchNorm2d) and key + files.RUNNING in state:
                layer.note_loaded_statistics()

    def params_from(self, other: Sequential) -> None:
        """Take parameters and running values of another net of the same architecture."""
        self.load_state_dict(other.state_dict(tensors=True, running=True))

    def save(self, path: str | Path) -> None:
        """Write the net: `.pt` and `.pth` as a torch file, anything else as pytagi's binary.

        Missing directories are made; the file appears whole or not at all.
        """
        (files.save_torch if files.is_torch(path) else files.save_binary)(self, path)

    def load(self, path: str | Path) -> None:
        """Read a file that `save`, or pytagi, wrote; the architecture must be the same."""
        (files.load_torch if files.is_torch(path) else files.load_binary)(self, path)

    def save_csv(self, prefix: str | Path) -> None:
        """Write `<prefix>_1_mw.csv`, `_2_Sw.csv`, `_3_mb.csv`, `_4_Sb.csv`, one value per line.

        Nets with batch norms also get `_5_mra.csv`, `_6_Sra.csv`: their running values.
        """
        files.save_csv(self, prefix)

    def load_csv(self, prefix: str | Path) -> None:
        """Read the files of `save_csv`; warns if running values are wanted and not there."""
        files.load_csv(self, prefix)

    def to_torch(self) -> nn.Sequential:
        """Return the means as a torch module in eval mode; see `unisono.bayes.to_torch`."""
        from unisono.bayes.torch_bridge import to_torch  # it makes nets too

        return to_torch(self)

    # Recurrent layers.

    def _recurrent(self, kind: type[R]) -> dict[Place, R]:
        """Return the layers of a kind by their places."""
        pairs = ((key.partition(".")[2], leaf) for key, leaf in self._leaves)
        return {int(p) if p.isdigit() else p: leaf for p, leaf in pairs if isinstance(leaf, kind)}

    @property
    def num_samples(self) -> int:
        """Time steps allowed between two smoothings; 0 is any number."""
        return next((layer.num_samples for layer in self._recurrent(SLSTM).values()), 0)

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        for layer in self._recurrent(SLSTM).values():
            layer.num_samples = value

    def reset_lstm_states(self) -> None:
        """Let all LSTM layers start at zero; SLSTM layers forget their history."""
        for layer in self._recurrent(LSTM).values():
            layer.reset_state()

    def get_lstm_states(self, time_step: int = -1) -> dict[Place, FlatState]:
        """Return the states of all LSTM layers that have one, by layer index.

        Layers inside blocks go by the path that their keys in state dicts have: `"main.1.0"`.

        Args:
            time_step: -1 for the state after the last step (its posterior, once backward ran);
                t >= 0 for the smoothed state of SLSTM layers at step t.
        """
        if time_step >= 0:
            layers = self._recurrent(SLSTM).items()
            return {n: layer.smoothed_state(time_step).lists() for n, layer in layers}
        states = {n: layer.state for n, layer in self._recurrent(LSTM).items()}
        return {n: state.lists() for n, state in states.items() if state is not None}

    def set_lstm_states(self, states: Mapping[Any, FlatState]) -> None:
        """Let the next call start from these states, as `get_lstm_states` gives them."""
        layers = self._recurrent(LSTM)
        for n in states:
            if n not in layers:
                raise PartitionError.because(
                    f"the state of layer {n}",
                    f"LSTM layers are {list(layers)}",
                    hint="the keys that get_lstm_states() gives",
                )
        read = {n: layers[n].read_state(parts, n) for n, parts in states.items()}
        for n, state in read.items():
            layers[n].set_state(state)

    def recurrent_state(self) -> dict[str, Any]:
        """Return what recurrent layers go on from, and what SLSTM layers keep for the smoother.

        States are those that the next call starts from; layers that start at zero have none.
        """
        states = {n: layer.carried for n, layer in self._recurrent(LSTM).items()}
        return {
            "lstm": {n: state.lists() for n, state in states.items() if state is not None},
            "history": {n: layer.history_tensors() for n, layer in self._recurrent(SLSTM).items()},
        }

    def set_recurrent_state(self, state: Mapping[str, Any]) -> None:
        """Let recurrent layers go on from what `recurrent_state` gave."""
        self.reset_lstm_states()
        self.set_lstm_states(state["lstm"])
        for n, layer in self._recurrent(SLSTM).items():
            if n in state.get("history", {}):
                layer.set_history(state["history"][n])

    @torch.no_grad()
    def smoother(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Smooth all time steps since the last reset; return the net's output at each, flat.

        Afterwards histories are empty and states zero; `get_lstm_states(t)` has the smoothed ones.
        """
        layers = self._recurrent(SLSTM)
        steps = {n: len(layer.history) for n, layer in layers.items()}
        if not layers or not all(steps.values()):
            raise PartitionError.because(
                "smoother()",
                f"{len(layers)} SLSTM layers with {list(steps.values())} time steps",
                hint="SLSTM layers, and forward, update, backward, step for each time step before",
            )
        behind = _behind_the_last(self.layers)
        smoothed = [layer.smooth() for layer in layers.values()][-1]
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
                "get_outputs_smoother()", "smoother() has not run yet", hint="net.smoother()"
            )
        mean, var = self._smoothed
        return mean.copy(), var.copy()

    # What a net tells about itself.

    def infos(self) -> list[str]:
        """Return the infos of all plain layers."""
        return [layer.get_layer_info() for _, layer in self._leaves]

    def get_layer_stack_info(self) -> str:
        """Return the info of each layer, each line ended."""
        return "".join(f"{layer.get_layer_info()}\n" for layer in self.layers)

    def get_neg_var_w_counter(self) -> dict[str, int]:
        """Return how many weight variances of each layer the last step floored."""
        counts: dict[str, int] = {}
        leaves = [(key, layer) for key, layer in self._leaves if layer.params is not None]
        for (key, layer), count in zip(leaves, self._arena.floored.tolist(), strict=True):
            info, place = layer.get_layer_info(), key.partition(".")[2]
            counts[f"{info}_{place}" if info in counts else info] = count
        return counts

    def get_norm_mean_var(self) -> dict[str, NormValues]:
        """Return running and batch statistics of batch norms, by info and index of the layer.

        Each of mu_ra, var_ra, mu_batch, var_batch is a list with one inner list per norm layer.
        """
        statistics: dict[str, NormValues] = {}
        for n, layer in enumerate(self.layers):
            norms = [leaf for _, leaf in layer.leaves() if isinstance(leaf, BatchNorm2d)]
            if norms:
                statistics[f"{layer.get_layer_info()}_{n}"] = (
                    [to_array(norm.running_mean).tolist() for norm in norms],
                    [to_array(norm.running_var).tolist() for norm in norms],
                    [to_array(norm.batch_mean).tolist() for norm in norms],
                    [to_array(norm.batch_var).tolist() for norm in norms],
                )
        return statistics

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
        names = [key for key, layer in self._leaves if layer.params is not None]
        trace = self._trace = Trace(names, [0.0] * len(names), [0] * len(names))
        try:
            yield trace
        finally:
            self._trace = None
            if show:
                print(trace.table())

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for n, layer in enumerate(self.layers):
            lines += _tree(f"({n})", layer, 1)
        lines.append(f")  {self.num_parameters():,} parameters, each a mean and a variance")
        return "\n".join(lines)


def not_a_number(where: str, problem: str) -> UnisonoError:
    """Return the error of a net that has met a NaN."""
    return PartitionError.because(
        f"{where} of a net in which a NaN has come up",
        problem,
        hint="standardise inputs and targets; net.double() if numbers grow large; load an earlier "
        "state if parameters hold it",
    )


def _with_inner(layers: Sequence[BaseLayer]) -> list[BaseLayer]:
    """Return every layer: blocks, and what is in them."""
    return [
        each
        for layer in layers
        for each in (layer, *_with_inner([child for _, child in layer.inner()]))
    ]


def _behind_the_last(layers: Sequence[BaseLayer]) -> list[BaseLayer]:
    """Return the layers that the output of the last SLSTM goes through."""
    last = max(
        n
        for n, layer in enumerate(layers)
        if any(isinstance(leaf, SLSTM) for _, leaf in layer.leaves())
    )
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


def _tree(label: str, layer: BaseLayer, depth: int) -> list[str]:
    size = f"  -> {layer.output_size}" if layer.output_size else ""
    lines = [f"{'  ' * depth}{label} {layer.get_layer_info()}{size}"]
    for n, (_, child) in enumerate(layer.inner()):
        lines += _tree(f"({n})", child, depth + 1)
    return lines
