"""Silent mistakes of data-parallel training: what replicas must share, and what they must not.

A mistake of this kind stops no rank and gives a wrong model. Now and then ranks compare a few
numbers at the end of a backward: digests of parameters, digests of the first batches. In check mode
they do so at every step, and compare rows, random states and buffers, too.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from unisono import torch_private as private
from unisono.accelerator import is_accelerator
from unisono.comm import Communicator
from unisono.comm.call import call_site
from unisono.comm.digest import digest_of, digests_of
from unisono.comm.health import check
from unisono.data_parallel.batch_norm import SharedBatchNorm
from unisono.data_parallel.divisor import Divisor
from unisono.errors import LayoutError, explain, name_ranks
from unisono.operators.gradients import tensors_in

EVERY = 64
"""Steps between two comparisons; the first ones come earlier, at powers of two."""
_WORDS = 4096
"""How much of a tensor is looked at in one comparison; the rest has its turn in later ones."""
_PARAMETERS = 64
"""How many parameters are looked at in one comparison outside of check mode."""
_ROUNDING = 1e-5
"""Replicas that are closer than this, relative to their values, may differ by rounding alone."""
_BATCHES = 2
"""Number of batches that are compared outside of check mode."""


_HINTS = {
    "DataParallel": {
        "equal": "DataParallel(..., equal_batches=True) if they are meant to be equal",
        "uneven": "with model.samples(len(x)): loss.backward()",
        "norm": "DataParallel(..., sync_batch_norm=True), or nn.GroupNorm",
    },
    "DistributedDataParallel": {
        "equal": 'warnings.simplefilter("ignore", CheckWarning) if they are meant to be equal',
        "uneven": "batches of equal length (drop_last=True), or unisono.DataParallel, and "
        "with model.samples(len(x)): loss.backward()",
        "norm": "nn.SyncBatchNorm.convert_sync_batchnorm(model), unisono.DataParallel(..., "
        "sync_batch_norm=True), or nn.GroupNorm",
    },
}
"""What to write instead, by wrapper."""


@dataclass(frozen=True)
class _Record:
    """What one rank tells the others."""

    is_comparable: int = 0
    """Whether parameters must be equal now."""
    parameters: int = 0
    batches: int = 0
    """Digest of the inputs since the last comparison; 0 for none."""
    is_varied: int = 0
    """Whether the inputs of one step differ from those of another."""
    rows: int = -1
    """Rows of the inputs of this step; -1 where that is not known."""
    is_weighted: int = 0
    """Whether `samples` or `join` says how much this rank counts."""
    generator: int = 0
    """Digest of the random state at a forward with dropout; 0 for none."""
    buffers_changed: int = 0
    """Whether buffers have changed outside of a training forward."""
    divisor: int = 1
    """By what the loss and its gradients were divided."""
    backwards: int = 1
    """Backwards whose gradients this step adds up."""


class ReplicaCheck:
    """What is looked at in the training of one wrapper, and what it has shown so far.

    Args:
        module: the replica.
        wrapper: name of the class that averages its gradients.
        equal_batches: whether ranks are meant to see the same rows.
    """

    def __init__(self, module: nn.Module, wrapper: str, *, equal_batches: bool = False) -> None:
        self._module = weakref.ref(module)
        self._wrapper = wrapper
        self._equal_batches = equal_batches
        self.may_drift = False
        """Whether replicas are meant to differ between exchanges."""
        self._batches: list[Tensor] = []
        self._forwards = 0
        self._rows = -1
        self.backwards = 0
        """Backwards that have added to the gradients of this step."""
        self._generator = 0
        self._buffers: list[int] | None = None
        self._buffers_changed = False
        self._waiting: tuple[int, _Record, list[Tensor], Any] | None = None
        self._equal_at = 0
        self._is_inspected = False
        self._divisor: Divisor | None = None

    # -- what this rank sees ----------------------------------------------------------------------

    def see_forward(self, inputs: Any) -> None:
        """Look at the inputs of a training forward. Local, and nothing after the first ones."""
        if self._forwards >= _BATCHES and not check.active:
            return
        self._forwards += 1
        plain = (x for x in tensors_in(inputs) if type(x) is Tensor)
        tensors = [x for x in plain if x.numel() and not x.is_meta]
        self._rows = tensors[0].shape[0] if tensors and tensors[0].dim() else -1
        if tensors:
            first, *others = digests_of(tensors[:4], _WORDS)
            self._batches.append(sum((other.to(first.device) for other in others), first))
        if check.active:
            self._divisor = self._divisor or Divisor()
            if not self._is_inspected and any(_drops(part) for part in self.module.modules()):
                self._generator = _number(torch.get_rng_state().numpy().tobytes())
            before = self._buffers
            self._buffers_changed |= before is not None and before != _buffers_of(self.module)

    def end_forward(self) -> None:
        """Remember the buffers that a training forward leaves. Local."""
        if check.active:
            self._buffers = _buffers_of(self.module)

    # -- what ranks tell each other ---------------------------------------------------------------

    def compare(
        self, comm: Communicator, step: int, *, joins: bool = False, weighs: bool = False
    ) -> None:
        """Compare this rank with the others, if it is time to. Collective over `comm`.

        Args:
            comm: the ranks that have a replica.
            step: number of averaged backwards, the same on all ranks.
            joins: whether some ranks may have run out of data.
            weighs: whether ranks say how much they count.

        Raises:
            LayoutError: on all ranks, where parameters have drifted apart.
        """
        backwards, self.backwards = self.backwards, 0
        is_early = step <= EVERY and step & (step - 1) == 0 and step > 1
        if not (check.active or is_early or step % EVERY == 0):
            return
        chosen = _chosen(self.module, step)
        digests = digests_of(chosen, _WORDS, step if check.active else step // EVERY)
        record = _Record(
            is_comparable=int(not (joins or self.may_drift)),
            rows=self._rows,
            is_weighted=int(weighs),
            generator=self._generator,
            buffers_changed=int(self._buffers_changed),
            divisor=1 if self._divisor is None else self._divisor.take(),
            backwards=max(1, backwards),
        )
        if self._divisor is not None:
            self._divisor.remember(chosen)
        values, self._batches, self._buffers_changed = [*digests, *self._batches], [], False
        is_later = not check.active and any(is_accelerator(x.device) for x in values)
        due: tuple[int, _Record, list[Tensor], Any] | None = step, record, values, None
        if is_later:
            # The device says later what it has found: the host waits for nothing under way.
            device = values[0].device
            host = [x.to("cpu", non_blocking=True) for x in values]
            event = torch.accelerator.current_stream(device).record_event()
            due, self._waiting = self._waiting, (step, record, host, event)
        if due is not None:
            self._judge(comm, len(digests), *due)

    def _judge(
        self,
        comm: Communicator,
        count: int,
        step: int,
        record: _Record,
        values: list[Tensor],
        event: Any,
    ) -> None:
        if event is not None and not event.query():
            # The device is that far behind: this comparison is left out, on all ranks alike.
            record, values, count = replace(record, is_comparable=0), [], 0
        numbers = [int(x) for x in values]
        batches = numbers[count:]
        fields = {
            **vars(record),
            "parameters": _number(repr(numbers[:count]).encode()),
            "batches": _number(repr(batches).encode()) if batches else 0,
            "is_varied": int(len(set(batches)) > 1 or (step > 2 and bool(batches))),
        }
        table = [_Record(*row) for row in comm.all_gather_ints(list(fields.values()))]
        if all(row.is_comparable for row in table):
            if any(row.parameters != table[0].parameters for row in table):
                _report_drift(self.module, comm, self._equal_at, step)
            else:
                self._equal_at = step
        is_inspected = self._is_inspected
        if check.active:
            self._is_inspected, self._generator = True, 0
        if comm.rank != 0:
            return
        if not self._equal_batches:
            self._report_equal_batches(table, comm)
        if check.active:
            self._report_table(table, comm)
            self._report_divided_twice(table, comm)
            if not is_inspected:
                self._inspect_module(comm)
                _inspect_samplers(comm)

    # -- what rank 0 reports ----------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The replica."""
        return cast(nn.Module, self._module())

    def _report_equal_batches(self, table: Sequence[_Record], comm: Communicator) -> None:
        first = table[0]
        if not first.batches or any(row.batches != first.batches for row in table):
            return
        if not (first.is_varied or check.active):
            return  # one batch for all steps: a test, or all the data there is
        check.report(
            f"batches of {self._wrapper} on {comm.size} ranks",
            f"the inputs are the same on {name_ranks(comm.ranks)}: all ranks train on the same "
            "rows",
            "DataLoader(data, sampler=torch.utils.data.DistributedSampler(data)), or "
            + _HINTS[self._wrapper]["equal"],
            arithmetic=f"{comm.size} ranks, {first.rows} rows each, {first.rows} different ones",
        )

    def _report_table(self, table: Sequence[_Record], comm: Communicator) -> None:
        """Report uneven batches, equal dropout, and buffers that changed on some ranks."""
        rows, states = [row.rows for row in table], {row.generator for row in table}
        is_weighted = any(row.is_weighted for row in table)
        if len(set(rows)) > 1 and min(rows) >= 0 and not is_weighted:
            check.report(
                f"uneven batches in {self._wrapper}",
                "\n".join(f"rank {r}: {n} rows" for r, n in zip(comm.ranks, rows, strict=True)),
                _HINTS[self._wrapper]["uneven"],
                arithmetic=f"a row of rank {comm.ranks[rows.index(min(rows))]} counts "
                f"1/{min(rows)}/{comm.size}, in one process 1/{sum(rows)}",
            )
        if len(states) == 1 and 0 not in states:
            check.report(
                f"dropout in {self._wrapper} on {comm.size} ranks",
                "all ranks draw from the same random state, so the n-th row of each has the same "
                "mask",
                "torch.manual_seed(seed + unisono.world().rank) after the model is built, or "
                "unisono.run(..., seed=0)",
            )
        changed = [r for r, row in zip(comm.ranks, table, strict=True) if row.buffers_changed]
        if changed and len(changed) < comm.size:
            check.report(
                f"buffers of {self._wrapper} between two training forwards",
                f"they have changed on {name_ranks(changed)} only: was a model evaluated there in "
                "train mode?",
                "model.eval() around an evaluation, on all ranks or on none",
            )

    def _report_divided_twice(self, table: Sequence[_Record], comm: Communicator) -> None:
        count, divisor, size = table[0].backwards, table[0].divisor, comm.size
        if any((row.divisor, row.backwards) != (divisor, count) for row in table):
            return
        if count > 1 and divisor == count * count:
            problem = f"the loss and its gradient are divided by {count} each"
            hint = f"loss / {count} in each backward, and nothing else"
        elif divisor > count and divisor == count * size:
            problem = f"gradients are averaged over {size} ranks already, and divided by them again"
            hint = "leave the division by the number of ranks out"
        else:
            return
        check.report(
            f"the gradient of {self._wrapper} is divided twice",
            problem,
            hint,
            arithmetic=f"{count} backwards a step, {size} ranks: divided by {divisor}, not by "
            f"{count}",
        )

    def _inspect_module(self, comm: Communicator) -> None:
        """Report layers whose result depends on the number of ranks. Local."""
        names = [
            name
            for name, part in self.module.named_modules()
            if isinstance(part, private.BatchNormBase)
            and not isinstance(part, SharedBatchNorm | nn.SyncBatchNorm)
            and part.training
        ]
        if names:
            check.report(
                f"batch normalisation in {self._wrapper} on {comm.size} ranks",
                f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: statistics of each "
                "rank's own rows, not of the whole batch",
                _HINTS[self._wrapper]["norm"],
            )


def _chosen(module: nn.Module, step: int) -> list[nn.Parameter]:
    """Return the parameters to compare: all in the beginning, some in turn later on."""
    params = [p for p in module.parameters() if not p.is_meta]
    if check.active or step <= 2 or len(params) <= _PARAMETERS:
        return params
    begin = step // EVERY * _PARAMETERS % len(params)
    return (params + params)[begin : begin + _PARAMETERS]


def _report_drift(module: nn.Module, comm: Communicator, equal_at: int, step: int) -> None:
    """Name the first parameter that differs, the ranks and how far they are apart. Collective."""
    named = [(name, p) for name, p in module.named_parameters() if not p.is_meta]
    digests = [int(digest_of(p)) for _, p in named]
    said = comm.all_gather_object((digests, _settings_of(module)))
    everything, everywhere = zip(*said, strict=True)
    place = next(
        (i for i, column in enumerate(zip(*everything, strict=True)) if len(set(column)) > 1), None
    )
    if place is None:
        return
    name, p = named[place]
    some = p.detach().reshape(-1)[:: p.numel() // _WORDS + 1].double().cpu()
    samples = torch.stack(comm.all_gather_object(some))
    highest, lowest = samples.max(0).values, samples.min(0).values
    apart, scale = float((highest - lowest).max()), float(samples.abs().max())
    column = [row[place] for row in everything]
    odd = [comm.ranks[r] for r, number in enumerate(column) if number != column[0]]
    unlike = unlike_settings(everywhere, comm)
    when = f"at step {step}" if step - equal_at <= 1 else f"between steps {equal_at} and {step}"
    title = f"replicas of {type(module).__name__} on {comm.size} ranks have drifted apart"
    text = explain(
        title,
        f"{name} differs between {name_ranks([comm.ranks[0]])} and {name_ranks(odd)}, {when}, "
        f"noticed at {call_site()}" + (f"\n{unlike}" if unlike else ""),
        f"values differ by {apart:.3g}; the largest is {scale:.3g}",
        (
            "the same optimizer settings on all ranks"
            if unlike
            else "the same steps on all ranks: no step, load or in-place change on one rank alone"
            + ("" if check.active else "; UNISONO_CHECK=1 names the first step")
        ),
    )
    if not unlike and apart <= _ROUNDING * scale:
        if comm.rank == 0:
            check.warn_once(title, f"{text}\n  so far by rounding only")
        return
    raise LayoutError(text)


def _settings_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the settings of the optimizers of a module, from all objects; rarely needed."""
    params = {id(p) for p in module.parameters()}
    differences: list[dict[str, Any]] = []
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.optim.Optimizer):
            continue
        groups = check.last_settings.get(thing) or thing.__dict__.get("param_groups", [])
        for group in groups:
            if any(id(p) in params for p in group["params"]):
                kept = plain_settings(group)
                if kept not in differences:
                    differences.append(kept)
    return differences


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's group that are plain values."""
    plain = (bool, int, float, str, tuple, type(None))
    return {k: v for k, v in group.items() if isinstance(v, plain) and k != "params"}


def unlike_settings(everywhere: Sequence[list[dict[str, Any]]], comm: Communicator) -> str:
    """Return the first optimizer setting that is not equal on all ranks, in words."""
    for rank, groups in enumerate(everywhere):
        for ours, theirs in zip(everywhere[0], groups, strict=False):
            for name, value in ours.items():
                if theirs.get(name) != value:
                    return (
                        f"{name} of the optimizer is {value} on rank {comm.ranks[0]} and "
                        f"{theirs.get(name)} on rank {comm.ranks[rank]}"
                    )
    return ""


def _inspect_samplers(comm: Communicator) -> None:
    """Report samplers that pad by repeating rows, of all objects. Local."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), DistributedSampler):
            continue
        rows: int = len(thing.dataset)
        if thing.total_size > rows and comm.size > 1:
            extra = thing.total_size - rows
            check.report(
                f"DistributedSampler over {thing.num_replicas} ranks",
                f"{rows} rows do not divide by {thing.num_replicas}: {extra} of them come twice in "
                "every epoch",
                "DistributedSampler(..., drop_last=True), or uneven shares with model.join()",
                arithmetic=f"{thing.num_replicas} * {thing.num_samples} = {thing.total_size} "
                f"!= {rows}",
            )
            return


def _drops(part: nn.Module) -> bool:
    """Whether a layer drops at random: torch's own, attention and recurrent ones too."""
    rate: object = part.p if isinstance(part, private.DropoutBase) else getattr(part, "dropout", 0)
    return part.training and isinstance(rate, int | float) and rate > 0


def _buffers_of(module: nn.Module) -> list[int]:
    return [int(x) for x in digests_of(b for b in module.buffers() if not b.is_meta)]


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest()) + 1
