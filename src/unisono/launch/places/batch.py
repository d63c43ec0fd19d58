"""Batch scripts for PBS and LSF, in which `unisono run` starts the ranks of a job. Pure text.

Such a job is submitted and looked after with the scheduler's own programs; inside it ranks are
started as anywhere else, by the cluster's `mpiexec` or by ssh.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence

from unisono.errors import PlatformError
from unisono.launch.platform import Platform

_INSIDE = ("mpi", "ssh", "cpu", "gpu")
"""Places that can be inside a job of a scheduler."""
_OF_SCRIPT = ("partition", "timeout_min", "mem_per_node")
"""Fields that are for the scheduler, not for the command in the script."""
_NODE_FILES = {"pbs": "PBS_NODEFILE", "lsf": "LSB_DJOB_HOSTFILE"}
"""Variables with the path of a file that has a line for each slot: the name of its host."""


def script_text(
    scheduler: str, place: str, platform: Platform, own: Sequence[str], rest: Sequence[str]
) -> str:
    """Return a batch script for a scheduler.

    Args:
        scheduler: `"pbs"` or `"lsf"`.
        place: where ranks are started, inside the job.
        platform: how many nodes, ranks, CPUs, GPUs, how much memory and time.
        own: words after `unisono run`, up to `--`.
        rest: the others.
    """
    if place not in _INSIDE:
        raise PlatformError.because(
            f"unisono run --script {scheduler} --on {place}",
            f"inside a job ranks are started on {', '.join(_INSIDE)}",
            None,
            "--on mpi",
        )
    lines = list(_pbs(platform) if scheduler == "pbs" else _lsf(platform))
    if strange := next((line for line in lines if "\n" in line), None):
        raise PlatformError.because(f"the line {strange!r} of a batch script", "a line break in it")
    words = list(_inner_words(own))
    if not any(word == "--on" or word.startswith("--on=") for word in words):
        words = ["--on", place, *words]
    command = shlex.join([sys.executable, "-m", "unisono", "run", *words])
    is_listed = any(word == "--hosts" or word.startswith("--hosts=") for word in words)
    before = ['cd "$PBS_O_WORKDIR"'] if scheduler == "pbs" else []
    if place == "ssh" and not is_listed:
        before.append(f'hosts=$(sort -u "${_NODE_FILES[scheduler]}" | paste -sd, -)')
        command = command.replace(" run ", ' run --hosts "$hosts" ', 1)
    tail = f" {shlex.join(rest)}" if rest else ""
    return "\n".join(["#!/bin/bash", *lines, "", *before, f"exec {command}{tail}", ""])


def _pbs(platform: Platform) -> Iterator[str]:
    """Yield the directives of PBS Pro and OpenPBS."""
    per_node = platform.ranks_per_node
    cpus = platform.n_cpus_per_node or per_node
    chunk = [f"select={platform.n_nodes}", f"ncpus={cpus}", f"mpiprocs={per_node}"]
    if platform.n_gpus_per_node:
        chunk.append(f"ngpus={platform.n_gpus_per_node}")
    if platform.mem_per_node:
        chunk.append(f"mem={platform.mem_per_node}gb")
    yield f"#PBS -N {platform.name}"
    if platform.partition is not None:
        yield f"#PBS -q {platform.partition}"
    yield f"#PBS -l {':'.join(chunk)}"
    yield "#PBS -l place=scatter"
    if platform.timeout_min is not None:
        hours, minutes = divmod(platform.timeout_min, 60)
        yield f"#PBS -l walltime={hours:02d}:{minutes:02d}:00"
    yield "#PBS -j oe"


def _lsf(platform: Platform) -> Iterator[str]:
    """Yield the directives of LSF, whose slots are CPUs here."""
    cpus = platform.n_cpus_per_node or platform.ranks_per_node
    yield f"#BSUB -J {platform.name}"
    if platform.partition is not None:
        yield f"#BSUB -q {platform.partition}"
    yield f"#BSUB -n {cpus * platform.n_nodes}"
    yield f'#BSUB -R "span[ptile={cpus}]"'
    if platform.mem_per_node:
        yield f'#BSUB -R "rusage[mem={platform.mem_per_node}GB/host]"'
    if platform.n_gpus_per_node:
        yield f'#BSUB -gpu "num={platform.n_gpus_per_node}/host"'
    if platform.timeout_min is not None:
        yield f"#BSUB -W {platform.timeout_min}"
    yield f"#BSUB -o {platform.name}.%J.log"


def _inner_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the words that the command inside the job needs, too."""
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in ("--script", "--partition"):
            if not equals:
                next(rest, None)
        elif name == "--set":
            value = word.partition("=")[2] if equals else next(rest, "")
            if value.partition("=")[0] not in _OF_SCRIPT:
                yield from ("--set", value)
        else:
            yield word
