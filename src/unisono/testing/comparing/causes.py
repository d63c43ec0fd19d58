"""Why two forms of a program differ: the first difference, and the evidence around it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import compress_ranks
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


@dataclass(frozen=True)
class Cause:
    """Why forms differ."""

    name: str
    """One of the causes above."""
    evidence: str
    """What shows it, with numbers."""
    hint: str = ""
    """What to write instead."""


def first_real(base: ProgramForm, other: ProgramForm) -> Difference | None:
    """Return the first difference that rounding does not explain."""
    return next((d for d in differences(base, other) if d.is_real), None)


def nondeterminism(base: ProgramForm, again: ProgramForm) -> Cause | None:
    """Return why two runs of the very same form differ, if they do."""
    difference = next((d for d in differences(base, again) if d.distance > 0), None)
    if difference is None:
        return None
    seeds = [form.recordings[0].seeds for form in (base, again)]
    unseeded = bool(seeds[0]) and seeds[0][:1] != seeds[1][:1]
    why = "the random state differs from the first step on" if unseeded else "random states agree"
    return Cause(
        RANDOM,
        f"{difference.key} of step {difference.key.step} differs by {difference.distance:.2g} "
        f"between two runs on {base.size} rank{'s' * (base.size > 1)}; {why}",
        "torch.manual_seed(0) before the model and the data are made"
        if unseeded
        else "torch.use_deterministic_algorithms(True); a fixed order of data and workers",
    )


def explain(base: ProgramForm, other: ProgramForm) -> Cause:
    """Return why a form differs from the first one."""
    sizes = _batch_cause(base, other)
    difference = first_real(base, other)
    if difference is None:
        if sizes is not None:
            return sizes
        return _rounding(base, other)
    if sizes is not None and difference.key.kind not in ("start", "setting"):
        # A step that differs in its rows differs in everything after them.
        step = _first_unlike_rows(base, other)
        if step is None or step <= difference.key.step:
            return sizes
    key = difference.key
    by_kind = {
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
    return by_kind[key.kind](base, other, difference)


def _rounding(base: ProgramForm, other: ProgramForm) -> Cause:
    worst = max(differences(base, other), key=lambda d: d.ulps / d.bound, default=None)
    same = _same_rows(other)
    note = f"; {same}" if same else ""
    if worst is None or worst.ulps == 0:
        return Cause(EQUAL, f"no tensor differs at all{note}")
    return Cause(
        EQUAL,
        f"{ROUNDING}: at most {worst.ulps:.1f} units in the last place, at {worst.key} of step "
        f"{worst.key.step}; another order of sums explains {worst.bound:.0f}{note}",
    )


def _same_rows(form: ProgramForm) -> str:
    """Say so if all ranks see the same batches."""
    if form.size == 1 or form.steps == 0:
        return ""
    batches = [[note.rows for note in r.notes if note.key.kind == "batch"] for r in form.recordings]
    is_same = bool(batches[0]) and all(rows == batches[0] for rows in batches)
    return "but all ranks train on the same rows, so they share no work" if is_same else ""


# -- batches --------------------------------------------------------------------------------------


def _first_unlike_rows(base: ProgramForm, other: ProgramForm) -> int | None:
    """Return the first step in which the ranks together see other rows than the first form."""
    for step in range(min(base.steps, other.steps)):
        ours, theirs = base.rows(step), other.rows(step)
        is_replicated = (
            bool(_same_rows(other)) and other.batch_sizes(step)[:1] == (base.batch_sizes(step)[:1])
        )
        if ours is None or theirs is None or is_replicated or _are_blocks(base, other, step):
            continue
        if ours != theirs:
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
    if step is None:
        if base.steps == other.steps:
            return None
        step = min(base.steps, other.steps)
        return Cause(
            BATCH,
            f"{base.steps} steps on {base.size} rank{'s' * (base.size > 1)}, {other.steps} on "
            f"{other.size}",
            "as many batches in each form; drop_last alike",
        )
    ours, theirs = base.rows(step), other.rows(step)
    if ours is None or theirs is None:
        return None
    total, count = theirs.total(), ours.total()
    sizes = other.batch_sizes(step)
    where = f"step {step}: {count} rows on {base.size} rank{'s' * (base.size > 1)}, {total} on "
    where += f"{other.size} ({' + '.join(map(str, sizes))})"
    twice = [row for row, n in theirs.items() if n > ours.get(row, 1)]
    missing, extra = ours - theirs, theirs - ours
    sampler = next((r.padded for r in other.recordings if r.padded), "")
    if sampler and not missing and 0 < extra.total() < other.size:
        return Cause(
            BATCH,
            f"{where}; {extra.total()} too many: a sampler pads by repeating rows, {sampler}",
            "DistributedSampler(..., drop_last=True), or uneven shares with model.join()",
        )
    if total != count and total == count * other.size and not twice:
        return Cause(
            BATCH_SIZE,
            f"{where}: each rank takes as many rows as one rank does, so a step is "
            f"{other.size} times as large",
            f"batch_size // {other.size} on each rank, or scale learning rate and schedule",
        )
    lost = _positions(base, step, missing)
    if twice:
        by_rank = _ranks_with(other, step, set(twice))
        return Cause(
            BATCH,
            f"{where}; {len(twice)} rows are seen by more than one rank "
            f"(ranks {compress_ranks(by_rank)}), {missing.total()} of the first form are missing"
            f"{lost}",
            "DistributedSampler, with one seed for all ranks",
        )
    if missing and _whole(base) == _whole(other):
        return Cause(
            BATCH,
            f"{where}; {missing.total()} rows come in another step{lost}: the order differs",
            "one order for all forms: shuffle with a seed that does not depend on the rank",
        )
    all_ours, all_theirs = _whole(base), _whole(other)
    again, never = all_theirs - all_ours, all_ours - all_theirs
    if again and never and again.keys() <= all_ours.keys():
        return Cause(
            BATCH,
            f"{where}; over all steps {again.total()} rows come again and {never.total()} never "
            "come: ranks follow unlike orders",
            "DistributedSampler, with one seed for all ranks",
        )
    return Cause(
        BATCH,
        f"{where}; {missing.total()} rows are missing{lost}, {extra.total()} are others",
        "the same rows in each form: no augmentation or seed by rank, drop_last alike",
    )


def _positions(base: ProgramForm, step: int, missing: Counter[int]) -> str:
    """Return where missing rows are in the batch of the first form."""
    rows = [
        row
        for note in base.recordings[0].notes
        if note.key.step == step and note.key.kind == "batch" and note.key.name == "input 0"
        for row in note.rows or ()
    ]
    places = [place for place, row in enumerate(rows) if row in missing]
    return f" (rows {compress_ranks(places)} of its batch)" if places else ""


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
    notes = other.of(difference.key)
    odd = [r for r, note in enumerate(notes) if apart(notes[0].moments, note.moments) > 0]
    unlike = f"replicas on ranks 0 and {compress_ranks(odd)} differ" if odd else "all ranks agree"
    return Cause(
        START,
        f"{difference.key.name} differs by {difference.distance:.2g} before the first step; "
        f"{unlike}",
        "the same seed on all ranks before the model is made, or a wrapper that sends rank 0's "
        "parameters to all",
    )


def _setting(base: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    name = difference.key.name.partition(",")[0]
    here = base.of(difference.key)[0].value
    there = [note.value for note in other.of(difference.key)]
    texts = f"{name} is {here} on {base.size} rank{'s' * (base.size > 1)}"
    texts += f" and {', '.join(map(str, there))} on ranks 0-{other.size - 1} of {other.size}"
    if len(set(there)) > 1:
        hint = f"one {name} for all ranks"
    else:
        hint = f"{name} that does not depend on the number of ranks, or a batch that grows with it"
    kind = SETTING if name in ("lr", "initial_lr") else OPTIMIZER
    return Cause(kind, f"{texts}, from step {difference.key.step} on", hint)


def _batch_values(_: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    return Cause(
        BATCH,
        f"{difference.key.name} of step {difference.key.step} differs by "
        f"{difference.distance:.2g} on {other.size} ranks",
        "the same rows in each form",
    )


def _output(base: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    note = base.of(difference.key)[0]
    where = f"{difference.key.name or 'the model'} ({note.module}), step {difference.key.step}"
    before = "its inputs agree" if difference.key.step == 0 else "all before it agrees"
    text = f"the result of {where} differs by {difference.distance:.2g}, and {before}"
    if "BatchNorm" in note.module:
        return Cause(
            BATCH_NORM,
            f"{text}: each rank takes mean and variance of its own rows",
            "DataParallel(..., sync_batch_norm=True), nn.SyncBatchNorm on GPUs, or nn.GroupNorm",
        )
    if note.has_drawn or any(n.has_drawn for n in other.of(difference.key)):
        seeds = {r.seeds[0] for r in other.recordings if r.seeds}
        alike = "alike on all ranks" if len(seeds) == 1 else "differently on each rank"
        return Cause(
            DROPOUT,
            f"{text}; it draws random numbers, seeded {alike}: a rank draws for its own rows",
            "masks differ by nature: compare with dropout off (p=0), and seed ranks differently",
        )
    if cuts := _cuts(other):
        return Cause(CUT, f"{text}; a collective inside the forward: {cuts}", _DERIVATIVE)
    return Cause(MODULE, text, f"look at the forward of {difference.key.name or note.module}")


_DERIVATIVE = (
    "unisono.operators (all_sum_reduce, all_gather, ...) or torch.distributed.nn.functional: the "
    "same movements with derivatives"
)


def _cuts(form: ProgramForm) -> str:
    return "; ".join(dict.fromkeys(cut for r in form.recordings for cut in r.cuts[:2]))


def _uneven(base: ProgramForm, other: ProgramForm, step: int) -> list[int]:
    sizes = other.batch_sizes(step)
    is_cut = sum(sizes) == sum(base.batch_sizes(step))
    return sizes if len(set(sizes)) > 1 and is_cut else []


def _loss(base: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    one = base.of(difference.key)[0].moments.total
    losses = [note.moments.total for note in other.of(difference.key)]
    mean = sum(losses) / len(losses)
    summary = (
        f"loss of step {difference.key.step}: {one:.6g} on {base.size}, mean over ranks {mean:.6g}"
    )
    if sizes := _uneven(base, other, difference.key.step):
        weighted = sum(n * x for n, x in zip(sizes, losses, strict=True)) / sum(sizes)
        if abs(weighted - one) < abs(mean - one) / 8:
            return _means(summary + f", weighted by rows {weighted:.6g}", sizes)
    ratio = _whole_ratio(one, mean)
    if ratio:
        return Cause(
            SCALED,
            f"{summary}: {ratio}",
            "the mean over the own rows, and nothing divided by ranks",
        )
    if cuts := _cuts(other):
        return Cause(CUT, f"{summary}; {cuts}", _DERIVATIVE)
    return Cause(
        LOSS,
        f"{summary}, and the outputs of the model agree: targets or reduction differ",
        "targets of the same rows. Masks and ignore_index make means of unlike counts: "
        "model.samples(count). A loss that couples rows (contrastive) needs those of all ranks: "
        "unisono.operators.all_gather",
    )


def _means(summary: str, sizes: Sequence[int]) -> Cause:
    return Cause(
        MEANS,
        f"{summary}; ranks have {' and '.join(map(str, sizes))} rows: "
        "a mean over each, then over all",
        "with model.samples(len(x)): loss.backward(), or batches of one size",
    )


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
        return Cause(CUT, f"{summary}, though outputs and losses agree; {cuts}", _DERIVATIVE)
    spread = 0.0
    if not notes[0].is_shard:
        spread = max(apart(notes[0].moments, note.moments) for note in notes)
    if spread > difference.bound * one.eps:
        return Cause(
            UNSYNCED,
            f"{summary}, and between ranks by {spread:.2g}: each rank steps with its own gradient",
            "DataParallel(model), and the forward through the wrapper",
        )
    norms = [math.sqrt(_squares(form)) for form in ([one], notes)]
    if ratio := _whole_ratio(*norms):
        return Cause(
            SCALED,
            f"{summary}: {ratio}, on all ranks alike",
            "average over ranks once: DataParallel does; no sum, no further division",
        )
    if sizes := _uneven(base, other, key.step):
        return _means(summary, sizes)
    return Cause(
        GRADIENTS,
        f"{summary}, though outputs and losses agree",
        "what comes between backward and step (clipping before the average), hooks, autograd "
        "Functions",
    )


def _squares(notes: Sequence[Note]) -> float:
    if notes[0].is_shard:
        return sum(note.moments.squares for note in notes)
    return notes[0].moments.squares


def _parameter(_: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    notes = other.of(difference.key)
    odd = [r for r, note in enumerate(notes) if apart(notes[0].moments, note.moments) > 0]
    which = f", on rank {compress_ranks(odd)} other than on rank 0" if odd else ""
    return Cause(
        OPTIMIZER,
        f"{difference.key} differs by {difference.distance:.2g} after step "
        f"{difference.key.step}{which}, though gradients and settings agree",
        "the same optimizer, state and steps on all ranks",
    )


def _buffer(_: ProgramForm, other: ProgramForm, difference: Difference) -> Cause:
    notes = other.of(difference.key)
    odd = [r for r, note in enumerate(notes) if apart(notes[0].moments, note.moments) > 0]
    which = f"on rank {compress_ranks(odd)} other than on rank 0" if odd else "on all ranks alike"
    return Cause(
        BUFFERS,
        f"{difference.key.name} differs by {difference.distance:.2g} after step "
        f"{difference.key.step}, {which}, though parameters agree",
        "model.eval() in evaluations, on all ranks; buffers are not averaged",
    )
