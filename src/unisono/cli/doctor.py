"""`unisono doctor`: what this machine can run, one line per check, and a fix where it cannot.

A check is a function that says what it found; `check` gives it a name. One that raises counts as
FAIL with its message, so there is never a traceback.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli.words import ShellSpelling
from unisono.errors import PlatformError

if TYPE_CHECKING:
    from unisono.launch import Platform, Results

Finding = tuple[str, str] | tuple[str, str, str]
"""Status (ok, warn, FAIL, skip), what was found, and what to do about it."""
Group = list[Callable[[], "Check"]]

MIN_SHM_MB = 64
SHM = Path("/dev/shm")
_PIP = f"{Path(sys.executable).name} -m pip install --force-reinstall"


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do about it."""

    name: str
    status: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        """Return one line, and a second one with the fix if there is one."""
        line = f"{self.status:<5} {self.name:<12} {self.found}"
        return f"{line}\n      {'':<12} fix: {self.fix}" if self.fix else line


CHECKS: Group = []
"""The checks of every machine, in the order of this file."""
SLURM_CHECKS: Group = []
"""Further checks of `--on slurm`."""


def check(
    name: str, group: Group | None = None
) -> Callable[[Callable[[], Finding]], Callable[[], Check]]:
    """Make a function a check with this name, and add it to `group`."""

    def named(function: Callable[[], Finding]) -> Callable[[], Check]:
        def run() -> Check:
            try:
                return Check(name, *function())
            except Exception as error:
                finding = f"{type(error).__name__}: {_in_one_line(error)}"
                return Check(name, "FAIL", finding, _fix(error))

        if group is not None:
            group.append(run)
        return run

    return named


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check what this machine can run",
        description="Check Python, torch, cores, shared memory and network, and run two ranks.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--on",
        metavar="PLACE",
        help="also check this place: gpu, mps, mpi, ray, slurm, inline, or a profile; "
        "on gpu, or a kind such as xpu, programs are compared with the CPU",
    )
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Run all checks, print them as they end, and return 1 if one failed."""
    checks: list[Check] = []
    for result in _all_checks(args.on):
        checks.append(result)
        if not args.json:
            print(result, flush=True)
    failed = any(check.status == "FAIL" for check in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}))
    else:
        print("Something is wrong, see FAIL." if failed else "This machine is ready.")
    return int(failed)


def _all_checks(place: str | None) -> Iterator[Check]:
    from unisono import accelerator
    from unisono.launch.request import known_place
    from unisono.launch.settings import read_configuration

    if place not in (None, "auto"):
        known_place(place, read_configuration(), ShellSpelling("doctor"))
    for run_check in CHECKS:
        yield run_check()
    if place == "slurm":
        for run_check in SLURM_CHECKS:
            yield run_check()
    elif place not in (None, "cpu", "auto"):
        at_place = check(f"on {place}")(functools.partial(_run_at, place))()
        yield at_place
        if at_place.status == "ok" and (place == "gpu" or accelerator.is_kind(place)):
            yield from device_checks(place)


def device_checks(place: str) -> Iterator[Check]:
    """Run the programs of `self_test` on two ranks, or one where there is one device."""
    from unisono import accelerator
    from unisono.cli import self_test
    from unisono.launch import Logs, Platform, run

    devices = accelerator.count(None if place == "gpu" else place)
    platform = Platform(device=place, ranks=min(2, devices), comm_timeout_s=20.0)
    fix = "report this, with all lines above"
    try:
        ranks = list(run(self_test.on_rank, on=platform, timeout_s=60, logs=Logs(console="none")))
    except Exception as error:
        yield Check("self-test", "FAIL", f"{type(error).__name__}: {error}", fix)
        return
    for rank, (device, _) in enumerate(ranks):
        yield Check(f"rank {rank}", "ok", device)
    for name in self_test.PROGRAMS:
        outcomes = [by_program[name] for _, by_program in ranks]
        wrong = [f"rank {rank}: {o.wrong}" for rank, o in enumerate(outcomes) if o.wrong]
        took, host = max(o.total_s for o in outcomes), min(o.host_s for o in outcomes)
        finding = f"as on the CPU, in {took:.2f} s; the host was free after {host:.2f} s"
        yield Check(name, "FAIL", "; ".join(wrong), fix) if wrong else Check(name, "ok", finding)


def _in_one_line(error: Exception) -> str:
    """Return what an error says in one line: what was asked, and what was found there."""
    first, *rest = str(error).strip().splitlines() or [""]
    causes = [line.strip().removeprefix("found: ") for line in rest if "HINT: " not in line]
    return f"{first} ({causes[0]})" if isinstance(error, PlatformError) and causes else first


def _fix(error: Exception) -> str:
    """Return what to type against an error that a check did not expect."""
    hints = [line for line in str(error).splitlines() if "HINT: " in line]
    if hints:
        return hints[-1].partition("HINT: ")[2]
    if isinstance(error, ImportError):
        return f"{_PIP} {(error.name or 'torch').partition('.')[0]}"
    return "unisono run --ranks 1 --debug os:getpid shows whether and where a rank fails"


@check("python", CHECKS)
def check_python() -> Finding:
    """Which Python runs this."""
    return "ok", f"{platform.python_version()} at {sys.executable}"


@check("torch", CHECKS)
def check_torch() -> Finding:
    """The installed torch has torch.distributed."""
    import torch
    import torch.distributed as dist

    from unisono import torch_private

    if not dist.is_available():
        return "FAIL", f"{torch.__version__} without torch.distributed", f"{_PIP} torch"
    untested, missing = torch_private.untested(), torch_private.missing()
    if untested is None and not missing:
        return "ok", torch.__version__
    lacks = f"; it lacks {', '.join(missing)}" if missing else ""
    return "warn", f"{untested or torch.__version__}{lacks}", "a torch of these versions"


@check("devices", CHECKS)
def check_devices() -> Finding:
    """Which accelerators torch sees."""
    import torch

    from unisono import accelerator

    kind = accelerator.kind() or "cpu"
    devices = [torch.device(kind, index) for index in range(accelerator.count())]
    return "ok", ", ".join(["CPU", *(f"{d} ({accelerator.name(d)})" for d in devices)])


@check("backends", CHECKS)
def check_backends() -> Finding:
    """Which backends torch and unisono have."""
    import torch.distributed as dist

    from unisono import accelerator
    from unisono.comm import transports

    default = dist.Backend.default_device_backend_map.get(accelerator.kind() or "cpu", "gloo")
    there = {name: dist.is_backend_available(name) for name in ("gloo", default)}
    words = {name: "ok" if is_there else "not in this torch" for name, is_there in there.items()}
    words |= transports.available()
    finding = ", ".join(n if word == "ok" else f"{n} ({word})" for n, word in words.items())
    return ("ok", finding) if there["gloo"] else ("FAIL", finding, f"{_PIP} torch: it has gloo")


@check("core", CHECKS)
def check_core() -> Finding:
    """The compiled core, without which ranks of one host send their tensors over gloo."""
    from unisono.comm.engines import core

    reason = core.unavailable()
    if reason is None:
        return "ok", f"compiled, layout version {core.load().VERSION}"
    if os.environ.get("UNISONO_CORE") == "0":
        return "warn", f"{reason}: ranks use gloo", "unset UNISONO_CORE"
    if sys.platform != "linux":
        return "ok", f"{reason}: ranks use gloo"
    fix = f"apt install g++ && {_PIP} --no-deps --no-cache-dir unisono (in a checkout: -e .)"
    return "warn", "not built: ranks use gloo, which is slower", fix


@check("cores", CHECKS)
def check_cores() -> Finding:
    """How many cores ranks can share."""
    from unisono.cores import cgroup_quota, usable_cores

    cores, quota = usable_cores(), cgroup_quota()
    finding = f"{cores} usable of {os.cpu_count()}"
    finding += "" if quota is None else f", control group allows {quota:g}"
    if threads := os.environ.get("OMP_NUM_THREADS"):
        finding += f"; OMP_NUM_THREADS={threads} sets the threads of each rank"
    if cores > 1:
        return "ok", finding
    return "warn", finding, "ranks share one core: correct, but not faster; taskset -p $$"


@check("/dev/shm", CHECKS)
def check_shared_memory() -> Finding:
    """/dev/shm exists and has room, and killed processes have left nothing in it."""
    from unisono.launch.pool.cleanup import unused_memory

    try:
        space = os.statvfs(SHM)
    except OSError as error:
        return "warn", f"{error.strerror}", "mount -t tmpfs tmpfs /dev/shm, or UNISONO_BACKEND=gloo"
    free_mb = space.f_bavail * space.f_frsize / 2**20
    finding = f"{free_mb:,.0f} MB free of {space.f_blocks * space.f_frsize / 2**20:,.0f} MB"
    if free_mb < MIN_SHM_MB:
        return "warn", finding, "docker run --shm-size=1g, or UNISONO_BACKEND=gloo"
    kinds = {f"{SHM}/{start}*": SHM.glob(f"{start}*") for start in ("unisono-", "mpich_shm_")}
    unused = {kind: len(unused_memory(files)) for kind, files in kinds.items()}
    if not (count := sum(unused.values())):
        return "ok", finding
    finding += f"; {count} file{'' if count == 1 else 's'} of processes that were killed"
    left = " ".join(kind for kind, number in unused.items() if number)
    return "warn", finding, f"rm {left} once none of your ranks runs"


@check("mpi", CHECKS)
def check_mpi() -> Finding:
    """There is an mpiexec, of the same MPI as mpi4py."""
    from unisono.comm.engines.mpi.library import unavailable
    from unisono.launch.places.mpi import find_mpiexec
    from unisono.launch.platform import Platform

    try:
        mpiexec = find_mpiexec(Platform(device="mpi"))
    except PlatformError as error:
        finding = str(error).splitlines()[1].strip().removeprefix("found: ")
        if "MPIEXEC" in os.environ:
            return "warn", finding, "unset MPIEXEC, or MPIEXEC=/path/of/an/mpiexec"
        return "skip", finding, 'pip install "unisono[mpi]" mpich, if you need --on mpi'
    finding = f"{mpiexec.version} at {mpiexec.path}"
    if (why := unavailable()) is not None:
        return "ok", f'{finding}; backend="mpi" is not available: {why}'
    theirs = "openmpi" if "Open MPI" in _library_of_mpi4py() else "mpich"
    if theirs != mpiexec.flavour:
        finding += f", but mpi4py uses {theirs}"
        return "warn", finding, "MPIEXEC=... with the mpiexec of that MPI"
    return "ok", f"{finding}; mpi4py uses the same"


def _library_of_mpi4py() -> str:
    """Ask in a process of its own which library mpi4py loads; here that would start MPI."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    code += "print(MPI.Get_library_version())"
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout


@check("slurm", CHECKS)
def check_slurm() -> Finding:
    """Whether jobs can be submitted from here."""
    from unisono.launch.places.slurm import cluster

    missing = cluster.missing_programs()
    if len(missing) == len(cluster.PROGRAMS):
        return "skip", "not on this machine", "a login node, to use a cluster"
    if missing:
        fix = "apt install slurm-client, or a login node of the cluster"
        return "FAIL", f"no {', '.join(missing)}", fix
    try:
        return "ok", "; ".join(cluster.partitions(timeout_s=10.0))
    except PlatformError as error:
        words = [line.strip() for line in str(error).splitlines() if "HINT:" not in line]
        finding = f"programs are installed, but no cluster answers ({words[-1]})"
        fix = "set SLURM_CONF=/path/of/slurm.conf; scontrol ping shows whether the cluster is up"
        return "warn", finding, fix


@check("shared", SLURM_CHECKS)
def check_shared_directory() -> Finding:
    """Whether a node sees the directory from which jobs are submitted."""
    from unisono.launch.places.slurm import cluster

    with tempfile.TemporaryDirectory(prefix=".unisono-", dir=".") as probe:
        path = str(Path(probe).absolute())
        words = ("srun", "--immediate=30", "--ntasks=1", "--time=1", "ls", "-d", path)
        output = cluster.call(*words, check=False, timeout_s=60.0)
    if path in output:
        return "ok", f"a node sees {Path.cwd()}"
    fix = "logs= with a directory that all nodes share; sinfo shows whether a node is free"
    return "warn", f"no node has answered for {Path.cwd()}", fix


@check("settings", CHECKS)
def check_settings() -> Finding:
    """Which settings are in force, and the file that they come from."""
    from unisono.launch.settings import read_configuration

    configuration = read_configuration()
    finding = [] if configuration.path is None else [f"file {configuration.path.absolute()}"]
    finding += [f"{name}={value!r}" for name, value in configuration.settings.items()]
    if forced := os.environ.get("UNISONO_FORCE_ON"):
        finding.append(f"every device becomes {forced} (UNISONO_FORCE_ON)")
    if configuration.profiles:
        finding.append(f"profiles {', '.join(configuration.profiles)}")
    return "ok", "; ".join(finding) or "defaults only"


def _run_at(place: str) -> Finding:
    """Start two ranks at `place`, or one where only one fits."""
    ranks = 1 if place in ("inline", "mps") else 2
    results = _summed(place, ranks)
    hosts = ", ".join(dict.fromkeys(results.hosts))
    return "ok", f"{ranks} of {ranks} ranks right, on {hosts}, started in {results.start_s:.1f} s"


@check("two ranks", CHECKS)
def check_two_ranks() -> Finding:
    """Two ranks start and add up a tensor, over each backend of this host."""
    from unisono.comm import transports
    from unisono.launch import Platform

    names = [name for name in ("gloo", "shm") if transports.available().get(name, "ok") == "ok"]
    starts = [_summed(Platform(device="cpu", backend=name), 2).start_s for name in names]
    took = ", then in ".join(f"{seconds:.2f} s" for seconds in starts)
    return "ok", f"all_reduce is right over {', '.join(names)}; started in {took}"


def _summed(on: str | Platform, ranks: int) -> Results[float]:
    """Have ranks add up a tensor; raise if the sum is wrong on one of them."""
    from unisono.launch import Logs, run

    results = run(_self_test, on=on, ranks=ranks, timeout_s=120, logs=Logs(console="none"))
    right = [ranks * (ranks + 1) / 2] * ranks
    if list(results) != right:
        finding = f"{list(results)} instead of {right}"
        hint = "UNISONO_BACKEND=gloo or shm, the one that was not used, and report this"
        raise PlatformError.because(f"a sum over ranks on {on}", finding, hint=hint)
    return results


def _self_test() -> float:
    import torch

    import unisono

    comm = unisono.world()
    return comm.all_reduce(torch.tensor(float(comm.rank + 1))).item()
