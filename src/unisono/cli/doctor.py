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
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unisono.errors import PlatformError

if TYPE_CHECKING:
    from unisono.launch import Platform, Results

Status = Literal["ok", "warn", "FAIL", "skip"]
Finding = tuple[Status, str] | tuple[Status, str, str]
"""Status, what was found, and what to do about it."""

MIN_SHM_MB = 64
SHM = Path("/dev/shm")
_PIP = f"{Path(sys.executable).name} -m pip install --force-reinstall"


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do about it."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def __str__(self) -> str:
        """Return one line, and a second one with the fix if there is one."""
        line = f"{self.status:<5} {self.name:<12} {self.found}"
        return f"{line}\n      {'':<12} fix: {self.fix}" if self.fix else line


CHECKS: list[Callable[[], Check]] = []
"""The checks of every machine, in the order of this file."""
SLURM_CHECKS: list[Callable[[], Check]] = []
"""Further checks of `--on slurm`."""


def check(
    name: str, group: list[Callable[[], Check]] | None = None
) -> Callable[[Callable[[], Finding]], Callable[[], Check]]:
    """Make a function a check with this name, and add it to `group`."""

    def named(function: Callable[[], Finding]) -> Callable[[], Check]:
        def run() -> Check:
            try:
                status, finding, *fix = function()
                return Check(name, status, finding, *fix)
            except Exception as error:
                finding = f"{type(error).__name__}: {_in_one_line(error)}"
                return Check(name, "FAIL", finding, _fix(error, name))

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
    place, more = args.on, []
    if place not in (None, "auto"):
        from unisono.cli.outcome import ShellSpelling
        from unisono.launch.request import known_place
        from unisono.launch.settings import read_configuration

        known_place(place, read_configuration(), ShellSpelling("doctor"))
    if place == "slurm":
        more = SLURM_CHECKS
    elif place not in (None, "cpu"):
        more = [check(f"on {place}")(functools.partial(_run_at, place))]
    checks: list[Check] = []
    for run_check in (*CHECKS, *more):
        checks.append(run_check())
        if not args.json:
            print(checks[-1], flush=True)
    if place is not None and checks[-1].status == "ok" and _names_accelerator(place):
        for further in device_checks(place):
            checks.append(further)
            if not args.json:
                print(further, flush=True)
    failed = any(check.status == "FAIL" for check in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}))
    else:
        print("Something is wrong, see FAIL." if failed else "This machine is ready.")
    return int(failed)


def _names_accelerator(place: str) -> bool:
    from unisono import accelerator

    return place == "gpu" or accelerator.is_kind(place)


def device_checks(place: str) -> list[Check]:
    """Run the programs of `self_test` on two ranks, or one where there is one device."""
    from unisono import accelerator
    from unisono.cli import self_test
    from unisono.launch import Logs, Platform, run

    devices = accelerator.count(None if place == "gpu" else place)
    platform = Platform(device=place, ranks=min(2, devices), comm_timeout_s=20.0, verbose=False)
    try:
        ranks = list(run(self_test.on_rank, on=platform, timeout_s=60, logs=Logs(console="none")))
    except Exception as error:
        fix = "report this, with all lines above and the traceback in the log"
        return [Check("self-test", "FAIL", f"{type(error).__name__}: {error}", fix)]
    checks = [Check(f"rank {rank}", "ok", device) for rank, (device, _) in enumerate(ranks)]
    for name in self_test.PROGRAMS:
        outcomes = [by_program[name] for _, by_program in ranks]
        wrong = [f"rank {rank}: {o.wrong}" for rank, o in enumerate(outcomes) if o.wrong]
        if wrong:
            fix = "report this, with all lines above"
            checks.append(Check(name, "FAIL", "; ".join(wrong), fix))
            continue
        took, host = max(o.total_s for o in outcomes), min(o.host_s for o in outcomes)
        finding = f"as on the CPU, in {took:.2f} s; the host was free after {host:.2f} s"
        checks.append(Check(name, "ok", finding))
    return checks


def _in_one_line(error: Exception) -> str:
    """Return what an error says in one line: what was asked, and what was found there."""
    first, *rest = str(error).strip().splitlines() or [""]
    causes = [line.strip().removeprefix("found: ") for line in rest if "HINT: " not in line]
    return f"{first} ({causes[0]})" if isinstance(error, PlatformError) and causes else first


def _fix(error: Exception, name: str) -> str:
    """Return what to type against an error that a check did not expect."""
    hints = [line for line in str(error).splitlines() if "HINT: " in line]
    if hints:
        return hints[-1].partition("HINT: ")[2]
    if isinstance(error, ImportError):
        package = (error.name or "torch").partition(".")[0]
        return f"{_PIP} {package}"
    if isinstance(error, PermissionError):
        return f"ls -ld {error.filename or Path.cwd()}, which this user cannot use"
    if name.startswith("on "):
        place = name.removeprefix("on ")
        return f"unisono run --on {place} --ranks 1 --debug os:getpid shows the whole traceback"
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

    if not dist.is_available():
        finding = f"{torch.__version__} without torch.distributed"
        return "FAIL", finding, f"{_PIP} torch, from pytorch.org"
    from unisono import torch_private

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
    return "ok", ", ".join(
        ["CPU", *(f"{device} ({accelerator.name(device)})" for device in devices)]
    )


@check("backends", CHECKS)
def check_backends() -> Finding:
    """Which backends torch and unisono have."""
    import torch.distributed as dist

    from unisono import accelerator
    from unisono.comm import transports

    default = dist.Backend.default_device_backend_map.get(accelerator.kind() or "cpu", "gloo")
    states = {name: dist.is_backend_available(name) for name in ("gloo", default)}
    words = {name: "ok" if there else "not in this torch" for name, there in states.items()}
    words |= transports.available()
    finding = ", ".join(
        name if word == "ok" else f"{name} ({word})" for name, word in words.items()
    )
    if not states["gloo"]:
        return "FAIL", finding, f"{_PIP} torch: its wheels have gloo"
    return "ok", finding


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
    limit = "" if quota is None else f", control group allows {quota:g}"
    finding = f"{cores} usable of {os.cpu_count()}{limit}"
    if "OMP_NUM_THREADS" in os.environ:
        finding += (
            f"; OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} sets the threads of each rank"
        )
    if cores == 1:
        fix = "ranks share one core: correct, but not faster; taskset -p $$ shows what limits them"
        return "warn", finding, fix
    return "ok", finding


@check("/dev/shm", CHECKS)
def check_shared_memory() -> Finding:
    """/dev/shm exists and has room, and killed processes have left nothing in it."""
    try:
        space = os.statvfs(SHM)
    except OSError as error:
        fix = "mount -t tmpfs tmpfs /dev/shm, or UNISONO_BACKEND=gloo"
        return "warn", f"{error.strerror}", fix
    free_mb = space.f_bavail * space.f_frsize / 2**20
    finding = f"{free_mb:,.0f} MB free of {space.f_blocks * space.f_frsize / 2**20:,.0f} MB"
    if free_mb < MIN_SHM_MB:
        return "warn", finding, "docker run --shm-size=1g, or UNISONO_BACKEND=gloo"
    from unisono.launch.pool.cleanup import unused_memory

    kinds = [f"{SHM}/{start}*" for start in ("unisono-", "mpich_shm_")]
    unused = {kind: unused_memory(SHM.glob(Path(kind).name)) for kind in kinds}
    if count := sum(map(len, unused.values())):
        finding += f"; {count} file{'' if count == 1 else 's'} of processes that were killed"
        fix = f"rm {' '.join(kind for kind in kinds if unused[kind])} once none of your ranks runs"
        return "warn", finding, fix
    return "ok", finding


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

    directory = Path(".unisono").absolute()
    was_there = directory.exists()
    probe = directory / f"probe-{os.getpid()}-{secrets.token_hex(4)}"
    probe.mkdir(mode=0o700, parents=True)
    try:
        words = ("srun", "--immediate=30", "--ntasks=1", "--time=1", "ls", "-d", str(probe))
        output = cluster.call(*words, check=False, timeout_s=60.0)
    finally:
        probe.rmdir()
        if not was_there:
            directory.rmdir()
    if str(probe) in output:
        return "ok", f"a node sees {directory.parent}"
    fix = "logs= with a directory that all nodes share; sinfo shows whether a node is free"
    return "warn", f"no node has answered for {directory.parent}", fix


@check("settings", CHECKS)
def check_settings() -> Finding:
    """Which settings are in force, and where each came from."""
    from unisono.launch.settings import read_configuration

    configuration = read_configuration()
    finding = [f"{n}={s.value!r} ({s.source})" for n, s in configuration.settings.items()]
    if forced := os.environ.get("UNISONO_FORCE_ON"):
        finding.append(f"every device becomes {forced} (UNISONO_FORCE_ON)")
    if configuration.path is not None:
        finding.insert(0, f"file {configuration.path.absolute()}")
    if configuration.profiles:
        names = ", ".join(configuration.profiles)
        finding.append(f"profiles {names} ({configuration.path})")
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
