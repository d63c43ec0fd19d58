"""DistDL's layers with its arguments and defaults, against torch on the whole tensor."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unisono
import unisono.compat.distdl as distdl
from unisono.compat.distdl.backends.mpi.functional.halo_exchange import HaloExchangeFunction
from unisono.compat.distdl.backends.mpi.halo_exchange import allocate_halo_exchange_buffers
from unisono.compat.distdl.backends.mpi.partition import layout_of
from unisono.compat.distdl.halos import ghost_slices
from unisono.compat.distdl.nn.mixins import ConvMixin, HaloMixin, InterpolateMixin
from unisono.compat.distdl.utilities.torch import TensorStructure, zero_volume_tensor
from unisono.errors import PartitionError

BufferManager = distdl.backend.backend.BufferManager
Partition = distdl.backend.backend.Partition


def grid(shape, ranks=None):
    """Return a grid of the first ranks, or of these."""
    everybody = Partition(unisono.world())
    chosen = range(int(np.prod(shape))) if ranks is None else ranks
    return everybody.create_partition_inclusive(chosen).create_cartesian_topology_partition(shape)


def drawn(*shape, seed=1):
    """Return the same float64 tensor on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def own(x, P):
    """Return the own block of a tensor; one without elements outside of the partition."""
    return x[layout_of(P).local_slices(x.shape)] if P.active else x.new_empty(x.shape[0], 0)


def compare(layer, plain, P_x, P_y, x):
    """Compare output, input gradient and parameter gradients; return the own output."""
    mine, whole = own(x, P_x).clone().requires_grad_(), x.clone().requires_grad_()
    y, z = layer(mine), plain(whole)
    probe = torch.linspace(-1, 1, z.numel(), dtype=x.dtype).reshape(z.shape)
    if P_y.active:
        torch.testing.assert_close(y, own(z, P_y))
    else:
        assert y.numel() == 0
    (y * own(probe, P_y)).sum().backward()
    (z * probe).sum().backward()
    if P_x.active:
        torch.testing.assert_close(mine.grad, own(whole.grad, P_x))
    theirs = dict(plain.named_parameters()) if isinstance(plain, nn.Module) else {}
    for name, p in layer.named_parameters():
        block = theirs[name].grad[layer._holdings[name].slices]
        torch.testing.assert_close(p.grad, block.view(p.shape))
    return y


def owned(layer):
    """Return the names of a layer's parameters; what optimizers see has elements."""
    assert all(p.numel() for p in layer.parameters())
    return sorted(name for name, _ in layer.named_parameters())


def same_weights(layer, plain):
    """Give the distributed layer the weights of the plain one."""
    layer.load_state_dict(plain.state_dict())


@pytest.mark.ranks(4)
def test_convolutions_store_weights_once_and_equal_torch():
    me = unisono.world().rank
    x = drawn(2, 4, 9, 7)
    P_x = grid([1, 1, 2, 2])
    manager = BufferManager()
    plain = nn.Conv2d(4, 6, 3, 1, 1, dtype=x.dtype)
    layer = distdl.nn.DistributedConv2d(
        P_x, in_channels=4, out_channels=6, kernel_size=3, padding=1, buffer_manager=manager,
        dtype=x.dtype,
    )  # fmt: skip
    assert type(layer) is distdl.nn.DistributedFeatureConv2d
    assert isinstance(layer, distdl.nn.Module)
    assert layer.buffer_manager is manager
    flags = (layer.stores_bias, layer.receives_bias, layer.use_bias, layer.serial)
    assert flags == (me == 0, True, True, False)
    assert layer.conv_layer.weight is layer.weight
    assert layer.conv_layer.bias is layer.bias
    assert layer.weight.numel() == (6 * 4 * 9 if me == 0 else 0)
    assert owned(layer) == (["bias", "weight"] if me == 0 else [])
    same_weights(layer, plain)
    compare(layer, plain, P_x, P_x, x)
    assert layer.bias.grad.numel() == (6 if me == 0 else 0)
    assert "weight" in copy.deepcopy(layer).state_dict()

    P_x, P_y, P_w = grid([1, 2, 1], [0, 1]), grid([1, 2, 1], [2, 3]), grid([2, 2, 1])
    plain = nn.Conv1d(4, 6, 3, dtype=x.dtype)
    layer = distdl.nn.DistributedConv1d(P_x, P_y, P_w, 4, 6, 3, dtype=x.dtype)
    assert type(layer) is distdl.nn.DistributedChannelConv1d
    assert (layer.stores_bias, layer.receives_bias) == (me in (0, 2), me in (0, 2))
    assert layer.conv_layer.weight.shape == (3, 2, 3)
    assert owned(layer) == (["bias", "weight"] if me in (0, 2) else ["weight"])
    same_weights(layer, plain)
    compare(layer, plain, P_x, P_y, x[..., 0])

    P_x = grid([1, 1, 2], [0, 1])
    layer = distdl.nn.DistributedConv1d(P_x, P_x, P_x, 4, 6, 3, 2, 1, dtype=x.dtype)
    assert type(layer) is distdl.nn.DistributedGeneralConv1d
    plain = nn.Conv1d(4, 6, 3, 2, 1, dtype=x.dtype)
    same_weights(layer, plain)
    compare(layer, plain, P_x, P_x, x[..., 0])
    flags = (layer.stores_bias, layer.receives_bias, layer.serial)
    assert flags == (me == 0, me < 2, False)
    assert layer.weight.numel() == (4 * 6 * 3 if me == 0 else 0)
    with pytest.raises(ValueError, match="all three"):
        distdl.nn.DistributedConv1d(P_x, P_x, None, 4, 6, 3)

    layer = distdl.nn.DistributedFeatureConvTranspose1d(P_x, 4, 2, 3, 2, dtype=x.dtype)
    plain = nn.ConvTranspose1d(4, 2, 3, 2, dtype=x.dtype)
    same_weights(layer, plain)
    compare(layer, plain, P_x, P_x, x[..., 0])
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.ranks([1, 2])
def test_one_partition_of_one_rank_is_serial():
    x = drawn(2, 3, 8)
    P_x = grid([1, 1, 1])
    for make in (
        lambda: distdl.nn.DistributedFeatureConv1d(P_x, 3, 2, 3, bias=False, dtype=x.dtype),
        lambda: distdl.nn.DistributedGeneralConv1d(
            P_x, P_x, P_x, 3, 2, 3, bias=False, dtype=x.dtype
        ),
    ):
        layer = make()
        assert (layer.serial, layer.use_bias, layer.stores_bias) == (True, False, False)
        assert layer.conv_layer.bias is None
        plain = nn.Conv1d(3, 2, 3, bias=False, dtype=x.dtype)
        same_weights(layer, plain)
        compare(layer, plain, P_x, P_x, x)


@pytest.mark.ranks([1, 3])
def test_pools_have_stride_one_unless_it_is_given():
    size = unisono.world().size
    x = drawn(2, 3, 10, 6)
    P_x = grid([1, 1, size, 1])
    for kind in ("Max", "Avg"):
        layer = getattr(distdl.nn, f"Distributed{kind}Pool2d")
        plain = getattr(nn, f"{kind}Pool2d")
        compare(layer(P_x, 3), plain(3, stride=1), P_x, P_x, x)
        compare(layer(P_x, (2, 3), (2, 1), 1), plain((2, 3), (2, 1), 1), P_x, P_x, x)
        arguments = inspect.signature(layer).parameters
        names = ["P_x", "kernel_size", "stride", "padding", "dilation", "buffer_manager"]
        assert list(arguments) == names
        assert [arguments[name].default for name in names[2:]] == [1, 0, 1, None]
    dilated = distdl.nn.DistributedMaxPool2d(P_x, 2, dilation=2)
    compare(dilated, nn.MaxPool2d(2, 1, dilation=2), P_x, P_x, x)
    with pytest.raises(ValueError, match="dilation=1"):
        distdl.nn.DistributedAvgPool2d(P_x, 2, dilation=(1, 2))
    for layer in ("MaxPool2d", "AvgPool2d"):
        with pytest.raises(ValueError, match="BufferManager"):
            getattr(distdl.nn, f"Distributed{layer}")(P_x, 2, buffer_manager="mine")


@pytest.mark.ranks(4)
def test_linear_layers_equal_torch():
    me = unisono.world().rank
    x = drawn(3, 7)
    P_x, P_y, P_w = grid([1, 2], [0, 1]), grid([1, 2], [2, 3]), grid([2, 2])
    plain = nn.Linear(7, 5, dtype=x.dtype)
    layer = distdl.nn.DistributedLinear(P_x, P_y, P_w, 7, 5, dtype=x.dtype)
    same_weights(layer, plain)
    compare(layer, plain, P_x, P_y, x)
    flags = (layer.use_bias, layer.receives_bias, layer.stores_bias, layer.serial)
    assert flags == (True, me in (0, 2), me in (0, 2), False)
    assert layer.sublinear.weight is layer.weight
    assert layer.sublinear.bias is layer.bias
    assert layer.weight.shape == ((3, 2)[me // 2], (4, 3)[me % 2])
    everybody = grid([1, 4])
    one = distdl.nn.DistributedLinearAllGather(everybody, 7, 8, collect_state=True, dtype=x.dtype)
    two = distdl.nn.DistributedLinearReduceScatter(everybody, 8, 5, dtype=x.dtype, collect_state=1)
    first, second = nn.Linear(7, 8, dtype=x.dtype), nn.Linear(8, 5, dtype=x.dtype)
    same_weights(one, first)
    same_weights(two, second)
    y = two(torch.relu(one(own(x, everybody))))
    torch.testing.assert_close(y, own(second(torch.relu(first(x))), everybody))
    for kind in (distdl.nn.DistributedLinearAllGather, distdl.nn.DistributedLinearReduceScatter):
        with pytest.raises(TypeError, match=r"(?s)out_features.*unexpected.*num_heads"):
            kind(everybody, 7, 8, num_heads=2)


@pytest.mark.ranks(4)
def test_norms_and_embeddings_keep_their_parameters_on_first_ranks():
    me = unisono.world().rank
    x = drawn(4, 6, 5, 3)
    P_x = grid([2, 2, 1, 1])
    plain = nn.BatchNorm2d(6, dtype=x.dtype)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    layer = distdl.nn.DistributedBatchNorm(P_x, 6, dtype=x.dtype)
    same_weights(layer, plain)
    assert layer.weight.shape == ((1, 3, 1, 1) if me < 2 else (0,))
    assert [p.shape for p in layer.parameters()] == [layer.weight.shape] * (2 if me < 2 else 0)
    assert owned(layer) == (["bias", "weight"] if me < 2 else [])
    assert owned(copy.deepcopy(layer)) == owned(layer)
    assert layer.float().weight.dtype == torch.float32
    assert layer.double().weight.dtype == torch.float64
    same_weights(layer, plain)
    assert layer.gamma is layer.weight
    assert layer.beta is layer.bias
    compare(layer, plain, P_x, P_x, x)
    if me < 2:  # as programs for DistDL join them
        parts = unisono.world().sub([0, 1]).all_gather(layer.gamma.grad, 1)
        torch.testing.assert_close(parts.flatten(), plain.weight.grad)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())
    with torch.no_grad():
        layer.gamma.fill_(2.0)
    assert torch.all(layer.weight == 2)
    layer.eval()
    layer.zero_grad()
    plain.eval()
    plain.zero_grad()
    nn.init.constant_(plain.weight, 2.0)
    compare(layer, plain, P_x, P_x, x)
    assert distdl.nn.DistributedBatchNorm(P_x, 6, affine=False).gamma is None
    # Second derivatives pass through the broadcast of the parameters too.
    layer.train()
    plain.train()
    mine, whole = own(x, P_x).clone().requires_grad_(), x.clone().requires_grad_()
    (g,) = torch.autograd.grad((layer(mine) ** 3).sum(), mine, create_graph=True)
    (h,) = torch.autograd.grad((plain(whole) ** 3).sum(), whole, create_graph=True)
    layer.zero_grad()
    plain.zero_grad()
    (g**2).sum().backward()
    (h**2).sum().backward()
    torch.testing.assert_close(mine.grad, own(whole.grad, P_x))
    if me < 2:
        torch.testing.assert_close(
            layer.weight.grad.flatten(), plain.weight.grad[3 * me : 3 * me + 3]
        )

    P_x = grid([2, 1, 2, 1])
    plain = nn.LayerNorm((5, 3), dtype=x.dtype)
    nn.init.normal_(plain.weight)
    layer = distdl.nn.DistributedLayerNorm(P_x, (5, 3), dtype=x.dtype, collect_state=True)
    same_weights(layer, plain)
    assert layer.weight.numel() == ((9, 6, 0, 0)[me])
    compare(layer, plain, P_x, P_x, x)

    P_x = grid([2, 1, 2, 1])
    plain = nn.RMSNorm((5, 3), 1e-6, dtype=x.dtype)
    nn.init.normal_(plain.weight)
    layer = distdl.nn.rmsnorm_zero.DistributedRMSNormZero(P_x, (5, 3), 1e-6, dtype=x.dtype)
    same_weights(layer, plain)
    assert owned(layer) == (["weight"] if me < 2 else [])
    compare(layer, plain, P_x, P_x, x)
    layer.requires_grad_(False)  # frozen where it is stored; the others still take part
    compare(layer, plain.requires_grad_(False), P_x, P_x, x)

    P_x = grid([2, 2])
    for kind in (
        distdl.nn.DistributedLinearAllGatherZero,
        distdl.nn.DistributedLinearReduceScatterZero,
    ):
        plain = nn.Linear(6, 4, dtype=x.dtype)
        layer = kind(P_x, 6, 4, collect_state=True, checkpoint=True, dtype=x.dtype)
        same_weights(layer, plain)
        assert ("weight" in owned(layer)) == (me < 2)
        compare(layer, plain, P_x, P_x, x[..., 0, 0])
    ids = torch.arange(8) % 5
    plain = nn.Embedding(5, 6, dtype=x.dtype)
    layer = distdl.nn.DistributedEmbedding(P_x, 5, 6, dtype=x.dtype, collect_state=False)
    same_weights(layer, plain)
    rows = ids[me // 2 * 4 : me // 2 * 4 + 4]
    assert torch.equal(layer(rows), own(plain(ids), P_x))
    for kind, sizes in (
        (distdl.nn.DistributedLayerNorm, (3,)),
        (distdl.nn.DistributedEmbedding, (5, 6)),
    ):
        with pytest.raises(TypeError, match=r"unexpected.*P_store"):
            kind(P_x, *sizes, P_store=1)


class Exchange(HaloMixin, ConvMixin):
    pass


@pytest.mark.ranks(4)
def test_halo_exchange_by_widths_fills_ghosts_and_adds_their_gradients():
    x = drawn(1, 2, 9, 7)
    P_x = grid([1, 1, 2, 2])
    widths = Exchange()._compute_exchange_info(
        x.shape, [3, 4], [1, 1], [0, 0], [1, 1], P_x.active, P_x.shape, P_x.index
    )
    halo, recv, send, needed = widths
    layer = distdl.nn.HaloExchange(P_x, halo, recv, send, BufferManager())
    pads = distdl.utilities.torch.distdl_padding_to_torch_padding(halo)
    padded = F.pad(own(x, P_x), pads).requires_grad_()
    before = padded.detach().clone()
    y = layer(padded)
    assert y is not padded
    assert torch.equal(padded, before)
    # A convolution of the windows is that of the whole image, corners included.
    weight = drawn(3, 2, 3, 4, seed=2)
    window = y[distdl.utilities.slicing.assemble_slices(needed[:, 0], needed[:, 1])]
    expected = F.conv2d(x, weight)
    torch.testing.assert_close(F.conv2d(window, weight), own(expected, P_x))
    # <Fx, z> = <x, F*z>, in both derivatives
    z = drawn(*y.shape, seed=3 + P_x.rank).requires_grad_()
    (adjoint,) = torch.autograd.grad(y, padded, z, create_graph=True)
    both = torch.stack([(y * z).sum(), (padded * adjoint).sum()]).detach()
    left, right = unisono.world().all_reduce(both).tolist()
    assert left == pytest.approx(right)
    outer = np.pad(np.ones(own(x, P_x).shape), halo)
    for dim, (left_rank, right_rank) in enumerate(P_x.neighbor_ranks(P_x.rank)):
        edges = [slice(None)] * 4
        if left_rank >= 0 and halo[dim, 0]:
            edges[dim] = slice(0, halo[dim, 0])
            assert not adjoint[tuple(edges)].any()
        if right_rank >= 0 and halo[dim, 1]:
            edges[dim] = slice(outer.shape[dim] - halo[dim, 1], None)
            assert not adjoint[tuple(edges)].any()
    (again,) = torch.autograd.grad(adjoint, z, padded.detach())
    torch.testing.assert_close(again, y.detach())
    slices = ghost_slices(padded.shape, recv, send)
    buffers = allocate_halo_exchange_buffers(BufferManager(), slices, recv, send, x.dtype)
    assert [[b is not None for b in row] for row in buffers] == [
        [bool(w) for w in (s[0], r[0], s[1], r[1])] for s, r in zip(send, recv, strict=True)
    ]
    direct = HaloExchangeFunction.apply(padded, P_x, slices, buffers, P_x.neighbor_ranks(P_x.rank))
    assert torch.equal(direct, y)
    with pytest.raises(PartitionError, match=r"sends 2 points, rank \d expects 1"):
        distdl.nn.HaloExchange(P_x, halo, recv, send + (send > 0))
    with pytest.raises(PartitionError, match=r"not an array of shape \(4, 2\)"):
        distdl.nn.HaloExchange(P_x, halo, recv[1:], send[1:])


@pytest.mark.ranks(2)
def test_halo_exchange_refuses_widths_that_points_do_not_fill():
    P_x = grid([2])
    ghosts = np.array([[0, 3], [3, 0]])[P_x.rank][None]
    layer = distdl.nn.HaloExchange(P_x, ghosts, ghosts, ghosts)
    y = layer(torch.arange(6.0) + 10 * P_x.rank)
    assert y.tolist() == [[0, 1, 2, 13, 14, 15], [0, 1, 2, 13, 14, 15]][P_x.rank]
    for length in (5, 2):
        with pytest.raises(PartitionError, match="fewer points than are sent"):
            layer(torch.zeros(length))


@pytest.mark.ranks(3)
def test_halo_exchange_on_some_ranks_leaves_the_others_alone():
    P_x = grid([2], [0, 2])
    ghosts = None
    if P_x.active:
        ghosts = np.array([[0, 1], [1, 0]])[P_x.rank][None]
    layer = distdl.nn.HaloExchange(P_x, ghosts, ghosts, ghosts)
    x = torch.zeros(4, requires_grad=True)
    if not P_x.active:
        x = zero_volume_tensor(requires_grad=True)
    y = layer(x + unisono.world().rank if P_x.active else x)
    assert y.tolist() == [[0, 0, 0, 2], [], [0, 2, 2, 2]][unisono.world().rank]
    y.sum().backward()
    assert x.grad.tolist() == [[1, 1, 2, 0], [], [0, 2, 1, 1]][unisono.world().rank]


class Resampling(InterpolateMixin):
    pass


@pytest.mark.ranks([1, 3])
def test_upsampling_takes_whole_sizes_and_families_of_modes():
    size = unisono.world().size
    x = drawn(2, 3, 7, 5)
    P_x = grid([1, 1, size, 1])
    for options, reference in (
        ({"scale_factor": 2}, {"scale_factor": 2, "mode": "bilinear"}),
        ({"size": (2, 3, 11, 9)}, {"size": (11, 9), "mode": "bilinear"}),
        (
            {"size": (2, 3, 11, 9), "align_corners": True},
            {"size": (11, 9), "mode": "bilinear", "align_corners": True},
        ),
        ({"scale_factor": 2, "mode": "nearest"}, {"scale_factor": 2, "mode": "nearest"}),
        ({"scale_factor": 2, "mode": "cubic"}, {"scale_factor": 2, "mode": "bicubic"}),
    ):  # fmt: skip
        layer = distdl.nn.DistributedUpsample(P_x, BufferManager(), **options)
        compare(layer, nn.Upsample(**reference), P_x, P_x, x)
    line = grid([1, 1, size])
    compare(
        distdl.nn.DistributedUpsample(line, scale_factor=3),
        nn.Upsample(scale_factor=3, mode="linear"),
        line,
        line,
        x[..., 0],
    )
    with pytest.raises(NotImplementedError, match="1 != 2"):
        distdl.nn.DistributedUpsample(line, scale_factor=2, mode="cubic")
    with pytest.raises(ValueError, match="with batch and channels"):
        distdl.nn.DistributedUpsample(P_x, size=(11, 9))
    with pytest.raises(ValueError, match=r"\[2, 3\] != \[2, 4\]"):
        distdl.nn.DistributedUpsample(P_x, size=(2, 4, 11, 9))(own(x, P_x))
    names = ["P_x", "buffer_manager", "size", "scale_factor", "mode", "align_corners"]
    assert list(inspect.signature(distdl.nn.DistributedUpsample).parameters) == names
    # The same by hand: widths, exchange of padded blocks, interpolation of what is needed.
    y = TensorStructure(torch.empty(2, 3, 14, 10))
    info = Resampling()._compute_exchange_info(P_x, TensorStructure(x), y, 2.0, "linear", False)
    halo, recv, send, needed = info
    pads = distdl.utilities.torch.distdl_padding_to_torch_padding(halo)
    block = distdl.nn.HaloExchange(P_x, halo, recv, send)(F.pad(own(x, P_x), pads))
    window = block[distdl.utilities.slicing.assemble_slices(needed[:, 0], needed[:, 1])]
    start = distdl.utilities.slicing.compute_start_index(P_x.shape, P_x.index, y.shape)
    stop = distdl.utilities.slicing.compute_stop_index(P_x.shape, P_x.index, y.shape)
    rest = (x.shape, y.shape, 2.0, "linear", False)
    local = distdl.nn.Interpolate(
        Resampling()._compute_needed_start(start, *rest),
        Resampling()._compute_needed_stop(stop - 1, *rest),
        x.shape, start, stop, y.shape, 2.0, "linear", False,
    )  # fmt: skip
    expected = nn.Upsample(scale_factor=2, mode="bilinear")(x)
    torch.testing.assert_close(local(window), own(expected, P_x))
    inactive = Partition().create_cartesian_topology_partition([1, 1, 2, 2])
    assert Resampling()._compute_exchange_info(inactive, y, y, None, "linear", False) == (None,) * 4


@pytest.mark.ranks([1, 3])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_interpolation_of_own_points_alone_is_a_share_of_the_whole(mode):
    comm = unisono.world()
    torchs = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    x = drawn(2, 3, 7, 5)
    for P_x in (grid([1, 1, comm.size, 1]), grid([1, 1, 1, comm.size])):
        here = layout_of(P_x).local_slices(x.shape)
        start, stop = [s.start for s in here], [s.stop for s in here]
        whole = (torch.zeros(4).int(), torch.tensor([2, 3, 11, 9]))
        layer = distdl.nn.Interpolate(start, stop, x.shape, *whole, whole[1], None, mode, False)
        mine, plain = x[here].clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = layer(mine), F.interpolate(plain, (11, 9), mode=torchs)
        torch.testing.assert_close(comm.all_reduce(y.detach()), expected.detach())
        probe = drawn(*expected.shape, seed=2)
        y.backward(probe)
        expected.backward(probe)
        torch.testing.assert_close(mine.grad, plain.grad[here])


@pytest.mark.ranks(3)
def test_losses_take_the_reduction_second_and_give_their_value_on_every_rank():
    P_x = grid([2, 1], [0, 2])
    x, t = drawn(5, 4), drawn(5, 4, seed=2).abs()
    for name in ("L1", "MSE", "PoissonNLL", "BCEWithLogits", "KLDiv"):
        kind = getattr(distdl.nn, f"Distributed{name}Loss")
        assert list(inspect.signature(kind).parameters)[:2] == ["P_x", "reduction"]
        for reduction in kind._valid_reductions:
            whole = x.clone().requires_grad_()
            # torch warns of what it calls the mean of KLDiv
            as_none = (name, reduction) == ("KLDiv", "mean")
            plain = getattr(nn, f"{name}Loss")(reduction="none" if as_none else reduction)
            expected = plain(whole, t).mean() if as_none else plain(whole, t)
            mine = own(x, P_x).clone().requires_grad_()
            loss = kind(P_x, reduction)(mine, own(t, P_x))
            if reduction == "none":
                if P_x.active:
                    assert torch.equal(loss, own(expected, P_x))
                continue
            assert loss.item() == (pytest.approx(expected.item()) if P_x.active else 0.0)
            loss.backward()
            expected.backward()
            if P_x.active:
                torch.testing.assert_close(mine.grad, own(whole.grad, P_x))
    p = torch.sigmoid(x)
    value = distdl.nn.DistributedBCELoss(P_x)(own(p, P_x), own((t > 1).to(p), P_x))
    if P_x.active:
        torch.testing.assert_close(value, F.binary_cross_entropy(p, (t > 1).to(p)))
    target = torch.arange(5) % 4
    rows = target[layout_of(P_x).local_slices((5, 1))[0]] if P_x.active else target[:0]
    for kind, reference in (
        (distdl.nn.DistributedCrossEntropyLoss, F.cross_entropy),
        (distdl.nn.DistributedNLLLoss, F.nll_loss),
    ):
        loss = kind(P_x, "sum", ignore_index=1)(own(x, P_x), rows)
        if P_x.active:
            torch.testing.assert_close(loss, reference(x, target, reduction="sum", ignore_index=1))
    with pytest.raises(ValueError, match="'mean', 'sum'"):
        distdl.nn.DistributedL1Loss(P_x, "median")


@pytest.mark.ranks(4)
def test_movements_between_and_over_partitions():
    me = unisono.world().rank
    P_x, P_y = grid([1, 2], [0, 1]), grid([2, 2])
    x = drawn(3, 4)
    mine = own(x, P_x).clone().requires_grad_()
    y = distdl.nn.Broadcast(P_x, P_y)(mine)
    assert torch.equal(y, x[:, :2] if me % 2 == 0 else x[:, 2:])
    total = distdl.nn.SumReduce(P_y, P_x)(y)
    if P_x.active:
        assert torch.equal(total, 2 * own(x, P_x))
    else:
        assert total.shape == (3, 0)
    total.sum().backward()
    assert mine.grad is None or torch.all(mine.grad == 2)
    rows = distdl.nn.AllSumReduce(P_y, axes_reduce=(1,))(torch.tensor([float(me)]))
    assert rows.item() == (1 if me < 2 else 5)
    joined = distdl.nn.AllGather(P_y, axes_all_gather=(1,))(own(x, P_y))
    assert torch.equal(joined, x[:2] if me < 2 else x[2:])
    part = distdl.nn.ReduceScatter(P_y, axes_reduce_scatter=(1,))(joined)
    assert torch.equal(part, 2 * own(x, P_y))
    assert distdl.nn.DistributedTranspose is distdl.nn.Repartition
    moved = distdl.nn.Repartition(P_x, P_y)
    assert torch.equal(moved(own(x, P_x)), own(x, P_y))
    with pytest.raises(ValueError, match="BufferManager"):
        distdl.nn.Repartition(P_x, P_y, buffer_manager=3)
    with pytest.raises(TypeError, match="a partition is needed"):
        distdl.nn.Broadcast([1, 2], P_y)
    # Partitions of unisono itself are taken as well.
    ours = distdl.nn.Repartition(unisono.Partition([1, 2]), unisono.Partition([2, 2]))
    assert torch.equal(ours(own(x, P_x)), own(x, P_y))


class Doubling(distdl.nn.Module):
    """A layer as DistDL's manual has it: four hooks of its own."""

    def __init__(self, P_x):
        super().__init__()
        self.P_x = P_x
        self.calls = []
        self._seen = TensorStructure()

    def _distdl_module_requires_reset(self, input):
        self.calls.append("reset?")
        return super()._distdl_module_requires_reset(input)

    def _distdl_input_changed(self, input):
        self.calls.append("changed?")
        return self._seen != TensorStructure(input[0])

    def _distdl_module_teardown(self, input):
        self.calls.append("teardown")
        self._distdl_is_setup = False

    def _distdl_module_setup(self, input):
        self.calls.append("setup")
        self._distdl_is_setup = True
        self._seen = TensorStructure(input[0])
        self.whole = self._distdl_backend.assemble_global_tensor_structure(input[0], self.P_x)

    def forward(self, x):
        self.calls.append("forward")
        return 2 * x


@pytest.mark.ranks([1, 3])
def test_a_layer_of_ones_own_sees_its_hooks_in_order_on_all_ranks():
    size, me = unisono.world().size, unisono.world().rank
    P_x = grid([size, 1])
    layer = Doubling(P_x)
    rows = [4] + [3] * (size - 1)
    assert torch.equal(layer(torch.ones(rows[me], 2)), torch.full((rows[me], 2), 2.0))
    assert layer.calls == ["reset?", "setup", "forward"]
    assert layer.whole.shape == (sum(rows), 2)
    layer.calls.clear()
    layer(torch.ones(rows[me], 2))
    assert layer.calls == ["reset?", "changed?", "forward"]
    layer.calls.clear()
    rows[-1] += 1  # only the last rank sees it
    layer(torch.ones(rows[me], 2))
    assert layer.calls == ["reset?", "changed?", "teardown", "setup", "forward"]
    assert layer.whole.shape == (sum(rows), 2)
    assert layer.partitions() == (layout_of(P_x),)


@pytest.mark.ranks([2, 3])
def test_gradients_are_clipped_and_compared_where_ranks_own_different_parameters():
    size = unisono.world().size
    x = drawn(4, 3, 6)
    plain = nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)).double()
    P_x, P_first, P_last = grid([1, 1, size]), grid([1, 1, 1], [0]), grid([1, 1, 1], [size - 1])
    layers = nn.Sequential(
        distdl.nn.DistributedFeatureConv1d(P_x, 3, 3, 3, padding=1, dtype=x.dtype),
        distdl.nn.DistributedBatchNorm(P_x, 3).double(),
    )
    assert bool(list(layers.parameters())) == (unisono.world().rank == 0)
    same_weights(layers, plain)
    layers(own(x, P_x)).square().sum().backward()
    plain(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(unisono.nn.clip_grad_norm_(layers, 0.1), expected)
    for name, p in layers.named_parameters():
        torch.testing.assert_close(p.grad, plain.get_parameter(name).grad.view(p.shape))
    unisono.nn.check_replicas(layers)

    # One layer on the first rank, one on the last: each rank has what the other has not.
    each = nn.ModuleList(
        distdl.nn.DistributedFeatureConv1d(P, 3, 3, 3, dtype=x.dtype) for P in (P_first, P_last)
    )
    for i, (layer, P) in enumerate(zip(each, (P_first, P_last), strict=True)):
        (layer(own(x, P)).sum() * (i + 1)).backward()
    norms = unisono.world().all_gather_object(unisono.nn.clip_grad_norm_(each, 1e9).item())
    assert len(set(norms)) == 1, norms
    assert norms[0] > 0
