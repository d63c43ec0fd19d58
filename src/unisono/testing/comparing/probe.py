"""What one rank of a training does, tensor by tensor: digests and moments, in the order of events.

A probe looks at a program through hooks of torch, so it does not matter who wraps the model. It
keeps a few numbers of each tensor; whole tensors only where asked to.
"""

from __future__ import annotations

import contextlib
import functools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.distributed import DistributedSampler

from unisono.comm import perform
from unisono.comm.call import call_site
from unisono.environment import detect
from unisono.torch_private import on_backward

_WRAPPERS = {
    *("DataParallel", "DataParallelMultiGPU", "DistributedDataParallel", "OptimizedModule"),
    *("GraphParallel", "SplitModule", "DistributedNetwork", "CheckpointWrapper"),
    "FullyShardedDataParallel",
}
"""Modules that hold another one and return what it returns, by the names of their classes."""
_VERBS = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "gather"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "all_to_all", "all_to_all_single"),
)
_ROWS = 4096
"""Number of rows of a batch that are told apart."""
_OUTPUTS = 4
"""Number of tensors of one result that are looked at."""


class Key(NamedTuple):
    """Which tensor of a program: equal for the same one in each form."""

    step: int
    """Optimizer steps before it."""
    kind: str
    """`start`, `batch`, `output`, `loss`, `setting`, `gradient`, `parameter`, `state`, `buffer`."""
    name: str
    """Path of the module or parameter."""
    call: int
    """How many of this name came before it in the step."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip() + (f" (call {self.call})" if self.call else "")


class TensorMoments(NamedTuple):
    """A few numbers of a tensor that do not depend on the order of its rows."""

    elements: float
    total: float
    squares: float
    projected: float
    """Sum over rows of the square of their product with a fixed vector."""
    largest: float

    def joined(self, other: TensorMoments) -> TensorMoments:
        """Return the moments of both tensors together."""
        return TensorMoments(
            self.elements + other.elements,
            self.total + other.total,
            self.squares + other.squares,
            self.projected + other.projected,
            max(self.largest, other.largest),
        )


@dataclass
class Note:
    """One tensor, as a rank has seen it."""

    key: Key
    moments: TensorMoments
    eps: float
    """Relative size of one unit in the last place."""
    width: int = 0
    """Elements of a row."""
    is_shard: bool = False
    """Whether ranks hold parts of one tensor, as FSDP and split tensors say."""
    rows: list[int] | None = None
    """A digest of each row of a batch."""
    module: str = ""
    """Class of the module whose result it is."""
    has_drawn: bool = False
    """Whether that module has drawn random numbers."""
    value: object = None
    """A setting, as it is."""
    whole: Tensor | None = None


@dataclass
class Recording:
    """All that one rank has done."""

    rank: int = 0
    size: int = 1
    notes: list[Note] = field(default_factory=list)
    steps: int = 0
    cuts: list[str] = field(default_factory=list)
    """Collectives without derivative that were given tensors with one."""
    padded: str = ""
    """A sampler that repeats rows, in words."""
    seeds: list[int] = field(default_factory=list)
    """Digest of the random state before each step."""


class _Enough(BaseException):
    """All steps that were asked for have been seen. Passes `except Exception` of the program."""


class Probe:
    """Records a program while it is entered.

    Args:
        focus: tensors to keep whole.
        most: end the program after this number of steps; None: let it run to its end.
    """

    def __init__(self, focus: Sequence[Key] = (), most: int | None = None) -> None:
        place = detect()
        self._most = most
        self.recording = Recording(place.rank, place.size)
        self._focus = set(focus)
        self._roots: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._params: dict[int, str] = {}
        self._stack: list[tuple[nn.Module, int]] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._stepper: Callable[[], object] | None = None
        self._is_looking = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[Recording]:
        """Follow the program inside."""
        with contextlib.ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            stack.callback(on_backward(self._see_loss))
            stack.enter_context(_cuts_noted(self.recording.cuts))
            stack.enter_context(_samplers_noted(self.recording))
            yield self.recording
        if dist.is_initialized():
            self.recording.rank, self.recording.size = dist.get_rank(), dist.get_world_size()

    # -- notes ------------------------------------------------------------------------------------

    def _note(self, kind: str, name: str, x: Tensor, **facts: Any) -> None:
        key = self._key(kind, name)
        shard = _shard_of(x)
        local = (x if shard is None else shard).detach()
        width = local.numel() // max(1, local.shape[0] if local.dim() else 1)
        note = Note(key, moments_of(local), _eps(local), width, shard is not None, **facts)
        if key in self._focus:
            note.whole = local.cpu().clone()
        self.recording.notes.append(note)

    def _key(self, kind: str, name: str) -> Key:
        call = self._calls[kind, name]
        self._calls[kind, name] += 1
        return Key(self.recording.steps, kind, name, call)

    # -- forward ----------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if self._is_looking or torch.compiler.is_compiling():
            return
        if not self._stack:
            has_parameters = next(module.parameters(), None) is not None
            if not (has_parameters and module.training and torch.is_grad_enabled()):
                return
            self._learn(module)
        self._stack.append((module, _generator()))
        path = self._names.get(id(module))
        is_wrapper = _kind(module) in _WRAPPERS
        above = [m for m, _ in self._stack[:-1] if _kind(m) not in _WRAPPERS]
        if path is not None and not above and not is_wrapper:
            with self._looking():
                tensors = _tensors_in(inputs)
                for number, x in enumerate(tensors[:_OUTPUTS]):
                    self._note("batch", f"input {number}", x, rows=_rows_of(x))

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._is_looking or not self._stack or self._stack[-1][0] is not module:
            return
        _, before = self._stack.pop()
        path = self._names.get(id(module))
        if path is None or _kind(module) in _WRAPPERS:
            return
        with self._looking():
            drawn = before != _generator()
            for x in _tensors_in(output)[:_OUTPUTS]:
                self._note("output", path, x, module=_kind(module), has_drawn=drawn)

    def _learn(self, root: nn.Module) -> None:
        """Learn the names of a model, and note what it begins with."""
        if any(root is other for other in self._roots):
            return
        prefix = "" if not self._roots else f"model {len(self._roots) + 1}."
        self._roots.append(root)
        for name, part in root.named_modules():
            self._names.setdefault(id(part), prefix + clean(name))
        with self._looking():
            for name, p in root.named_parameters():
                if id(p) not in self._params:
                    self._params[id(p)] = prefix + clean(name)
                    self._note("start", prefix + clean(name), p)

    # -- backward and step ------------------------------------------------------------------------

    def _see_loss(self, roots: Sequence[Tensor]) -> None:
        with self._looking():
            for x in roots:
                if x.numel() == 1 and x.grad_fn is not None:
                    self._note("loss", "", x)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._roots:
            return
        with self._looking():
            for number, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if isinstance(value, bool | int | float | tuple):
                        self._setting(f"{name}, group {number}", value)
                for i, p in enumerate(group["params"]):
                    if p.grad is not None:
                        name = self._params.get(id(p), f"parameter {i} of group {number}")
                        self._note("gradient", name, p.grad)

    def _setting(self, name: str, value: Any) -> None:
        numbers = [float(v) for v in (value if isinstance(value, tuple) else (value,))]
        x = torch.tensor(numbers, dtype=torch.float64)
        note = Note(self._key("setting", name), moments_of(x), _eps(x), value=value)
        self.recording.notes.append(note)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._roots:
            return
        with self._looking():
            for number, group in enumerate(optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    name = self._params.get(id(p), f"parameter {i} of group {number}")
                    self._note("parameter", name, p)
                    for what, x in optimizer.state.get(p, {}).items():
                        if isinstance(x, Tensor) and x.numel() > 1:
                            self._note("state", f"{name}, {what}", x)
            for number, root in enumerate(self._roots):
                prefix = "" if number == 0 else f"model {number + 1}."
                for name, b in root.named_buffers():
                    self._note("buffer", prefix + clean(name), b)
            if self._stepper is None:
                self._stepper = functools.partial(lambda o: o, optimizer)
            if self._stepper() is optimizer:
                self.recording.seeds.append(_generator())
                self.recording.steps += 1
                self._calls.clear()
                if self.recording.steps == self._most:
                    raise _Enough

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Leave out what the probe itself does."""
        before, self._is_looking = self._is_looking, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_looking = before


def record(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    focus: Sequence[Key] = (),
    most: int | None = None,
) -> Recording:
    """Call a function on this rank, and return what it has done in its first steps."""
    probe = Probe(focus, most)
    with probe.watching() as recording, contextlib.suppress(_Enough):
        fn(*args, **kwargs)
    return recording


# -- tensors in numbers ---------------------------------------------------------------------------


@torch.no_grad()
def moments_of(x: Tensor) -> TensorMoments:
    """Return the moments of a tensor; rows are those of its first dim.

    >>> moments_of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[:3]
    (4.0, 10.0, 30.0)
    """
    if x.numel() == 0 or x.is_meta:
        return TensorMoments(float(x.numel()), 0.0, 0.0, 0.0, 0.0)
    x = x.to_dense() if x.layout != torch.strided else x
    wide = (torch.view_as_real(x) if x.is_complex() else x).to("cpu", torch.float64)
    rows = wide.reshape(wide.shape[0] if wide.dim() else 1, -1)
    generator = torch.Generator().manual_seed(rows.shape[1])
    vector = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
    numbers = (wide.sum(), wide.square().sum(), (rows @ vector).square().sum(), wide.abs().max())
    return TensorMoments(float(wide.numel()), *(float(number) for number in numbers))


def _rows_of(x: Tensor) -> list[int] | None:
    """Return a digest of each row of a batch; None where there are too many."""
    x = x.detach()
    if x.dim() == 0 or not 0 < x.shape[0] <= _ROWS or x.is_complex():
        return None
    rows = x.to("cpu").contiguous().reshape(x.shape[0], -1)
    return [zlib.crc32(row.view(torch.uint8).numpy().tobytes()) for row in rows]


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0.0


def _shard_of(x: Tensor) -> Tensor | None:
    """Return the own part of a tensor of which each rank holds another one; None if all hold it."""
    placements = getattr(x, "placements", None)
    if placements is not None:
        local: Tensor = x.to_local()  # type: ignore[attr-defined]
        if any(p.is_shard() for p in placements):
            return local
        return None
    if getattr(x, "cuts", None):
        return x.local  # type: ignore[attr-defined]
    return None


def _tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [] if values.is_meta else [values]
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [x for value in values for x in _tensors_in(value)]
    return []


def _generator() -> int:
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())


def _kind(module: nn.Module) -> str:
    return re.sub(r"^FSDP(?=[A-Z])", "", type(module).__name__)


def clean(name: str) -> str:
    """Return the name of a module or parameter without what wrappers put into it.

    >>> clean("module.encoder._orig_mod.0.weight"), clean("module")
    ('encoder.0.weight', '')
    """
    parts = name.split(".")
    while parts and parts[0] == "module":
        parts.pop(0)
    hidden = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in parts if part not in hidden)


# -- what else tells a cause ----------------------------------------------------------------------


@contextlib.contextmanager
def _cuts_noted(cuts: list[str]) -> Iterator[None]:
    """Note collectives that are given a tensor with a history, which ends in them."""

    def noted(op: str) -> None:
        text = f"{op} at {call_site(2)}"
        if text not in cuts:
            cuts.append(text)

    def watched(verb: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(verb)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and any(
                x.grad_fn is not None for x in _tensors_in((args, kwargs))
            ):
                noted(f"torch.distributed.{name}")
            return verb(*args, **kwargs)

        return call

    before = {name: getattr(dist, name) for name in _VERBS}
    warn, perform._warn_of_cut = perform._warn_of_cut, noted
    for name, verb in before.items():
        setattr(dist, name, watched(verb, name))
    try:
        yield
    finally:
        perform._warn_of_cut = warn
        for name, verb in before.items():
            setattr(dist, name, verb)


@contextlib.contextmanager
def _samplers_noted(recording: Recording) -> Iterator[None]:
    """Note samplers that repeat rows to give all ranks equally many."""
    before = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler[Any]) -> Any:
        rows, ranks = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
        if sampler.total_size > rows:
            recording.padded = (
                f"{rows} rows over {ranks} ranks: {ranks} * {sampler.num_samples} != {rows}"
            )
        return before(sampler)

    setattr(DistributedSampler, "__iter__", noted)  # noqa: B010
    try:
        yield
    finally:
        setattr(DistributedSampler, "__iter__", before)  # noqa: B010
