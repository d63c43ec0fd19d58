"""A net as a whole: shapes, modes, buffers, steps, and what others get wrong."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bayes.nets import condition, learn, observe, trained

from unisono import bayes
from unisono.bayes import (
    LSTM,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    LayerBlock,
    LayerNorm,
    Linear,
    MaxPool2d,
    MultiheadAttention,
    OutputUpdater,
    ReLU,
    ResNetBlock,
    RMSNorm,
    Sequential,
    Tanh,
)


def moved(net, before):
    """Return the keys of layers that changed."""
    return {key for key, value in net.state_dict().items() if value != before[key]}


def test_a_layer_that_stands_in_two_nets_learns_in_both():
    net = Sequential(Linear(2, 3), Tanh(), Linear(3, 1))
    other = Sequential(net[0], Linear(3, 1))  # its memory is the other net's from now on
    for one in (net, other, net):
        before = one.state_dict()
        trained(one, np.ones((4, 2)), np.ones(4))
        assert moved(one, before) == set(before)
        assert net.state_dict()["Linear.0"] == other.state_dict()["Linear.0"]


def test_a_step_does_not_walk_over_the_layers(monkeypatch):
    net = Sequential(Linear(2, 3), ReLU(), Linear(3, 1))
    monkeypatch.setattr(bayes.BaseLayer, "leaves", None)
    monkeypatch.setattr(bayes.BaseLayer, "inner", None)
    trained(net, np.ones((4, 2)), np.ones(4))


def test_arrays_come_back_as_they_were_sent():
    net = Sequential(Linear(3, 2))
    flat = np.arange(6, dtype=np.float64)
    mean, var = net(flat)
    assert isinstance(mean, np.ndarray)
    assert mean.shape == var.shape == (4,)
    assert mean.dtype == np.float32
    for same in (
        flat.reshape(2, 3),
        flat.tolist(),
        np.asfortranarray(flat.reshape(2, 3)),
        flat[::-1][::-1],
    ):
        assert np.array_equal(net(same)[0], mean)
    tensor, _ = net(torch.arange(6.0).view(2, 3))
    assert tensor.shape == (2, 2)
    assert torch.allclose(tensor.flatten(), torch.tensor(mean))
    assert net(torch.arange(6.0))[0].shape == (4,)
    assert net.double()(flat)[0].dtype == np.float64


@pytest.mark.parametrize(
    ("layers", "size"),
    [
        (lambda: [RMSNorm([4])], 4),
        (lambda: [LayerNorm([4])], 4),
        (lambda: [ReLU(), BatchNorm2d(4), Tanh()], 4),
        (lambda: [MultiheadAttention(4, 2)], 4),
        (lambda: [MultiheadAttention(4, 2, seq_len=3), Linear(12, 1)], 12),
        (lambda: [MultiheadAttention(4, 2), Linear(12, 1)], 12),
        (lambda: [LayerBlock(RMSNorm([4]), Linear(4, 2))], 4),
        (lambda: [LSTM(2, 3, 2), Linear(6, 1)], 4),
    ],
)
def test_a_flat_input_is_cut_into_the_samples_of_the_first_layer(layers, size):
    bayes.manual_seed(1)
    net = Sequential(*layers())
    x = np.linspace(-1, 1, 3 * size)
    flat, rows = net(x), net(x.reshape(3, size))
    np.testing.assert_array_equal(flat, rows)
    assert net.output_z_buffer.block_size == 3


@pytest.mark.parametrize("last", [[], [ReLU], [Tanh]])
def test_a_net_goes_on_from_the_states_of_another(last):
    """Two nets, one behind the other, are one net: an encoder and its decoder."""
    x, y = np.linspace(-1, 1, 12).reshape(3, 4), np.linspace(0, 1, 12)
    bayes.manual_seed(2)
    front, back = [Linear(4, 6), ReLU(), Linear(6, 2), *(kind() for kind in last)], [Linear(2, 4)]
    whole = Sequential(*copy.deepcopy(front), *copy.deepcopy(back))
    encoder, decoder = Sequential(*front), Sequential(*back)
    decoder.input_state_update = True
    for _ in range(3):
        encoder(x.reshape(-1))
        mean, var = decoder(encoder.output_z_buffer)
        np.testing.assert_allclose((mean, var), whole(x.reshape(-1)), rtol=1e-6)
        for net in (whole, decoder):
            observe(net, y)
        encoder.input_delta_z_buffer = decoder.output_delta_z_buffer
        encoder.backward()
        for net in (whole, encoder, decoder):
            net.step()
    halves = [*encoder.state_dict().values(), *decoder.state_dict().values()]
    for mine, theirs in zip(halves, whole.state_dict().values(), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    before = decoder.state_dict()
    encoder(x[:0])  # as a rank without rows does
    assert decoder(encoder.output_z_buffer)[0].shape == (0,)
    assert decoder.output_z_buffer.block_size == 0
    condition(decoder, [])
    assert decoder.state_dict() == before
    other = Sequential(Linear(4, 3))
    other(x)
    with pytest.raises(ValueError, match="the net reads 2 per sample"):
        decoder(other.output_z_buffer)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_inputs_and_outputs_are_not_shared_with_the_net(kind):
    net = Sequential(Linear(2, 2))
    x = kind(np.ones((3, 2), np.float32))
    kept = copy.deepcopy(x)
    mean, _ = net(x)
    before = net.get_outputs()[0]
    mean[:] = 99
    assert np.array_equal(net.get_outputs()[0], before)
    x[:] = 7  # after forward: must not reach backward
    observe(net, 0.0)
    other = learn(copy.deepcopy(net), kept, 0.0)
    assert np.array_equal(net[0].delta_mu_w, other[0].delta_mu_w)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batches_of_any_size_follow_each_other(mode):
    net = Sequential(
        Conv2d(1, 2, 3, padding=1, in_width=4, in_height=4),
        BatchNorm2d(2),
        ReLU(),
        MaxPool2d(2, 2),
        Linear(8, 3),
    )
    for batch in (1, 3, 300, 3, 0, 2):
        getattr(net, mode)()
        mean, var = net(np.random.default_rng(batch).normal(size=(batch, 16)))
        assert mean.shape == (3 * batch,)
        assert (var >= 0).all()
        if mode == "train":
            condition(net, 1.0, 1.0)
    assert np.isfinite(net[0].mu_w).all()


def test_the_bound_of_a_step_follows_the_batch():
    for batch, cap in ((1, 0.1), (2, 2.0), (255, 2.0), (256, 3.0)):
        net = Sequential(Linear(1, 1, bias=False))
        net[0].mu_w, net[0].var_w = [0.0], [0.25]
        net(np.ones(batch))
        net.set_delta_z(np.full(batch, 1e6), np.full(batch, -1e6))
        net.backward()
        net.step()
        assert net[0].mu_w[0] == pytest.approx(0.5 / cap, rel=1e-5)
        expected = 0.25 - 0.5 / cap
        assert net[0].var_w[0] == pytest.approx(expected if expected > 0 else 1e-5, rel=1e-4)
        assert net.get_neg_var_w_counter() == {"Linear(1,1)": int(expected <= 0)}


def test_a_second_step_does_nothing_and_reading_copies():
    net = Sequential(Linear(2, 1))
    trained(net, [[1.0, 2.0]], [3.0])
    after = net.state_dict()
    deltas = net[0].delta_mu_w
    deltas[:] = 5
    assert not np.array_equal(net[0].delta_mu_w, deltas)
    net.step()
    assert net.state_dict() == after


def test_deltas_written_by_hand_are_applied_once():
    net = Sequential(Linear(2, 1))
    net[0].mu_w, net[0].var_w = [0.0, 0.0], [1.0, 1.0]
    net[0].delta_mu_w = [0.1, 0.2]
    net.step()
    net.step()
    assert np.allclose(net[0].mu_w, [0.1, 0.2])


def test_parameters_read_as_copies_and_write_in_place():
    layer = Linear(2, 3)
    live = layer.tensors()["mu_w"]
    layer.mu_w = np.arange(6)
    assert live.flatten().tolist() == list(range(6))
    layer.mu_w[0] = 50
    assert layer.mu_w[0] == 0
    before = layer.mu_w
    layer.init_weight_bias()
    assert not np.array_equal(layer.mu_w, before)
    assert (layer.num_weights, layer.num_biases) == (6, 3)


def test_seeds_repeat_and_leave_the_global_generator_alone():
    state = torch.random.get_rng_state()
    bayes.manual_seed(7)
    first = Sequential(Linear(3, 4), Embedding(3, 2)).state_dict()
    bayes.manual_seed(7)
    assert Sequential(Linear(3, 4), Embedding(3, 2)).state_dict() == first
    bayes.manual_seed(8)
    assert Sequential(Linear(3, 4), Embedding(3, 2)).state_dict() != first
    assert torch.equal(state, torch.random.get_rng_state())


def test_start_values_have_the_scale_of_their_method():
    he, xavier = Linear(400, 100, gain_weight=0.5), Linear(400, 100, init_method="Xavier")
    assert he.var_w[0] == pytest.approx(0.25 / 400)
    assert he.mu_w.std() == pytest.approx(400**-0.5, rel=0.05)
    assert xavier.var_w[0] == pytest.approx(2 / 500)
    assert Conv2d(3, 8, 5).var_w[0] == pytest.approx(1 / 75)
    assert LSTM(3, 5, 2).var_w[0] == pytest.approx(1 / 8)
    norm = BatchNorm2d(4, gain_weight=2.0)
    assert norm.mu_w.tolist() == [1] * 4
    assert norm.var_w.tolist() == [1] * 4
    assert norm.var_b.tolist() == [0.25] * 4
    table = Embedding(50, 20, scale=3.0)
    assert table.var_w[0] == 9
    assert table.mu_w.std() == pytest.approx(3, rel=0.1)


FIRST_LAYERS = {
    "batch norm": lambda: Sequential(BatchNorm2d(3), Linear(3, 1)),
    "layer norm": lambda: Sequential(LayerNorm([3]), Linear(3, 1)),
    "rms norm": lambda: Sequential(RMSNorm([3]), Linear(3, 1)),
    "activation": lambda: Sequential(Tanh(), Linear(3, 1)),
    "residual": lambda: Sequential(ResNetBlock(LayerBlock(Linear(3, 3), ReLU())), Linear(3, 1)),
    "block": lambda: Sequential(LayerBlock(Linear(3, 3), ReLU()), Linear(3, 1)),
    "shortcut": lambda: Sequential(
        ResNetBlock(LayerBlock(Linear(3, 4), Tanh()), LayerBlock(Linear(3, 4))), Linear(4, 1)
    ),
    "embedding": lambda: Sequential(Embedding(5, 2, input_size=3), Linear(6, 1)),
    "attention": lambda: Sequential(Linear(3, 8), MultiheadAttention(4, 2), Linear(8, 1)),
    "no biases": lambda: Sequential(Linear(3, 3, bias=False), RMSNorm([3]), Linear(3, 1, False)),
    "two activations": lambda: Sequential(Linear(3, 3), ReLU(), Tanh(), Linear(3, 1)),
    "lstm behind an activation": lambda: Sequential(
        Linear(3, 4), Tanh(), LSTM(2, 3, 2), Linear(6, 1)
    ),
    "norms of the steps of a sequence": lambda: Sequential(
        Linear(3, 4), LSTM(2, 3, 2), RMSNorm([3]), LSTM(3, 2, 2), LayerNorm([2]), Linear(4, 1)
    ),
}


@pytest.mark.parametrize("name", FIRST_LAYERS)
def test_every_layer_of_a_net_learns(name):
    net = FIRST_LAYERS[name]()
    x = (
        np.abs(np.random.default_rng(0).normal(size=(4, 3))).round() % 5
        + (name != "embedding") * 0.3
    )
    before = net.state_dict()
    assert before
    trained(net, x, np.full(4, 3.0))
    assert moved(net, before) == set(before)


def test_missing_targets_change_nothing():
    net = Sequential(Linear(3, 4), ReLU(), Linear(4, 2))
    before = net.state_dict()
    trained(net, np.ones((5, 3)), np.full(10, np.nan))
    assert net.state_dict() == before


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    batch=st.integers(1, 9),
    noise=st.floats(1e-6, 10.0),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["ReLU", "Tanh", "MixtureReLU", "LeakyReLU", "Softplus"]),
)
def test_variances_stay_positive_and_a_permuted_batch_changes_nothing(
    sizes, batch, noise, seed, kind
):
    rng = np.random.default_rng(seed)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [Linear(a, b), getattr(bayes, kind)()]
    net = Sequential(*layers[:-1]).double()
    twin = copy.deepcopy(net)
    for _ in range(3):
        x, y = rng.normal(size=(batch, sizes[0])), 5 * rng.normal(size=(batch, sizes[-1]))
        order = rng.permutation(batch)
        trained(net, x, y, noise)
        trained(twin, x[order], y[order], noise)
    for layer, other in zip(net, twin, strict=True):
        assert (layer.var_w > 0).all()
        assert (layer.var_b > 0).all()
        assert np.allclose(layer.mu_w, other.mu_w, atol=1e-8)
        assert np.allclose(layer.var_w, other.var_w, atol=1e-8)


def test_images_need_not_be_square():
    net = Sequential(
        Conv2d(2, 4, 3, padding=1, in_width=8, in_height=6),
        ReLU(),
        AvgPool2d(2),
        ResNetBlock(
            LayerBlock(Conv2d(4, 6, 3, padding=1), BatchNorm2d(6), ReLU()), Conv2d(4, 6, 1)
        ),
        MaxPool2d(2, 1),
        ConvTranspose2d(6, 2, 2, stride=2),
        LayerNorm([2, 6, 4]),
        Linear(48, 2),
    )
    infos = net.get_layer_stack_info().splitlines()
    assert infos[0] == "Conv2d(2,4,8,6,3)"
    assert infos[2] == "AvgPool2d(4,4,4,3,2)"
    assert infos[3] == "ResNetBlock(48,72)"
    assert infos[4] == "MaxPool2d(6,6,3,2,2)"
    assert infos[5] == "ConvTranspose2d(6,2,6,4,2)"
    before = net.state_dict()
    assert net(torch.randn(3, 2, 6, 8))[0].shape == (3, 2)
    trained(net, np.random.default_rng(0).normal(size=(3, 96)), np.ones(6), 1.0)
    assert moved(net, before) == set(before)


def test_sizes_of_images_come_from_the_input_if_nobody_told():
    net = Sequential(Conv2d(1, 2, 3), ReLU(), AvgPool2d(2))
    assert set(net.state_dict()) == {"Conv2d.0"}
    net.preinit_layer()
    assert net(torch.randn(2, 1, 6, 8))[0].shape == (2, 2 * 2 * 3)
    assert net(torch.randn(2, 1, 8, 8))[0].shape == (2, 2 * 3 * 3)
    assert net(np.zeros(64))[0].shape == (18,)  # the last size is remembered for flat input


def test_predict_leaves_everything_as_it_was():
    net = Sequential(LSTM(1, 3, 1), BatchNorm2d(3), Linear(3, 1))
    net([[0.5]])
    OutputUpdater("cpu").update(net.output_z_buffer, [1.0], 0.1, net.input_delta_z_buffer)
    twin = copy.deepcopy(net)
    mean, std = net.predict(np.ones((7, 1)), batch_size=3)
    assert mean.shape == std.shape == (7, 1)
    assert net.get_lstm_states() == twin.get_lstm_states()
    for one in (net, twin):  # the forward pass before still can be gone back through
        one.backward()
        one.step()
    assert net.state_dict(running=True) == twin.state_dict(running=True)


def test_the_input_can_be_inferred():
    net = Sequential(Linear(1, 1))
    net[0].mu_w, net[0].mu_b, net[0].var_w, net[0].var_b = [2.0], [0.0], [1e-9], [1e-9]
    net.input_state_update = True
    net([0.0], [1.0])
    observe(net, 4.0, 1e-6)
    mean, var = net.input_states_posterior()
    assert mean[0] == pytest.approx(2.0, rel=1e-3)
    assert var[0] < 1e-3


def test_buffers_have_exact_sizes():
    net = Sequential(Linear(3, 5), ReLU(), Linear(5, 2))
    net(np.ones(12))
    z = net.output_z_buffer
    assert (z.size, z.block_size, z.actual_size) == (8, 4, 2)
    assert (net.z_buffer_size, net.z_buffer_block_size) == (20, 4)
    assert len(net.output_to_host()) == 8
    net.set_delta_z(np.ones(9), np.ones(9))  # a longer tail is ignored
    net.backward()
    assert len(net.delta_z_to_host()) == 8
    delta = bayes.BaseDeltaStates(4, 2)
    delta.copy_from(net.input_delta_z_buffer, 3)
    assert delta.delta_mu.tolist() == [1, 1, 1]
    delta.reset_zeros()
    assert delta.delta_var.tolist() == [0, 0, 0]
    states = bayes.BaseHiddenStates()
    states.set_input_x([1.0, 2.0], None, 2)
    assert (states.jcb.tolist(), states.var_a.tolist(), states.actual_size) == ([1, 1], [0, 0], 1)
    assert states.get_name() == "BaseHiddenStates"


def test_thread_counts_are_written_down_and_change_nothing():
    nets = [Sequential(Linear(3, 4), BatchNorm2d(4), Linear(4, 1)) for _ in range(2)]
    nets[1].params_from(nets[0])
    nets[1].set_threads(8)
    for net in nets:
        trained(net, np.arange(12.0).reshape(4, 3), np.ones(4))
    assert nets[0].state_dict(running=True) == nets[1].state_dict(running=True)
    assert nets[1][0].num_threads == 8
    assert torch.get_num_threads() == 1


def test_the_first_training_batch_becomes_the_running_values():
    net = Sequential(BatchNorm2d(2, momentum=0.9))
    x = np.array([[1.0, 2.0], [3.0, 6.0]])
    net(x)
    key = "BatchNorm2d()_0"
    assert net.get_norm_mean_var()[key][0] == [[2.0, 4.0]]
    assert net.get_norm_mean_var()[key][1] == [[2.0, 8.0]]
    net(x + 1)
    assert np.allclose(net.get_norm_mean_var()[key][0], [[2.1, 4.1]])


def test_padding_of_an_embedding_never_moves():
    net = Sequential(Embedding(4, 2, input_size=3, padding_idx=0), Linear(6, 1))
    table = net[0].mu_w
    mean, var = net.layers[0].forward(bayes.moments.Moments(torch.tensor([[0.0, 1.0, 1.0]])))[:2]
    assert mean[0, :2].tolist() == [0, 0]
    assert var[0, :2].tolist() == [0, 0]
    trained(net, [[0, 1, 1], [0, 3, 0]], [2.0, -1.0])
    after = net[0].mu_w
    assert np.array_equal(after[:2], table[:2])
    assert (after[2:4] != table[2:4]).all()
    assert np.array_equal(after[4:6], table[4:6])  # row 2 did not occur


def test_attention_masks_the_future():
    net = Sequential(MultiheadAttention(4, 2, seq_len=3))
    x = torch.randn(2, 3, 4)
    first, _ = net(x)
    changed = x.clone()
    changed[:, 2] += 1
    second, _ = net(changed)
    assert torch.equal(first.view(2, 3, 4)[:, :2], second.view(2, 3, 4)[:, :2])
    scores, var = net.get_attention_scores()[0]
    assert scores.shape == var.shape == (2, 2, 3, 3)
    assert (np.triu(scores[0, 0], 1) == 0).all()
    assert np.allclose(scores.sum(-1), 1, atol=1e-5)
    free = Sequential(MultiheadAttention(4, 2, causal=False))
    free(x)
    assert (free.get_attention_scores()[0][0] > 0).all()


def test_the_tree_and_the_trace_are_readable(capsys):
    net = Sequential(
        Linear(3, 4), ReLU(), ResNetBlock(LayerBlock(Linear(4, 4), ReLU())), Linear(4, 1)
    )
    text = repr(net)
    assert "(2) ResNetBlock(4,4)" in text
    assert f"{net.num_parameters():,} parameters" in text
    assert net.num_parameters() == 16 + 20 + 5
    assert (len(net), net[1], next(iter(net))) == (4, net.layers[1], net.layers[0])
    with net.trace() as trace:
        for _ in range(3):
            trained(net, np.ones((2, 3)), [50.0, 50.0], 1e-6)
    printed = capsys.readouterr().out
    assert "Linear.main.2.0" in printed
    assert trace.steps == 3
    assert trace.push[-1] / 3 > 1  # the noise is far too small: updates hit their bound


def test_a_net_goes_to_torch_and_back():
    net = Sequential(
        Conv2d(1, 2, 3, padding=1, in_width=6, in_height=6),
        BatchNorm2d(2),
        ReLU(),
        MaxPool2d(2, 2),
        Linear(18, 4),
        Tanh(),
        Linear(4, 1),
    )
    trained(net, np.random.default_rng(0).normal(size=(4, 36)), np.ones(4), 1.0)
    model = bayes.to_torch(net)
    x = torch.randn(3, 1, 6, 6)
    assert torch.allclose(model(x), net.eval() or net(x)[0], atol=1e-5)
    again = bayes.from_torch(model, var=0.01)
    again.eval()
    assert torch.allclose(again(x)[0], model(x), atol=1e-5)
    assert np.allclose(again[0].var_w, 0.01)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_takes_a_batch_without_rows(heads):
    net = Sequential(MultiheadAttention(8, *heads, use_rope=True), Linear(24, 1))
    trained(net, np.ones((2, 3, 8)), [1.0, 2.0])
    before = net.state_dict()
    trained(net, np.ones((0, 3, 8)), [])
    assert net.state_dict() == before
    assert net.predict(np.ones((0, 3, 8)))[0].shape == (0, 1)


def test_a_shortcut_before_a_convolution_padded_on_one_side_goes_back():
    def net(size, padding_type):
        kernel = Conv2d(1, 1, size, True, 1, 1, padding_type, in_width=4, in_height=4)
        return Sequential(Linear(3, 16), ResNetBlock(Linear(16, 16)), kernel)

    one_sided, both = net(2, 2), net(3, 1)
    for kept, taken in zip(one_sided.leaves(), both.leaves(), strict=True):
        for name, tensor in taken[1].tensors().items():
            value = kept[1].tensors()[name]
            if value.dim() == 4:  # the same kernel, with zeros on the left and on top
                value = torch.nn.functional.pad(value, (1, 0, 1, 0))
            tensor.copy_(value)
    for one in (one_sided, both):
        trained(one, np.random.default_rng(0).normal(size=(2, 3)), np.ones(32))
    for kept, taken in list(zip(one_sided.parameters(), both.parameters(), strict=True))[:2]:
        assert np.allclose(np.concatenate(kept), np.concatenate(taken), atol=1e-6)
