"""Recurrent nets: states that are carried, set and smoothed; sequences; forecasting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.bayes.nets import condition, same_parameters

from unisono.bayes import (
    LSTM,
    SLSTM,
    BatchNorm2d,
    LayerBlock,
    Linear,
    ResNetBlock,
    Sequential,
    SLinear,
)
from unisono.errors import UnisonoError


def test_a_batch_without_rows_goes_through_and_changes_nothing():
    net = Sequential(LSTM(2, 3, 4), Linear(12, 1))
    before = net.state_dict()
    assert net(np.zeros((0, 8)))[0].shape == (0,)
    condition(net, [])
    assert net.state_dict() == before
    net(np.ones((2, 8)))
    condition(net, [1.0, 1.0])
    assert net.state_dict() != before


def test_the_output_is_all_time_steps_and_steps_depend_on_the_past():
    net = Sequential(LSTM(2, 3, 4))
    x = torch.randn(5, 4, 2)
    mean, var = net(x)
    assert mean.shape == (5, 12)
    assert (var > 0).all()
    changed = x.clone()
    changed[:, 0] += 1
    other, _ = net(changed)
    assert (mean[:, 9:] != other[:, 9:]).any()
    late = x.clone()
    late[:, 3] += 1
    assert torch.equal(net(late)[0][:, :9], mean[:, :9])


def test_a_sequence_is_the_same_steps_one_by_one():
    whole = Sequential(LSTM(2, 3, 4, stateful=False)).double()
    single = Sequential(LSTM(2, 3, 1, stateful=True)).double()
    single.load_state_dict(whole.state_dict())
    x = torch.randn(5, 4, 2, dtype=torch.float64)
    mean, var = whole(x)
    single.eval()
    for t in range(4):
        step_mean, step_var = single(x[:, t])
        assert torch.allclose(step_mean, mean.view(5, 4, 3)[:, t], atol=1e-12)
        assert torch.allclose(step_var, var.view(5, 4, 3)[:, t], atol=1e-12)


def test_online_use_carries_and_batches_start_at_zero():
    online = Sequential(LSTM(1, 2, 1))
    first = online([1.0])[0]
    assert not np.array_equal(online([1.0])[0], first)
    online.reset_lstm_states()
    assert np.array_equal(online([1.0])[0], first)
    batch = Sequential(LSTM(1, 2, 3))
    x = np.ones((4, 3))
    assert np.array_equal(batch(x)[0], batch(x)[0])
    never = Sequential(LSTM(1, 2, 1, stateful=False))
    assert np.array_equal(never([1.0])[0], never([1.0])[0])


def test_states_can_be_read_and_set():
    net = Sequential(LSTM(1, 2, 1), Linear(2, 1))
    net.eval()
    net([0.3])
    states = net.get_lstm_states()
    assert set(states) == {0}
    assert [len(part) for part in states[0]] == [2, 2, 2, 2]
    follow = net([0.7])[0]
    net.set_lstm_states(states)
    assert np.array_equal(net([0.7])[0], follow)


def test_backward_replaces_the_carried_state_by_its_posterior():
    net = Sequential(LSTM(1, 2, 1), Linear(2, 1))
    net([0.3])
    prior = net.get_lstm_states()[0]
    condition(net, [5.0])
    posterior = net.get_lstm_states()[0]
    assert posterior != prior
    assert sum(posterior[1]) < sum(prior[1])  # an observation takes uncertainty away


def test_another_batch_size_is_refused_while_states_are_carried():
    net = Sequential(LSTM(1, 2, 3, stateful=True))
    net(np.ones((4, 3)))
    with pytest.raises(UnisonoError, match="2 != 4"):
        net(np.ones((2, 3)))
    net.reset_lstm_states()
    net(np.ones((2, 3)))


def test_a_change_of_batch_size_resets_automatic_states():
    net = Sequential(LSTM(1, 2, 1))
    fresh = net([1.0])[0]
    net([1.0])
    net([[1.0], [1.0]])
    net.reset_lstm_states()
    assert np.array_equal(net([1.0])[0], fresh)


def smoothable():
    return Sequential(SLSTM(1, 4, 1), SLSTM(4, 3, 1), SLinear(3, 2))


def test_the_last_smoothed_state_is_the_current_one():
    net = smoothable()
    for t in range(6):
        net([np.sin(t)])
        condition(net, [np.cos(t), 1.0])
    current = net.get_lstm_states()
    mean, var = net.smoother()
    assert mean.shape == var.shape == (12,)
    assert (var > 0).all()
    last = net.get_lstm_states(5)
    for n in (0, 1):
        assert np.allclose(last[n], current[n], atol=1e-6)
    assert net.get_lstm_states() == {}
    assert np.array_equal(net.get_outputs_smoother()[0], mean)
    with pytest.raises(UnisonoError, match="6 >= 6"):
        net.get_lstm_states(6)


def test_smoothing_takes_uncertainty_away():
    net = smoothable()
    filtered = []
    for t in range(12):
        net([np.sin(0.5 * t)])
        condition(net, [np.sin(0.5 * t + 0.5), np.nan], 0.01)
        filtered.append(sum(net.get_lstm_states()[1][1]))
    net.smoother()
    smoothed = [sum(net.get_lstm_states(t)[1][1]) for t in range(12)]
    assert np.mean(smoothed) < np.mean(filtered)


def test_limits_of_smoothing_are_told():
    net = smoothable()
    with pytest.raises(UnisonoError, match="2 SLSTM layers with"):
        net.smoother()
    with pytest.raises(UnisonoError, match="0 SLSTM"):
        Sequential(Linear(1, 1)).smoother()
    net.num_samples = 2
    net([0.0])
    net([0.0])
    with pytest.raises(UnisonoError, match="3 > 2"):
        net([0.0])
    with pytest.raises(UnisonoError, match="2 != 1"):
        net(np.zeros(2))
    with pytest.raises(UnisonoError, match="5 != 1"):
        SLSTM(1, 2, 5)


def nested(kind):
    return Sequential(LayerBlock(kind(1, 4, 1), kind(4, 3, 1)), Linear(3, 2))


def test_layers_in_a_block_carry_and_travel_as_plain_ones(tmp_path):
    net, plain = nested(LSTM), Sequential(LSTM(1, 4, 1), LSTM(4, 3, 1), Linear(3, 2))
    same_parameters(plain, net)
    for one in (net, plain):
        one([1.0])
        condition(one, [1.0, 2.0])
    states = net.get_lstm_states()
    assert list(states) == ["0.0", "0.1"]
    assert list(states.values()) == list(plain.get_lstm_states().values())
    net.save(tmp_path / "net.pt")
    other = nested(LSTM)
    other.load(tmp_path / "net.pt")
    want = net.predict([0.5])[0]
    assert np.array_equal(other.predict([0.5])[0], want)
    net.reset_lstm_states()
    assert net.get_lstm_states() == {}
    assert not np.array_equal(net.predict([0.5])[0], want)
    net.set_lstm_states(states)
    assert np.array_equal(net.predict([0.5])[0], want)


def test_a_layer_in_a_branch_has_the_path_of_its_key():
    net = Sequential(Linear(1, 2), ResNetBlock(LayerBlock(LSTM(2, 2, 1), Linear(2, 2))))
    net([1.0])
    assert list(net.get_lstm_states()) == ["main.1.0"]
    assert "LSTM.main.1.0" in net.state_dict()


def test_smoothing_reaches_into_blocks():
    net, plain = nested(SLSTM), Sequential(SLSTM(1, 4, 1), SLSTM(4, 3, 1), Linear(3, 2))
    same_parameters(plain, net)
    net.num_samples = 4
    assert net.num_samples == 4
    for t in range(4):
        for one in (net, plain):
            one([np.sin(t)])
            condition(one, [np.cos(t), 1.0])
    with pytest.raises(UnisonoError, match="5 > 4"):
        net([0.0])
    assert np.array_equal(net.smoother(), plain.smoother())
    assert net.get_lstm_states(2)["0.1"] == plain.get_lstm_states(2)[1]


def test_norms_in_blocks_behind_the_last_layer_are_not_trained_by_the_smoother():
    net = Sequential(SLSTM(1, 3, 1), LayerBlock(BatchNorm2d(3), Linear(3, 1)))
    for t in range(3):
        net([np.sin(t)])
        condition(net, [1.0])
    before = net.state_dict(running=True)
    net.smoother()
    assert net.state_dict(running=True) == before


def test_a_series_may_change_its_dtype_on_the_way():
    net, double = smoothable(), smoothable().double()
    double.params_from(net)
    for t in range(6):
        if t == 3:
            net.double()
        for one in (net, double):
            one([np.sin(t)])
            condition(one, [np.cos(t), 1.0])
    assert np.allclose(net.smoother(), double.smoother(), atol=1e-5)
    net.float()
    assert np.float32(net.get_lstm_states(2)[0][0][0]) == net.get_lstm_states(2)[0][0][0]


def test_a_forecast_of_a_sine_is_good_and_knows_its_error():
    t = np.arange(300)
    series = np.sin(0.3 * t) + 0.02 * np.random.default_rng(0).normal(size=300)
    windows = np.lib.stride_tricks.sliding_window_view(series, 9)
    x, y = windows[:, :8], windows[:, 8]
    net = Sequential(LSTM(1, 8, 8), Linear(64, 1))
    for epoch in range(6):
        order = np.random.default_rng(epoch).permutation(230)
        for rows in np.array_split(order, 23):
            net(x[rows])
            condition(net, y[rows], 0.05**2 + 0.5 * 0.5**epoch)
    mean, std = net.predict(x[240:])
    assert np.sqrt(np.mean((mean[:, 0] - y[240:]) ** 2)) < 0.15
    assert (std > 0).all()
