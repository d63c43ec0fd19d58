"""Compile the simulated accelerator against the installed torch.

`python tests/accelerator/build.py` prints the directory to put on PYTHONPATH. There is one
directory for each state of the sources, torch, Python and the compiler, so a change of any of them
builds anew and nothing else does. The entry point in it has every `import torch` load the device,
also in processes that others start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("simdev")
UNITS = ("ops", "simccl", "fallback", "device", "module", "wire", "memory", "runtime")
"""Those that take longest first."""
CACHE = Path(__file__).parents[2] / "build" / "accelerator"


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler, `CXX` or what is installed; None without one."""
    if name := os.environ.get("CXX"):
        words = shlex.split(name)
        return words if shutil.which(words[0]) else None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def ensure(jobs: int = 2) -> Path:
    """Return the directory of the built package; compile it if it is not there.

    `SIMDEV_CACHE` is where builds are kept, `build/accelerator` of the repository by default.
    """
    import torch

    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler: neither CXX nor c++, g++ or clang++ is there")
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    texts = [path.read_text() for path in sorted((SOURCES / "csrc").iterdir())]
    key = "\0".join([torch.__version__, sys.version, *command, version.stdout, *_FLAGS, *texts])
    root = Path(os.environ.get("SIMDEV_CACHE", CACHE))
    target = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes, one compiles
        if not (target / "done").exists():
            shutil.rmtree(target, ignore_errors=True)
            _compile(target, command, Path(torch.__file__).parent, jobs)
            (target / "done").touch()
        for path in SOURCES.glob("*.py"):
            copied = target / "simdev" / path.name
            if not copied.exists() or copied.read_bytes() != path.read_bytes():
                shutil.copy(path, copied)
    return target


_FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-Wall", "-Wno-interference-size")


def _compile(target: Path, command: list[str], torch_home: Path, jobs: int) -> None:
    package, info = target / "simdev", target / "simdev-0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    include = torch_home / "include"
    folders = [include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*_FLAGS, *(f"-isystem{folder}" for folder in folders)]

    def compile_unit(name: str) -> Path:
        unit, made = SOURCES / "csrc" / f"{name}.cpp", target / f"{name}.o"
        _run([*command, *flags, "-c", str(unit), "-o", str(made)])
        return made

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_unit, UNITS))
    lib = torch_home / "lib"
    libraries = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    built = str(package / "_C.so")
    _run([*command, "-shared", *map(str, objects), "-o", built, *libraries, "-lc10"])
    for path in objects:
        path.unlink()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simdev\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nsimdev = simdev:autoload\n")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    print(ensure())
