"""Convolutions without windows: passes over own blocks and patches, all ranks in one process."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.topology.simulation import slices, write
from torch.nn import functional as F

from unisono.topology import halo
from unisono.topology.cover import cover
from unisono.topology.decompose import grid_index

MODES = ("zeros", "reflect", "replicate", "circular")


def share_of(plan, found, blocks, weight, stride, dilation):
    """Return one rank's outputs by its cover, taking messages straight from the owners' blocks."""
    own = blocks[plan.rank]
    space = (slice(None), slice(None))
    view = own[space + slices(found.view)]
    y = F.conv2d(view, weight, None, stride, found.padding, dilation)
    sent = [(message.peer, piece) for message in plan.recvs for piece in message.pieces]
    for patch, (owner, piece) in zip(found.patches, sent, strict=True):
        window = own.new_zeros(patch.window_shape)
        write(window, patch.piece, blocks[owner][slices(piece.source)])
        y[space + slices(patch.output)] += F.conv2d(window, weight, None, stride, 0, dilation)
    return y


@st.composite
def cases(draw):
    grid = (1, 1, draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    sizes = [draw(st.integers(7, 12)) for _ in range(2)]
    cuts = [(0, 2), (0, 2)]
    for n, parts in zip(sizes, grid[2:], strict=True):
        inner = sorted(draw(st.integers(0, n)) for _ in range(parts - 1))
        cuts.append((0, *inner, n))
    kernel = [draw(st.integers(1, 4)) for _ in range(2)]
    stride = [draw(st.integers(1, 3)) for _ in range(2)]
    dilation = [draw(st.integers(1, 2)) for _ in range(2)]
    padding = [(draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(2)]
    return grid, cuts, kernel, stride, dilation, padding, draw(st.sampled_from(MODES))


def padded(x, padding, mode):
    (top, bottom), (left, right) = padding
    pads = (left, right, top, bottom)
    return F.pad(x, pads) if mode == "zeros" else F.pad(x, pads, mode)


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_passes_and_patches_of_all_ranks_make_up_the_convolution(case):
    grid, cuts, kernel, stride, dilation, padding, mode = case
    x = torch.randn(2, 2, cuts[2][-1], cuts[3][-1], dtype=torch.float64)
    weight = torch.randn(3, 2, *kernel, dtype=torch.float64)
    expected = F.conv2d(padded(x, padding, mode), weight, None, stride, 0, dilation)
    blocks, plans = [], []
    for place in range(grid[2] * grid[3]):
        index = grid_index(grid, place)
        where = slices((own[i], own[i + 1]) for own, i in zip(cuts, index, strict=True))
        blocks.append(x[where])
        plans.append(halo.plan(cuts, index, kernel, stride, padding, dilation, mode))
    for plan in plans:
        found = cover(plan, kernel, stride, dilation, padding)
        if found is None:  # by its window, which other tests compare with torch
            continue
        y = share_of(plan, found, blocks, weight, stride, dilation)
        where = slices(
            (a, a + n) for a, n in zip(plan.output_start, plan.output_shape, strict=True)
        )
        torch.testing.assert_close(y, expected[(slice(None), slice(None), *where[2:])])


def test_a_kernel_that_keeps_the_size_is_one_pass_and_one_patch_a_neighbour():
    cuts = [(0, 1), (0, 4), (0, 32, 64, 96), (0, 64)]
    for i, patches in enumerate((1, 2, 1)):
        plan = halo.plan(cuts, (0, 0, i, 0), (3, 3), 1, 1)
        found = cover(plan, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
        assert found.padding == (1, 1)
        assert found.view == ((0, 32), (0, 64))
        assert [patch.window_shape for patch in found.patches] == [(1, 4, 3, 66)] * patches
        assert found.patched_share == patches / 32
