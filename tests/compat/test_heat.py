"""Programs written for HeAT: only the import line changes."""

from __future__ import annotations

import base64
import importlib
import re
import struct
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

import unisono.compat.heat as ht
from unisono import data_parallel
from unisono.cli import main
from unisono.comm import mpi_style
from unisono.compat.libraries import library_named
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
    x = ht.array(torch.ones(2, 3))
    with pytest.raises(AttributeError, match=r"(?s)'cumsum'.*x\.larray"):
        x.cumsum(0)
    for wrong in (lambda: ht.array(torch.ones(2, 3), split=1), lambda: x.resplit(1)):
        with pytest.raises(ValueError, match="rows are split here"):
            wrong()


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
    assert (x.dtype, x.ndim, len(x), x.device.type) == (ht.float32, 2, 7, "cpu")
    assert x.comm == ht.MPI_WORLD
    assert torch.equal(torch.tensor(x.numpy()), whole)
    assert torch.equal(ht.resplit(ht.array(whole), 0).larray, x.larray)
    assert torch.equal(x.resplit(None).larray, whole)
    assert ht.array(x).numpy().tolist() == ht.array(x, split=0).numpy().tolist() == whole.tolist()
    assert torch.equal(ht.array(x, is_split=0).larray, x.larray)
    own = ht.array(torch.full((rank + 1, 2), rank), ht.int64, is_split=0)
    assert own.shape == (sum(range(rank_count + 1)), 2)
    assert (own.lshape, own.dtype) == ((rank + 1, 2), torch.int64)
    data = ht.utils.data.Dataset(ht.array(torch.arange(6.0) + 10 * rank, is_split=0))
    data.Shuffle()
    everything = torch.empty(6 * rank_count)
    ht.MPI_WORLD.Allgather(data.data, everything)
    expected = torch.cat([torch.arange(6.0) + 10 * r for r in range(rank_count)])
    assert torch.equal(everything.sort().values, expected)


@pytest.fixture
def files(tmp_path):
    """Write digits as an HDF5 file of encoded images and as TFRecord files."""
    h5py = pytest.importorskip("h5py")
    images, labels = load_digits(return_X_y=True)
    images, labels = images[:500].astype(np.uint8), labels[:500]
    rows = 300
    with h5py.File(tmp_path / "images.h5", "w") as file:
        encoded = [list(base64.binascii.b2a_base64((row * 15).tobytes())) for row in images[:rows]]
        file["images"] = np.array(encoded, dtype=np.uint8)
        meta = np.zeros((rows, 9), dtype=np.float32)
        meta[:, 0], meta[:, 1], meta[:, 3], meta[:, 4] = 8, 8, labels[:rows] + 1, np.arange(rows)
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


class Numbered(ht.utils.data.partial_dataset.PartialH5Dataset):
    """Rows that know their numbers."""

    def __getitem__(self, index):
        return self.data[index], self.twice[index]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Write a file of the numbers 0 to 46, and of their doubles."""
    path = tmp_path_factory.mktemp("numbers") / "numbers.h5"
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["data"], file["twice"], file["short"] = np.arange(47.0), 2 * np.arange(47), [1]
    return path


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    first=st.integers(1, 60), load=st.integers(1, 60), batch=st.integers(1, 50), drop=st.booleans()
)
def test_a_window_of_a_file_moves_over_every_row_once(numbers, first, load, batch, drop):
    names = ["data", "twice"]
    options = {"transforms": [lambda x: x + 1, None], "initial_load": first, "load_length": load}
    rows = Numbered(str(numbers), dataset_names=names, **options)
    loader = ht.utils.data.DataLoader(rows, batch_size=batch, drop_last=drop)
    epochs = [list(loader), list(loader)]
    for batches in epochs:
        sizes = [len(x) for x, _ in batches]
        assert sizes == [batch] * (47 // batch) + [47 % batch] * (47 % batch > 0 and not drop)
        assert len(batches) == len(loader)
        seen = [int(x) for xs, _ in batches for x in xs]
        assert len(set(seen)) == len(seen)
        assert all(0 < x <= 47 for x in seen)
        assert all(torch.equal(2 * (x - 1), y.double()) for x, y in batches)
        assert len(rows.data) <= first + batch, "a window at a time"
    if len(epochs[0]) > 1:
        assert not torch.equal(epochs[0][0][0], epochs[1][0][0]) or batch == 1, "another order"


def test_a_file_that_does_not_fit_is_refused(numbers):
    kind = ht.utils.data.partial_dataset.PartialH5Dataset
    for options in ({"dataset_names": ["data", "short"]}, {"load_length": 0}):
        with pytest.raises(ValueError, match="as many rows in each data set"):
            kind(str(numbers), **options)
    plain = kind(str(numbers), validate_set=True)
    assert (len(plain), len(plain.data), plain.Shuffle()) == (47, 47, None)
    with pytest.raises(NotImplementedError, match=r"return self\.data\[index\]"):
        plain[0]
    with pytest.raises(ValueError, match="num_workers has to be 0"):
        ht.utils.data.DataLoader(plain, 2, 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["mnist.py", "imagenet.py", "imagenet_daso.py"])
def test_scripts_in_the_style_of_heats_examples_learn_as_with_one_rank(
    name, files, tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [str(SCRIPTS / name), *map(str, files[name])]
    assert main(["run", "--compat", "heat", "--ranks", "1", *words]) == 0, capfd.readouterr().err
    alone = reached(capfd.readouterr().out, 1)
    assert main(["run", "--compat", "heat", "--ranks", "2", *words]) == 0, capfd.readouterr().err
    assert alone > 0.9
    assert reached(capfd.readouterr().out, 2) > alone - 0.04


def reached(printed, ranks):
    """Return the share of right answers at the end; all ranks print the same, each in its time."""
    found = re.findall(r"RIGHT (\S+) with (\d) ([^R\n]+)", printed)
    assert {int(size) for _, size, _ in found} == {ranks}
    assert {count % ranks for count in Counter(found).values()} == {0}
    return float(found[-1][0])


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_script_runs_under_mpiexec_served_by_the_search_path(printed_by, mpiexec):
    where = library_named("heat").directory
    printed = printed_by(SCRIPTS / "mnist.py", mpiexec, "-n", "2", PYTHONPATH=where)
    assert reached(printed, 2) > 0.85


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


def test_an_index_of_records_is_whole_whenever_it_is_read(tmp_path):
    record = struct.pack("<Q", 8) + bytes(4 + 8 + 4)
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0").write_bytes(record * 5000)
    folders = [str(tmp_path / name) for name in ("train", "idx", "val", "val-idx")]
    ht.utils.data._utils.dali_tfrecord2idx(*folders)
    index = tmp_path / "idx" / "part-0.idx"
    whole = index.read_text()
    assert whole.splitlines()[:2] == ["0 24", "24 24"]
    assert len(whole.splitlines()) == 5000
    with ThreadPoolExecutor(2) as others:
        writing = [
            others.submit(ht.utils.data._utils.dali_tfrecord2idx, *folders) for _ in range(20)
        ]
        while not all(written.done() for written in writing):
            assert index.read_text() == whole
    assert all(written.exception() is None for written in writing)
    assert [path.name for path in index.parent.iterdir()] == ["part-0.idx"]
