"""Submission through submitit: its executor, our script."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from unisono.launch.slurm.driver import drive_for_submitit
from unisono.launch.slurm.script import batch_script

FOLDER = "submitit"
"""Where submitit keeps its files, in the directory of the job."""


class _Executor(submitit.SlurmExecutor):
    """Writes the same script as without submitit, but for the command."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        super().__init__(folder=directory / FOLDER)
        self._directory = directory
        self._options = options

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        del uid
        lines = ("export SUBMITIT_EXECUTOR=slurm", f"exec {command}")
        return batch_script(self._options, *lines)


def submit_script(directory: Path, options: Mapping[str, str]) -> str:
    """Submit the driver of the job in `directory`; return the id of the job."""
    from unisono.launch.slurm.submission import SCRIPT, refused

    (directory / FOLDER).mkdir(mode=0o700)
    try:
        job = _Executor(directory, options).submit(drive_for_submitit, str(directory))
    except (FailedJobError, FailedSubmissionError, subprocess.SubprocessError) as error:
        raise refused(directory / SCRIPT, str(error)) from error
    return str(job.job_id)
