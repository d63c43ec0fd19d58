"""The fourteen halo cases worked out by hand: needed points, signed halos, fill, receives."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from unisono.topology import decompose, halo
from unisono.topology.window import output_length


class Rank(NamedTuple):
    """What one rank must find; `needed` None means no outputs and no window."""

    needed: tuple[int, int] | None
    widths: tuple[int, int] = (0, 0)
    fill: tuple[int, int] = (0, 0)
    recv: dict[int, tuple[int, int]] = {}


CASES = {
    "1 even split": ([5, 5], (3, 1, 1, 1), [5, 5], [
        Rank((0, 6), (0, 1), (1, 0), {1: (5, 6)}),
        Rank((4, 10), (1, 0), (0, 1), {0: (4, 5)}),
    ]),
    "2 uneven split": ([5, 4], (3, 1, 1, 1), [5, 4], [
        Rank((0, 6), (0, 1), (1, 0), {1: (5, 6)}),
        Rank((4, 9), (1, 0), (0, 1), {0: (4, 5)}),
    ]),
    "3 no padding": ([5, 5], (3, 1, 0, 1), [4, 4], [
        Rank((0, 6), (0, 1), (0, 0), {1: (5, 6)}),
        Rank((4, 10), (1, 0), (0, 0), {0: (4, 5)}),
    ]),
    "4 even kernel is one-sided": ([5, 5], (2, 1, 0, 1), [5, 4], [
        Rank((0, 6), (0, 1), (0, 0), {1: (5, 6)}),
        Rank((5, 10), (0, 0)),
    ]),
    "5 unbalanced: trim and move": ([7, 3], (3, 1, 1, 1), [5, 5], [
        Rank((0, 6), (0, -1), (1, 0)),
        Rank((4, 10), (3, 0), (0, 1), {0: (4, 7)}),
    ]),
    "6 unbalanced pooling": ([8, 2], (2, 2, 0, 1), [3, 2], [
        Rank((0, 6), (0, -2)),
        Rank((6, 10), (2, 0), (0, 0), {0: (6, 8)}),
    ]),
    "7 stride two on three ranks": ([4, 4, 3], (3, 2, 1, 1), [2, 2, 2], [
        Rank((0, 4), (0, 0), (1, 0)),
        Rank((3, 8), (1, 0), (0, 0), {0: (3, 4)}),
        Rank((7, 11), (1, 0), (0, 1), {1: (7, 8)}),
    ]),
    "8 pooling on four ranks": ([3, 3, 2, 2], (2, 2, 0, 1), [2, 1, 1, 1], [
        Rank((0, 4), (0, 1), (0, 0), {1: (3, 4)}),
        Rank((4, 6), (-1, 0)),
        Rank((6, 8)),
        Rank((8, 10)),
    ]),
    "9 dilation": ([5, 5], (3, 1, 2, 2), [5, 5], [
        Rank((0, 7), (0, 2), (2, 0), {1: (5, 7)}),
        Rank((3, 10), (2, 0), (0, 2), {0: (3, 5)}),
    ]),
    "10 kernel wider than a shard": ([2, 2, 2], (7, 1, 3, 1), [2, 2, 2], [
        Rank((0, 5), (0, 3), (3, 0), {1: (2, 4), 2: (4, 5)}),
        Rank((0, 6), (2, 2), (1, 1), {0: (0, 2), 2: (4, 6)}),
        Rank((1, 6), (3, 0), (0, 3), {0: (1, 2), 1: (2, 4)}),
    ]),
    "11 ranks that only send": ([2, 2, 2, 2], (5, 3, 0, 1), [1, 1, 0, 0], [
        Rank((0, 5), (0, 3), (0, 0), {1: (2, 4), 2: (4, 5)}),
        Rank((3, 8), (-1, 4), (0, 0), {2: (4, 6), 3: (6, 8)}),
        Rank(None),
        Rank(None),
    ]),
    "12 stride skips the border": ([8, 8], (1, 3, 0, 1), [3, 3], [
        Rank((0, 7), (0, -1)),
        Rank((9, 16), (-1, 0)),
    ]),
    "13 empty block": ([10, 0], (3, 1, 1, 1), [5, 5], [
        Rank((0, 6), (0, -4), (1, 0)),
        Rank((4, 10), (6, 0), (0, 1), {0: (4, 10)}),
    ]),
    "14 fewer points than ranks": ([1, 1, 1, 0], (3, 1, 1, 1), [1, 1, 1, 0], [
        Rank((0, 2), (0, 1), (1, 0), {1: (1, 2)}),
        Rank((0, 3), (1, 1), (0, 0), {0: (0, 1), 2: (2, 3)}),
        Rank((1, 3), (1, 0), (0, 1), {1: (1, 2)}),
        Rank(None),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hand_checked_case(name: str) -> None:
    shards, (k, s, p, d), shares, ranks = CASES[name]
    cuts = decompose.bounds(shards)
    assert output_length(sum(shards), k, s, p, d) == sum(shares)
    for me, want in enumerate(ranks):
        plan = halo.plan([cuts], (me,), k, s, p, d)
        assert plan.output_shape == (shares[me],)
        received = {
            message.peer: tuple(
                (piece.source[0][0] + cuts[message.peer], piece.source[0][1] + cuts[message.peer])
                for piece in message.pieces
            )
            for message in plan.recvs
        }
        assert received == {peer: (interval,) for peer, interval in want.recv.items()}
        if want.needed is None:
            assert plan.window_shape == (0,)
            assert plan.segments == ((),)
            continue
        assert plan.needed == (want.needed,)
        assert plan.widths == (want.widths,)
        assert plan.fills == (want.fill,)
        points = want.needed[1] - want.needed[0]
        assert plan.window_shape == (points + sum(want.fill),)


def test_stride_that_skips_the_border_sends_no_message_at_all() -> None:
    plans = [halo.plan([(0, 8, 16)], (me,), 1, 3) for me in range(2)]
    assert not any(plan.sends or plan.recvs for plan in plans)
    assert not any(plan.is_identity for plan in plans), "own points are cut off, so a copy is due"


def test_corners_come_straight_from_their_owner() -> None:
    cuts = [(0, 4, 8), (0, 4, 8)]
    plan = halo.plan(cuts, (0, 0), 3, padding=1)
    assert [(m.peer, m.numel) for m in plan.recvs] == [(1, 4), (2, 4), (3, 1)]
    assert plan.window_shape == (6, 6)


def test_leading_dims_without_a_kernel_are_taken_whole() -> None:
    plan = halo.plan([(0, 2), (0, 3), (0, 5, 9)], (0, 0, 1), (3,), padding=1)
    assert plan.window_shape == (2, 3, 6)
    assert plan.output_shape == (2, 3, 4)
    assert plan.recvs[0].numel == 2 * 3 * 1
    assert plan.output_start == (0, 0, 5)


def test_kernel_of_one_on_balanced_blocks_is_the_identity() -> None:
    plan = halo.plan([(0, 4, 7), (0, 2)], (1, 0), 1)
    assert plan.is_identity
    assert not halo.plan([(0, 5, 7), (0, 2)], (1, 0), 1).is_identity, "blocks must be balanced"


def test_widths_give_every_block_that_many_more_points() -> None:
    plan = halo.plan_widths([(0, 4), (0, 4, 8, 12)], (0, 1), [(2, 1)])
    assert plan.window_shape == (4, 7)
    assert plan.widths == ((0, 0), (2, 1))
    edge = halo.plan_widths([(0, 4), (0, 4, 8, 12)], (0, 0), [(2, 1)])
    assert edge.fills == ((0, 0), (2, 0))
    assert edge.window_shape == (4, 7)
