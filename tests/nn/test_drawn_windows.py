"""Layers that read windows, with drawn sizes, cuts and settings, against torch.

Values, gradients of inputs and parameters, and second derivatives; blocks of any cuts, empty ones
and such that are narrower than the halo too.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import unisono
import unisono.nn as unn
from unisono.topology import Partition
from unisono.topology.window import span

RANKS = [1, 2, 3, 4]
quick = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking would replace the ranks again and again
)


def grid(choice, dims, size):
    """Return one of the ways to lay up to `size` ranks over batch and space."""
    one = (1,) * dims
    ways = [(1, 1, *one[:i], size, *one[i + 1 :]) for i in range(dims)]
    ways += [(size, 1, *one), (1, 1, *one)]
    if size > 2:
        ways.append((1, 1, 2, *one[1:]))
    if size == 4:
        ways.append((2, 1, 2, *one[1:]))
    if size == 4 and dims > 1:
        ways = [(1, 1, *one[:-2], 2, 2), *ways]
    return Partition(ways[choice % len(ways)])


@st.composite
def windows(draw, *, modes=("zeros",), dims=(1, 2, 3), dilations=(1, 2, 3)):
    """Draw the settings of a convolution and an input that fits them."""
    space = draw(st.sampled_from(dims))
    most = 5 if space == 1 else 3
    k = [draw(st.integers(1, most)) for _ in range(space)]
    s = [draw(st.integers(1, 3)) for _ in range(space)]
    d = [draw(st.sampled_from(dilations)) if n > 1 else 1 for n in k]
    mode = draw(st.sampled_from(modes))
    p, x = [], []
    for i in range(space):
        reach = span(k[i], d[i])
        pad = draw(st.integers(0, 4 if space == 1 else 2))
        least = {"reflect": pad + 1, "circular": max(pad, 1)}.get(mode, 1)
        low = max(least, reach - 2 * pad)
        x.append(draw(st.integers(low, low + (9 if space == 1 else 4))))
        p.append(pad)
    return {
        "kernel_size": tuple(k), "stride": tuple(s), "padding": tuple(p), "dilation": tuple(d),
        "padding_mode": mode, "space": tuple(x),
    }  # fmt: skip


common = {"choice": st.integers(0, 9), "seed": st.integers(0, 40), "batch": st.integers(1, 3)}


@pytest.mark.ranks(RANKS)
@quick
@given(
    case=windows(modes=("zeros", "reflect", "replicate", "circular")),
    groups=st.sampled_from([1, 1, 2]),
    bias=st.booleans(),
    weights=st.sampled_from(["replicated", "replicated", "root"]),
    overlap=st.sampled_from(["auto", True, False]),
    **common,
)
def test_convolutions_split_in_space_equal_torch(
    case, groups, bias, weights, overlap, choice, seed, batch, proof
):
    space = case.pop("space")
    dims = len(space)
    P = grid(choice, dims, unisono.world().size)
    kind = getattr(unn, f"DistributedFeatureConv{dims}d")
    plain = getattr(nn, f"Conv{dims}d")
    options = {**case, "groups": groups, "bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: kind(P, 2, 4, **options, weights=weights, overlap=overlap),
        lambda: plain(2, 4, **options),
    )
    x = proof.drawn(batch, 2, *space)
    proof.compare(ours, theirs, x, P, P, seed=seed)


@pytest.mark.ranks(4)
@quick
@given(
    case=windows(modes=("zeros", "circular"), dims=(1, 2)),
    split=st.sampled_from([(1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 1), (1, 1, 4, 1),
                           (1, 4, 1, 1), (2, 1, 2, 1), (1, 1, 1, 4), (1, 1, 3, 1)]),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    bias=st.booleans(),
    weights=st.sampled_from(["replicated", "root"]),
    seed=st.integers(0, 40),
    turned=st.booleans(),
)  # fmt: skip
def test_convolutions_split_in_channels_equal_torch(
    case, split, channels, bias, weights, seed, turned, proof
):
    space = case.pop("space")
    dims = len(space)
    batch, ins, outs, along = split
    rest = (along, *(1,) * (dims - 1))
    P_x, P_y = Partition([batch, ins, *rest]), Partition([batch, outs, *rest])
    shape = [outs, ins, *rest] if batch == 1 else [batch, outs, ins, *rest]
    if turned:  # output on other ranks than the input
        count = batch * outs * along
        P_y = Partition(P_y.shape, ranks=[3 - r for r in range(count)])
    kind = unn.DistributedGeneralConv1d if dims == 1 else unn.DistributedGeneralConv2d
    plain = nn.Conv1d if dims == 1 else nn.Conv2d
    options = {**case, "bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: kind(P_x, P_y, Partition(shape), *channels, **options, weights=weights),
        lambda: plain(*channels, **options),
    )
    x = proof.drawn(2, channels[0], *space)
    proof.compare(ours, theirs, x, P_x, P_y, seed=seed)


@pytest.mark.ranks([2, 4])
@quick
@given(
    case=windows(dims=(1,)),
    groups=st.integers(2, 4),
    per=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    ins=st.integers(1, 4),
    outs=st.integers(1, 4),
    seed=st.integers(0, 10),
)
def test_groups_cut_by_rank_borders_equal_torch(case, groups, per, ins, outs, seed, proof):
    size = unisono.world().size
    (length,) = case.pop("space")
    ins, outs = min(ins, size), min(outs, size)
    P_x = Partition([1, ins, 1], ranks=list(range(size))[-ins:])
    P_y, P_w = Partition([1, outs, 1]), Partition([outs, 1, 1])
    channels = groups * per[0], groups * per[1]
    options = {**case, "groups": groups, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: unn.DistributedGeneralConv1d(P_x, P_y, P_w, *channels, **options),
        lambda: nn.Conv1d(*channels, **options),
    )
    proof.compare(ours, theirs, proof.drawn(2, channels[0], length), P_x, P_y)


@pytest.mark.ranks(RANKS)
@quick
@given(
    case=windows(),
    extra=st.integers(0, 2),
    groups=st.sampled_from([1, 1, 2]),
    bias=st.booleans(),
    weights=st.sampled_from(["replicated", "replicated", "root"]),
    **common,
)
def test_transposed_convolutions_equal_torch(
    case, extra, groups, bias, weights, choice, seed, batch, proof
):
    space = case.pop("space")
    case.pop("padding_mode")
    dims = len(space)
    P = grid(choice, dims, unisono.world().size)
    steps = zip(case["stride"], case["dilation"], strict=True)
    case["output_padding"] = tuple(min(extra, max(s, d) - 1) for s, d in steps)
    ends = zip(
        space, case["kernel_size"], case["stride"], case["padding"], case["dilation"],
        case["output_padding"], strict=True,
    )  # fmt: skip
    if any((x - 1) * s - 2 * p + span(k, d) + o < 1 for x, k, s, p, d, o in ends):
        case["padding"] = (0,) * dims
    kind = getattr(unn, f"DistributedFeatureConvTranspose{dims}d")
    plain = getattr(nn, f"ConvTranspose{dims}d")
    options = {**case, "groups": groups, "bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: kind(P, 4, 2, **options, weights=weights), lambda: plain(4, 2, **options)
    )
    proof.compare(ours, theirs, proof.drawn(batch, 4, *space), P, P, seed=seed)


def pool_case(case):
    """Limit the padding to what pooling takes, and the input to what is left."""
    space = list(case.pop("space"))
    case.pop("padding_mode")
    case["padding"] = tuple(
        min(p, k // 2) for p, k in zip(case["padding"], case["kernel_size"], strict=True)
    )
    for i, (k, p, d) in enumerate(
        zip(case["kernel_size"], case["padding"], case["dilation"], strict=True)
    ):
        # No window in padding alone; and torch's pooling of volumes wants a kernel's room.
        space[i] = max(space[i], span(k, d) - (2 * p if len(space) < 3 else 0), d)
    return tuple(space)


@pytest.mark.ranks(RANKS)
@quick
@given(case=windows(), ceil_mode=st.booleans(), channels=st.integers(1, 3), **common)
def test_max_pooling_equals_torch(case, ceil_mode, channels, choice, seed, batch, proof):
    space = pool_case(case)
    dims = len(space)
    P = grid(choice, dims, unisono.world().size)
    if choice == 7:
        P = Partition([1, unisono.world().size, *(1,) * dims])
    case["ceil_mode"] = ceil_mode
    x = proof.drawn(batch, channels, *space)
    kind, plain = (
        getattr(unn, f"DistributedMaxPool{dims}d"),
        getattr(nn, f"MaxPool{dims}d"),
    )
    proof.compare(kind(P, **case), plain(**case), x, P, P, seed=seed)
    where = proof.own_slices(P, proof.cuts_of(x.shape, P.shape, seed))
    own = x.new_empty(batch, 0) if where is None else x[where]
    y, indices = kind(P, **case, return_indices=True)(own)
    z, expected = plain(**case, return_indices=True)(x)
    if where is not None:
        there = P.local_slices(z.shape)
        assert torch.equal(y, z[there])
        assert torch.equal(indices, expected[there])


@pytest.mark.ranks(RANKS)
@quick
@given(
    case=windows(dilations=(1,)),
    ceil_mode=st.booleans(),
    include=st.booleans(),
    divisor=st.sampled_from([None, None, 3]),
    **common,
)
def test_average_pooling_equals_torch(
    case, ceil_mode, include, divisor, choice, seed, batch, proof
):
    space = pool_case(case)
    case.pop("dilation")
    dims = len(space)
    P = grid(choice, dims, unisono.world().size)
    case |= {"ceil_mode": ceil_mode, "count_include_pad": include}
    if dims > 1:
        case["divisor_override"] = divisor
    kind, plain = (
        getattr(unn, f"DistributedAvgPool{dims}d"),
        getattr(nn, f"AvgPool{dims}d"),
    )
    proof.compare(kind(P, **case), plain(**case), proof.drawn(batch, 2, *space), P, P, seed=seed)


MODES = {
    1: ["nearest", "nearest-exact", "linear"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic"],
    3: ["nearest", "nearest-exact", "trilinear"],
}


@pytest.mark.ranks(RANKS)
@quick
@given(
    space=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    mode=st.integers(0, 3),
    aligned=st.sampled_from([None, False, True]),
    factor=st.sampled_from([0.5, 0.73, 1.0, 1.5, 2.0, 2.7, 3.0]),
    sizes=st.one_of(st.none(), st.lists(st.integers(1, 9), min_size=3, max_size=3)),
    **common,
)
def test_upsampling_equals_torch(space, mode, aligned, factor, sizes, choice, seed, batch, proof):
    dims = len(space)
    P = grid(choice, dims, unisono.world().size)
    name = MODES[dims][mode % len(MODES[dims])]
    how = {"size": tuple(sizes[:dims])} if sizes else {"scale_factor": factor}
    if not sizes and min(int(n * factor) for n in space) < 1:
        how = {"scale_factor": 2.0}
    if not name.startswith("nearest"):
        how["align_corners"] = aligned
    ours, theirs = unn.DistributedUpsample(P, mode=name, **how), nn.Upsample(mode=name, **how)
    proof.compare(ours, theirs, proof.drawn(batch, 2, *space), P, P, seed=seed)


@pytest.mark.ranks([1, 2, 3])
@quick
@given(
    shape=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    mode=st.sampled_from(["constant", "reflect", "replicate", "circular"]),
    pads=st.lists(st.integers(-2, 4), min_size=4, max_size=4),
    dims=st.integers(1, 2),
    value=st.sampled_from([0.0, 1.5]),
    split=st.integers(0, 2),
    seed=st.integers(0, 20),
)
def test_padding_equals_torch(shape, mode, pads, dims, value, split, seed, proof):
    size = unisono.world().size
    P = Partition([size if i == split else 1 for i in range(3)])
    sizes = list(reversed(shape))[:dims]
    most = {"reflect": [n - 1 for n in sizes], "circular": sizes}.get(mode, [9] * dims)
    pads = [min(p, most[i // 2]) for i, p in enumerate(pads[: 2 * dims])]
    if mode != "constant":
        pads = [max(p, 0) for p in pads]
    elif any(pads[2 * i] + pads[2 * i + 1] + n < 1 for i, n in enumerate(sizes)):
        pads = [abs(p) for p in pads]
    layer = unn.DistributedPad(P, pads, mode, value, balance=True)
    constant = value if mode == "constant" else None
    x = proof.drawn(*shape)
    plain = nn.Identity()
    plain.forward = lambda t: F.pad(t, pads, mode, constant)
    proof.compare(layer, plain, x, P, P, seed=seed)
    kept = unn.DistributedPad(P, pads, mode, value)(x[proof.own_slices(P, P.cuts(shape))])
    joined = P.comm.all_gather(kept, dim=split)
    assert torch.equal(joined, plain(x))


@pytest.mark.ranks(RANKS)
@quick
@given(case=windows(modes=("zeros", "reflect", "replicate", "circular"), dims=(1, 2)), **common)
def test_halo_windows_are_those_of_the_padded_tensor(case, choice, seed, batch, proof):
    space = case.pop("space")
    dims = len(space)
    P = grid(choice, dims, unisono.world().size)
    layer = unn.HaloExchange(P, **case)
    x = proof.drawn(batch, 2, *space)
    cuts = proof.cuts_of(x.shape, P.shape, seed)
    where = proof.own_slices(P, cuts)
    if where is None:
        assert layer(x.new_empty(batch, 0)).numel() == 0
        return
    pads = [p for p in reversed(case["padding"]) for _ in (0, 1)]
    mode = {"zeros": "constant"}.get(case["padding_mode"], case["padding_mode"])
    own = x[where].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    y, padded = layer(own), F.pad(whole, pads, mode)
    lengths = [
        (n + 2 * p - span(k, d)) // s + 1
        for n, k, s, p, d in zip(
            space, case["kernel_size"], case["stride"], case["padding"], case["dilation"],
            strict=True,
        )
    ]  # fmt: skip
    shares = P.local_slices((batch, 2, *lengths))
    there = list(shares[:2])
    for i, share in enumerate(shares[2:]):
        s, reach = case["stride"][i], span(case["kernel_size"][i], case["dilation"][i])
        stop = s * (share.stop - 1) + reach if share.stop > share.start else s * share.start
        there.append(slice(s * share.start, stop))
    if 0 not in y.shape:
        assert torch.equal(y, padded[tuple(there)])
    y.sum().backward()
    everyone = P.comm.all_gather_object([(s.start, s.stop) for s in there] if y.numel() else None)
    total = sum(
        (padded[tuple(slice(*box) for box in boxes)].sum() for boxes in everyone if boxes),
        start=padded.sum() * 0,
    )
    total.backward()
    torch.testing.assert_close(own.grad, whole.grad[where])
