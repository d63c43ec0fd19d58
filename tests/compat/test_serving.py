"""Scripts written for other libraries run as they are: `unisono run --compat NAME script.py`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest

from unisono.cli import main
from unisono.compat import serve, serving
from unisono.compat.libraries import LIBRARIES, library_named
from unisono.errors import PlatformError

# Each prints one line per rank: a sum over ranks, so that it also shows that they are one world.
_GATHERED = """
import torch
import unisono
{imports}

size = unisono.world().size
gp_utils.setup_graph_parallel_groups(size, None)
x = torch.arange(5.0).view(5, 1)
whole = {gathered}
print("ranks", gp_utils.get_gp_world_size(), "equal", torch.equal(whole, x))
gp_utils.cleanup_gp()
"""
SCRIPTS = {
    "heat": """
import torch
import heat as ht
import heat.nn.functional as F
from heat.optim import DataParallelOptimizer, lr_scheduler
from heat.utils.data.datatools import DataLoader, Dataset

optimizer = DataParallelOptimizer(ht.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), True)
total = torch.ones(1)
ht.MPI_WORLD.Allreduce(ht.MPI.IN_PLACE, total, ht.MPI.SUM)
print("ranks", int(total), "equal", len(DataLoader(Dataset(torch.ones(4)), batch_size=4)) == 1)
""",
    "ddpw": """
import ddpw.wrapper
from ddpw import Platform, Wrapper, wrapper

def task(global_rank, local_rank, process_group, args):
    import torch, torch.distributed as dist
    from ddpw.functional import has_batch_norm
    total = torch.ones(1)
    dist.all_reduce(total, group=process_group)
    print("ranks", int(total), "equal", not has_batch_norm(torch.nn.Linear(1, 1)), args)

assert callable(wrapper) and ddpw.wrapper is wrapper
Wrapper(Platform(device="cpu", n_gpus=2, verbose=False)).start(task, ("x",))
""",
    "pytagi": """
import pytagi
from pytagi.nn import DDPConfig, DDPSequential, Linear, Sequential
import pytagi.metric as metric
import unisono

comm = unisono.world()
config = DDPConfig(list(range(comm.size)), "gloo", rank=comm.rank, world_size=comm.size)
net = DDPSequential(Sequential(Linear(2, 1)), config)
net.check_sync()
print("ranks", comm.size, "equal", metric.mse(net([1.0, 1.0])[0], net([1.0, 1.0])[0]) == 0.0)
""",
    "distdl": """
import torch
from mpi4py import MPI
import distdl.nn as dnn
import distdl.utilities.slicing
from distdl.backends.mpi.partition import MPIPartition
from distdl.nn.module import Module

P_world = MPIPartition(MPI.COMM_WORLD)
P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1])
layer = dnn.DistributedConv2d(P_x, in_channels=1, out_channels=1, kernel_size=3, padding=1)
y = layer(torch.ones(1, 1, 4, 4))
print("ranks", P_world.size, "equal", y.shape == (1, 1, 4, 4) and isinstance(layer, Module))
""",
    "ocpmodels": """
import torch
import ocpmodels.common.gp_utils
from ocpmodels.common import gp_utils
from ocpmodels.common.gp_utils import gather_from_model_parallel_region as gather
import unisono

gp_utils.setup_gp({"gp_gpus": unisono.world().size, "distributed_backend": None})
x = torch.arange(6.0).view(6, 1)
whole = gather(gp_utils.scatter_to_model_parallel_region(x, 0), 0)
print("ranks", gp_utils.get_gp_world_size(), "equal", torch.equal(whole, x))
ocpmodels.common.gp_utils.cleanup_gp()
""",
    "fairchem": _GATHERED.format(
        imports="from fairchem.core.common import gp_utils",
        gathered="gp_utils.gather_from_model_parallel_region("
        "gp_utils.scatter_to_model_parallel_region(x, 0), 0, natoms=5)",
    ),
    "fairchem_v2": _GATHERED.format(
        imports="import fairchem.core.common.gp_utils as gp_utils",
        gathered="gp_utils.gather_from_model_parallel_region("
        "gp_utils.scatter_to_model_parallel_region(x), 5)",
    ),
}


@pytest.fixture
def untouched(monkeypatch):
    """What a script does to this process when it runs inline is undone."""
    path, argv, modules = [*sys.path], [*sys.argv], set(sys.modules)
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(sys, "argv", argv)
    yield
    roots = {library.root for library in LIBRARIES.values()}
    assert not [name for name in set(sys.modules) - modules if name.partition(".")[0] in roots]
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("unisono")]


def run_served(name, text, tmp_path, capfd, *words):
    (tmp_path / "script.py").write_text(text)
    code = main(["run", "--compat", name, *words, str(tmp_path / "script.py")])
    return code, capfd.readouterr()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_unchanged_on_two_ranks(name, tmp_path, capfd, untouched):
    code, said = run_served(name, SCRIPTS[name], tmp_path, capfd, "--ranks", "2")
    assert code == 0, said.err
    lines = said.out.splitlines()
    assert [line[:22] for line in sorted(lines)] == [f"[{r}] ranks 2 equal True" for r in (0, 1)]
    assert f"is served by unisono.compat.{name}" in said.err


@pytest.mark.parametrize("name", ["heat", "pytagi", "fairchem"])
def test_a_script_runs_unchanged_in_one_process(name, tmp_path, capfd, untouched):
    code, said = run_served(name, SCRIPTS[name], tmp_path, capfd, "--on", "inline")
    assert code == 0, said.err
    assert "ranks 1 equal True" in said.out.splitlines()[0]


@pytest.mark.parametrize("words", [("--on", "inline"), ()])
def test_a_script_that_starts_its_own_ranks_finds_its_library_in_them(
    words, tmp_path, capfd, untouched
):
    text = SCRIPTS["ddpw"].replace("n_gpus=2", "n_gpus=3")
    code, said = run_served("ddpw", text, tmp_path, capfd, *words)
    assert code == 0, said.err
    assert sorted(said.out.splitlines()) == [f"[{r}] ranks 3 equal True ('x',)" for r in range(3)]


def test_a_script_that_asks_for_gpus_gets_as_many_ranks_or_an_error(
    tmp_path, capfd, untouched, monkeypatch
):
    text = SCRIPTS["ddpw"].replace('device="cpu", n_gpus=2', 'device="gpu", n_gpus=3')
    monkeypatch.setattr("unisono.accelerator.kind", lambda: None)
    code, said = run_served("ddpw", text, tmp_path, capfd)
    assert code == 2
    assert "UNISONO_FORCE_ON=cpu" in said.err
    monkeypatch.setenv("UNISONO_FORCE_ON", "cpu")
    code, said = run_served("ddpw", text, tmp_path, capfd)
    assert code == 0, said.err
    assert sorted(said.out.splitlines()) == [f"[{r}] ranks 3 equal True ('x',)" for r in range(3)]
    assert run_served("ddpw", "1 / 0", tmp_path, capfd, "--dry-run")[0] == 0, "nothing is run"


def test_a_function_whose_module_imports_the_library_reaches_the_ranks(
    tmp_path, capfd, untouched, monkeypatch
):
    (tmp_path / "oldlib.py").write_text(
        "from heat.core.communication import MPI_WORLD\n\ndef size(): return MPI_WORLD.size\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--compat", "heat", "--ranks", "2", "oldlib:size"]) == 0
    sys.modules.pop("oldlib", None)
    assert capfd.readouterr().out == "[0] 2\n[1] 2\n"


SPAWNING = """
import torch
import heat as ht
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        import heat.utils.data
        return torch.tensor(i * i), ht.__name__

if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    for squares, names in loader:
        print(squares.tolist(), set(names))
"""


def test_spawned_workers_of_a_loader_find_the_library(tmp_path, capfd, untouched):
    code, said = run_served("heat", SPAWNING, tmp_path, capfd, "--ranks", "1")
    assert code == 0, said.err
    assert "[0, 1, 4, 9] {'unisono.compat.heat'}" in said.out


def test_other_launchers_serve_by_the_search_path(warm_python):
    words = [sys.executable, "-m", "unisono.compat"]
    found = subprocess.run([*words, "heat", "pytagi"], capture_output=True, text=True, check=True)
    code = (
        "import pytagi.nn.linear, unisono.compat.pytagi.nn.linear as own\n"
        "assert pytagi.nn.linear is own and pytagi.__name__ == 'unisono.compat.pytagi'\n"
        "try:\n    import pytagi.hmm\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": found.stdout.strip()}
    done = subprocess.run(
        [warm_python, "-c", code], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "import pytagi.hmm\n  found: unisono.compat.pytagi answers" in done.stdout
    wrong = subprocess.run([*words, "haet"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "one of ddpw, distdl, fairchem" in wrong.stderr


def test_both_names_are_the_same_modules_in_either_order(untouched):
    with serving("pytagi", "heat"):
        first = importlib.import_module("pytagi.nn.conv2d")
        assert first is importlib.import_module("unisono.compat.pytagi.nn.conv2d")
        own = importlib.import_module("unisono.compat.heat.nn.functional")
        assert importlib.import_module("heat.nn.functional") is own
        assert own.__spec__ is not None
        assert own.__spec__.name == own.__name__ == "unisono.compat.heat.nn.functional"
        spec = importlib.util.find_spec("heat.optim")
        assert spec is not None
        assert str(spec.origin).endswith("__init__.py")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pytagi")


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("heat", "import heat.linalg", ["import heat.linalg", "heat.nn", "pass x.larray"]),
        ("heat", "from heat import matmul", ["heat.matmul", "pass x.larray"]),
        ("heat", "import heat; heat.linspace(3)", ["'linspace'", "pass x.larray"]),
        ("heat", "from heat.optim.utils import Foo", ["heat.optim.utils.Foo", "pass x.larray"]),
        ("ocpmodels", "import ocpmodels.models", ["ocpmodels.models", "gp_utils"]),
        ("fairchem", "from fairchem.core import units", ["fairchem.core.units", "fairchem_v2"]),
        ("pytagi", "from pytagi.nn import Transformer", ["pytagi.nn.Transformer", "unisono.bayes"]),
    ],
)
def test_what_is_left_out_is_named_with_what_to_use(name, line, words, untouched):
    with pytest.raises((ImportError, AttributeError)) as refused, serving(name):
        exec(line, {})
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ddpw", "from ddpw.io import Nope"),
        ("distdl", "from distdl.utilities.torch import Nope"),
        ("fairchem", "from fairchem.core.common.gp_utils import Nope"),
        ("heat", "from heat.optim.lr_scheduler import Nope"),
        ("ocpmodels", "import ocpmodels.common.gp_utils as gp; gp.Nope"),
        ("pytagi", "from pytagi.nn.ddp import Nope"),
    ],
)
def test_a_name_that_a_module_lacks_comes_with_a_hint_once(name, line, untouched):
    with pytest.raises((ImportError, AttributeError), match="Nope") as refused, serving(name):
        exec(line, {})
    assert str(refused.value).count("HINT: ") == 1
    assert library_named(name).instead in str(refused.value)


def test_a_script_that_needs_more_is_told_on_its_rank(tmp_path, capfd, untouched):
    text = "from heat.optim.utils import Foo\n"
    code, said = run_served("heat", text, tmp_path, capfd, "--on", "cpu", "--ranks", "2")
    assert code == 1
    assert "import heat.optim.utils.Foo" in said.err
    assert "HINT: for more of its arrays keep heat" in said.err


def test_an_installed_library_is_said_not_to_be_used(tmp_path, capfd, untouched, monkeypatch):
    (tmp_path / "there" / "heat").mkdir(parents=True)
    (tmp_path / "there" / "heat" / "__init__.py").write_text("raise RuntimeError('the other one')")
    monkeypatch.syspath_prepend(str(tmp_path / "there"))
    with pytest.warns(UserWarning, match=r"served by unisono.compat.heat; what is installed in"):
        serve("heat")
    serve("heat")  # again: nothing to say
    with serving("heat"):
        assert importlib.import_module("heat").__name__ == "unisono.compat.heat"
    assert "heat" in sys.modules  # served before, and still
    from unisono.compat.serving import _hook

    _hook.stop(library_named("heat"))
    assert library_named("ddpw").installed_at() is None
    (tmp_path / "there" / "ddpw").mkdir()  # any directory is a package to Python
    assert library_named("ddpw").installed_at() is None


def test_libraries_that_cannot_be_served_are_refused(untouched, monkeypatch, capsys):
    with pytest.raises(PlatformError, match="one of ddpw, distdl, fairchem, fairchem_v2, heat"):
        serve("torchx")
    monkeypatch.setitem(sys.modules, "heat", sys)
    with pytest.raises(PlatformError, match=r"finds .*sys.* already"):
        serve("heat")
    monkeypatch.delitem(sys.modules, "heat")
    both = serving("fairchem", "fairchem_v2")
    with pytest.raises(PlatformError, match=r"finds unisono.compat.fairchem already"):
        both.__enter__()
    with pytest.raises(SystemExit):
        main(["run", "--compat", "torchx", "x.py"])
    assert "choose from" in capsys.readouterr().err
