"""Run torch's own tests of torch.distributed and DDP on a backend, and compare backends.

The tests are those of `torch.testing._internal.distributed.distributed_test`, on four ranks. They
skip by the name of the backend and for want of GPUs; here no gate holds, and CUDA means the CPU.
Whatever holds on gloo must hold on shm:

    python tests/comm/torch/suite.py                  # all tests on gloo and on shm, compared
    python tests/comm/torch/suite.py sparse join      # tests whose names have one of these words
    python tests/comm/torch/suite.py --on shm         # on one backend
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

RANKS = 4
DEADLINE_S = 300
"""Seconds after which a test counts as hanging."""
BACKENDS = ("gloo", "shm")


class PassesForGloo(str):
    """Name of a backend that is equal to gloo's, too: tests ask for it in their bodies."""

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", str(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str) -> type[unittest.TestCase]:
    """Import torch's tests without their gates, and return a class of them on `backend`.

    Once a process: it changes torch for good.
    """
    # The tests read these while they are imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), OMP_NUM_THREADS="1")
    import torch
    from torch.testing._internal import common_distributed

    _lift_gates()
    _lift_gate_of_monitored_barrier()
    _map_cuda_to_cpu()
    common_distributed.get_timeout = lambda _: DEADLINE_S
    from torch.testing._internal.distributed import distributed_test as tests

    tests.BACKEND = PassesForGloo(backend)

    class TorchSuite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            # Forked, as torch is loaded here already; this process has only one thread.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchSuite


def _lift_gates() -> None:
    from torch.testing._internal import common_distributed, common_utils

    def lifted(*_: object, **__: object) -> Callable[[Any], Any]:
        return lambda test: test

    for name in ("skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"):
        setattr(common_utils, name, lifted)
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, name, lifted)
    for name in ("skip_if_no_gpu", "skip_if_small_worldsize"):
        setattr(common_distributed, name, lambda test: test)
    for backends in common_distributed.DistTestCases.backend_feature.values():
        backends.update(BACKENDS)


def _lift_gate_of_monitored_barrier() -> None:
    """Let the function pass a group of any backend to the group's method."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    gated: Any = c10d.monitored_barrier

    def lifted(*args: Any, **kwargs: Any) -> None:
        with unittest.mock.patch.object(c10d, "get_backend", return_value="gloo"):
            gated(*args, **kwargs)

    torch.distributed.monitored_barrier = lifted


def _map_cuda_to_cpu() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    changed: Any = torch
    cpu = torch.device("cpu")

    def on_cpu(x: Any) -> Any:
        is_cuda = isinstance(x, (str, torch.device)) and str(x).startswith("cuda")
        return cpu if is_cuda or type(x) is int else x

    class CudaIsCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            kwargs = kwargs or {}
            if "device" in kwargs:
                kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
            if getattr(func, "__name__", "") == "to":
                args = (args[0], *map(on_cpu, args[1:]))
            return func(*args, **kwargs)

    CudaIsCpu().__enter__()
    changed.Tensor.cuda = changed.nn.Module.cuda = lambda self, *_, **__: self
    changed.cuda.device_count = lambda: 2 * RANKS
    changed.cuda.current_device = lambda: 0
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    move = changed.nn.Module.to
    changed.nn.Module.to = lambda self, *args, **kw: move(self, *map(on_cpu, args), **kw)
    changed.cuda.stream = changed.cuda.device = lambda *_: contextlib.nullcontext()
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    make = ddp.__init__

    def without_devices(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kw: Any,
    ) -> None:
        make(self, module, None, None, *args, **kw)

    ddp.__init__ = without_devices


@contextlib.contextmanager
def _output_in(log: Path) -> Iterator[None]:
    """Send what this process and its ranks print to a file."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)


def outcome(suite: type[unittest.TestCase], name: str, log: Path) -> str:
    """Run one test; return "holds", or what went wrong in a line."""
    result = unittest.TestResult()
    with _output_in(log):
        print(f"=== {name}", flush=True)
        suite(name).run(result)
        problems = [text for _, text in (*result.failures, *result.errors)]
        print(*problems, flush=True)
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    if not problems:
        return "holds"
    # The first exception of the first rank that names one; behind it, the runner's own.
    raised = re.findall(r"^(?:\w+\.)*\w+: .*", problems[0], re.MULTILINE)
    lines = [line for line in raised if ": Process " not in line] or raised[-1:]
    return (lines or ["failed"])[0][:140]


def run(backend: str, words: Sequence[str], log: Path) -> None:
    """Print a line for each test, its name and its outcome, as they end."""
    suite = load(backend)
    suite.setUpClass()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    for name in unittest.defaultTestLoader.getTestCaseNames(suite):
        if not words or any(word in name for word in words):
            print(name, outcome(suite, name, log), sep="\t", flush=True)


def outcomes(
    backend: str, words: Sequence[str], log: Path, *, show: bool = False
) -> dict[str, str]:
    """Run tests on a backend in a process of their own; return the outcome of each by its name."""
    command = [sys.executable, __file__, *words, "--run", backend, "--log", str(log)]
    by_name: dict[str, str] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            name, _, text = line.rstrip("\n").partition("\t")
            by_name[name] = text
            if show:
                print(f"{backend} {len(by_name):3} {name}: {text}", flush=True)
    if process.returncode:
        raise SystemExit(f"the tests on {backend} ended with {process.returncode}, see {log}")
    return by_name


def lost(reference: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the tests that hold in the reference and not in the other."""
    return [name for name, text in reference.items() if text == "holds" != other.get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description="torch's own tests of torch.distributed, compared")
    parser.add_argument("words", nargs="*", help="run tests whose names have one of these")
    parser.add_argument("--on", choices=BACKENDS, help="run on this backend only")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, default=None, help="where output of the tests goes")
    options = parser.parse_args()
    if options.run:
        run(options.run, options.words, options.log)
        return 0
    logs = options.log or Path(tempfile.mkdtemp(prefix="torch-suite-"))
    logs.mkdir(exist_ok=True)
    results = {
        backend: outcomes(backend, options.words, logs / f"{backend}.log", show=True)
        for backend in ([options.on] if options.on else BACKENDS)
    }
    print(f"\noutput of the tests: {logs}")
    for backend, by_name in results.items():
        holds = sum(text == "holds" for text in by_name.values())
        print(f"{backend}: {holds} of {len(by_name)} hold")
    if options.on:
        return 0
    missing = lost(results["gloo"], results["shm"])
    print(f"hold on gloo and not on shm: {len(missing)}")
    for name in missing:
        print(f"  {name}: {results['shm'][name]}")
    return bool(missing)


if __name__ == "__main__":
    raise SystemExit(main())
