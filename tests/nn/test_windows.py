"""Pooling, upsampling, padding and halo windows, with drawn and chosen settings, against torch.

Values, gradients, and second derivatives; blocks of any cuts, empty ones and such that are narrower
than the halo too.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.drawing import RANKS, common, grid, quick, windows
from torch import nn
from torch.nn import functional as F

import unisono
import unisono.nn as unn
from unisono.errors import PartitionError
from unisono.nn.layers.halo import DistributedPad
from unisono.nn.layers.upsampling import DistributedUpsample
from unisono.topology import Partition
from unisono.topology.window import span


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


MAX = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "dilation": 2},
]


AVG = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True, "count_include_pad": False},
]


@pytest.mark.ranks([1, 2, 3])
def test_averages_of_integers_are_rounded_as_torch_rounds_them():
    size = unisono.world().size
    cases = [*AVG, {"kernel_size": 3, "stride": 2, "padding": 1, "divisor_override": 4}]
    for ours, plain, shape in (
        (unn.DistributedAvgPool1d, nn.AvgPool1d, (2, 2, 11)),
        (unn.DistributedAvgPool2d, nn.AvgPool2d, (1, 2, 11, 5)),
        (unn.DistributedAvgPool3d, nn.AvgPool3d, (1, 1, 11, 4, 3)),
    ):
        P = Partition([1, 1, size, *(1 for _ in shape[3:])])
        x = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(3))
        for case in cases[: -1 if len(shape) == 3 else None]:
            y, z = ours(P, **case)(x[P.local_slices(x.shape)]), plain(**case)(x)
            assert y.dtype == z.dtype
            assert torch.equal(y, z[P.local_slices(z.shape)]), (shape, case)
        with pytest.raises(PartitionError, match=r"torch.uint8[\s\S]*x.float"):
            ours(P, 3)(x[P.local_slices(x.shape)].to(torch.uint8))


@pytest.mark.ranks([1, 2, 3, 4])
def test_padding_wins_over_no_point_however_low():
    size = unisono.world().size
    grid = [2, 2] if size == 4 else [size, 1]
    cases = [*MAX[1:3], {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}]
    draw = torch.Generator().manual_seed(5)
    for dtype in (torch.float64, torch.int64, torch.uint8):
        lowest = -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
        x = torch.randint(1, 9, (1, 2, 9, 7), generator=draw).to(dtype)
        x[0, 0], x[0, 1, :4] = lowest, lowest
        for case in cases:
            for kind, plain, shape, P in (
                (unn.DistributedMaxPool1d, nn.MaxPool1d, (2, 7, 9), Partition([1, 1, size])),
                (unn.DistributedMaxPool2d, nn.MaxPool2d, x.shape, Partition([1, 1, *grid])),
                (
                    unn.DistributedMaxPool3d,
                    nn.MaxPool3d,
                    (1, 1, 3, 6, 7),
                    Partition([1, 1, 1, *grid]),
                ),
            ):
                leaf = x.reshape(shape).clone().requires_grad_(dtype.is_floating_point)
                own = leaf.detach()[P.local_slices(shape)].clone()
                own.requires_grad_(dtype.is_floating_point)
                y, indices = kind(P, **case, return_indices=True)(own)
                z, expected = plain(**case, return_indices=True)(leaf)
                where = P.local_slices(z.shape)
                assert torch.equal(y, z[where])
                assert torch.equal(indices, expected[where]), (shape, case, dtype)
                if dtype.is_floating_point:
                    probe = torch.arange(1.0, z.numel() + 1).reshape(z.shape)
                    kind(P, **case)(own).backward(probe[where])
                    z.backward(probe)
                    assert torch.equal(own.grad, leaf.grad[P.local_slices(shape)])


@pytest.mark.ranks(3)
def test_padding_without_balance_grows_the_ends_only():
    P = Partition([3])
    x = torch.arange(7.0)
    y = DistributedPad(P, (2, 1), value=9.0)(x[P.local_slices(x.shape)])
    expected = ([9.0, 9.0, 0.0, 1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 9.0])
    assert y.tolist() == expected[P.root.rank]
    y = DistributedPad(P, (-4, 1))(x[P.local_slices(x.shape)])
    assert y.tolist() == ([], [4.0], [5.0, 6.0, 0.0])[P.root.rank]


@pytest.mark.ranks(2)
def test_integers_are_copied_but_not_weighed():
    P, space = Partition([1, 1, 2]), Partition([1, 1, 2, 1])
    x = torch.arange(250, 256, dtype=torch.uint8).reshape(1, 1, 6)
    y = DistributedUpsample(P, scale_factor=2)(x[P.local_slices(x.shape)])
    z = nn.Upsample(scale_factor=2)(x)
    assert torch.equal(y, z[P.local_slices(z.shape)])
    said = r"torch.uint8[\s\S]*weighted sums[\s\S]*x.float\(\)"
    with pytest.raises(PartitionError, match=said):
        DistributedUpsample(P, scale_factor=2, mode="linear")(x[P.local_slices(x.shape)])
    with pytest.raises(PartitionError, match=said):
        DistributedUpsample(space, scale_factor=2, mode="bicubic")(torch.ones_like(x)[None])
