"""Why two forms of a program differ: the first difference, and the evidence around it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from unisono.errors import compress_ranks, name_ranks
from unisono.testing.comparing.forms import Difference, ProgramForm, apart, differences
from unisono.testing.comparing.probe import Key, Note

EQUAL = "equal up to rounding"
ROUNDING = "summation order only"
RANDOM = "not deterministic even on one rank"
BATCH = "batch content"
BATCH_SIZE = "batch size"
START = "initial parameters"
SETTING = "learning rate"
OPTIMIZER = "optimizer settings"
BATCH_NORM = "BatchNorm statistics"
DROPOUT = "dropout masks"
MEANS = "mean of means"
CUT = "a collective without derivative"
UNSYNCED = "gradients are not averaged"
SCALED = "gradients are scaled"
LOSS = "loss"
BUFFERS = "buffers"
MODULE = "a module"
GRADIENTS = "gradients"

_HINTS = {
    RANDOM: "torch.manual_seed(0) before the model and the data are made, a fixed order of data "
    "and workers, torch.use_deterministic_algorithms(True)",
    BATCH: "DistributedSampler(..., drop_last=True) with one seed for all ranks; no augmentation "
    "by rank; uneven shares with model.join()",
    BATCH_SIZE: "the batch size divided by the ranks on each of them, or a scaled learning rate",
    START: "the same seed on all ranks before the model is made, or a wrapper that sends rank 0's "
    "parameters to all",
    SETTING: "one learning rate for all ranks, or a batch that grows with it",
    OPTIMIZER: "the same optimizer, settings, state and steps on all ranks",
    BATCH_NORM: "DataParallel(..., sync_batch_norm=True), nn.SyncBatchNorm on GPUs, or "
    "nn.GroupNorm",
    DROPOUT: "masks differ by nature: compare with dropout off (p=0), and seed ranks differently",
    MEANS: "with model.samples(len(x)): loss.backward(), or batches of one size",
    CUT: "unisono.operators (all_sum_reduce, all_gather, ...) or torch.distributed.nn.functional: "
    "the same movements with derivatives",
    UNSYNCED: "DataParallel(model), and the forward through the wrapper",
    SCALED: "the mean over the own rows, averaged over ranks once: DataParallel does that",
    LOSS: "targets of the same rows. Masks and ignore_index make means of unlike counts: "
    "model.samples(count). A loss that couples rows (contrastive) needs those of all ranks: "
    "unisono.operators.all_gather",
    BUFFERS: "model.eval() in evaluations, on all ranks; buffers are not averaged",
    MODULE: "look at the forward of this module",
    GRADIENTS: "what comes between backward and step (clipping before the average), hooks, "
    "autograd Functions",
}


@dataclass(frozen=True)
class Cause:
    """Why forms differ."""

    name: str
    """One of the causes above."""
    evidence: str
    """What shows it, with numbers."""

    @property
    def hint(self) -> str:
        """What to write instead."""
        return _HINTS.get(self.name, "")


def nondeterminism(base: ProgramForm, again: ProgramForm) -> Cause | None:
    """Return why two runs of the very same form differ, if they do."""
    difference = next((d for d in differences(base, again) if d.distance > 0), None)
    if difference is None:
        return None
    seeds = [form.recordings[0].seeds[:1] for form in (base, again)]
    is_seeded = seeds[0] == seeds[1]
    why = "random states agree" if is_seeded else "the random state differs from the first step on"
    return Cause(
        RANDOM,
        f"{difference.key} of step {difference.key.step} differs by {difference.distance:.2g} "
        f"between two runs on {_ranks(base)}; {why}",
    )


def explain(base: ProgramForm, other: ProgramForm) -> Cause:
    """Return why a form differs from the first one."""
    rows = _batch_cause(base, other)
    difference = next((d for d in differences(base, other) if d.is_real), None)
    if difference is None:
        return rows or _rounding(base, other)
    if rows is not None and difference.key.kind not in ("start", "setting"):
        # A step that differs in its rows differs in everything after them.
        step = _first_unlike_rows(base, other)
        if step is None or step <= difference.key.step:
            return rows
    return _BY_KIND[difference.key.kind](base, other, difference)


def _rounding(base: ProgramForm, other: ProgramForm) -> Cause:
    worst = max(differences(base, other), key=lambda d: d.ulps / d.bound, default=None)
    same = "; but all ranks train on the same rows, so they share no work"
    note = same if _is_replicated(other) else ""
    if worst is None or worst.ulps == 0:
        return Cause(EQUAL, f"no tensor differs at all{note}")
    return Cause(
        EQUAL,
        f"{ROUNDING}: at most {worst.ulps:.1f} units in the last place, at {worst.key} of step "
        f"{worst.key.step}; another order of sums explains {worst.bound:.0f}{note}",
    )


def _ranks(form: ProgramForm) -> str:
    return f"{form.size} rank{'s' * (form.size > 1)}"


def _is_replicated(form: ProgramForm) -> bool:
    """Whether all ranks see the same batches."""
    batches = [[note.rows for note in r.notes if note.key.kind == "batch"] for r in form.recordings]
    is_same = bool(batches[0]) and all(rows == batches[0] for rows in batches)
    return form.size > 1 and form.steps > 0 and is_same


# -- batches --------------------------------------------------------------------------------------


def _first_unlike_rows(base: ProgramForm, other: ProgramForm) -> int | None:
    """Return the first step in which the ranks together see other rows than the first form."""
    is_replicated = _is_replicated(other)
    for step in range(min(base.steps, other.steps)):
        ours, theirs = base.rows(step), other.rows(step)
        if ours is None or theirs is None or ours == theirs or _are_blocks(base, other, step):
            continue
        if not (is_replicated and other.batch_sizes(step)[:1] == base.batch_sizes(step)[:1]):
            return step
    return None


def _are_blocks(base: ProgramForm, other: ProgramForm, step: int) -> bool:
    """Whether inputs are cut inside of rows, as in a split network: digests of rows say nothing."""
    key = Key(step, "batch", "input 0", 0)
    ours, theirs = base.of(key), other.of(key)
    if not ours or not theirs or theirs[0].is_shard:
        return True
    return (
        len(theirs) > 1
        and all(len(note.rows or ()) == len(ours[0].rows or ()) for note in theirs)
        and sum(note.moments.elements for note in theirs) == ours[0].moments.elements
    )


def _batch_cause(base: ProgramForm, other: ProgramForm) -> Cause | None:
    """Return what is wrong with the rows that ranks see."""
    step = _first_unlike_rows(base, other)
    if step is None and base.steps != other.steps:
        text = f"{base.steps} steps on {_ranks(base)}, {other.steps} on {other.size}"
        return Cause(BATCH, text)
    ours, theirs = (None, None) if step is None else (base.rows(step), other.rows(step))
    if step is None or ours is None or theirs is None:
        return None
    total, count, sizes = theirs.total(), ours.total(), other.batch_sizes(step)
    where = f"step {step}: {count} rows on {_ranks(base)}, {total} on {other.size} "
    where += f"({' + '.join(map(str, sizes))})"
    twice = {row for row, n in theirs.items() if n > ours.get(row, 1)}
    missing, extra = ours - theirs, theirs - ours
    sampler = next((r.padded for r in other.recordings if r.padded), "")
    if sampler and not missing and 0 < extra.total() < other.size:
        return Cause(
            BATCH, f"{where}; {extra.total()} too many: a sampler pads by repeating rows, {sampler}"
        )
    if total != count and total == count * other.size and not twice:
        return Cause(
            BATCH_SIZE,
            f"{where}: each rank takes as many rows as one rank does, so a step is {other.size} "
            "times as large",
        )
    again, never = _whole(other) - _whole(base), _whole(base) - _whole(other)
    if twice:
        by_rank = _ranks_with(other, step, twice)
        what = f"{len(twice)} rows are seen by more than one rank (ranks {compress_ranks(by_rank)})"
        what += f", {missing.total()} of the first form are missing"
    elif missing and not again and not never:
        what = f"{missing.total()} rows come in another step: the order differs"
    elif again and never and again.keys() <= _whole(base).keys():
        what = f"over all steps {again.total()} rows come again and {never.total()} never come: "
        what += "ranks follow unlike orders"
    else:
        what = f"{missing.total()} rows are missing, {extra.total()} are others"
    return Cause(BATCH, f"{where}; {what}")


def _ranks_with(form: ProgramForm, step: int, rows: set[int]) -> list[int]:
    return [
        recording.rank
        for recording in form.recordings
        if any(
            rows & set(note.rows or ())
            for note in recording.notes
            if note.key.step == step and note.key.kind == "batch"
        )
    ]


def _whole(form: ProgramForm) -> Counter[int]:
    """Return all rows that a form sees in all its steps."""
    counts: Counter[int] = Counter()
    for step in range(form.steps):
        counts.update(form.rows(step) or Counter())
    return counts


# -- one kind of tensor each ----------------------------------------------------------------------


def _start(_: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    key = difference.key
    text = f"{key.name} differs by {difference.distance:.2g} at the start, {_odd(other, key)}"
    return Cause(START, text)


def _setting(base: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    name = difference.key.name.partition(",")[0]
    here = base.of(difference.key)[0].value
    there = ", ".join(str(note.value) for note in other.of(difference.key))
    return Cause(
        SETTING if name in ("lr", "initial_lr") else OPTIMIZER,
        f"{name} is {here} on {_ranks(base)} and {there} on ranks 0-{other.size - 1} of "
        f"{other.size}, from step {difference.key.step} on",
    )


def _batch_values(_: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    key = difference.key
    text = f"{key.name} of step {key.step} differs by {difference.distance:.2g} on {_ranks(other)}"
    return Cause(BATCH, text)


def _output(base: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    note, key = base.of(difference.key)[0], difference.key
    where = f"{key.name or 'the model'} ({note.module}), step {key.step}"
    before = "its inputs agree" if key.step == 0 else "all before it agrees"
    text = f"the result of {where} differs by {difference.distance:.2g}, and {before}"
    if "BatchNorm" in note.module:
        return Cause(BATCH_NORM, f"{text}: each rank takes mean and variance of its own rows")
    if any(n.has_drawn for n in (note, *other.of(key))):
        seeds = {r.seeds[0] for r in other.recordings if r.seeds}
        alike = "alike on all ranks" if len(seeds) == 1 else "differently on each rank"
        return Cause(
            DROPOUT,
            f"{text}; it draws random numbers, seeded {alike}: a rank draws for its own rows",
        )
    if cuts := _cuts(other):
        return Cause(CUT, f"{text}; a collective inside the forward: {cuts}")
    return Cause(MODULE, text)


def _cuts(form: ProgramForm) -> str:
    return "; ".join(dict.fromkeys(cut for r in form.recordings for cut in r.cuts[:2]))


def _uneven(base: ProgramForm, other: ProgramForm, step: int) -> list[int]:
    sizes = other.batch_sizes(step)
    is_cut = sum(sizes) == sum(base.batch_sizes(step))
    return sizes if len(set(sizes)) > 1 and is_cut else []


def _means(summary: str, sizes: list[int]) -> Cause:
    rows = " and ".join(map(str, sizes))
    return Cause(MEANS, f"{summary}; ranks have {rows} rows: a mean over each, then over all")


def _loss(base: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    step = difference.key.step
    one = base.of(difference.key)[0].moments.total
    losses = [note.moments.total for note in other.of(difference.key)]
    mean = sum(losses) / len(losses)
    summary = f"loss of step {step}: {one:.6g} on {base.size}, mean over ranks {mean:.6g}"
    if sizes := _uneven(base, other, step):
        weighted = sum(n * x for n, x in zip(sizes, losses, strict=True)) / sum(sizes)
        if abs(weighted - one) < abs(mean - one) / 8:
            return _means(f"{summary}, weighted by rows {weighted:.6g}", sizes)
    if ratio := _whole_ratio(one, mean):
        return Cause(SCALED, f"{summary}: {ratio}")
    if cuts := _cuts(other):
        return Cause(CUT, f"{summary}; {cuts}")
    text = f"{summary}, and the outputs of the model agree: targets or reduction differ"
    return Cause(LOSS, text)


def _whole_ratio(one: float, other: float) -> str:
    """Return in words by what whole number one value is larger than another."""
    if one == 0 or other == 0:
        return ""
    for a, b, words in ((other, one, "too large"), (one, other, "too small")):
        ratio = a / b
        if ratio > 1.5 and abs(ratio - round(ratio)) < 1e-3 * ratio:
            return f"{words} by a factor of {round(ratio)}"
    return ""


def _gradient(base: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    key = difference.key
    notes, one = other.of(key), base.of(key)[0]
    summary = f"gradient of {key.name}, step {key.step}, differs by {difference.distance:.2g}"
    if cuts := _cuts(other):
        return Cause(CUT, f"{summary}, though outputs and losses agree; {cuts}")
    spread = 0.0
    if not notes[0].is_shard:
        spread = max(apart(notes[0].moments, note.moments) for note in notes)
    if spread > difference.bound * one.eps:
        text = f"{summary}, and between ranks by {spread:.2g}: each steps with its own gradient"
        return Cause(UNSYNCED, text)
    if ratio := _whole_ratio(*(math.sqrt(_squares(form)) for form in ([one], notes))):
        return Cause(SCALED, f"{summary}: {ratio}, on all ranks alike")
    if sizes := _uneven(base, other, key.step):
        return _means(summary, sizes)
    return Cause(GRADIENTS, f"{summary}, though outputs and losses agree")


def _squares(notes: list[Note]) -> float:
    """Return the square of a gradient's norm: the sum over shards, or that of one replica."""
    return sum(note.moments.squares for note in (notes if notes[0].is_shard else notes[:1]))


def _parameter(_: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    return Cause(OPTIMIZER, f"{_after(other, difference)}, though gradients and settings agree")


def _buffer(_: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    return Cause(BUFFERS, f"{_after(other, difference)}, though parameters agree")


def _after(form: ProgramForm, difference: Difference) -> str:
    key = difference.key
    return f"{key} differs by {difference.distance:.2g} after step {key.step}, {_odd(form, key)}"


def _odd(form: ProgramForm, key: Key) -> str:
    """Say which replicas differ from that of rank 0."""
    notes = form.of(key)
    odd = [r for r, note in enumerate(notes) if apart(notes[0].moments, note.moments) > 0]
    return f"on {name_ranks(odd)} other than on rank 0" if odd else "on all ranks alike"


_BY_KIND: dict[str, Callable[[ProgramForm, ProgramForm, Difference], Cause]] = {
    "start": _start,
    "setting": _setting,
    "batch": _batch_values,
    "output": _output,
    "loss": _loss,
    "gradient": _gradient,
    "parameter": _parameter,
    "state": _parameter,
    "buffer": _buffer,
}
