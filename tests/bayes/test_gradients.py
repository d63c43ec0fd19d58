"""Without variance, deltas of means are the gradients that autograd computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono import bayes


def means_only(net):
    """Return the net in float64 with all variances zero, and the parameters' live tensors."""
    net.double()
    for p in net.arena.members:
        p.var_w.zero_()
        p.var_b.zero_()
    return net


def deltas_over_variance(net, x, grad):
    """Run the net backwards from minus a loss gradient; return the sums before the variance."""
    net(x)
    net.set_delta_z(-grad, torch.zeros_like(grad))
    for p in net.arena.members:  # sums are multiplied by the variance: make that 1
        p.var_w.fill_(1.0)
        p.var_b.fill_(1.0)
    net.backward()
    return {
        key: (layer.params.delta_mean_w.clone(), layer.params.delta_mean_b.clone())
        for key, layer in net.leaves()
        if layer.params is not None
    }


def compare(net, model, x, pairs):
    """Compare all deltas with the gradients of `0.5 |output|^2` of a torch model."""
    out = model(x)
    (0.5 * out.square().sum()).backward()
    found = deltas_over_variance(net, x, out.detach().reshape(-1))
    for key, module in pairs.items():
        weight, bias = found[key]
        assert torch.allclose(-weight, module.weight.grad.view_as(weight), atol=1e-10), key
        if bias.numel():
            assert torch.allclose(-bias, module.bias.grad.view_as(bias), atol=1e-10), key


CONV = {
    "conv": lambda: bayes.Conv2d(1, 3, 3, padding=1, in_width=6, in_height=5),
    "stride": lambda: bayes.Conv2d(1, 3, 2, stride=2, in_width=6, in_height=4),
    "transposed": lambda: bayes.ConvTranspose2d(
        1, 3, 3, stride=2, padding=1, in_width=4, in_height=3
    ),
}


@pytest.mark.parametrize("kind", CONV)
@pytest.mark.parametrize("pool", [None, "avg", "max"])
def test_convolutions_and_pools(kind, pool):
    first = CONV[kind]()
    layers = [first, bayes.Tanh()]
    if pool is not None:
        layers.append(bayes.AvgPool2d(2, 1) if pool == "avg" else bayes.MaxPool2d(2))
    channels, height, width = first.out_channels, first.out_height, first.out_width
    if pool:
        height, width = height - 1, width - 1
    layers += [bayes.Linear(channels * height * width, 2)]
    net = means_only(bayes.Sequential(*layers))
    model = bayes.to_torch(net)
    x = torch.randn(3, 1, first.in_height, first.in_width, dtype=torch.float64)
    last = len(layers) - 1
    pairs = {f"{first.get_layer_name()}.0": model[0], f"Linear.{last}": model[-1]}
    compare(net, model.requires_grad_(), x, pairs)


@pytest.mark.parametrize("steps", [1, 4])
def test_lstm_over_time(steps):
    net = means_only(
        bayes.Sequential(
            bayes.LSTM(3, 5, steps, stateful=False), bayes.LSTM(5, 4, steps, stateful=False)
        )
    )
    model = nn.LSTM(3, 5, batch_first=True).double()
    second = nn.LSTM(5, 4, batch_first=True).double()
    order = [1, 0, 2, 3]  # torch has i, f, g, o
    for lstm, layer in zip((model, second), net.layers, strict=True):
        width = layer.input_size
        w = layer.params.mean_w[order].flatten(0, 1)
        with torch.no_grad():
            lstm.weight_ih_l0.copy_(w[:, :width])
            lstm.weight_hh_l0.copy_(w[:, width:])
            lstm.bias_ih_l0.copy_(layer.params.mean_b[order].flatten())
            lstm.bias_hh_l0.zero_()
    x = torch.randn(6, steps, 3, dtype=torch.float64, requires_grad=True)
    out = second(model(x)[0])[0]
    (0.5 * out.square().sum()).backward()
    net.input_state_update = True
    mean, _ = net(x.detach())
    assert torch.allclose(mean, out.detach().flatten(1), atol=1e-12)
    found = deltas_over_variance(net, x.detach(), out.detach().reshape(-1))
    for n, lstm in enumerate((model, second)):
        weight, bias = found[f"LSTM.{n}"]
        want = torch.cat([lstm.weight_ih_l0.grad, lstm.weight_hh_l0.grad], 1)
        want = want.view(4, weight.shape[1], -1)[order]
        assert torch.allclose(-weight, want, atol=1e-12)
        assert torch.allclose(-bias, lstm.bias_ih_l0.grad.view(4, -1)[order], atol=1e-12)
    back = torch.as_tensor(net.get_input_states()[0]).view(x.shape)
    assert torch.allclose(-back, x.grad, atol=1e-12)


@pytest.mark.parametrize("with_shortcut", [False, True])
def test_residual_blocks(with_shortcut):
    main = bayes.LayerBlock(bayes.Linear(4, 6), bayes.Tanh(), bayes.Linear(6, 4), bayes.Tanh())
    shortcut = bayes.Linear(4, 4) if with_shortcut else None
    net = means_only(
        bayes.Sequential(
            bayes.Linear(3, 4),
            bayes.Sigmoid(),
            bayes.ResNetBlock(main, shortcut),
            bayes.Linear(4, 1),
        )
    )
    tensors = {key: layer.params for key, layer in net.leaves() if layer.params is not None}
    leaf = {
        key: (p.mean_w.clone().requires_grad_(), p.mean_b.clone().requires_grad_())
        for key, p in tensors.items()
    }

    def line(key, x):
        return nn.functional.linear(x, *leaf[key])

    x = torch.randn(5, 3, dtype=torch.float64)
    a = torch.sigmoid(line("Linear.0", x))
    b = torch.tanh(line("Linear.main.2.2", torch.tanh(line("Linear.main.2.0", a))))
    out = line("Linear.3", b + (line("Linear.shortcut.2", a) if with_shortcut else a))
    (0.5 * out.square().sum()).backward()
    found = deltas_over_variance(net, x, out.detach().reshape(-1))
    assert set(found) == set(leaf)
    for key, (weight, bias) in found.items():
        assert torch.allclose(-weight, leaf[key][0].grad, atol=1e-10), key
        assert torch.allclose(-bias, leaf[key][1].grad, atol=1e-10), key
