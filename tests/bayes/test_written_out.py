"""Corrections of variances against the formulas written out, unit by unit.

Autograd knows the corrections of means (`test_gradients`); those of variances go back through
squares of sums, which no gradient shows.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.nn import functional as F

from unisono import bayes
from unisono.bayes.moments import Delta, Moments

close = torch.testing.assert_close


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def padded(x, value=0.0):
    return F.pad(x, (0, 1, 0, 1), value=value)


LAYERS = {
    "linear": (lambda: bayes.Linear(4, 3), (4,), F.linear),
    "conv": (
        lambda: bayes.Conv2d(2, 3, 2, stride=2, padding=1, padding_type=2, in_width=5, in_height=7),
        (2, 7, 5),
        lambda x, w, b: F.conv2d(padded(x), w, b, stride=2),
    ),
    "transposed": (
        lambda: bayes.ConvTranspose2d(
            2, 3, 3, stride=2, padding=1, padding_type=2, in_width=3, in_height=4
        ),
        (2, 4, 3),
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2)[..., :-1, :-1],
    ),
    "avg": (lambda: bayes.AvgPool2d(3, 1, 1, 1), (2, 4, 5), lambda x, *_: F.avg_pool2d(x, 3, 1, 1)),
    "max": (
        lambda: bayes.MaxPool2d(2, 1, 1, 2),
        (2, 4, 5),
        lambda x, *_: F.max_pool2d(padded(x, -1e9), 2, 1),
    ),
    "rms": (
        lambda: bayes.RMSNorm([6]),
        (6,),
        lambda x, w, _: x * w * (x.detach().square().mean(1, keepdim=True) + 1e-6).rsqrt(),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_variances_go_back_through_squared_derivatives(name):
    make, shape, f = LAYERS[name]
    layer = make()
    layer.move(torch.device("cpu"), torch.float64)
    layer.plan(shape)
    x, slope = drawn(3, *shape, seed=0), drawn(3, *shape, seed=1)
    w = b = torch.zeros(1, dtype=torch.float64)
    if (p := layer.params) is not None:
        p.ensure_deltas()
        w, b = p.mean_w, p.mean_b
    out = layer.forward(Moments(x, x.square(), slope))
    dm, dv = drawn(*out.mean.shape, seed=2), drawn(*out.mean.shape, seed=3)
    back = layer.backward(Delta(dm, dv), to_input=True)
    by_x, by_w, by_b = (
        None if j.numel() == 0 else j.reshape(dm.numel(), -1)
        for j in jacobian(f, (x, w, b if b.numel() else torch.zeros_like(w[:1])))
    )
    close(out.mean, f(x, w, b))
    close(back.mean.flatten(), by_x.T @ dm.flatten() * slope.flatten())
    close(back.var.flatten(), by_x.square().T @ dv.flatten() * slope.flatten().square())
    if p is not None:
        close(p.delta_mean_w.flatten(), by_w.T @ dm.flatten())
        close(p.delta_var_w.flatten(), by_w.square().T @ dv.flatten())
        if p.mean_b.numel():
            close(p.delta_var_b, by_b.square().T @ dv.flatten())


def lstm_by_hand(p, x, vx, dm, dv):
    """One sample: return h and its variance `[T, H]`, the parameters' sums, the input's deltas."""
    w, vw = p.mean_w, p.var_w
    steps, width = x.shape
    h = vh = c = vc = x.new_zeros(w.shape[1])
    outs, trail = [], []
    for t in range(steps):
        a, va = torch.cat([x[t], h]), torch.cat([vx[t], vh])
        z = w @ a + p.mean_b
        vz = (w**2 + vw) @ va + vw @ a**2 + p.var_b
        f, i, g, o = torch.sigmoid(z[0]), torch.sigmoid(z[1]), torch.tanh(z[2]), torch.sigmoid(z[3])
        jf, ji, jg, jo = f * (1 - f), i * (1 - i), 1 - g**2, o * (1 - o)
        vf, vi, vg, vo = jf**2 * vz[0], ji**2 * vz[1], jg**2 * vz[2], jo**2 * vz[3]
        cov = ji * jg * (w[1] * va * w[2]).sum(1)
        mcp, vcp = c, vc
        c = f * mcp + i * g + cov
        vc = vcp * f**2 + vcp * vf + vf * mcp**2 + vg * i**2 + vi * vg + vi * g**2
        vc = vc + cov**2 + 2 * cov * i * g
        ca = torch.tanh(c)
        jc = 1 - ca**2
        vca = jc**2 * vc
        s = [(w[gate] * va * w[3])[:, :width].sum(1) for gate in range(3)]  # columns of x alone
        cov = jc * jo * (s[0] * jf * mcp + s[1] * ji * g + s[2] * jg * i)
        h = o * ca + cov
        vh = vca * o**2 + vca * vo + vo * ca**2 + cov**2 + 2 * cov * o * ca
        outs.append(torch.stack([h, vh]))
        to_c = torch.stack([jf * mcp, ji * g, jg * i, torch.zeros_like(i)])
        to_h = jc * o * to_c
        to_h[3] = jo * ca
        trail.append((a, f, jc * o, to_h, to_c))
    rm = rv = fm = fv = torch.zeros_like(h)
    sums = [torch.zeros_like(t) for t in (w, w, p.mean_b, p.mean_b)]
    back = torch.zeros(2, steps, width, dtype=x.dtype)
    for t in reversed(range(steps)):
        a, f, k, to_h, to_c = trail[t]
        hm, hv = dm[t] + rm, dv[t] + rv
        mean, var = to_h * hm + to_c * fm, to_h**2 * hv + to_c**2 * fv
        for total, part in zip(
            sums, (mean[..., None] * a, var[..., None] * a**2, mean, var), strict=True
        ):
            total += part
        through_h, through_c = (to_h[..., None] * w).sum(0), (to_c[..., None] * w).sum(0)
        m = hm @ through_h + fm @ through_c
        v = hv @ through_h**2 + fv @ through_c**2
        back[:, t] = torch.stack([m[:width], v[:width]])
        rm, rv = m[width:], v[width:]
        fm, fv = f * (k * hm + fm), f**2 * (k**2 * hv + fv)
    return torch.stack(outs, 1), sums, back


def test_an_lstm_over_time():
    batch, steps, width, units = 3, 4, 2, 3
    net = bayes.Sequential(bayes.LSTM(width, units, steps)).double()
    net.input_state_update = True
    p = net.layers[0].params
    p.var_w.copy_(0.3 * drawn(*p.var_w.shape, seed=1).abs())
    p.var_b.copy_(0.2 * drawn(*p.var_b.shape, seed=2).abs())
    x, vx = drawn(batch, steps, width, seed=3), drawn(batch, steps, width, seed=4).abs()
    dm, dv = drawn(batch, steps, units, seed=5), -drawn(batch, steps, units, seed=6).abs()
    out = torch.stack(net(x, vx)).view(2, batch, steps, units)
    net.set_delta_z(dm, dv)
    net.backward()
    found = [torch.as_tensor(t).view(x.shape) for t in net.get_input_states()]
    each = [lstm_by_hand(p, x[n], vx[n], dm[n], dv[n]) for n in range(batch)]
    close(out, torch.stack([states for states, _, _ in each], 1))
    close(torch.stack(found), torch.stack([back for _, _, back in each], 1))
    sums = [sum(parts) for parts in zip(*(sums for _, sums, _ in each), strict=True)]
    close(p.delta_mean_w, sums[0] * p.var_w)
    close(p.delta_var_w, sums[1] * p.var_w**2)
    close(p.delta_mean_b, sums[2] * p.var_b)
    close(p.delta_var_b, sums[3] * p.var_b**2)


def turns(tokens, d):
    """Return the rotation of the pairs of units of each token, `[tokens, d, d]`."""
    angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
    pairs = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    return torch.stack([torch.block_diag(*row) for row in pairs.unflatten(-1, (2, 2))])


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(("causal", "kv_heads"), [(True, 2), (False, 4)])
def test_attention_score_by_score(causal, kv_heads, rope):
    batch, tokens, width, heads = 2, 3, 16, 4
    d, scale = width // heads, 1 / math.sqrt(width // heads)
    layer = bayes.MultiheadAttention(width, heads, kv_heads, causal=causal, use_rope=rope)
    net = bayes.Sequential(layer).double()
    net.input_state_update = True
    p = layer.params
    p.var_w.copy_(0.1 * drawn(*p.var_w.shape, seed=1).abs())
    x, vx = drawn(batch, tokens, width, seed=3), drawn(batch, tokens, width, seed=4).abs()
    dm, dv = drawn(batch, tokens, width, seed=5), -drawn(batch, tokens, width, seed=6).abs()
    out = torch.stack(net(x, vx)).view(2, batch, tokens, heads, d)
    net.set_delta_z(dm, dv)
    net.backward()
    z = x @ p.mean_w.T + p.mean_b
    vz = vx @ (p.mean_w**2 + p.var_w).T + x**2 @ p.var_w.T + p.var_b
    parts = [width, kv_heads * d, kv_heads * d]
    rows = torch.zeros(2, *z.shape, dtype=z.dtype)  # deltas of q, k, v
    (q, k, v), (vq, vk, vv), to = (
        [part.unflatten(-1, (-1, d)) for part in t.split(parts, -1)] for t in (z, vz, rows)
    )
    turn = turns(tokens, d) if rope else torch.eye(d).double().expand(tokens, d, d)
    q, k = (torch.einsum("tij,bthj->bthi", turn, part) for part in (q, k))
    vq, vk = (torch.einsum("tij,bthj->bthi", turn**2, part) for part in (vq, vk))
    for n, h, t in ((n, h, t) for n in range(batch) for h in range(heads) for t in range(tokens)):
        g = h // (heads // kv_heads)
        seen = slice(0, t + 1 if causal else tokens)
        mq, sq = q[n, t, h], vq[n, t, h]
        mk, sk, mv, sv = (part[n, seen, g] for part in (k, vk, v, vv))
        score = Moments(
            (scale * (mk @ mq))[None], (scale**2 * (sk @ sq + mk**2 @ sq + sk @ mq**2))[None]
        )
        share, share_var, slope = (part[0] for part in bayes.Remax().forward(score))
        close(out[0, n, t, h], share @ mv)
        close(out[1, n, t, h], share_var @ sv + share_var @ mv**2 + share**2 @ sv)
        for power, delta in ((1, dm), (2, dv)):
            up = delta[n, t, h * d : (h + 1) * d]
            into = [part[power - 1, n] for part in to]
            down = (scale * slope) ** power * (mv**power @ up)
            into[0][t, h] += down @ mk**power
            into[1][seen, g] += down[:, None] * mq**power
            into[2][seen, g] += share[:, None] ** power * up
    for part in to[:2]:  # of q and k, turned back
        for power in (1, 2):
            back = torch.einsum("tij,bthi->bthj", turn**power, part[power - 1])
            part[power - 1].copy_(back)
    found = [torch.as_tensor(t).view(x.shape) for t in net.get_input_states()]
    close(found[0], rows[0] @ p.mean_w)
    close(found[1], rows[1] @ p.mean_w**2)
    close(p.delta_mean_w, torch.einsum("btr,btc->rc", rows[0], x) * p.var_w)
    close(p.delta_var_w, torch.einsum("btr,btc->rc", rows[1], x**2) * p.var_w**2)
