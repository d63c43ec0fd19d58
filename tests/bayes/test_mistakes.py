"""Bad input is answered in sentences with numbers, and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unisono import bayes
from unisono.bayes import (
    AvgPool2d,
    Conv2d,
    ConvTranspose2d,
    DDPConfig,
    DDPSequential,
    Embedding,
    EvenExp,
    Linear,
    MultiheadAttention,
    OutputUpdater,
    ReLU,
    Sequential,
)
from unisono.errors import MissingExtra, PlatformError, UnisonoError


def net_of(inputs=7, outputs=2):
    return Sequential(Linear(inputs, outputs))


def updated(outputs, y, var_y=1.0, method="update", rows=3, **more):
    net = net_of(2, outputs)
    net(np.ones((rows, 2)))
    arguments = {"mu_obs": y, "var_obs": var_y, **more}
    if method == "update_heteros":
        del arguments["var_obs"]
    getattr(OutputUpdater("cpu"), method)(
        net.output_z_buffer, delta_states=net.input_delta_z_buffer, **arguments
    )


def evaluated():
    net = net_of()
    net.eval()
    net(np.ones(7))
    return net


def forwarded():
    net = net_of()
    net(np.ones(7))
    return net


def smoothed_branch():
    net = Sequential(bayes.ResNetBlock(bayes.SLSTM(1, 1, 1)))
    net([1.0])
    net.smoother()


CASES = {
    "size": (lambda: net_of()(np.ones(30)), [r"30 = 4\*7 \+ 2", "HINT: shape"]),
    "shape": (lambda: net_of()(np.ones((6, 5))), [r"\(6, 5\)", r"\[batch, 7\]"]),
    "row": (
        lambda: Sequential(Linear(2, 4), ReLU()).predict(np.ones((4, 3))),
        [r"\(4, 3\)", "3 != 2", r"HINT: shape \[batch, 2\], or flat"],
    ),
    "narrow row": (lambda: net_of(4)(np.ones((6, 2))), ["2 != 4"]),
    "image row": (
        lambda: Sequential(Conv2d(1, 1, 3, in_width=4, in_height=4))(np.ones((2, 32))),
        ["32 != 16"],
    ),
    "small images": (
        lambda: Sequential(Conv2d(1, 1, 3, in_width=4, in_height=4))(np.ones((4, 1, 2, 2))),
        [r"1 \* 2 \* 2 = 4 != 16", r"HINT: shape \[batch, 1, 4, 4\]"],
    ),
    "x nan": (lambda: net_of(2)([[1, 1], [1, np.nan]]), [r"mu_x\[1, 1\] = nan", "1 of 4"]),
    "x inf": (lambda: net_of(2).predict(np.array([1, np.inf])), [r"mu_x\[1\] = inf"]),
    "inputs": (lambda: Linear(-1, 2), [r"Linear\(input_size=-1\)", "-1 < 1"]),
    "no inputs": (lambda: Linear(0, 2), ["0 < 1"]),
    "no outputs": (lambda: Linear(2, 0), ["0 < 1"]),
    "from_torch": (lambda: bayes.from_torch(torch.nn.Linear(1, 1), var=-1), [r"var\[0\] = -1"]),
    "label": (
        lambda: bayes.Utils().label_to_obs([3, 12], 10),
        [r"labels\[1\] = 12", "HINT: num_classes=13"],
    ),
    "negative label": (lambda: bayes.Utils().label_to_obs([-1], 10), ["count from 0"]),
    "variances": (lambda: net_of()(np.ones(7), np.ones(6)), ["7 != 6"]),
    "negative": (lambda: net_of()(np.ones(7), [1, 1, -2, 1, 1, 1, 1]), [r"var_x\[2\] = -2"]),
    "nan": (lambda: net_of()(np.ones(7), [1, 1, 1, np.nan, 1, 1, 1]), [r"var_x\[3\] = nan"]),
    "layers": (
        lambda: Sequential(Linear(10, 30), ReLU(), Linear(20, 5)),
        ["layer 2", "layer 1", "30 != 20", "input_size=30"],
    ),
    "stride": (
        lambda: Conv2d(1, 1, 5, stride=2, in_width=28, in_height=28),
        [r"\(28 \+ 0 - 5\) / 2 is not whole", "27 or 29"],
    ),
    "kernel": (
        lambda: Conv2d(1, 1, 9, in_width=4, in_height=4),
        ["9 > 4", "larger than the image"],
    ),
    "pool": (
        lambda: Sequential(Conv2d(1, 1, 3, in_width=8, in_height=8), AvgPool2d(4)),
        [r"\(6 \+ 0 - 4\) / 4 is not whole"],
    ),
    "crop": (lambda: ConvTranspose2d(1, 1, 2, padding=2, in_width=1, in_height=1), ["= -2"]),
    "flat image": (
        lambda: Sequential(Conv2d(1, 1, 3))(np.ones((2, 64))),
        ["HINT: in_width=8, in_height=8"],
    ),
    "told image": (
        lambda: Sequential(Conv2d(1, 1, 3, in_width=8, in_height=6))(torch.ones(1, 1, 8, 6)),
        ["8 x 6 != 6 x 8"],
    ),
    "channels": (lambda: Sequential(Conv2d(3, 1, 3))(torch.ones(1, 1, 8, 8)), ["1 != 3"]),
    "method": (lambda: Linear(2, 2, init_method="Glorot"), ["'He', 'Xavier'"]),
    "index": (lambda: Sequential(Embedding(5, 2))([[7]]), ["0 to 4", "num_embeddings=8"]),
    "fraction of a row": (lambda: Sequential(Embedding(5, 2))([[1, 1.4]]), [r"\[1\] = 1\.4"]),
    "pairs": (lambda: Sequential(Linear(2, 3), EvenExp()), ["3 % 2 = 1"]),
    "heads": (lambda: MultiheadAttention(10, 4), ["10 / 4 is not whole"]),
    "kv heads": (lambda: MultiheadAttention(8, 4, 3), ["4 / 3 is not whole"]),
    "y": (lambda: updated(2, np.ones(5)), ["5 != 6"]),
    "y inf": (lambda: updated(2, [1, 1, 1, -np.inf, 1, 1]), [r"mu_obs\[3\] = -inf", "nan"]),
    "y inf of indices": (
        lambda: updated(2, [1, np.inf, 1], method="update_using_indices", selected_idx=[1, 2, 1]),
        [r"mu_obs\[1\] = inf"],
    ),
    "var_y": (lambda: updated(2, np.ones(6), np.ones(5)), ["5 < 6"]),
    "negative var_y": (lambda: updated(2, np.ones(6), -1.0), [r"var_obs\[0\] = -1"]),
    "idx zero": (
        lambda: updated(2, np.ones(3), method="update_using_indices", selected_idx=[1, 0, 2]),
        ["1 to 2"],
    ),
    "idx high": (
        lambda: updated(2, np.ones(3), method="update_using_indices", selected_idx=[1, 3, 2]),
        ["1 to 2", "3 outputs"],
    ),
    "idx rows": (
        lambda: updated(2, np.ones(4), method="update_using_indices", selected_idx=[1, 2, 1, 2]),
        [r"4 = 1\*3 \+ 1"],
    ),
    "idx length": (
        lambda: updated(2, np.ones(2), method="update_using_indices", selected_idx=[1, 2, 1]),
        ["2 != 3"],
    ),
    "heteros": (lambda: updated(1, np.ones(1), method="update_heteros"), ["1 % 2 = 1"]),
    "heteros of an even batch": (
        lambda: updated(3, np.ones(6), rows=4, method="update_heteros"),
        ["3 outputs", "3 % 2 = 1"],
    ),
    "norm channels": (
        lambda: Sequential(
            Conv2d(1, 4, 3, padding=1, in_width=2, in_height=2), bayes.LayerNorm([2, 4, 2])
        ),
        ["4 != 2", r"HINT: LayerNorm\(\[4, 2, 2\]\)"],
    ),
    "norm pixels": (
        lambda: Sequential(Linear(1, 16), bayes.LayerNorm([2, 2, 2])),
        [r"16 != 2 \* 2 \* 2 = 8"],
    ),
    "state nan": (
        lambda: Sequential(bayes.LSTM(1, 1, 1)).set_lstm_states({0: ([0], [np.nan], [0], [0])}),
        [r"var_h of layer 0\[0\] = nan"],
    ),
    "other branch": (lambda: smoothed_branch(), ["branch of ResNetBlock", "HINT"]),
    "no forward": (lambda: net_of().backward(), [r"HINT: net\.train\(\)"]),
    "eval": (lambda: evaluated().backward(), [r"HINT: net\.train\(\)"]),
    "no deltas": (lambda: forwarded().backward(), ["HINT: OutputUpdater"]),
    "few deltas": (
        lambda: (net := forwarded()).set_delta_z([1.0], [1.0]) or net.backward(),
        ["1 < 2"],
    ),
    "input deltas": (lambda: forwarded().get_input_states(), [r"input_state_update = True"]),
    "parameter": (lambda: setattr(Linear(2, 2), "mu_w", [1.0, 2.0]), ["2 != 4"]),
    "objects": (lambda: net_of()([["a"] * 7]), ["'a'", "HINT: rows"]),
    "complex": (lambda: net_of()(torch.ones(7, dtype=torch.complex64)), ["complex", "HINT: rows"]),
    "ragged": (lambda: net_of()([[1.0], [1.0, 2.0]]), ["unlike lengths", "HINT: rows"]),
    "fraction of inputs": (lambda: Linear(2.5, 1), [r"Linear\(input_size=2\.5\)", "HINT"]),
    "fraction of a label": (
        lambda: bayes.Utils().label_to_obs([1, 1.7], 10),
        [r"labels\[1\] = 1\.7", "1 of 2"],
    ),
    "label nan": (lambda: bayes.Utils().label_to_one_hot([np.nan], 10), ["= nan"]),
    "fraction of an index": (
        lambda: updated(2, np.ones(3), method="update_using_indices", selected_idx=[1, 1.5, 2]),
        [r"selected_idx\[1\] = 1\.5"],
    ),
    "labels": (
        lambda: bayes.metric.classification_error([1, 2], [1]),
        ["2 != 1", "HINT: 2 labels"],
    ),
    "errors": (
        lambda: bayes.Utils().get_errors(
            np.ones(22), np.ones(22), [1], bayes.Utils().get_hierarchical_softmax(10), 10, 2
        ),
        ["2 != 1", "HINT: 2 labels"],
    ),
    "to_torch norm": (
        lambda: Sequential(Linear(2, 3), bayes.LayerNorm([3])).to_torch(),
        ["n - 1", "HINT: BatchNorm2d or RMSNorm"],
    ),
    "to_torch padding": (
        lambda: Sequential(bayes.MaxPool2d(2, 1, 1, 2)).to_torch(),
        ["padding_type=2", "HINT: padding_type=1"],
    ),
    "no layer": (lambda: Sequential(torch.nn.ReLU()), ["from_torch"]),
    "twice": (lambda: (one := Linear(2, 2)) and Sequential(one, ReLU(), one), ["same object"]),
    "branches": (lambda: bayes.ResNetBlock(Linear(3, 4)), ["4 != 3"]),
    "norm": (lambda: Sequential(Linear(3, 4), bayes.BatchNorm2d(5)), ["4 != 5"]),
    "level": (lambda: bayes.metric.coverage([0.0], [1.0], [0.0], 1.5), ["0 < level < 1"]),
    "half": (lambda: net_of().to(torch.float16), ["float32 or float64"]),
    "kernel size": (lambda: Conv2d(1, 1, -3), [r"Conv2d\(kernel_size=-3\)", "-3 < 1"]),
    "conv stride": (lambda: Conv2d(1, 1, 3, stride=0, in_width=4, in_height=4), ["stride=0"]),
    "conv padding": (lambda: ConvTranspose2d(1, 1, 3, padding=-1), ["padding=-1", "-1 < 0"]),
    "pool size": (lambda: AvgPool2d(0), ["kernel_size=0", "0 < 1"]),
    "pool of a frame": (lambda: bayes.MaxPool2d(2, 1, 2, 2), ["padding=2", "2 >= 2", "HINT: pad"]),
    "pool stride": (lambda: bayes.MaxPool2d(2, 0), ["stride=0"]),
    "norm size": (lambda: bayes.BatchNorm2d(0), ["features=0"]),
    "norm dims": (lambda: bayes.LayerNorm([3, 4]), ["2 dims", r"LayerNorm\(\[12\]\)"]),
    "steps": (lambda: bayes.LSTM(2, 3, 0), ["seq_len=0", "0 < 1"]),
    "rows": (lambda: Embedding(0, 3), ["num_embeddings=0"]),
    "padding row": (lambda: Embedding(4, 3, padding_idx=9), ["9 >= 4", "HINT: padding_idx"]),
    "fraction": (lambda: bayes.LSTM(2, 2.5, 1), ["output_size=2.5", "integer"]),
    "block": (lambda: bayes.LayerBlock(Linear(2, 2), "x"), ["layer 1 = 'x'"]),
    "branch": (lambda: bayes.ResNetBlock(torch.nn.Linear(2, 2)), ["from_torch"]),
    "three parts": (
        lambda: net_of().load_state_dict({"Linear.0": net_of().parameters()[0][:3]}),
        ["Linear.0: 3 parts"],
    ),
    "negative state": (
        lambda: net_of(1, 1).load_state_dict({"Linear.0": ([0.0], [-1.0], [0.0], [1.0])}),
        [r"Linear\.0 part 1\[0\] = -1"],
    ),
    "variance": (lambda: setattr(Linear(1, 1), "var_w", [-2.0]), [r"Linear\.var_w\[0\] = -2"]),
    "predict": (lambda: net_of().predict(np.ones(7), batch_size=-1), ["-1 < 1"]),
    "device": (lambda: net_of().to("tpu"), ["'tpu'", "to_device"]),
    "negative std": (lambda: bayes.metric.crps([1.0, 1.0], [1.0, -2.0], 1.0), [r"std\[1\] = -2"]),
    "certain likelihood": (
        lambda: bayes.metric.log_likelihood([1.0, 1.0], [1.0, 2.0], [1.0, 0.0]),
        [r"std\[1\] = 0", "HINT: np.hypot"],
    ),
    "paired": (lambda: bayes.metric.rmse([1.0, 2.0], [1.0, 2.0, 3.0]), ["2 != 3"]),
    "columns": (
        lambda: bayes.Utils().create_rolling_window(np.ones((9, 2)), [0], 2, 1, 3, 1),
        ["2 != 3"],
    ),
    "window": (
        lambda: bayes.Utils().create_rolling_window(np.ones((9, 2)), [0], -2, 1, 2, 1),
        ["input_seq_len", "-2 < 1"],
    ),
    "column": (
        lambda: bayes.Utils().create_rolling_window(np.ones((9, 2)), [2], 2, 1, 2, 1),
        ["from 0 to 1"],
    ),
    "idx file": (
        lambda: bayes.Utils().load_mnist_images(__file__, __file__, 1),
        ["idx file", "gunzip"],
    ),
    "state": (lambda: Sequential(Linear(2, 2)).set_lstm_states({0: ([], [], [], [])}), ["layer 0"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_with_its_numbers(name):
    action, texts = CASES[name]
    with pytest.raises(ValueError) as caught:
        action()
    for text in texts:
        assert caught.match(text)
    if texts:
        assert isinstance(caught.value, UnisonoError)


def test_a_refused_input_leaves_the_net_as_it_was():
    net = net_of()
    net(np.ones(7))
    before = (net.state_dict(), net.get_outputs()[0].tolist())
    with pytest.raises(UnisonoError):
        net(np.ones(30))
    with pytest.raises(UnisonoError):
        net(np.ones(7), -np.ones(7))
    OutputUpdater("cpu").update(net.output_z_buffer, [1.0, 2.0], 1.0, net.input_delta_z_buffer)
    with pytest.raises(UnisonoError):
        OutputUpdater("cpu").update(net.output_z_buffer, [1.0], 1.0, net.input_delta_z_buffer)
    assert (net.state_dict(), net.get_outputs()[0].tolist()) == before
    net.backward()  # the good deltas are still there


DDP_CASES = {
    "nccl": (DDPConfig([0]), {}, PlatformError, 'HINT: backend="gloo"'),
    "word": (DDPConfig([], "smoke"), {}, PlatformError, "'nccl', 'gloo'"),
    "rank": (DDPConfig([], "gloo", 2, 2), {}, PlatformError, "0 to 1"),
    "no launcher": (DDPConfig([], "gloo", 0, 2), {}, PlatformError, r"HINT: unisono\.run"),
    "cap": (DDPConfig([], "auto"), {"cap_batch": "both"}, ValueError, "'local', 'global'"),
    "norm": (DDPConfig([], "auto"), {"sync_norm_stats": "all"}, ValueError, "'running', 'batch'"),
}


@pytest.mark.parametrize("name", DDP_CASES)
def test_a_wrong_world_is_told(name, monkeypatch):
    if name == "nccl" and torch.cuda.is_available():
        pytest.skip("nccl works here")
    for variable in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    config, options, kind, text = DDP_CASES[name]
    with pytest.raises(kind, match=text) as caught:
        DDPSequential(net_of(), config, **options)
    assert isinstance(caught.value, UnisonoError)


def test_a_torch_module_is_no_bayesian_net():
    with pytest.raises(UnisonoError, match=r"torch\.nn.*Linear\n.*HINT: (.|\n)*from_torch"):
        DDPSequential(torch.nn.Linear(1, 1), DDPConfig([], "auto"))


def test_flat_columns_steps_and_lines_of_pixels_are_still_read():
    assert len(net_of(7)(np.ones(14))[0]) == 4
    assert len(Sequential(bayes.LSTM(2, 3, 5))(np.ones((10, 2)))[0]) == 2 * 5 * 3
    image = Sequential(Conv2d(1, 1, 3, in_width=4, in_height=4), ReLU())
    assert len(image(np.ones((4, 4)))[0]) == len(image(np.ones((1, 16)))[0]) == 4


def test_a_sum_that_overflows_is_no_infinity():
    net = net_of(2)
    net(np.full((1, 2), 3e38))
    updated(2, [np.nan, 3e38, 3e38, 0, 0, 0])


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch):
    from unisono.comm import transports

    monkeypatch.setattr(transports, "available", lambda: {"shm": "ok", "mpi": "no mpi4py"})
    with pytest.raises(MissingExtra, match=r'pip install "unisono\[mpi\]"'):
        DDPSequential(net_of(), DDPConfig([], "mpi"))


def test_a_device_that_is_not_there_is_told():
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    with pytest.raises(PlatformError, match="cuda"):
        net_of().to_device("cuda")
    layer, block = Linear(1, 1), bayes.LayerBlock(Linear(1, 1))
    for moves in (layer.to_cuda, lambda: setattr(layer, "device", "cuda"), block.switch_to_cuda):
        with pytest.raises(PlatformError, match=r"(Linear|LayerBlock).* on cuda"):
            moves()
    assert layer.device == block.device == "cpu"
