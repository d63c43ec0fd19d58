"""The order of calls of a group whose process may use MPI in one thread only."""

from __future__ import annotations

from unisono.comm.transports.jobs import Job, JobQueue


class InlineJobs(JobQueue):
    """Runs everything in the caller's thread; an asynchronous call is over when it returns."""

    def post(self, job: Job) -> None:
        """Run `job` now; its exception is kept for those who wait."""
        self.run(job.run)

    def wake(self) -> None:
        """Start no thread: messages move on while somebody waits."""
