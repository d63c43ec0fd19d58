"""Measured workloads, the calibration of this machine, and the command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from unisono.cli import main
from unisono.errors import PlatformError
from unisono.plan import (
    Cluster,
    Link,
    Prediction,
    Subject,
    calibrate,
    compare,
    load_subject,
    profile,
    read_calibration,
)
from unisono.plan.calibration import TYPICAL
from unisono.plan.prediction import Impossible
from unisono.plan.report import table
from unisono.plan.subject import PRESETS, as_subject
from unisono.plan.ways import spatial
from unisono.plan.workload import Pace, SentBucket, Workload


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """The user's calibration is not ours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def few_rounds(monkeypatch):
    module = sys.modules["unisono.plan.profile"]  # the package's attribute is the function
    monkeypatch.setattr(module, "_ROUNDS", 2)
    monkeypatch.setattr(module, "_ROUND_S", 0.01)


def small():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 8)
    )
    return Subject(name="small", model=model, batch=(torch.randn(6, 2, 8, 8),))


def test_a_model_is_measured_as_it_is(few_rounds):
    threads = torch.get_num_threads()
    found = profile(small())
    assert torch.get_num_threads() == threads
    parameters = (2 * 4 * 9 + 4) + (64 * 8 + 8)
    assert found.parameter_bytes == found.state_bytes == found.sent_bytes == 4 * parameters
    assert [layer.kind for layer in found.layers] == [
        "Conv2d", "ReLU", "MaxPool2d", "Flatten", "Linear"
    ]  # fmt: skip
    assert found.layers[0].input_shape == (2, 8, 8)
    # Blocks of a convolution look at each other, those of a pool do not.
    assert 0 < sum(layer.share for layer in found.layers) <= 1 + 1e-9
    # Autograd keeps at least the input of the convolution and the indices of the pool.
    assert found.activation_bytes >= 4 * 2 * 64
    assert found.forward.seconds(6) > 0
    assert found.optimizer_s > 0
    assert [(b.ready, b.needed) for b in found.buckets] == [(1.0, 0.0)]


def test_layers_have_the_bytes_that_are_trained_each_once(few_rounds):
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    second.weight = first.weight  # tied
    model = nn.Sequential(first, second, nn.Linear(64, 64).requires_grad_(False))
    found = profile(Subject(model=model, batch=(torch.randn(4, 64),)))
    assert [layer.parameter_bytes for layer in found.layers] == [4 * 64 * 64, 0, 0]
    assert found.parameter_bytes == 4 * 64 * 64
    for each in compare(found, TYPICAL.here(4), 4):
        if isinstance(each, Prediction):
            assert min(each.compute_s, each.waiting_s, each.memory_bytes) >= 0, each.way


def test_presets_cover_the_ways(few_rounds):
    ways = {}
    for name in ("graph", "bayes"):
        subject = PRESETS[name]()
        found = compare(profile(subject), TYPICAL.here(4), subject.samples)
        ways[name] = {each.way for each in found if isinstance(each, Prediction)}
    assert ways["bayes"] == {"Bayesian"}
    assert {"graph (halos)", "tensor (features)", "sharded (FSDP2)"} <= ways["graph"]
    assert 24 <= PRESETS["graph"]().graph.busiest(4)[1] <= 4 * 48  # the sides of a quarter


def test_buckets_become_ready_from_the_last_layer_on(few_rounds):
    layers = [nn.Linear(512, 512) for _ in range(4)]
    subject = Subject(model=nn.Sequential(*layers), batch=(torch.randn(4, 512),))
    found = profile(subject).buckets
    assert len(found) == 2  # the first is closed at 1 MB
    assert found[0].ready < found[1].ready == 1.0
    assert found[0].needed > found[1].needed == 0.0


def test_a_calibration_is_kept_and_read_again(tmp_path):
    found = calibrate([small], ranks=(2,), rounds=2)
    assert set(found.slowdown) == {1, 2}
    assert found.slowdown[1] == 1.0
    assert found.links["shm"].bytes_per_s > 1e6
    assert found.links["shm"].slowdown == {2: 1.0}
    assert 0 <= found.links["gloo"].overlap <= 1
    path = tmp_path / "there" / "calibration.json"
    found.write(path)
    assert read_calibration(path) == found
    assert "a step takes longer: " in found.describe()
    assert "shm: " in found.describe()
    cluster = read_calibration(path).here(2, link="gloo")
    assert (cluster.ranks, cluster.slowdown) == (2, found.slowdown)


def test_calibrations_that_are_none_are_refused(tmp_path):
    assert read_calibration() is TYPICAL
    with pytest.raises(PlatformError, match="--calibrate"):
        read_calibration(tmp_path / "nothere.json")
    for text in ("{}", "[]", "no json", '{"version": 0}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(PlatformError, match="--calibrate"):
            read_calibration(tmp_path / "c.json")


def test_models_come_from_files_and_modules(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from sibling_of_train import WIDTH\n"  # as a script finds its neighbours
        "def make(): return torch.nn.Linear(WIDTH, 2), torch.ones(5, WIDTH)\n"
        "def wrong(): return 3\n"
        "value = 1\n"
    )
    (tmp_path / "sibling_of_train.py").write_text("WIDTH = 3\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    subject = load_subject(f"{tmp_path / 'train.py'}:make")
    assert (subject.name, subject.samples) == ("make", 5)
    assert load_subject("unisono.plan.subject:mlp").name == "mlp"
    assert as_subject(subject) is subject
    for word, message in (
        ("resnet", "there are mlp, cnn, transformer, graph, bayes"),
        (f"{tmp_path / 'no.py'}:make", "No such file"),
        (f"{tmp_path / 'train.py'}:missing", "no attribute 'missing'"),
        (f"{tmp_path / 'train.py'}:value", "not callable"),
        (f"{tmp_path / 'train.py'}:wrong", "return model, batch"),
        ("nomodule:make", "No module named"),
    ):
        with pytest.raises(PlatformError, match=message):
            load_subject(word)


def test_the_command_prints_ways_and_assumptions(few_rounds, capsys):
    machine = ["--ranks", "64", "--nodes", "16", "--link", "10GB/s", "--latency", "3us"]
    assert main(["plan", "--model", "mlp", *machine]) == 0
    out = capsys.readouterr().out
    for words in ("data parallel, blocking", "DASO", "not possible:", "16 x 4 ranks"):
        assert words in out
    assert "between nodes 10GB/s: 3 us + n / 10 GB/s" in out
    assert "typical values, not measured" in out
    assert main(["plan", "--model", "mlp", *machine, "--json", "--rank-speed", "50"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_way = {each["way"]: each for each in found["ways"]}
    assert by_way["DASO"]["ranks"] == 64
    assert 0 < by_way["data parallel, blocking"]["communication_share"] < 1
    assert "no spatial dims" in by_way["spatial (halos)"]["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no --model"),
        (["--model", "mlp", "--nodes", "2", "--ranks", "8"], "--link 10GB/s"),
        (["--model", "mlp", "--nodes", "2", "--link", "1GB/s"], "--ranks 16"),
        (
            ["--model", "mlp", "--nodes", "3", "--ranks", "8", "--link", "1GB/s"],
            "8 ranks / 3 nodes = 2.66667",
        ),
        (["--model", "mlp", "--ranks", "0"], "--ranks 0\n"),
        (["--model", "mlp", "--ranks", "4", "--link", "fast"], "HINT: write 10GB/s"),
        (["--model", "mlp", "--overlap", "2"], "not between 0 and 1"),
        (["--model", "mlp", "--batch", "0"], "--batch 0"),
        (["--model", "mlp", "--batch", "inf"], "not between 1e-09 and 1e+09"),
        (["--model", "mlp", "--rank-speed", "nan"], "not between 1e-09 and 1e+09"),
        (["--model", "mlp", "--cores", "-2"], "--cores -2"),
        (["--model", "mlp", "--ranks", "8", "--team", "3"], "8 ranks / 3 = 2.66667 teams"),
    ],
)
def test_bad_options_are_explained(words, message, capsys):
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_network_this_machine_is_planned(few_rounds, capsys):
    assert main(["plan", "--model", "mlp", "--ranks", "4", "--cores", "2"]) == 0
    out = capsys.readouterr().out
    assert "1 x 4 ranks on 2 cores a node" in out


BAD_MODELS = """
import torch
from torch import nn

def make():
    return nn.Linear(4, 2), torch.ones(8, 4)

def needs(width, depth=2):
    return nn.Linear(width, 2), torch.ones(8, width)

def wide():
    return nn.Linear(4, 2), torch.ones(8, 5)

def empty():
    return nn.Linear(4, 2), torch.ones(0, 4)

def fixed():
    return nn.ReLU(), torch.ones(8, 4)
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "{file}:mak"], "no attribute 'mak'"),
        (["--model", "{file}:empty"], "[0, 4] has no samples"),
        (["--model", "{file}:fixed"], "ReLU has no parameter that is trained"),
        (["--model", "{file}:needs"], "missing 1 required positional argument: 'width'"),
        (["--model", "{file}:wide"], "shapes cannot be multiplied"),
        (["--latency", "5"], "write 2us"),
        (["--node-link", "5"], "write 10GB/s"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(
    options, said, tmp_path, capsys, monkeypatch
):
    def measured(*_, **__):
        raise AssertionError("measured first")

    monkeypatch.setattr("unisono.plan.profile", measured)
    file = tmp_path / "m.py"
    file.write_text(BAD_MODELS)
    words = {"file": file}
    given = [option.format(**words) for option in options]
    model = [] if "--model" in given else ["--model", "mlp"]
    assert main(["plan", *model, *given]) == 2
    text = capsys.readouterr().err
    assert said.format(**words) in text
    assert "Traceback" not in text


def test_efficiency_above_one_comes_from_a_shared_update_and_the_table_says_so():
    work = Workload(
        name="w",
        forward=Pace(fixed_s=0.0, sample_s=1e-3),
        backward=Pace(fixed_s=0.0, sample_s=1e-3),
        optimizer_s=1e-2,
        parameter_bytes=1000,
        state_bytes=1000,
        activation_bytes=10.0,
        buckets=[SentBucket(nbytes=1000, ready=1.0, needed=1.0)],
    )
    fast = Link(name="fast", latency_s=1e-9, bytes_per_s=1e12)
    cluster = Cluster(nodes=1, ranks_per_node=2, inner=fast, outer=fast)
    found = {e.way: e for e in compare(work, cluster, 1.0) if isinstance(e, Prediction)}
    assert found["sharded (FSDP2)"].efficiency > 1.5
    assert found["data parallel, blocking"].efficiency <= 1.0
    assert "above 100%" in table(list(found.values()))
    assert "above 100%" not in table([found["data parallel, blocking"]])


NETS = {
    "a stack": (lambda: nn.Conv2d(2, 4, 3, padding=1), (8, 12), 2),
    "strides": (lambda: nn.Conv2d(2, 4, 5, stride=2, padding=2), (8, 12), 3),
    "a pool": (lambda: nn.MaxPool2d(2), (8, 12), 0),
}


@pytest.mark.parametrize("name", NETS)
def test_a_halo_is_what_a_layer_reads_beyond_its_block(name, few_rounds):
    make, (height, width), reach = NETS[name]
    net = nn.Sequential(make(), nn.Conv2d(2 if name == "a pool" else 4, 2, 1))
    work = profile(Subject(model=net, batch=(torch.randn(4, 2, height, width),)))
    assert work.layers[0].reach == (reach, reach)
    free = Link(name="free", latency_s=0.0, bytes_per_s=1e9, overlap=0.0)
    cluster = Cluster(nodes=1, ranks_per_node=2, inner=free, outer=free)
    found = spatial(replace(work, buckets=()), cluster, 2)
    assert isinstance(found, Prediction)
    # Two ranks share the longer side: half of the reach to each, forward and back.
    nbytes = 2 * (reach / 2) * 2 * height * 4 * 4
    assert found.communication_s == pytest.approx(nbytes / 1e9)
    too_many = spatial(work, replace(cluster, ranks_per_node=1024), 2)
    assert isinstance(too_many, Impossible)
