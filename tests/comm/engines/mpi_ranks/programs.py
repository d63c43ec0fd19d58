"""The list of checks that the ranks of an MPI job run, the same for the job and for pytest.

Most are test functions of the shared-memory transport, run here on MPI: what torch builds on a
group, every kernel, and the verbs of MPI's style must do the same on both. The rest, `check_*` of
the files beside this one, is about MPI itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
from pathlib import Path

import torch.distributed as dist

HERE = Path(__file__).parent
OWN = ("kernels", "verbs", "trouble", "worlds")
"""Files with checks of MPI alone, in the order in which they run; `worlds` ends the world."""
BORROWED = {
    "engines/test_shm_kernels.py": "shm",
    "engines/test_shm_messages.py": "shm",
    "engines/test_torch_on_shm.py": "shm",
    "torch/test_entry.py": "shm",
    "test_mpi_style.py": ["gloo", "shm"],
    "test_verbs.py": ["gloo", "shm"],
}
"""Files whose tests are run here too: those marked with these backends that need no fixture."""
_WAYS = ("plain", "in_pieces")
"""Ways to do a kernel over MPI, where the tests of shared memory have large and small slots."""


def load(path):
    """Import a file by its path; it belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"mpi_ranks_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def engine_made(way):
    """Yield the engine of a new MPI group of all ranks: as it is, or cut in pieces."""
    group = dist.new_group(backend="mpi4py")
    engine = group.unisono_engine
    if way in ("in_pieces", "small_slots"):
        engine.channel.chunk_bytes = 4096
    yield engine
    dist.destroy_process_group(group)


def cases(size):
    """Return name and function of each check for a world of `size` ranks, in order."""
    found = borrowed(size)
    for stem in OWN:
        for name, function in vars(load(HERE / f"{stem}.py")).items():
            if name.startswith("check_") and size in getattr(function, "sizes", (size,)):
                found.append((name.removeprefix("check_"), function))
    return found


def borrowed(size):
    """Return name and function of each test of other files for `size` ranks, in order."""
    found = []
    for file, backends in BORROWED.items():
        module = load(HERE.parents[1] / file)
        if hasattr(module, "engine_made"):
            module.engine_made = engine_made
        for name, test in list(vars(module).items()):
            marks = {mark.name: mark for mark in getattr(test, "pytestmark", ())}
            is_test = name.startswith("test_") and "ranks" in marks
            if is_test and marks["ranks"].kwargs.get("backend") == backends:
                found += _borrowed(test, size)
    return found


def _borrowed(test, size):
    """Return the calls of a pytest function that its marks ask for on `size` ranks."""
    marks = {mark.name: mark for mark in test.pytestmark}
    ranks = marks["ranks"].args[0]
    if size != ranks and (isinstance(ranks, int) or size not in ranks):
        return []
    choices = []
    for mark in test.pytestmark:
        if mark.name == "parametrize":
            argument, values = mark.args[:2]
            values = _WAYS if argument == "way" else values
            choices.append([(argument, value) for value in values])
    if set(inspect.signature(test).parameters) != {choice[0][0] for choice in choices}:
        return []  # it asks for a fixture
    found = []
    for chosen in itertools.product(*choices):
        words = "-".join(str(value) for _, value in chosen)
        name = test.__name__.removeprefix("test_") + (f"[{words}]" if words else "")
        found.append((name, lambda chosen=chosen: test(**dict(chosen))))
    return found
