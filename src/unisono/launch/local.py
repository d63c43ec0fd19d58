"""Ranks as processes of this host: what each is told, and one attempt to run a job on them."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from unisono.launch.console import Console
from unisono.launch.cores import threads_per_rank, usable_cores
from unisono.launch.process import start_rank
from unisono.launch.rank import Job
from unisono.launch.supervise import Outcome, Supervisor


def run_local(
    job: Job,
    *,
    ranks: int,
    console: Console,
    job_dir: Path,
    timeout_s: float | None,
    attempt: int = 0,
    grace_s: float = 1.0,
) -> Outcome:
    """Run `job` on `ranks` processes of this host; return what they returned, or raise.

    Whatever happens, no process, descriptor or thread of the run is left when this returns.
    """
    run_id = secrets.token_hex(8)
    supervisor = Supervisor(
        console,
        start_timeout_s=job.start_timeout_s,
        timeout_s=timeout_s,
        grace_s=grace_s,
        job_dir=job_dir,
        attempt=attempt,
    )
    with supervisor, _payload(job) as payload_fd:
        for rank in range(ranks):
            env = rank_environment(
                os.environ, rank=rank, ranks=ranks, run_id=run_id, job_dir=job_dir, attempt=attempt
            )
            if (width := console.width()) is not None:
                env |= {"COLUMNS": str(width), "LINES": "24"}
            supervisor.watch(
                start_rank(rank, ranks, payload_fd=payload_fd, env=env, job_dir=job_dir)
            )
        return supervisor.until_all_returned()


def rank_environment(
    base: Mapping[str, str], *, rank: int, ranks: int, run_id: str, job_dir: Path, attempt: int
) -> dict[str, str]:
    """Return `base` with what tells a rank of this host its place and its share of the cores.

    What would tell it of another world is left out.
    """
    misleading = ("UNISONO_DETECT", "MASTER_ADDR", "MASTER_PORT")
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else each lost connection prints a C++ stack
        "OMP_NUM_THREADS": str(threads_per_rank(ranks, usable_cores())),
        **{name: value for name, value in base.items() if name not in misleading},
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "UNISONO_RUN_ID": run_id,
        "UNISONO_JOB_DIR": str(job_dir),
        "UNISONO_RESTART": str(attempt),
    }


@contextmanager
def _payload(job: Job) -> Iterator[int]:
    """Yield a descriptor of a nameless file with our search path and the job.

    A file and not a pipe: all ranks read the same one, and none can keep the launcher waiting.
    """
    search_path = b"\0".join(os.fsencode(entry) for entry in sys.path)
    with tempfile.TemporaryFile() as file:
        file.write(len(search_path).to_bytes(8, "little") + search_path)
        pickle.dump(job, file, protocol=pickle.HIGHEST_PROTOCOL)
        file.flush()
        yield file.fileno()
