"""Nets to `torch.nn` and back: the same numbers, or a refusal by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono import bayes
from unisono.errors import UnisonoError

REFUSED = {
    "output_padding": lambda: nn.ConvTranspose2d(1, 1, 3, stride=2, output_padding=1),
    "padding_mode": lambda: nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
    "groups": lambda: nn.Conv2d(2, 2, 3, groups=2),
    "dilation": lambda: nn.MaxPool2d(2, dilation=2),
    "ceil_mode": lambda: nn.AvgPool2d(2, ceil_mode=True),
    "return_indices": lambda: nn.MaxPool2d(2, return_indices=True),
    "count_include_pad": lambda: nn.AvgPool2d(2, padding=1, count_include_pad=False),
    "divisor_override": lambda: nn.AvgPool2d(2, divisor_override=3),
    "kernel_size": lambda: nn.Conv2d(1, 1, (2, 3)),
    "padding": lambda: nn.Conv2d(1, 1, 3, padding="same"),
    "track_running_stats": lambda: nn.BatchNorm2d(2, track_running_stats=False),
    "affine": lambda: nn.BatchNorm1d(2, affine=False),
    "start_dim": lambda: nn.Flatten(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_without_a_counterpart_is_refused_by_name(name):
    part = REFUSED[name]()
    with pytest.raises(UnisonoError, match=rf"{type(part).__name__}\({name}=(.|\n)*HINT: .*{name}"):
        bayes.from_torch(nn.Sequential(part))


@torch.no_grad()
def test_what_can_be_expressed_gives_the_numbers_of_torch():
    module = nn.Sequential(
        nn.ConvTranspose2d(1, 2, 3, stride=2, padding=1),
        nn.AvgPool2d(3, stride=2, padding=1),
        nn.MaxPool2d((2, 2), stride=(2, 2)),
        nn.AvgPool2d(1, count_include_pad=False),
        nn.Flatten(),
        nn.RMSNorm(4),
        nn.Linear(8, 3),
        nn.RMSNorm(3, eps=0.1),
    ).double()
    x = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    module[5] = nn.Sequential(nn.Unflatten(1, (2, 4)), module[5], nn.Flatten())
    want = module(x)
    module[5] = module[5][1]
    net = bayes.from_torch(module, var=0.01)
    got, _ = net.predict(x)
    assert got.dtype == torch.float64
    assert torch.allclose(got, want, atol=1e-12)
    assert torch.allclose(net.to_torch()(x), want, atol=1e-12)


def test_a_pool_whose_padding_is_switched_off_has_none_in_torch():
    net = bayes.Sequential(
        bayes.Conv2d(1, 1, 3, in_width=6, in_height=6), bayes.AvgPool2d(2, 2, 1, 3)
    )
    x = torch.randn(1, 1, 6, 6)
    assert torch.allclose(net.to_torch()(x).flatten(1), net.predict(x)[0], atol=1e-6)


def test_root_mean_squares_of_images_keep_their_shape():
    net = bayes.Sequential(
        bayes.Conv2d(1, 2, 3, in_width=6, in_height=4),
        bayes.RMSNorm([4]),
        bayes.AvgPool2d(2, 2),
    )
    x = torch.randn(3, 1, 4, 6)
    net(x)
    assert torch.allclose(net.to_torch()(x).flatten(1), net.predict(x)[0], atol=1e-6)


def test_the_global_random_numbers_stay_where_they_were():
    net = bayes.Sequential(
        bayes.Conv2d(1, 2, 3, in_width=6, in_height=6), bayes.ReLU(), bayes.Linear(32, 2)
    )
    before = torch.get_rng_state()
    module = bayes.to_torch(net)
    bayes.from_torch(module)
    assert torch.equal(torch.get_rng_state(), before)
