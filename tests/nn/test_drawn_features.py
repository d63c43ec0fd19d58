"""Linear layers, norms, embeddings, losses and movements with drawn sizes and cuts, against torch.

Values, gradients of inputs and parameters, and second derivatives, on even, uneven and empty
blocks.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

import unisono
import unisono.nn as unn
from unisono.errors import PartitionError
from unisono.topology import Partition

RANKS = [1, 2, 3, 4]
quick = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking would replace the ranks again and again
)


@pytest.mark.ranks(RANKS)
@quick
@given(
    split=st.sampled_from([(1, 2, 2), (1, 1, 4), (1, 4, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1),
                           (1, 1, 3), (1, 3, 1), (1, 1, 2), (1, 1, 1)]),
    features=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    lead=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    bias=st.booleans(),
    weights=st.sampled_from(["replicated", "root"]),
    seed=st.integers(0, 20),
    last=st.booleans(),
)  # fmt: skip
def test_the_grid_of_weight_blocks_equals_torch(
    split, features, lead, bias, weights, seed, last, proof
):
    size = unisono.world().size
    batch, outs, ins = (min(n, size) for n in split)
    if batch * outs * ins > size:
        batch, outs, ins = 1, 1, size
    ones = [1] * (len(lead) - 1)
    P_x, P_y = Partition([batch, *ones, ins]), Partition([batch, *ones, outs])
    if last:
        P_y = Partition(P_y.shape, ranks=list(range(size))[-batch * outs :])
    P_w = Partition([outs, ins] if batch == 1 else [batch, outs, ins])
    options = {"bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: unn.DistributedLinear(P_x, P_y, P_w, *features, **options, weights=weights),
        lambda: nn.Linear(*features, **options),
    )
    x = proof.drawn(*lead, features[0])
    cuts = list(P_x.cuts(x.shape))
    cuts[-1] = proof.cuts_of(x.shape, P_x.shape, seed)[-1]  # the batch stays as it is cut
    proof.compare(ours, theirs, x, P_x, P_y, cuts=cuts)


@pytest.mark.ranks(RANKS)
@quick
@given(
    features=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    lead=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    bias=st.booleans(),
    rows=st.booleans(),
    sequence=st.booleans(),
    halved=st.booleans(),
)
def test_column_and_row_parallel_layers_equal_torch(
    features, lead, bias, rows, sequence, halved, proof
):
    size = unisono.world().size
    batch = 2 if halved and size == 4 else 1
    along = size // batch
    split, other = Partition([batch, 1, along]), Partition([batch, along, 1])
    kind = unn.DistributedLinearReduceScatter if rows else unn.DistributedLinearAllGather
    more = {("P_y" if rows else "P_x"): other} if sequence else {}
    options = {"bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: kind(split, *features, **options, **more), lambda: nn.Linear(*features, **options)
    )
    P_x = other if sequence and not rows else split
    P_y = other if sequence and rows else split
    proof.compare(ours, theirs, proof.drawn(*lead, features[0]), P_x, P_y)


def scrambled(layer):
    """Give a norm weights and statistics that are not all ones and zeros."""
    with torch.no_grad():
        for value in layer.state_dict().values():
            if value.is_floating_point():
                value.copy_(0.5 + torch.arange(value.numel()).reshape(value.shape) / 7)


@pytest.mark.ranks(RANKS)
@quick
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    axis=st.integers(0, 4),
    options=st.sampled_from([{}, {"momentum": None}, {"affine": False}, {"eps": 0.1},
                             {"track_running_stats": False}, {"momentum": 0.5}]),
    seed=st.integers(0, 40),
    training=st.booleans(),
)  # fmt: skip
def test_batch_norm_equals_torch(shape, axis, options, seed, training, proof):
    size = unisono.world().size
    shape = [max(2, shape[0]), *shape[1:]]
    axis %= len(shape)
    P = Partition([size if i == axis else 1 for i in range(len(shape))])
    plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    theirs = plain[len(shape)](shape[1], **options, dtype=torch.float64)
    scrambled(theirs)
    ours = unn.DistributedBatchNorm(P, shape[1], **options, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    ours.train(training)
    theirs.train(training)
    x = proof.drawn(*shape)
    proof.compare(ours, theirs, x, P, seed=0 if axis == 1 else seed)
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(state[name], value)


@pytest.mark.ranks(RANKS)
@quick
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    count=st.integers(1, 3),
    axis=st.integers(0, 3),
    bias=st.booleans(),
    affine=st.booleans(),
    seed=st.integers(0, 40),
)
def test_layer_norm_equals_torch(shape, count, axis, bias, affine, seed, proof):
    size = unisono.world().size
    axis %= len(shape)
    last = shape[-min(count, len(shape)) :]
    if torch.Size(last).numel() == 1:
        last[-1] = shape[-1] = 3
    P = Partition([size if i == axis else 1 for i in range(len(shape))])
    options = {"elementwise_affine": affine, "bias": bias, "dtype": torch.float64}
    theirs = nn.LayerNorm(last, **options)
    scrambled(theirs)
    ours = unn.DistributedLayerNorm(P, last, **options)
    ours.load_state_dict(theirs.state_dict())
    proof.compare(ours, theirs, proof.drawn(*shape), P, seed=seed)


@pytest.mark.ranks(RANKS)
@quick
@given(
    table=st.tuples(st.integers(1, 9), st.integers(1, 6)),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    split=st.sampled_from(["dim", "vocab"]),
    batched=st.booleans(),
    padding=st.sampled_from([None, 0, -1]),
    max_norm=st.sampled_from([None, 0.9]),
    by_frequency=st.booleans(),
    weights=st.sampled_from(["replicated", "root"]),
)
def test_embeddings_equal_torch(
    table, shape, split, batched, padding, max_norm, by_frequency, weights, proof
):
    size = unisono.world().size
    P = Partition([size if batched else 1, *[1] * (len(shape) - 1), 1 if batched else size])
    options = {
        "padding_idx": padding, "max_norm": max_norm, "scale_grad_by_freq": by_frequency,
        "dtype": torch.float64,
    }  # fmt: skip
    ours, theirs = proof.pair(
        lambda: unn.DistributedEmbedding(P, *table, **options, split=split, weights=weights),
        lambda: nn.Embedding(*table, **options),
    )
    ids = torch.randint(table[0], shape, generator=torch.Generator().manual_seed(3))
    where = P.local_slices((*shape, table[1]))
    y, z = ours(ids[where[:-1]]), theirs(ids)
    there = where if split == "dim" else where[:-1]
    torch.testing.assert_close(y, z[there])
    weights = proof.ramp(z)
    proof.score(y, weights[there]).backward()
    proof.score(z, weights).backward()
    held = ours._holdings["weight"].slices
    grad = torch.zeros_like(ours.weight) if ours.weight.grad is None else ours.weight.grad
    torch.testing.assert_close(grad, theirs.weight.grad[held])
    torch.testing.assert_close(ours.weight, theirs.weight[held])  # rows scaled by max_norm
    if weights == "root" and P.index[0] > 0:  # the first of those who split the ids holds it
        assert ours.weight.numel() == 0


def curved(gradient, x):
    """Return the gradient of the squares of a gradient: zeros where it does not depend on `x`."""
    if not gradient.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad((gradient**2).sum(), x, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


LOSSES = {
    "L1Loss": [{}],
    "MSELoss": [{}],
    "PoissonNLLLoss": [{}, {"full": True}, {"log_input": False, "eps": 1e-3}],
    "BCELoss": [{}],
    "BCEWithLogitsLoss": [{}],
    "KLDivLoss": [{}, {"log_target": True}],
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.ranks(RANKS)
@settings(quick, max_examples=2, phases=[Phase.explicit, Phase.generate])
@example(shape=[3, 4], axis=1, seed=0)  # few, since each is tried with every loss and reduction
@example(shape=[2, 1, 3], axis=2, seed=7)
@example(shape=[4], axis=0, seed=3)
@example(shape=[1], axis=0, seed=0)  # one point, and ranks with none
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    seed=st.integers(0, 40),
)
def test_losses_of_elements_equal_torch(shape, axis, seed, proof):
    size = unisono.world().size
    axis %= len(shape)
    P = Partition([size if i == axis else 1 for i in range(len(shape))])
    x, t = proof.drawn(*shape), proof.drawn(*shape, seed=2).sigmoid()
    cuts = proof.cuts_of(shape, P.shape, seed)
    where = proof.own_slices(P, cuts)
    for name, options in LOSSES.items():
        ours, plain = getattr(unn, f"Distributed{name}"), getattr(nn, name)
        values = x.sigmoid() if name == "BCELoss" else x
        if name == "PoissonNLLLoss":
            values = x.abs() + 0.1
        for more in options:
            for reduction in ours._valid_reductions:
                own = values[where].clone().requires_grad_()
                whole = values.clone().requires_grad_()
                target = t.log() if more.get("log_target") else t
                y = ours(P, reduction=reduction, **more)(own, target[where])
                z = plain(reduction=reduction, **more)(whole, target)
                if reduction == "none":
                    torch.testing.assert_close(y, z[where])
                    y, z = y.sum(), z.sum()
                else:
                    torch.testing.assert_close(y, z)
                g, h = (
                    torch.autograd.grad(v, i, create_graph=True)[0]
                    for v, i in ((y, own), (z, whole))
                )
                torch.testing.assert_close(g, h[where])
                torch.testing.assert_close(curved(g, own), curved(h, whole)[where])


@pytest.mark.ranks(RANKS)
@quick
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    axis=st.integers(0, 3),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    weighted=st.booleans(),
    smooth=st.sampled_from([0.0, 0.3]),
    ignored=st.sampled_from([-100, 0]),
    seed=st.integers(0, 40),
)
def test_losses_of_classes_equal_torch(
    shape, axis, reduction, weighted, smooth, ignored, seed, proof
):
    size = unisono.world().size
    axis %= len(shape)
    P = Partition([size if i == axis else 1 for i in range(len(shape))])
    x = proof.drawn(*shape)
    target = torch.randint(
        shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(seed)
    )
    target.view(-1)[-1] = ignored
    weight = torch.linspace(0.5, 2, shape[1], dtype=x.dtype) if weighted else None
    where = proof.own_slices(P, proof.cuts_of(shape, P.shape, seed))
    spot = (where[0], *where[2:])
    options = {"ignore_index": ignored, "reduction": reduction}
    for ours, theirs, values in (
        (
            unn.DistributedCrossEntropyLoss(P, weight, **options, label_smoothing=smooth),
            nn.CrossEntropyLoss(weight, **options, label_smoothing=smooth),
            x,
        ),
        (
            unn.DistributedNLLLoss(P, weight, **options),
            nn.NLLLoss(weight, **options),
            x.log_softmax(1),
        ),
    ):
        own, whole = values[where].clone().requires_grad_(), values.clone().requires_grad_()
        y, z = ours(own, target[spot]), theirs(whole, target)
        torch.testing.assert_close(y, z[spot] if reduction == "none" else z, equal_nan=True)
        y, z = y.sum(), z.sum()  # every class rank holds every position, and seeds it alike
        g, h = (torch.autograd.grad(v, i, create_graph=True)[0] for v, i in ((y, own), (z, whole)))
        torch.testing.assert_close(g, h[where], equal_nan=True)
        torch.testing.assert_close(curved(g, own), curved(h, whole)[where], equal_nan=True)


@pytest.mark.ranks(RANKS)
@quick
@given(
    shape=st.lists(st.integers(2, 7), min_size=2, max_size=3),
    ways=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    firsts=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 40),
)
def test_repartition_moves_any_cuts_to_balanced_blocks(shape, ways, firsts, seed, proof):
    size = unisono.world().size

    def some(way, first):
        count = (1, 2, 3, 4, size, size)[way]
        count = min(count, size)
        grid = [1] * len(shape)
        grid[way % len(shape)] = count
        if count == 4 and way == 5:
            grid = [2, 2, *[1] * (len(shape) - 2)]
        ranks = [(first + r) % size for r in range(count)]
        return Partition(grid, ranks=ranks)

    P_x, P_y = some(ways[0], firsts[0]), some(ways[1], firsts[1])
    proof.compare(
        unn.Repartition(P_x, P_y), nn.Identity(), proof.drawn(*shape), P_x, P_y, seed=seed
    )


@pytest.mark.ranks(4)
@quick
@given(
    shape=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    turned=st.tuples(st.booleans(), st.booleans()),
    case=st.sampled_from([((1, 2), (2, 2)), ((2, 1), (2, 2)), ((1,), (2, 2)), ((2,), (2, 2)),
                          ((2, 2), (2, 2)), ((1, 1), (4, 1)), ((1, 3), (1, 3))]),
    first=st.integers(0, 3),
)  # fmt: skip
def test_broadcast_and_sum_are_adjoint_between_any_two_partitions(
    shape, turned, case, first, proof
):
    world = unisono.world()
    small, large = case
    src = Partition(small, ranks=[(first + r) % 4 for r in range(torch.Size(small).numel())])
    dest = Partition(large)
    try:
        layer = unn.Broadcast(src, dest, *turned)
    except PartitionError:
        with pytest.raises(PartitionError, match="against"):
            unn.SumReduce(dest, src, turned[1], turned[0])
        return
    back = unn.SumReduce(dest, src, turned[1], turned[0])
    x = proof.drawn(*shape, seed=world.rank) if src.active else torch.empty(2, 0)
    x.requires_grad_()
    y = layer(x)
    assert y.dtype == torch.float64 or not layer._takes_part
    v = proof.drawn(*y.shape, seed=9 + world.rank)
    (gradient,) = torch.autograd.grad(y, x, v.to(y), create_graph=True)
    adjoint = back(v)
    if src.active:
        torch.testing.assert_close(gradient.to(adjoint), adjoint)
    forward = world.all_reduce((y * v).sum().detach().double())
    backward = world.all_reduce((x * gradient).sum().detach().double())
    torch.testing.assert_close(forward, backward)


@pytest.mark.ranks(RANKS)
@quick
@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=3),
    axis=st.integers(0, 2),
    seed=st.integers(0, 20),
)
def test_sums_and_joins_over_an_axis_equal_torch(shape, axis, seed, proof):
    world = unisono.world()
    size = world.size
    axis %= len(shape)
    P = Partition([size if i == axis else 1 for i in range(len(shape))])
    x = proof.drawn(*shape)
    cuts = proof.cuts_of(shape, P.shape, seed)
    where = proof.own_slices(P, cuts)
    own = x[where].clone().requires_grad_()
    joined = unn.AllGather(P, axes_all_gather=axis)(own)
    assert torch.equal(joined, x)
    weights = proof.ramp(x)
    ((joined**2) * weights * (world.rank + 1)).sum().backward()
    factor = size * (size + 1) / 2  # every rank's use of the joined tensor counts
    torch.testing.assert_close(own.grad, 2 * factor * (x * weights)[where])

    whole = (x * (world.rank + 1)).requires_grad_()
    kept = unn.ReduceScatter(P, axes_reduce_scatter=axis)(whole)
    here = P.local_slices(shape)
    torch.testing.assert_close(kept, x[here] * factor)
    (kept**2).sum().backward()
    torch.testing.assert_close(whole.grad, 2 * x * factor)

    each = x.clone().requires_grad_()
    total = unn.AllSumReduce(P, axes_reduce=axis)(each * (world.rank + 1))
    torch.testing.assert_close(total, x * factor)
    (total**2).sum().backward()
    torch.testing.assert_close(each.grad, 2 * x * factor * size * (world.rank + 1))
