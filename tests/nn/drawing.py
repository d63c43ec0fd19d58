"""How tests of layers draw their cases: few, the same in each run, on any number of ranks."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st

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
