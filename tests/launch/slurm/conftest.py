"""A real SLURM cluster for the tests of this directory: started once, ended with the session."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[2] / "cluster" / "slurm_cluster.py"


def _module():
    name = "unisono_slurm_cluster"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, CLUSTER)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _start(**options):
    module = _module()
    why = module.why_not(namespaces=options.get("namespaces", False))
    if why is not None:
        if "slurm" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail(f"UNISONO_REQUIRE wants slurm, but {why}")
        pytest.skip(why)
    return module.Cluster(**options)


@pytest.fixture(scope="session")
def slurm_cluster():
    """Two nodes of four CPUs and one GPU that nobody can use."""
    with _start(nodes=2, cpus=4, gpus=1) as running:
        yield running


@pytest.fixture(scope="module")
def namespaced_cluster():
    """Two nodes that have neither host name nor network in common."""
    with _start(nodes=2, cpus=2, namespaces=True) as running:
        yield running


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Return a function that makes a cluster the one of this process; `sacct` must not be used."""
    called = tmp_path / "sacct-was-called"
    stub = tmp_path / "stubs" / "sacct"
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    stub.chmod(0o755)

    def use(cluster):
        for name, value in cluster.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{stub.parent}:{cluster.variables['PATH']}")
        monkeypatch.chdir(tmp_path)
        return cluster

    yield use
    assert not called.exists()


@pytest.fixture
def forked_jobs(monkeypatch, forked_python):
    """Let jobs start forks of the warm interpreter, where SLURM need not end anything of them."""
    monkeypatch.setattr(sys, "executable", forked_python)


@pytest.fixture
def cluster(slurm_cluster, use):
    """The cluster of this session, in use; a test leaves no job behind."""
    # One that is about to end may come back: it was requeued.
    before = _jobs(slurm_cluster, "PD,R,S,CF,CG")
    yield use(slurm_cluster)
    end = time.monotonic() + 30.0
    while left := _jobs(slurm_cluster, "PD,R,S,CF") - before:  # a job may just be ending
        if time.monotonic() > end:
            slurm_cluster.call("scancel", *left)
            pytest.fail(f"jobs {sorted(left)} are left")
        time.sleep(0.05)


def _jobs(cluster, states):
    return set(cluster.call("squeue", "--noheader", "--format=%i", f"--states={states}").split())
