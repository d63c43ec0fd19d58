"""Run all checks on this rank of an MPI job; rank 0 prints one line of JSON for each.

mpiexec -n 2 python -W ignore main.py [words of names]
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback

import programs
import torch
from mpi4py import MPI

from unisono.comm import Communicator, detect, start_world


def main():
    """Run the checks up to the first that fails: ranks do not agree about anything after it."""
    faulthandler.dump_traceback_later(180)  # where it hangs, if it does
    torch.set_num_threads(1)
    os.environ["UNISONO_TIMEOUT_S"] = "20"
    everybody = MPI.COMM_WORLD
    start_world(detect(), backend="mpi", timeout_s=20)
    sys.path.insert(0, str(programs.HERE.parents[3]))  # where the helpers of all tests are
    wanted = sys.argv[1:]
    for name, check in programs.cases(everybody.size):
        if wanted and not any(word in name for word in wanted):
            continue
        began, spent = time.monotonic(), time.process_time()
        error = None
        try:
            check()
        except BaseException:
            error = traceback.format_exc()
        errors = everybody.gather(error)
        costs = everybody.gather(time.process_time() - spent)
        if everybody.rank == 0:
            found = {rank: text for rank, text in enumerate(errors) if text is not None}
            seconds = round(time.monotonic() - began, 3)
            spent = round(sum(costs), 3)
            line = json.dumps({"name": name, "errors": found, "seconds": seconds, "cpu": spent})
            print(f"CHECK {line}", flush=True)
        if everybody.bcast(any(text is not None for text in errors or [])):
            everybody.Abort(1)
    start_world(detect(), backend="mpi", timeout_s=20)
    Communicator.of(everybody).start.all_reduce(torch.ones(1)).wait()
    if everybody.rank:
        time.sleep(0.3)  # all leave without any clean-up, and the keeper of the store first


if __name__ == "__main__":
    main()
