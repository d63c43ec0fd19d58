"""A refused input leaves the net as it was: sizes, statistics, states and memories."""

from __future__ import annotations

import numpy as np
import pytest
from tests.bayes.nets import condition

from unisono.bayes import (
    LSTM,
    SLSTM,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Embedding,
    Linear,
    MultiheadAttention,
    ReLU,
    Sequential,
    SLinear,
)
from unisono.errors import UnisonoError


@pytest.mark.parametrize(("good", "bad"), [((6, 6), (4, 9)), ((8, 8), (7, 7))])
def test_an_image_that_does_not_fit_leaves_the_sizes(good, bad):
    net = Sequential(Conv2d(1, 2, 3, padding=1), ReLU(), AvgPool2d(2, 2))
    x = np.random.default_rng(0).normal(size=(1, 1, *good))
    mean, infos = net(x)[0], net.get_layer_stack_info()
    for refuses in (net, net.predict):
        with pytest.raises(UnisonoError, match="not whole"):
            refuses(np.zeros((1, 1, *bad)))
        assert net.get_layer_stack_info() == infos
        assert np.array_equal(net(x)[0], mean)
    condition(net, np.ones(len(mean)))


@pytest.mark.parametrize(
    ("layers", "good", "bad", "told"),
    [
        (lambda: [Linear(2, 3), BatchNorm2d(3), SLSTM(3, 2, 1), SLinear(2, 1)], 1, 2, "2 != 1"),
        (lambda: [BatchNorm2d(2), LSTM(2, 2, 1, stateful=True)], 2, 3, "3 != 2"),
    ],
)
def test_a_layer_that_refuses_leaves_statistics_and_carried_states(layers, good, bad, told):
    net = Sequential(*layers())
    x = np.arange(6.0).reshape(3, 2)
    net(x[:good])
    before, states = net.state_dict(running=True), net.get_lstm_states()
    with pytest.raises(UnisonoError, match=told):
        net(x[:bad])
    assert net.state_dict(running=True) == before
    assert net.get_lstm_states() == states
    condition(net, 1.0)  # of the step before


def test_a_step_that_a_later_layer_refuses_is_not_in_the_history():
    net = Sequential(SLSTM(1, 2, 1), Linear(2, 1), ReLU(), Embedding(1, 1), Linear(1, 1))
    net[1].mu_w, net[1].mu_b = [0.0, 0.0], [0.0]
    net([1.0])
    net[1].mu_b = [5.0]
    states = net.get_lstm_states()
    with pytest.raises(UnisonoError, match="Embedding"):
        net([1.0])
    assert len(net[0].history) == 1
    assert net.get_lstm_states() == states


def test_deltas_survive_an_index_out_of_range():
    net, twin = (Sequential(Embedding(3, 2), Linear(2, 1)) for _ in range(2))
    twin.params_from(net)
    for one in (net, twin):
        one([[1]])
        one.set_delta_z([1.0], [-0.1])
    with pytest.raises(UnisonoError, match="0 to 2"):
        net([[7]])
    for one in (net, twin):
        one.backward()
        one.step()
    assert net.state_dict() == twin.state_dict()


def test_a_prediction_between_forward_and_backward_disturbs_no_attention():
    net, twin = (Sequential(MultiheadAttention(4, 2), Linear(8, 1)) for _ in range(2))
    twin.params_from(net)
    x = np.random.default_rng(0).normal(size=(3, 2, 4))
    for one in (net, twin):
        one(x)
        if one is net:
            one.predict(-x)
        condition(one, np.ones(3))
    assert net.state_dict() == twin.state_dict()


def converted(net):
    net.double()


def smoothed(net):
    net.smoother()


@pytest.mark.parametrize("forgets", [converted, smoothed])
def test_a_forgotten_forward_is_told(forgets):
    net = Sequential(SLSTM(1, 2, 1), SLinear(2, 1))
    net([1.0])
    condition(net, [1.0])
    net([2.0])
    net.set_delta_z([1.0], [-0.1])
    forgets(net)
    with pytest.raises(UnisonoError, match=r"HINT: net\.train\(\)"):
        net.backward()


def test_the_posterior_of_an_input_is_that_of_the_backward_pass():
    net = Sequential(Linear(2, 1))
    net.input_state_update = True
    net([[1.0, 2.0]], [[0.5, 0.5]])
    condition(net, [3.0])
    mean, var = net.input_states_posterior()
    net.eval()
    net([[100.0, 200.0]], [[0.7, 0.7]])
    assert np.array_equal(net.input_states_posterior(), (mean, var))
