"""Programs written for HeAT: only the import line changes."""

from __future__ import annotations

import base64
import importlib
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import unisono.compat.heat as ht
from unisono import data_parallel
from unisono.cli import main
from unisono.comm import mpi_style
from unisono.errors import MissingExtra

# What is ours under HeAT's names, and where it comes from.
OURS = {
    "core.communication": mpi_style,
    "core": mpi_style,
    "optim": data_parallel,
    "optim.utils": data_parallel,
    "utils.data": data_parallel,
    "utils.data.datatools": data_parallel,
}

SCRIPTS = Path(__file__).with_name("heat_scripts")
"""Programs in the style of HeAT's examples, and stand-ins for what they import."""

SCRIPT = """\
import hashlib
import torch
import heat as ht
import heat.nn.functional as F
from heat.optim.lr_scheduler import StepLR
from sklearn.datasets import load_digits


class Net(ht.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = ht.nn.Linear(64, 48)
        self.scale = ht.nn.Parameter(torch.ones(48))
        self.fc2 = ht.nn.Linear(48, 10)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x)) * self.scale), dim=1)


class Digits(ht.utils.data.Dataset):
    def __init__(self, x, y, **kwargs):
        super().__init__(x, **kwargs)
        self.targets = y[self._cut_slice]

    def __getitem__(self, i):
        return self.data[i], self.targets[i]

    def Shuffle(self):
        ht.utils.data.dataset_shuffle(self, attrs=[["data", None], ["targets", None]])

    def Ishuffle(self):
        ht.utils.data.dataset_ishuffle(self, attrs=[["data", None], ["targets", None]])


comm = ht.MPI_WORLD
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
offset, lshape, lslice = comm.chunk(x.shape, split=0)
torch.manual_seed(comm.rank)  # weights are made equal by the wrapper


def loaders(ishuffle):
    data = Digits(x[lslice], y[lslice[0]], ishuffle=ishuffle)
    return ht.utils.data.DataLoader(data, batch_size=20)


def accuracy(model):
    model.eval()
    hits = torch.zeros(1)
    with torch.no_grad():
        hits += (model(x[lslice]).argmax(1) == y[lslice[0]]).sum()
    comm.Allreduce(ht.MPI.IN_PLACE, hits, op=ht.MPI.SUM)
    return hits.item() / len(x)


def digest(model):
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()[:16]


def report(name, model):
    line = f"SEEN {comm.rank} {comm.size} {name} {accuracy(model):.3f} {digest(model)}"
    lines = comm.gather(line, root=0)  # one rank prints, or lines would mix
    if comm.rank == 0:
        print(*lines, sep="\\n", flush=True)


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    return loss.detach()


for blocking in (True, False):
    model = Net()
    optimizer = ht.optim.Adam(model.parameters(), lr=0.01)
    dp_optimizer = ht.optim.DataParallelOptimizer(optimizer, blocking)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    loader = loaders(ishuffle=not blocking)
    model = ht.nn.DataParallel(model, comm, dp_optimizer, blocking_parameter_updates=blocking)
    for epoch in range(3):
        loader.last_epoch = epoch == 2
        train(model, loader, dp_optimizer)
        scheduler.step()
    report(f"dp-{blocking}", model)

model = Net()
loader = loaders(ishuffle=False)
local = ht.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
daso = ht.optim.DASO(local_optimizer=local, total_epochs=4, warmup_epochs=1, cooldown_epochs=1)
model = ht.nn.DataParallelMultiGPU(model, daso)
daso.last_batch = len(loader)
for epoch in range(4):
    daso.epoch_loss_logic(train(model, loader, daso))
report("daso", model)
"""


@pytest.mark.parametrize("path", OURS)
def test_every_path_gives_our_own_objects(path):
    module = importlib.import_module(f"unisono.compat.heat.{path}")
    own = {"DASO", "DataLoader", "communication"}  # subclasses, a module
    shared = [name for name in module.__all__ if hasattr(OURS[path], name) and name not in own]
    assert shared
    assert all(getattr(module, name) is getattr(OURS[path], name) for name in shared)
    if path.startswith("core"):
        assert module.MPIRequest is mpi_style.Request


def test_wrappers_are_ours_with_names_for_their_parts():
    for name in ("DataParallel", "DataParallelMultiGPU"):
        kind = getattr(ht.nn, name)
        assert kind is getattr(ht.nn.data_parallel, name)
        assert issubclass(kind, getattr(data_parallel, name))
    assert ht.communication is ht.core.communication
    assert re.fullmatch(r"\d+\.\d+\.\d+", ht.__version__)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ht.nn, torch.nn),
        (ht.nn.functional, torch.nn.functional),
        (ht.optim, torch.optim),
        (ht.optim.lr_scheduler, torch.optim.lr_scheduler),
    ],
)
def test_other_names_are_the_identical_objects_of_torch(ours, theirs):
    own = {"DataParallel", "functional", "lr_scheduler"}
    public = [name for name in dir(theirs) if not name.startswith("_") and name not in own]
    assert len(public) > 10
    for name in public:
        if not hasattr(ours, "__all__") or name not in ours.__all__:
            assert getattr(ours, name) is getattr(theirs, name), name
    with pytest.raises(AttributeError, match="no_such_name"):
        ours.no_such_name  # noqa: B018
    assert not hasattr(ours, "__no_such_name__")


def test_what_heat_has_and_we_have_not_is_said_plainly():
    for name in ("linalg", "mean", "load_hdf5"):
        with pytest.raises(AttributeError, match="larray"):
            getattr(ht, name)
    with pytest.raises(AttributeError, match="tensorflow"):
        ht.utils.data._utils.merge_files_imagenet_tfrecord  # noqa: B018
    x = ht.ones((2, 3))
    with pytest.raises(AttributeError, match=r"(?s)'cumsum'.*x\.larray"):
        x.cumsum(0)
    with pytest.raises(TypeError, match=r"x\.larray\[...\]"):
        x[0]
    for wrong in (lambda: ht.ones((2, 3), split=1), lambda: x.resplit(1)):
        with pytest.raises(ValueError, match="rows are split here"):
            wrong()
    with pytest.raises(ValueError, match="device 'tpu'"):
        ht.use_device("tpu")


def test_transforms_are_those_of_torchvision_or_the_cure_is_named(monkeypatch):
    transforms = ht.utils.vision_transforms
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(MissingExtra, match="pip install torchvision"):
        transforms.ToTensor  # noqa: B018
    fake = type(sys)("torchvision.transforms")
    fake.ToTensor = object()
    monkeypatch.setitem(sys.modules, "torchvision", type(sys)("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.transforms", fake)
    assert transforms.ToTensor is fake.ToTensor


@pytest.mark.ranks([1, 2, 3])
def test_an_array_splits_its_rows_and_is_the_same_at_any_number_of_ranks(rank_count):
    rank = ht.MPI_WORLD.rank
    whole = torch.arange(14.0).view(7, 2)
    x = ht.array(whole, split=0)
    _, lshape, mine = ht.MPI_WORLD.chunk((7, 2), split=0)
    assert torch.equal(x.larray, whole[mine])
    assert (x.shape, x.gshape, x.lshape, x.split) == ((7, 2), (7, 2), tuple(lshape), 0)
    assert (x.dtype, x.ndim, x.size, len(x), str(x.device)) == (ht.float32, 2, 14, 7, "cpu:0")
    assert x.comm == ht.MPI_WORLD
    assert torch.equal(torch.tensor(x.numpy()), whole)
    for y, expected in ((1 + x * 2, 1 + whole * 2), ((x - 1) / (x + 1), (whole - 1) / (whole + 1))):
        assert torch.equal(torch.tensor(y.numpy()), expected)
        assert y.split == 0
    assert torch.equal((-(x**2)).resplit(None).larray, -(whole**2))
    assert torch.equal(ht.resplit(ht.array(whole), 0).larray, x.larray)
    assert x.astype(ht.int64).resplit_(None).larray.tolist() == whole.long().tolist()
    own = ht.array(torch.full((rank + 1, 2), rank), is_split=0)
    assert own.shape == (sum(range(rank_count + 1)), 2)
    assert own.lshape == (rank + 1, 2)
    before = torch.get_rng_state()
    ht.random.seed(3)
    drawn = [ht.random.rand(7, 2, split=0).numpy(), ht.random.randn(5).numpy()]
    generator = torch.Generator().manual_seed(3)
    for got, draw, shape in zip(drawn, (torch.rand, torch.randn), ((7, 2), (5,)), strict=True):
        assert torch.equal(torch.tensor(got), draw(shape, generator=generator))
    ht.random.seed()
    ht.MPI_WORLD.Barrier()
    assert len({tuple(v) for v in ht.MPI_WORLD.allgather(ht.random.rand(3).larray.tolist())}) == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert ht.zeros(3, dtype=ht.int32).larray.tolist() == [0, 0, 0]
    assert ht.arange(1, 6, 2).larray.tolist() == [1, 3, 5]
    assert (ht.cpu, str(ht.get_device())) == ("cpu", "cpu:0")
    if rank_count > 1:
        with pytest.raises(ValueError, match="layouts have to be equal"):
            x + ht.ones((7, 2))
    data = ht.utils.data.Dataset(ht.array(torch.arange(6.0) + 10 * rank, is_split=0))
    data.Shuffle()
    everything = torch.empty(6 * rank_count)
    ht.MPI_WORLD.Allgather(data.data, everything)
    expected = torch.cat([torch.arange(6.0) + 10 * r for r in range(rank_count)])
    assert torch.equal(everything.sort().values, expected)


@pytest.fixture
def files(tmp_path):
    """Write 500 digits as an HDF5 file of encoded images and as TFRecord files."""
    h5py = pytest.importorskip("h5py")
    images, labels = load_digits(return_X_y=True)
    images, labels = images[:500].astype(np.uint8), labels[:500]
    with h5py.File(tmp_path / "images.h5", "w") as file:
        encoded = [list(base64.binascii.b2a_base64((row * 15).tobytes())) for row in images]
        file["images"] = np.array(encoded, dtype=np.uint8)
        meta = np.zeros((500, 9), dtype=np.float32)
        meta[:, 0], meta[:, 1], meta[:, 3], meta[:, 4] = 8, 8, labels + 1, np.arange(500)
        file["metadata"] = meta
    for part, count in (("train", 250), ("val", 10)):
        (tmp_path / part).mkdir()
        for number in range(2):
            rows = range(number * count, (number + 1) * count)
            raw = b"".join(
                struct.pack("<QI", 65, 0) + bytes([labels[i]]) + images[i].tobytes() + bytes(4)
                for i in rows
            )
            (tmp_path / part / f"part{number}").write_bytes(raw)
    return {"mnist.py": [], "imagenet.py": [tmp_path / "images.h5"], "imagenet_daso.py": [tmp_path]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["mnist.py", "imagenet.py", "imagenet_daso.py"])
def test_scripts_in_the_style_of_heats_examples_learn_as_with_one_rank(
    name, files, tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    reached = {}
    for ranks in (1, 2):
        words = ["--ranks", str(ranks), str(SCRIPTS / name), *map(str, files[name])]
        assert main(["run", "--compat", "heat", *words]) == 0, capfd.readouterr().err
        found = re.findall(
            r"\[?(\d?)\]? ?RIGHT (\S+) with (\d)(?: of (.*))?", capfd.readouterr().out
        )
        assert {int(size) for _, _, size, _ in found} == {ranks}
        reached[ranks] = {right for _, right, _, _ in found[-ranks:]}
        assert len(reached[ranks]) == 1, "ranks agree"
    alone, together = (float(*reached[ranks]) for ranks in (1, 2))
    assert alone > 0.9
    assert together > alone - 0.04


@pytest.fixture
def lines_of(printed_by, tmp_path):
    """Return a function that runs the script as a HeAT user does, and the lines of each rank."""
    script = tmp_path / "mnist.py"
    script.write_text(re.sub(r"\bheat\b", "unisono.compat.heat", SCRIPT))
    pattern = r"SEEN (\d) (\d) (\S+) (\S+) (\w+)"
    return lambda *before: sorted(re.findall(pattern, printed_by(script, *before)))


@pytest.mark.timeout(300)
def test_a_training_script_runs_in_one_process(lines_of):
    lines = lines_of()
    assert [(line[1], line[2]) for line in lines] == [
        ("1", "daso"),
        ("1", "dp-False"),
        ("1", "dp-True"),
    ]
    assert all(float(line[3]) > 0.8 for line in lines), lines


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_training_script_runs_under_mpiexec_and_ranks_end_equal(lines_of, mpiexec):
    lines = lines_of(mpiexec, "-n", "2")
    assert len(lines) == 6
    first, second = lines[:3], lines[3:]
    assert [line[1:] for line in first] == [line[1:] for line in second]
    assert {line[1] for line in lines} == {"2"}
    assert all(float(line[3]) > 0.8 for line in lines), lines


def test_the_script_is_the_same_for_heat_but_for_its_import_lines():
    changed = re.sub(r"\bheat\b", "unisono.compat.heat", SCRIPT).splitlines()
    different = [a for a, b in zip(SCRIPT.splitlines(), changed, strict=True) if a != b]
    assert different == [line for line in SCRIPT.splitlines() if "heat" in line]
    assert all("import" in line for line in different)


@pytest.mark.ranks([1, 2])
def test_the_communicator_of_daso_and_its_model_is_that_of_heat(rank_count):
    net = torch.nn.Linear(2, 1)
    daso = ht.optim.DASO(torch.optim.SGD(net.parameters(), lr=0.1), 4)
    model = ht.nn.DataParallelMultiGPU(net, daso)
    assert isinstance(daso, data_parallel.DASO)
    for comm in (daso.comm, model.comm):
        assert isinstance(comm, ht.MPICommunication)
        total = torch.ones(1)
        comm.Allreduce(ht.MPI.IN_PLACE, total, ht.MPI.SUM)
        assert (comm.size, total.item()) == (rank_count, rank_count)
    given = ht.MPICommunication(ht.MPI_WORLD.handle)
    assert ht.optim.DASO(daso.local_optimizer, 4, given, 1, cooldown_epochs=1).comm is given


def two_layers():
    """Return a module of two layers and a parameter of its own, the same on all ranks."""
    torch.manual_seed(1)
    module = torch.nn.ModuleDict(
        {"a": torch.nn.Sequential(torch.nn.Linear(2, 2)), "b": torch.nn.Linear(2, 1)}
    )
    module.register_parameter("p", torch.nn.Parameter(torch.ones(1)))
    return module


@pytest.mark.ranks(2)
def test_parts_of_a_model_have_heat_names():
    module, rank = two_layers(), ht.MPI_WORLD.rank
    optimizer = ht.optim.DataParallelOptimizer(ht.optim.SGD(module.parameters(), lr=0.1))
    model = ht.nn.DataParallel(module, ht.MPI_WORLD, optimizer)
    assert model._param_slices == {"": slice(0, 1), "a.0": slice(1, 3), "b": slice(3, 5)}
    assert list(model._param_indices) == ["p", "a.0.weight", "a.0.bias", "b.weight", "b.bias"]
    assert model._dp_optimizers == [optimizer]
    assert model.optimizer is optimizer
    assert len(model._fwd_hook_handles) == 3
    mean = model._blocking_hook(torch.full((2,), float(rank), dtype=torch.float64))
    assert torch.equal(mean, torch.full((2,), 0.5, dtype=torch.float64))
    for name, p in reversed(list(module.named_parameters())):
        hook = model._nonblocking_hook(name.rpartition(".")[0], name)
        grad = torch.full_like(p, float(rank))
        assert hook(grad) is grad
    handles = [handle for layer in model._layer_wait_handles.values() for handle in layer]
    assert len(handles) == 5
    for _, handle, dtype, buffer in handles:
        handle.wait()
        assert dtype == torch.float32
        assert torch.equal(buffer, torch.full_like(buffer, 0.5))
    with pytest.raises(KeyError, match="nothing"):
        model._nonblocking_hook("b", "nothing")


class Chain(torch.nn.Sequential):
    """Two layers in a row."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


@pytest.mark.ranks(2)
def test_owed_updates_of_a_layer_can_be_asked_for():
    torch.manual_seed(1)
    module, twin = Chain(), Chain()
    twin.load_state_dict(module.state_dict())
    inner = ht.optim.SGD(module.parameters(), lr=0.1)
    optimizer = ht.optim.DataParallelOptimizer(inner)
    model = ht.nn.DataParallel(module, ht.MPI_WORLD, optimizer)
    engine = model._engine
    engine.has_arrived = lambda bucket: bucket not in engine.under_way  # so that the step is owed
    twin.load_state_dict(module.state_dict())
    model(torch.ones(3, 2)).sum().backward()
    assert list(model._layer_wait_handles) == ["1", "0"]
    optimizer.step()
    assert model._active_layers == {"0", "1"}
    with pytest.raises(ValueError, match="leave one of the two out"):
        model._iparam_update(slice(0, 1), ["0"])
    with pytest.raises(KeyError, match=r"(?s)nowhere.*HINT: .*'0', '1'"):
        model._iparam_update(layer_names=["nowhere"])
    model._iparam_update(slice(0, 2), ["0"])
    model._iparam_update()
    assert model._active_layers == set()
    twin(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_layers_are_reset_by_their_own_function():
    layer, plain = torch.nn.Linear(2, 2), torch.nn.ReLU()
    for kind in (ht.nn.DataParallel, ht.nn.DataParallelMultiGPU):
        before = layer.weight.detach().clone()
        kind._reset_parameters(layer)
        kind._reset_parameters(plain)
        assert not torch.equal(layer.weight, before)
