"""DistDL's module tree, and its pure arithmetic against numbers worked out by hand."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import unisono.compat.distdl as distdl
from unisono import nn as ours
from unisono.compat.distdl.backends.mpi.buffer import MPIBufferManager, MPIExpandableBuffer
from unisono.compat.distdl.nn import mixins
from unisono.compat.distdl.utilities import dtype, slicing
from unisono.compat.distdl.utilities import tensor_decomposition as decomposition
from unisono.compat.distdl.utilities import torch as structures
from unisono.compat.distdl.utilities.misc import Bunch, DummyContext
from unisono.nn.agreement import current_mode


def test_the_packages_of_distdl_hold_every_layer_that_we_have():
    offered = {name for name in ours.__all__ if name[0] == "D" or "Halo" in name} - {
        "DistributedGroupNorm",  # these are ours alone
        "DistributedInstanceNorm",
        "DistributedPad",
        "DistributedRMSNorm",  # theirs is called Zero
    }
    assert offered <= set(distdl.nn.__all__)
    for name in distdl.nn.__all__:
        assert getattr(distdl.nn, name).__doc__, name
    assert distdl.nn.DistributedMaxPool2d.__name__ == "DistributedMaxPool2d"
    assert distdl.backend.backend is distdl.backends.mpi
    assert distdl.nn.Module._distdl_backend is distdl.backends.mpi
    assert set(distdl.backends.mpi.operation_map) == {"min", "max", "prod", "sum"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", distdl.__version__)


def test_what_is_left_out_is_named_with_what_to_use():
    for name, hint in (("DistributedPad", "unisono.nn.DistributedPad"), ("PadNd", "pad")):
        with pytest.raises(AttributeError, match=rf"(?s){name}.*HINT.*{hint}"):
            getattr(distdl.nn, name)
    with pytest.raises(AttributeError, match=r"(?s)logger.*HINT"):
        distdl.logger  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_name"):
        distdl.backends.mpi.no_such_name  # noqa: B018


def test_the_switch_of_the_forks_turns_comparing_off_and_on(monkeypatch):
    monkeypatch.setenv("DISTDL_CHECK_INPUT_CHANGED", "0")
    before = current_mode()
    try:
        distdl.config.set_backend("nccl", "cupy")
        assert (current_mode(), distdl.config.check_input_changed) == ("off", False)
    finally:
        distdl.config.set_backend(check_input_changed=True)
    assert (current_mode(), before) == ("always", "always")
    with pytest.raises(ValueError, match="'mpi', 'nccl'"):
        distdl.config.set_backend("pigeon")


def test_blocks_of_ten_by_seven_points_over_three_by_two_workers():
    shape, parts = (10, 7), (3, 2)
    blocks = {
        (0, 0): ([4, 4], [0, 0], [4, 4]),
        (1, 0): ([3, 4], [4, 0], [7, 4]),
        (2, 1): ([3, 3], [7, 4], [10, 7]),
    }
    for index, (size, start, stop) in blocks.items():
        assert slicing.compute_subshape(parts, index, shape).tolist() == size
        assert slicing.compute_start_index(parts, index, shape).tolist() == start
        assert slicing.compute_stop_index(parts, index, shape).tolist() == stop
    assert slicing.compute_subshape(4, 3, 2).tolist() == [0]  # fewer points than workers
    start, stop, size = slicing.compute_intersection([0, 5], [4, 9], [2, 9], [8, 12])
    assert (start.tolist(), stop.tolist(), size.tolist()) == ([2, 9], [4, 9], [2, 0])
    # Rows [4, 7) of three against rows [5, 10) of two: they share [5, 7), which is [1, 3) here.
    shared = slicing.compute_partition_intersection([3], [1], [2], [1], [10])
    assert shared == (slice(1, 3),)
    assert slicing.compute_partition_intersection([3], [0], [2], [1], [10]) is None
    box = slicing.assemble_slices(np.array([1, 2]), np.array([4, 8]))
    assert box == (slice(1, 4), slice(2, 8))
    assert slicing.compute_nd_slice_shape(box).tolist() == [3, 6]
    assert slicing.compute_nd_slice_volume(box) == 18


def test_blocks_of_all_workers_as_one_array():
    whole = structures.TensorStructure(torch.empty(5, 4))
    shapes = decomposition.compute_subtensor_shapes_balanced(whole, (2, 3))
    assert shapes.shape == (2, 3, 2)
    assert shapes[:, :, 0].tolist() == [[3, 3, 3], [2, 2, 2]]
    assert shapes[:, :, 1].tolist() == [[2, 1, 1], [2, 1, 1]]
    assert decomposition.compute_subtensor_start_indices(shapes)[1].tolist() == [
        [3, 0],
        [3, 2],
        [3, 3],
    ]
    assert decomposition.compute_subtensor_stop_indices(shapes)[0].tolist() == [
        [3, 2],
        [3, 3],
        [3, 4],
    ]
    meet = decomposition.compute_subtensor_intersection_slice
    assert meet([4, 0], [5, 4], [0, 2], [5, 3]) == (slice(0, 1), slice(2, 3))
    assert meet([0], [3], [3], [5]) is None


def test_structures_padding_and_dtypes():
    zero = structures.zero_volume_tensor
    assert zero().shape == (0,)
    assert zero(4, dtype=torch.int32, device="cpu").shape == (4, 0)
    assert zero(requires_grad=True).requires_grad
    assert zero().dtype == torch.get_default_dtype()
    x = torch.ones(2, 3)
    known, other = structures.TensorStructure(x), structures.TensorStructure()
    assert (known.shape, known.dtype, known.requires_grad) == (x.shape, x.dtype, False)
    assert (other.shape, other.dtype, other.requires_grad) == (None, None, None)
    assert known != other
    other.fill_from_tensor(torch.zeros(2, 3))
    assert known == other
    other.fill_from_tensor(torch.zeros(2, 3, requires_grad=True))
    assert known != other
    assert structures.distdl_padding_to_torch_padding(np.array([[1, 2], [3, 4]])) == (3, 4, 1, 2)
    for table, back in (
        (dtype.torch_to_numpy_dtype_dict, dtype.numpy_to_torch_dtype_dict),
        (dtype.torch_to_intID_dtype_dict, dtype.intID_to_torch_dtype_dict),
    ):
        assert {back[table[key]] == key for key in table} == {True}
    assert dtype.numpy_to_torch_dtype_dict[np.dtype("float32")] is torch.float32
    number = dtype.numpy_to_intID_dtype_dict[np.float64]
    assert dtype.intID_to_numpy_dtype_dict[number] is np.float64


def test_small_things():
    bunch = Bunch(a=1)
    bunch.b = 2
    assert (bunch["b"], bunch.a, sorted(bunch)) == (2, 1, ["a", "b"])
    with pytest.raises(AttributeError, match="c"):
        bunch.c  # noqa: B018
    ctx = DummyContext(extra=3)
    ctx.save_for_backward(torch.ones(1), torch.zeros(1))
    ctx.mark_dirty(torch.ones(1))
    assert (len(ctx.saved_tensors), ctx.extra) == (2, 3)


def test_buffers_grow_keep_their_values_and_are_shared():
    buffer = MPIExpandableBuffer(np.float32, initial_capacity=2)
    assert (buffer.capacity, buffer.raw_buffer.shape, buffer.views) == (2, (2,), {})
    small = buffer.get_view((2,))
    small[:] = [1, 2]
    wide = buffer.get_view([2, 3])
    assert (buffer.capacity, wide.shape, buffer.dtype) == (6, (2, 3), np.float32)
    assert buffer.get_view((2,)).tolist() == [1, 2]  # after growth, on the new memory
    wide[0] = 7
    assert buffer.views[2,].tolist() == [7, 7]
    buffer.expand(4)
    assert buffer.capacity == 6  # never shrinks
    buffer.allocate_view((4, 4))
    assert buffer.get_view((2, 3))[0].tolist() == [7, 7, 7]
    manager = MPIBufferManager()
    two = manager.request_buffers(2, np.float32, initial_capacity=5)
    assert [one.capacity for one in two] == [5, 5]
    assert manager.request_buffers(1, dtype=np.float32)[0] is two[0]
    three = manager.request_buffers(3, np.float32)
    assert three[:2] == two
    assert manager.request_buffers(1, np.int64)[0] not in three
    assert {key: len(found) for key, found in manager.buffers_map.items()} == {
        np.float32: 3,
        np.int64: 1,
    }


class Halos(mixins.HaloMixin, mixins.ConvMixin):
    pass


def halos(x, parts, kernel, stride, padding, dilation, sizes=None):
    """Return halo, sent widths and needed range of each rank of one dim."""
    shapes = None if sizes is None else np.array(sizes).reshape(-1, 1)
    found = []
    for i in range(parts):
        window = (kernel, stride, padding, dilation)
        info = Halos()._compute_exchange_info([x], *window, True, [parts], [i], shapes)
        halo, recv, send, needed = info
        assert halo.tolist() == recv.tolist()
        found.append(tuple(array[0].tolist() for array in (halo, send, needed)))
    return found


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # kernel 3 with padding 1: one point from each side
        ((10, 2, 3, 1, 1, 1), [([0, 1], [0, 1], [0, 6]), ([1, 0], [1, 0], [0, 6])]),
        # an even kernel looks to the right only
        ((10, 2, 2, 1, 0, 1), [([0, 1], [0, 0], [0, 6]), ([0, 0], [1, 0], [0, 5])]),
        # dilation 2
        ((10, 2, 3, 1, 2, 2), [([0, 2], [0, 2], [0, 7]), ([2, 0], [2, 0], [0, 7])]),
        # stride 2 on 4, 4, 3 points
        (
            (11, 3, 3, 2, 1, 1),
            [([0, 0], [0, 1], [0, 4]), ([1, 0], [0, 1], [0, 5]), ([1, 0], [0, 0], [0, 4])],
        ),
        # 3, 3, 2, 2 points in pairs: the second rank does not need its first point
        (
            (10, 4, 2, 2, 0, 1),
            [
                ([0, 1], [0, 0], [0, 4]),
                ([0, 0], [1, 0], [1, 3]),
                ([0, 0], [0, 0], [0, 2]),
                ([0, 0], [0, 0], [0, 2]),
            ],
        ),
        # blocks of 7 and 3: three points move, and the seventh is cut off
        ((10, 2, 3, 1, 1, 1, [7, 3]), [([0, 0], [0, 3], [0, 6]), ([3, 0], [0, 0], [0, 6])]),
        # a stride that skips points; right ends are cut only where blocks are given
        ((16, 2, 1, 3, 0, 1), [([0, 0], [0, 0], [0, 8]), ([0, 0], [0, 0], [1, 8])]),
        ((16, 2, 1, 3, 0, 1, [8, 8]), [([0, 0], [0, 0], [0, 7]), ([0, 0], [0, 0], [1, 8])]),
        # more ranks than outputs: the last has nothing to compute
        (
            (3, 3, 2, 1, 0, 1),
            [([0, 1], [0, 0], [0, 2]), ([0, 1], [1, 0], [0, 2]), ([0, 0], [1, 0], [1, 1])],
        ),
    ],
)
def test_widths_of_halos(case, expected):
    assert halos(*case) == expected


def test_halos_of_images_fill_up_leading_dims_and_inactive_ranks_get_none():
    args = ([2, 3, 10, 9], [3, 3], [1, 1], [1, 1], [1, 1])
    halo, _, send, needed = Halos()._compute_exchange_info(*args, True, [1, 1, 2, 3], [0, 0, 1, 1])
    assert halo.tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert send.tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert needed.tolist() == [[0, 2], [0, 3], [0, 6], [0, 5]]
    assert Halos()._compute_exchange_info(*args, False, [1, 1, 2, 3], None) == (None,) * 4
    for mixin in (mixins.ConvMixin(), mixins.PoolingMixin()):
        assert mixin._compute_min_input_range(4, 3, 2, 1, 2) == 7
        assert mixin._compute_max_input_range(4, 3, 2, 1, 2) == 11


def test_inputs_under_outputs_of_an_upsampling():
    mixin = mixins.InterpolateMixin()
    start, stop = mixin._compute_needed_start, mixin._compute_needed_stop
    x, y = (2, 3, 5), (2, 3, 10)
    # Doubling: output 4 lies at 4.5 / 2 - 0.5 = 1.75, between points 1 and 2.
    assert start((1, 2, 4), x, y, 2.0, "linear", False).tolist() == [1, 2, 1]
    assert stop((1, 2, 4), x, y, 2.0, "linear", False).tolist() == [2, 3, 3]
    assert stop((1, 2, 9), x, y, 2.0, "linear", False)[2] == 5  # never beyond the end
    # Corners aligned: output 4 of 10 lies at 4 * 4 / 9 = 1.78.
    assert start((0, 0, 4), x, y, None, "linear", True)[2] == 1
    assert (start((0, 0, 7), x, y, None, "nearest", False)[2]) == 3
    assert (stop((0, 0, 7), x, y, None, "nearest", False)[2]) == 4
    # Cubic: four points, from floor(1.75) - 1 on.
    assert start((0, 0, 4), x, y, None, "cubic", False)[2] == 0
    assert stop((0, 0, 4), x, y, None, "cubic", False)[2] == 4


def test_nearest_points_of_an_upsampling_are_those_of_the_dtype():
    """Output 41 of 82 lies at point 1 of 2, or a rounding of float32 before it."""
    right = SimpleNamespace(active=True, shape=np.array([1, 1, 2]), index=np.array([0, 0, 1]))
    for kind, halo in ((torch.float64, [0, 0]), (torch.float32, [1, 0])):
        line = torch.arange(2, dtype=kind).reshape(1, 1, 2)
        y = torch.nn.functional.interpolate(line, size=82)
        assert y[0, 0, 41].item() == 1 - halo[0]
        both = structures.TensorStructure(line), structures.TensorStructure(y)
        found = mixins.InterpolateMixin()._compute_exchange_info(
            right, *both, None, "nearest", False
        )
        assert found[0][2].tolist() == halo


def test_a_tensor_without_elements_becomes_a_number_to_call_backward_on():
    correct = distdl.functional.ZeroVolumeCorrectorFunction.apply
    empty = torch.empty(3, 0, requires_grad=True)
    zero = correct(empty)
    assert (zero.shape, zero.item()) == ((), 0.0)
    zero.backward()
    assert empty.grad.shape == (3, 0)
    x = torch.ones(2, requires_grad=True)
    y = correct(x)
    assert y is not x
    assert torch.equal(y, x)
    (3 * y).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_interpolation_of_a_whole_tensor_equals_torch():
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    apply = distdl.functional.interpolate.InterpolateFunction.apply
    boxes = ((0, 0, 0), (2, 3, 5), (2, 3, 5), (0, 0, 0), (2, 3, 8), (2, 3, 8))
    y = apply(x, None, "linear", False, *boxes)
    expected = torch.nn.functional.interpolate(x, size=8, mode="linear")
    torch.testing.assert_close(y, expected)
    layer = distdl.nn.Interpolate(*(torch.tensor(box) for box in boxes), mode="linear")
    torch.testing.assert_close(layer(x), expected)
