"""What a step frees is there for the next step, without the system's help."""

from __future__ import annotations

import sys

import pytest

import unisono

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc")


def faults_of_a_step() -> float:
    import resource

    import torch

    def step() -> None:
        [torch.zeros(3_000_000) for _ in range(4)]  # freed together

    for _ in range(5):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20


def test_a_rank_keeps_what_it_frees_unless_the_user_says_otherwise(monkeypatch):
    assert max(unisono.run(faults_of_a_step, ranks=2)) < 200  # of about 12,000 pages
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert min(unisono.run(faults_of_a_step, ranks=2)) > 200
