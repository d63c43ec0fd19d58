"""`plan_report`: what a split network will send, on tensors without data and without a process.

One rank after the other is played in this process: the rules of split tensors run as in a real
forward and backward, on communicators whose engine carries nothing, and the trace takes down what
would have been sent. So a plan and a measurement cannot disagree.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.comm.call import Call
from unisono.comm.engines.base import Blocks, Engine, How, Messages
from unisono.comm.groups import GroupEntry
from unisono.comm.health import trace
from unisono.errors import PartitionError, UnisonoError
from unisono.expect import expect, expect_int, is_integer
from unisono.nn.split_tensors.module import SplitModule, module_of
from unisono.nn.split_tensors.tensor import Gathered, Run, Split, agreed_cuts
from unisono.topology import Partition

_FORWARD, _BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Sent:
    """One call of a verb by one rank."""

    phase: str
    """`forward` or `backward`."""
    module: str
    """Path of the module in whose forward it happens; of a backward this is not known."""
    verb: str
    """As the trace calls it."""
    bytes: int
    """As the trace counts them."""
    ranks: int
    """Ranks that take part; of an exchange, those that it sends to."""


@dataclass(frozen=True)
class RankPlan:
    """One forward and one backward of one rank."""

    sent: tuple[Sent, ...]
    """Every call, in its order."""
    gathered: tuple[tuple[Gathered, int], ...]
    """What has to be gathered, and how often."""

    def bytes(self, phase: str) -> int:
        """Return what is sent in `forward` or `backward`."""
        return sum(one.bytes for one in self.sent if one.phase == phase)


@dataclass(frozen=True)
class PlanReport:
    """What every rank of a split network sends; printed, a table of the rank that sends most."""

    partition: tuple[int, ...]
    """How the input is cut."""
    ranks: dict[int, RankPlan]
    """By rank of the partition."""

    @property
    def busiest(self) -> int:
        """The rank that sends most."""
        return max(self.ranks, key=lambda r: sum(one.bytes for one in self.ranks[r].sent))

    @property
    def gathered(self) -> tuple[tuple[Gathered, int], ...]:
        """What has to be gathered, on all ranks alike."""
        return next(iter(self.ranks.values())).gathered

    def __str__(self) -> str:
        own = self.ranks[self.busiest]
        found: dict[tuple[str, str, str], list[int]] = {}
        for one in own.sent:
            found.setdefault((one.phase, one.module, one.verb), []).append(one.bytes)
        rows = [("pass", "module", "verb", "calls", "bytes")]
        for phase in (_FORWARD, _BACKWARD):
            rows += [
                (phase, module or "-", verb, str(len(sizes)), str(sum(sizes)))
                for (at, module, verb), sizes in found.items()
                if at == phase
            ]
            calls = sum(one.phase == phase for one in own.sent)
            rows.append((phase, "together", "", str(calls), str(own.bytes(phase))))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [f"rank {self.busiest} of {list(self.partition)}, which sends most"]
        for row in rows:
            left = (cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False))
            right = (cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True))
            lines.append("  ".join((*left, *right)))
        lines.append("gathered: nothing" if not own.gathered else "gathered:")
        for what, times in own.gathered:
            where = f" in {what.module}" if what.module else ""
            often = f", {times} times" if times > 1 else ""
            lines.append(f"  {what.function} of {list(what.shape)}{where}: {what.reason}{often}")
        return "\n".join(lines)


def plan_report(
    module: nn.Module,
    inputs: Sequence[int] | Tensor | Sequence[Tensor],
    partition: Partition | Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    input_grad: bool = False,
    ranks: Iterable[int] | None = None,
) -> PlanReport:
    """Return what `unisono.nn.split` of a network will send, found without ranks and without data.

    Needs no process group; takes about as long as some calls of the network's Python code.

    Args:
        module: the network; it is left as it is. One made by `split` or `distribute` is taken as
            the network inside it.
        inputs: shape of the whole input; or the whole arguments of `forward`, as tensors (on the
            device "meta" too), of which the first one is cut.
        partition: how the input is to be cut, e.g. `Partition([1, 1, 2, 2])` or `[1, 1, 2, 2]`.
        dtype: of an input that is given by its shape; default: that of the network.
        input_grad: whether the input's gradient is wanted too.
        ranks: the ranks to look at; default: all.

    Returns:
        `print` it for a table of the busiest rank; `report.ranks[r].sent` lists every call of a
        rank with its bytes, `report.gathered` what has to be gathered and why.

    Raises:
        PartitionError: this input cannot be cut like that.
        UnisonoError: the network does something for which values are needed.

    >>> print(plan_report(nn.Conv2d(1, 1, 3), (1, 1, 8, 8), [1, 1, 2, 1]))
    rank 0 of [1, 1, 2, 1], which sends most
    pass      module    verb        calls  bytes
    forward   -         exchange        1     32
    forward   together                  1     32
    backward  -         all_reduce      1     40
    backward  together                  1     40
    gathered: nothing
    """
    expect("module", module, nn.Module, "a torch.nn.Module")
    net, attention = module, "auto"
    if isinstance(module, SplitModule):
        net, attention = module.module, module.attention
    arguments = _arguments(net, inputs, dtype)
    shape = partition.shape if isinstance(partition, Partition) else tuple(partition)
    for parts in shape:
        expect_int("parts", parts, 1)
    everyone = range(math.prod(shape))
    bare = _without_data(net)
    played = {
        rank: _played(Rehearsal(bare, arguments, shape, rank, attention), input_grad)
        for rank in (everyone if ranks is None else ranks)
    }
    return PlanReport(tuple(shape), played)


def _arguments(
    net: nn.Module, inputs: Sequence[int] | Tensor | Sequence[Tensor], dtype: torch.dtype | None
) -> list[Any]:
    """Return the whole arguments of the network, without data."""
    given: list[Any] = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if given and all(is_integer(n) for n in given):
        kinds = (p.dtype for p in net.parameters() if p.is_floating_point())
        dtype = next(kinds, torch.get_default_dtype()) if dtype is None else dtype
        given = [torch.empty(given, dtype=dtype, device="meta")]
    if not given or not isinstance(given[0], Tensor):
        raise PartitionError.because(
            f"plan_report(net, {inputs!r})",
            "neither the shape of its input nor tensors",
            None,
            "plan_report(net, (1, 3, 64, 64), Partition([1, 1, 2, 1]))",
        )
    return [x.to("meta") if isinstance(x, Tensor) else x for x in given]


class Rehearsal:
    """One rank of a split network, played in this process: what others would send is zeros.

    On data it takes as long as on that rank, were it never to wait for the others.

    Args:
        net: the network.
        arguments: the whole arguments of its forward, of which the first is cut.
        shape: how it is cut.
        rank: of the partition.
        attention: as in `split`.
    """

    def __init__(
        self,
        net: nn.Module,
        arguments: Sequence[Any],
        shape: Sequence[int],
        rank: int,
        attention: str = "auto",
    ) -> None:
        whole, *self._rest = arguments
        ranks = range(math.prod(shape))
        self.partition = grid = Partition(shape, comm=on_paper(ranks, rank, whole.device))
        if whole.ndim != grid.dim:
            raise PartitionError.because(
                f"an input of shape {list(whole.shape)} for a partition {list(grid.shape)}",
                arithmetic=f"{whole.ndim} dims != {grid.dim}",
                hint=f"plan_report(net, {list(whole.shape)}, {[1] * (whole.ndim - 1) + [2]})",
            )
        self.module = SplitModule(net, grid, strict=False, attention=attention)
        self._cuts = agreed_cuts([grid.local_shape(whole.shape, rank=r) for r in ranks], grid)
        self.block = whole[grid.local_slices(whole.shape)].detach().clone()
        """The own part of the input."""

    def forward(self) -> Any:
        """Return the outputs of this rank."""
        made = self.module
        if not self._cuts:
            return made.module(self.block, *self._rest)
        run = Run(self.partition, made.module, False, made.attention)
        entry = Split(self.block, self._cuts, run)
        return made.run(entry, entry, *self._rest)


def _played(rehearsal: Rehearsal, input_grad: bool) -> RankPlan:
    """Run the forward and backward of a rank, without data."""
    net = rehearsal.module.module
    notes = Notes(net)
    rehearsal.block.requires_grad_(input_grad)
    with ExitStack() as around:
        around.enter_context(torch.random.fork_rng(devices=[]))
        around.enter_context(torch.device("meta"))
        around.enter_context(torch.enable_grad())
        around.enter_context(notes.taken())
        try:
            outputs = rehearsal.forward()
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, UnisonoError) or "meta" not in str(error).lower():
                raise
            raise _needs_values(net, error) from error
        notes.phase = _BACKWARD
        ends = [x.local if isinstance(x, Split) else x for x in _tensors_in(outputs)]
        ends = [x for x in ends if x.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
    return RankPlan(tuple(notes.sent), tuple(rehearsal.module.report()))


def _needs_values(net: nn.Module, error: Exception) -> UnisonoError:
    where = module_of(net, error)
    return UnisonoError.because(
        f"plan_report of {type(net).__name__}",
        f"the forward of {where} asks for values, and there are none on paper: {error}",
        None,
        "a real forward with unisono.comm.trace() as t: ... counts what is sent",
    )


def _without_data(net: nn.Module) -> nn.Module:
    """Return a copy of a network on the device "meta"; no parameter is copied on the way."""
    known: dict[int, Any] = {}
    for p in net.parameters():
        known[id(p)] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
    for buffer in net.buffers():
        known[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(net, known).to("meta")


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors_in(value)


class Notes(trace.Recorder):
    """Takes down what is sent, and in which module's forward."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(call_sites=False)
        self.phase = _FORWARD
        self.sent: list[Sent] = []
        self._inside: list[str] = [""]
        self._handles: list[Any] = []
        for path, module in () if net is None else net.named_modules():
            self._watch(module, path)

    def _watch(self, module: nn.Module, path: str) -> None:
        def enter(*_: Any) -> None:
            self._inside.append(path)

        def leave(*_: Any) -> None:
            self._inside.pop()

        self._handles += [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def add(self, call: Call, rank: int) -> None:  # noqa: ARG002
        """Take down a call."""
        inside = self._inside[-1] if self.phase == _FORWARD else ""
        peers = (
            len(call.sends_to) if call.op == "exchange" else len(call.group.split())
        )  # named by its ranks
        self.sent.append(Sent(self.phase, inside, call.op, call.sent, peers))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take notes while the context is open."""
        before, trace.recorder = trace.recorder, self
        try:
            yield
        finally:
            trace.recorder = before
            for handle in self._handles:
                handle.remove()


class PaperEngine(Engine):
    """Carries nothing: what others would send is zeros, what they would add to is left as it is."""

    backend = "paper"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> None:
        """Leave `x` as it is."""

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> None:
        """Leave `x` as it is."""

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> None:  # noqa: ARG002
        """Fill `outs` with zeros."""
        for out in outs:
            out.zero_()

    def reduce_scatter(self, out: Tensor, ins: Blocks, op: str, **how: object) -> None:  # noqa: ARG002
        """Return the own share."""
        out.copy_(ins[self.rank].view_as(out))

    def exchange(self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]) -> None:  # noqa: ARG002
        """Fill what is to come with zeros."""
        for _, out in recvs:
            out.zero_()

    def barrier(self, **how: Unpack[How]) -> None:
        """Do nothing."""

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:  # noqa: ARG002
        """Return the own numbers for every rank."""
        return [tuple(values)] * self.size


class PaperCommunicator(Communicator):
    """Ranks of which one is played in this process; the others are taken to say what it says."""

    def __init__(self, entry: GroupEntry, device: torch.device, **_: Any) -> None:
        super().__init__(entry, device=torch.device("cpu"))
        vars(self).update(device=device, backend="paper")

    def _made(self, ranks: tuple[int, ...]) -> Communicator:
        return on_paper(ranks, ranks.index(self.ranks[self.rank]), self.device)


def on_paper(
    ranks: Sequence[int], rank: int, device: torch.device | str = "meta"
) -> PaperCommunicator:
    """Return these ranks of a world on paper, as place `rank` among them sees them."""
    entry = GroupEntry(None, tuple(ranks), made_by_us=False)
    entry.rank = rank
    entry.name = entry.key = " ".join(map(str, ranks))
    entry._engines["self", "cpu"] = PaperEngine(rank, len(ranks))
    return PaperCommunicator(entry, torch.device(device))
