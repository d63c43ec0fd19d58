"""State dicts and the three kinds of files."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from tests.bayes.nets import trained

from unisono.bayes import (
    LSTM,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    LayerBlock,
    LayerNorm,
    Linear,
    ReLU,
    ResNetBlock,
    Sequential,
)
from unisono.errors import UnisonoError


def build():
    return Sequential(
        Conv2d(1, 2, 3, padding=1, in_width=4, in_height=4),
        BatchNorm2d(2),
        ReLU(),
        ResNetBlock(LayerBlock(Conv2d(2, 2, 3, padding=1), BatchNorm2d(2)), Conv2d(2, 2, 1)),
        Linear(32, 3),
    )


def seasoned(net, size=16):
    rng = np.random.default_rng(0)
    for _ in range(2):
        trained(net, rng.normal(size=(4, size)), 0.5, 1.0)
    return net


@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_binary_file_with_a_negative_variance_is_refused(tmp_path, place):
    net = seasoned(Sequential(BatchNorm2d(1)), 1)
    net.save(tmp_path / "n.bin")
    before = net.state_dict(running=True)
    raw = bytearray((tmp_path / "n.bin").read_bytes())
    at = 8 + len("BatchNorm2d()") + 4 * place
    raw[at : at + 4] = struct.pack("<f", -1.0)
    (tmp_path / "n.bin").write_bytes(raw)
    with pytest.raises(UnisonoError, match=r"BatchNorm2d\.0.* part \d\[0\] = -1"):
        net.load(tmp_path / "n.bin")
    assert net.state_dict(running=True) == before


def test_keys_tell_the_place_of_a_layer():
    assert list(build().state_dict()) == [
        "Conv2d.0",
        "BatchNorm2d.1",
        "Conv2d.main.3.0",
        "BatchNorm2d.main.3.1",
        "Conv2d.shortcut.3",
        "Linear.4",
    ]
    values = build().state_dict()["Linear.4"]
    assert isinstance(values, tuple)
    assert [type(v) for v in values] == [list] * 4
    assert [len(v) for v in values] == [96, 96, 3, 3]
    assert build().parameters()[-1][3] == values[3]


def test_a_state_dict_goes_from_net_to_net():
    net, other = seasoned(build()), build()
    other.load_state_dict(net.state_dict())
    assert other.state_dict() == net.state_dict()
    x = np.ones(16)
    for one in (net, other):
        one.eval()
    assert not np.array_equal(net(x)[0], other(x)[0])  # running values did not travel
    other.load_state_dict(net.state_dict(running=True, tensors=True))
    assert np.array_equal(net(x)[0], other(x)[0])
    third = build()
    third.params_from(net)
    assert third.state_dict(running=True) == net.state_dict(running=True)


@pytest.mark.parametrize("name", ["net.pt", "net.pth", "net.bin", "deep/er/model"])
def test_a_file_brings_back_parameters_and_running_values(name, tmp_path):
    net, other = seasoned(build()), build()
    net.save(tmp_path / name)
    other.load(tmp_path / name)
    assert other.state_dict(running=True) == net.state_dict(running=True)
    assert [p.name for p in tmp_path.rglob("*partial*")] == []


def test_a_file_without_directory_goes_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = build()
    net.save("model.bin")
    other = build()
    other.load("model.bin")
    assert other.state_dict() == net.state_dict()


def test_text_files_bring_back_parameters(tmp_path):
    net, other = seasoned(build()), build()
    net.save_csv(tmp_path / "new" / "net")
    endings = ["_1_mw.csv", "_2_Sw.csv", "_3_mb.csv", "_4_Sb.csv"]
    names = sorted(p.name for p in (tmp_path / "new").iterdir())
    assert names == [f"net{e}" for e in [*endings, "_5_mra.csv", "_6_Sra.csv"]]
    assert (
        len((tmp_path / "new" / "net_3_mb.csv").read_text().splitlines()) == 2 + 2 + 2 + 2 + 2 + 3
    )
    other.load_csv(tmp_path / "new" / "net")
    assert other.state_dict(running=True) == net.state_dict(running=True)
    x = np.ones((2, 16))
    assert np.array_equal(other.predict(x)[0], net.predict(x)[0])


def test_four_text_files_without_running_values_are_read_with_a_warning(tmp_path, recwarn):
    net, other = seasoned(build()), build()
    net.save_csv(tmp_path / "net")
    (tmp_path / "net_5_mra.csv").unlink()
    with pytest.warns(UserWarning, match="2 batch norms keep their running values"):
        other.load_csv(tmp_path / "net")
    assert other.state_dict() == net.state_dict()
    plain = Sequential(Linear(2, 1))
    plain.save_csv(tmp_path / "plain")
    assert len(list(tmp_path.glob("plain*"))) == 4
    recwarn.clear()
    plain.load_csv(tmp_path / "plain")
    assert not recwarn


def test_lstm_states_travel_in_torch_files(tmp_path):
    net = Sequential(LSTM(1, 2, 1), Linear(2, 1))
    net([0.4])
    net.save(tmp_path / "net.pt")
    other = Sequential(LSTM(1, 2, 1), Linear(2, 1))
    other.load(tmp_path / "net.pt")
    assert np.array_equal(net([0.1])[0], other([0.1])[0])


def test_a_state_that_no_call_starts_from_stays_out_of_files(tmp_path):
    """Whole sequences start at zero in every call, so they do in the first after loading."""
    net, other = (Sequential(LSTM(1, 2, 3), Linear(6, 1)) for _ in range(2))
    x = np.arange(12.0).reshape(4, 3, 1)
    want = net(x)[0]
    net.save(tmp_path / "net.pt")
    other(x[:2])
    other.load(tmp_path / "net.pt")
    assert np.array_equal(other(x)[0], want)


def test_a_damaged_torch_file_is_refused(tmp_path):
    net = Sequential(Linear(1, 1))
    net.save(tmp_path / "net.pt")
    whole = (tmp_path / "net.pt").read_bytes()
    for content in (b"", b"text", whole[:300]):
        (tmp_path / "net.pt").write_bytes(content)
        with pytest.raises(UnisonoError, match=r"unisono\.bayes/1"):
            net.load(tmp_path / "net.pt")


def test_torch_files_need_no_trust(tmp_path):
    build().save(tmp_path / "net.pt")
    content = torch.load(tmp_path / "net.pt", weights_only=True)
    assert content["format"] == "unisono.bayes/1"
    assert set(content) == {"format", "state", "running", "lstm", "layers", "dtype"}


def test_the_binary_layout_byte_by_byte(tmp_path):
    net = Sequential(Linear(2, 1), ReLU(), BatchNorm2d(1))
    net.save(tmp_path / "net.bin")
    expected = b""
    for info, arrays in (
        (b"Linear(2,1)", net.state_dict()["Linear.0"]),
        (b"ReLU()", ()),
        (b"BatchNorm2d()", (*net.state_dict()["BatchNorm2d.2"], [0.0], [1.0])),
    ):
        expected += struct.pack("<Q", len(info)) + info
        expected += b"".join(np.array(values, "<f4").tobytes() for values in arrays)
    assert (tmp_path / "net.bin").read_bytes() == expected


def test_statistics_that_pytagi_leaves_behind_a_layer_norm_are_skipped(tmp_path):
    net = Sequential(Linear(2, 3), LayerNorm([3]), ReLU(), Linear(3, 1))
    net.save(tmp_path / "plain.bin")
    raw = (tmp_path / "plain.bin").read_bytes()
    at = raw.index(struct.pack("<Q", 6) + b"ReLU()")
    extra = np.random.default_rng(0).normal(size=14).astype("<f4").tobytes()
    upper = raw[at:].replace(b"ReLU", b"RELU")  # infos compare without regard to case
    (tmp_path / "theirs.bin").write_bytes(raw[:at] + extra + upper)
    other = Sequential(Linear(2, 3), LayerNorm([3]), ReLU(), Linear(3, 1))
    other.load(tmp_path / "theirs.bin")
    assert other.state_dict() == net.state_dict()


def test_another_architecture_is_refused_and_nothing_is_written(tmp_path):
    net = Sequential(Linear(2, 3), ReLU(), Linear(3, 1))
    before = net.state_dict()
    other = Sequential(Linear(2, 4), ReLU(), Linear(4, 1))
    for name in ("a.pt", "a.bin"):
        other.save(tmp_path / name)
        with pytest.raises(UnisonoError, match=r"(?s)Linear\(2,.\).*Linear\(2,.\)"):  # both nets
            net.load(tmp_path / name)
    other.save_csv(tmp_path / "a")
    with pytest.raises(UnisonoError, match=r"12 != 6 \+ 3 = 9"):
        net.load_csv(tmp_path / "a")
    longer = Sequential(Linear(2, 3), ReLU(), Linear(3, 1), ReLU())
    longer.save(tmp_path / "b.bin")
    with pytest.raises(UnisonoError, match="bytes more"):
        net.load(tmp_path / "b.bin")
    start = (Linear(2, 3), LayerNorm([3]))
    Sequential(*start, Linear(3, 3), ReLU(), Linear(3, 1)).save(tmp_path / "c.bin")
    for shorter in (Sequential(*start), Sequential(*start, Linear(3, 1))):
        with pytest.raises(UnisonoError, match=r"in the file"):  # more than LayerNorm's statistics
            shorter.load(tmp_path / "c.bin")
    for wrong, text in (
        ({"Linear.0": before["Linear.0"]}, "missing Linear.2"),
        ({**before, "Linear.9": before["Linear.2"]}, "too many Linear.9"),
        ({**before, "Linear.2": ([1.0], *before["Linear.2"][1:])}, "Linear.2: 1 numbers for 3"),
    ):
        with pytest.raises(UnisonoError, match=text):
            net.load_state_dict(wrong)
    assert net.state_dict() == before


def test_text_in_a_csv_file_is_told_with_its_line(tmp_path):
    net = Sequential(Linear(2, 1))
    net.save_csv(tmp_path / "net")
    (tmp_path / "net_2_Sw.csv").write_text("0.5\nvariance\n")
    before = net.state_dict()
    with pytest.raises(UnisonoError, match=r"net_2_Sw\.csv\n.*'variance' in line 2\n.*HINT"):
        net.load_csv(tmp_path / "net")
    assert net.state_dict() == before


def test_files_fit_whatever_size_the_images_had(tmp_path):
    def build_lazy():
        return Sequential(Conv2d(1, 2, 3), ReLU(), AvgPool2d(2, 2))

    early, seen, other = build_lazy(), build_lazy(), build_lazy()
    seen(np.ones((1, 1, 6, 6)))
    other(np.ones((1, 1, 8, 8)))
    for name in ("net.bin", "net.pt"):
        for source, target in ((early, seen), (seen, early), (seen, seen), (seen, other)):
            source.save(tmp_path / name)
            target[0].mu_b = [0.0, 0.0]
            target.load(tmp_path / name)
            assert target.state_dict() == source.state_dict()
