"""Programs written for pytagi: only the import line changes, or not even that."""

from __future__ import annotations

import numpy as np
import pytest

from unisono import bayes
from unisono.cli import main
from unisono.compat import pytagi, serving


def test_every_class_is_ours():
    for module in (pytagi, pytagi.nn, pytagi.nn.ddp, pytagi.tagi_utils, pytagi.metric):
        shared = [n for n in module.__all__ if n[0].isupper() and hasattr(bayes, n)]
        assert shared
        assert all(getattr(module, name) is getattr(bayes, name) for name in shared)


@pytest.mark.parametrize(
    "thing",
    [
        bayes.Linear(1, 1),
        bayes.Sequential(bayes.Linear(1, 1)),
        bayes.OutputUpdater("cpu"),
        bayes.Utils(),
        bayes.HRCSoftmax(),
        bayes.DDPConfig([]),
        bayes.BaseDeltaStates(),
        bayes.Normalizer(),
        bayes.HRCSoftmaxMetric(10),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_the_backend_of_an_object_is_the_object(thing):
    assert thing._cpp_backend is thing


def test_the_backend_of_a_replica_is_the_replica():
    net = bayes.DDPSequential(bayes.Sequential(bayes.Linear(1, 1)), bayes.DDPConfig([], "auto"))
    assert net._cpp_backend is net


PROGRAM = """
import numpy as np
from pytagi import Normalizer, exponential_scheduler, manual_seed
import pytagi.metric as metric
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential
from pytagi.nn.ddp import DDPConfig, DDPSequential

manual_seed(0)
x = np.linspace(-1, 1, 40, dtype=np.float32)
y = x**3
mean, std = Normalizer.compute_mean_std(y)
y = Normalizer.standardize(y, mean, std)
net = Sequential(Linear(1, 30), ReLU(), Linear(30, 1))
net = DDPSequential(net, DDPConfig(device_ids=[], backend="auto", rank=0, world_size=1))
updater = OutputUpdater(net.model.device)
sigma = 1.0
for epoch in range(40):
    sigma = exponential_scheduler(curr_v=sigma, min_v=0.1, decaying_factor=0.95, curr_iter=epoch)
    var_y = np.full((8,), sigma**2, dtype=np.float32)
    for rows in np.random.default_rng(epoch).permutation(40).reshape(5, 8):
        m, v = net(x[rows])
        updater.update(
            output_states=net.output_z_buffer,
            mu_obs=y[rows],
            var_obs=var_y,
            delta_states=net.input_delta_z_buffer,
        )
        net.backward()
        net.step()
net.eval()
m, v = net(x)
print(f"error {metric.rmse(m, y):.4f}")
assert metric.rmse(m, y) < 0.25
"""


def test_a_program_runs_after_one_more_line(printed_by, tmp_path):
    served = "import unisono.compat\nunisono.compat.serve('pytagi')\n"
    (tmp_path / "program.py").write_text(served + PROGRAM)
    assert "error" in printed_by("program.py")


INSISTS = """
import sys
import numpy as np
import pytagi
from pytagi.nn import DDPConfig, DDPSequential, Linear, OutputUpdater, ReLU, Sequential

if not (pytagi.cuda.is_available() and pytagi.is_cuda_available()):
    sys.exit("CUDA is not available")
if not pytagi.cuda.is_nccl_available():
    sys.exit("NCCL is not available")
devices = list(range(pytagi.cuda.get_device_count()))
config = DDPConfig(device_ids=devices, backend="nccl", rank=0, world_size=1)
net = Sequential(Linear(2, 4), ReLU(), Linear(4, 1))
net.to_device("cuda")
ddp = DDPSequential(net, config, average=True)
device = pytagi.cuda.get_current_device()
assert pytagi.cuda.set_device(device) and min(pytagi.cuda.get_device_memory(device)) > 0
updater = OutputUpdater(net.device)
x = np.ones((4, 2), np.float32) * (1 + device)
for _ in range(3):
    ddp(x.flatten())
    updater.update(ddp.output_z_buffer, np.ones(4), np.full(4, 0.1), ddp.input_delta_z_buffer)
    ddp.backward()
    ddp.step()
ddp.check_sync()
print("devices", len(devices), "mine", device, ddp.get_device_with_index())
"""


def test_a_program_that_insists_on_cuda_runs_where_there_is_none(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(INSISTS)
    run = ["run", "--compat", "pytagi", "--ranks", "2"]
    assert main([*run, "--as-cpu", str(script)]) == 0
    said = capfd.readouterr()
    lines = [f"[{rank}] devices 2 mine {rank} cpu" for rank in (0, 1)]
    assert sorted(said.out.splitlines()) == lines
    assert 'unisono: where there is no CUDA, "cuda" means the CPU' in said.err
    assert main([*run, str(script)]) != 0
    assert "CUDA is not available" in capfd.readouterr().err
    assert main(["run", "--as-cpu", str(script)]) == 2
    assert "HINT: --compat pytagi --as-cpu" in capfd.readouterr().err
    with serving("pytagi", as_cpu=True):
        assert pytagi.is_cuda_available()
        assert bayes.Linear(1, 1).to_cuda().device == "cpu"
    assert not pytagi.is_cuda_available()


def test_serving_in_python_takes_the_cpu_for_cuda_and_says_so(printed_by, tmp_path):
    served = "import unisono.compat, warnings\nwarnings.simplefilter('ignore')\n"
    served += "unisono.compat.serve('pytagi', as_cpu=True)\n"
    (tmp_path / "program.py").write_text(served + INSISTS)
    assert printed_by("program.py") == "devices 1 mine 0 cpu\n"


def test_arguments_have_the_names_of_pytagi():
    net = bayes.Sequential(bayes.Linear(input_size=2, output_size=1, bias=True, gain_weight=1.0))
    m, v = net(mu_x=np.ones(2), var_x=np.ones(2))
    assert m.shape == v.shape == (1,)
    config = bayes.DDPConfig(device_ids=[0], backend="gloo", rank=0, world_size=1)
    config.rank, config.world_size = 1, 2
    assert (config.rank, config.world_size) == (1, 2)


def test_a_name_that_is_not_offered_is_answered_with_those_that_are():
    with pytest.raises(AttributeError, match=r"(?s)'GRU'.*HINT: .*unisono\.bayes"):
        _ = pytagi.nn.GRU
    with pytest.raises(AttributeError, match=r"(?s)'Linear2'.*HINT: Linear"):
        _ = pytagi.nn.Linear2
