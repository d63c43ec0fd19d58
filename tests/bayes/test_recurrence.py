"""The steps of an LSTM in the compiled core and in torch: the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bayes.nets import trained

from unisono.bayes import LSTM, SLSTM, Linear, Sequential, SLinear
from unisono.bayes.layers import recurrence
from unisono.bayes.layers.recurrence import State
from unisono.bayes.moments import Delta, Moments
from unisono.bayes.parameters import Parameters
from unisono.comm.engines import core

pytestmark = pytest.mark.skipif(core.unavailable() is not None, reason=str(core.unavailable()))


@pytest.fixture
def no_core(monkeypatch):
    """Return a function that runs another one without the core."""

    def run(function, *args, **kwargs):
        with monkeypatch.context() as patched:
            patched.setattr(recurrence, "_core", lambda: None)
            return function(*args, **kwargs)

    return run


def random(generator, *shape, positive=False):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return 0.3 * x.square() if positive else x


def gates_of(generator, width, units, bias):
    sizes = [(4, units, width + units), (4, units)]
    w, vw, b, vb = (random(generator, *s, positive=p) for s in sizes for p in (False, True))
    p = Parameters(w, vw, b, vb) if bias else Parameters(w, vw, None, None)
    p.ensure_deltas()
    return p


def passes(p, x, steps, start, delta, to_input):
    """Go forward and back; return every number of both passes."""
    out, last, trail = recurrence.forward(p, x, steps, start, keep=True)
    assert trail is not None
    back = recurrence.backward(p, trail, delta, to_input=to_input)
    again, *_, nothing = recurrence.forward(p, x, steps, start, keep=False)
    assert nothing is None
    assert torch.equal(again.mean, out.mean)
    slopes = trail.slopes
    return [*out[:2], *last, trail.inputs, *slopes, *(t.clone() for t in p.deltas), *(back or ())]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(
        st.sampled_from([0, 1, 2, 10, 16, 17, 40]),
        st.integers(1, 5),
        st.integers(1, 5),
        st.integers(1, 9),
    ),
    flags=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 1000),
)
def test_the_core_and_torch_give_the_same_numbers(sizes, flags, seed):
    (batch, steps, width, units), (bias, certain, starts, to_input) = sizes, flags
    g = torch.Generator().manual_seed(seed)
    p = gates_of(g, width, units, bias)
    var = None if certain else random(g, batch, steps * width, positive=True)
    x = Moments(2 * random(g, batch, steps * width), var)
    start = State(*(random(g, batch, units, positive=n % 2 == 1) for n in range(4)))
    delta = Delta(*(random(g, batch, steps * units) for _ in range(2)))
    arguments = (p, x, steps, start if starts else None, delta, to_input)
    found = passes(*arguments)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recurrence, "_core", lambda: None)
        wanted = passes(*arguments)
    for n, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(
            one, other, rtol=1e-12, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_are_exact_from_tiny_to_huge(dtype, no_core):
    """Relative to the number itself: a cell near zero must not lose its digits."""
    units, big = 64, torch.finfo(dtype).max ** 0.5
    mean_b = torch.zeros(4, units, dtype=dtype)
    mean_b[2] = torch.cat(
        [torch.logspace(-20, 3, 31, dtype=dtype).repeat(2), mean_b.new_tensor([big, -big])]
    )
    mean_b[2, 31:62] *= -1
    mean_b[[0, 1, 3]] = mean_b[2].flip(0).repeat(3, 1)
    nothing = torch.zeros(4, units, 1 + units, dtype=dtype)
    p = Parameters(nothing, nothing, mean_b, torch.zeros_like(mean_b))
    x = Moments(torch.zeros(1, 1, dtype=dtype))
    found = recurrence.forward(p, x, 1, None, keep=True)
    wanted = no_core(recurrence.forward, p, x, 1, None, keep=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found[1].mean_c, wanted[1].mean_c, rtol=8 * eps, atol=eps**4)
    torch.testing.assert_close(found[0].mean, wanted[0].mean, rtol=8 * eps, atol=eps**4)


def test_a_nan_passes_through_the_core():
    p = gates_of(torch.Generator().manual_seed(0), 1, 3, True)
    x = torch.zeros(20, 2, dtype=torch.float64)
    x[17, 1] = math.nan
    mean, var, _ = recurrence.forward(p, Moments(x), 2, None, keep=False)[0]
    assert var is not None
    for out in (mean, var):
        is_nan = torch.isnan(out).view(20, 2, 3).any(-1)
        assert is_nan.nonzero().tolist() == [[17, 1]]


def test_wide_nets_and_machines_without_a_core_use_torch(monkeypatch):
    def core_of(layer):
        recurrence._core.cache_clear()
        return recurrence._in_core(layer._live)

    narrow, wide = LSTM(1, 8, 2), LSTM(64, 128, 2)
    assert core_of(narrow) is core.load()
    assert core_of(wide) is None
    with monkeypatch.context() as patched:
        patched.setenv("UNISONO_CORE", "0")
        assert core_of(narrow) is None
    assert core_of(narrow) is not None


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [LSTM(1, 4, 3), LSTM(4, 4, 3), Linear(12, 1)],
        lambda: [LSTM(1, 4, 3, stateful=True), LSTM(4, 4, 3, False), Linear(12, 1)],
        lambda: [SLSTM(3, 4, 1), SLSTM(4, 4, 1), SLinear(4, 1)],
    ],
)
def test_a_net_learns_the_same_with_and_without_the_core(layers, no_core):
    net, twin = (Sequential(*layers()).double() for _ in range(2))
    twin.params_from(net)
    g = torch.Generator().manual_seed(0)
    rows = 1 if isinstance(net[0], SLSTM) else 5
    for _ in range(4):
        x, y = random(g, rows, 3), random(g, rows)
        trained(net, x, y)
        no_core(trained, twin, x, y)
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-12, atol=1e-12)
    if isinstance(net[0], SLSTM):
        for a, b in zip(net.smoother(), twin.smoother(), strict=True):
            assert abs(a - b).max() < 1e-12
