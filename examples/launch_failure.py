"""What a failing rank and a missed deadline look like: `python examples/launch_failure.py`."""

from __future__ import annotations

import tempfile
import time

import unisono
from unisono.errors import RankFailed, RankTimeout


def divide(step):
    comm = unisono.world()
    if comm.rank == 1:
        return step / (comm.rank - 1)
    comm.barrier()  # waits for a rank that never comes
    return None


def oversleep():
    comm = unisono.world()
    if comm.rank == 1:
        time.sleep(600)
    comm.barrier()


def caught(kind, function, *args, **how):
    """Run a function that is bound to fail, and return the error."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as logs:  # else the logs of a failed run are kept
        try:
            unisono.run(function, *args, on="cpu", ranks=2, logs=logs, **how)
        except kind as error:
            print(f"after {time.perf_counter() - begin:.1f} s:\n{error}\n")
            return error
    raise RuntimeError("it did not fail")


def main():
    failed = caught(RankFailed, divide, 3)
    assert failed.rank == 1
    assert isinstance(failed.__cause__, ZeroDivisionError)
    late = caught(RankTimeout, oversleep, timeout_s=1)
    assert late.rank == 1, "the one that sleeps is to blame"
    assert len(late.stacks) == 2


main()
