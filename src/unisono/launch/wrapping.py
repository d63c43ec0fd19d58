"""`Wrapper` and `wrapper`: launching as DDPW spells it.

A world of one rank runs in the calling process, so that its side effects stay visible there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from unisono.launch.api import execute, submit_request
from unisono.launch.attempts import telling
from unisono.launch.console import IO
from unisono.launch.context import run_in_process
from unisono.launch.conventions import choose_convention
from unisono.launch.job import Job
from unisono.launch.platform import Platform
from unisono.launch.request import checked_request
from unisono.launch.results import Results
from unisono.launch.stacks import own_frames_hidden

__all__ = ["Wrapper", "wrapper"]


class Wrapper:
    """Starts tasks on a platform.

    Attributes:
        platform: where.
    """

    def __init__(self, platform: Platform, *, convention: str = "auto") -> None:
        """Take a platform.

        Args:
            platform: where tasks run; `IO.verbose` follows its `verbose`.
            convention: how tasks are called: `"seed"` (ranks, group, one value), `"ddpw6"` (by
                keyword), `"plain"`, or `"auto"` by their signature.
        """
        self.platform = platform
        self._convention = convention
        IO.verbose = platform.verbose

    def start(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Results[Any] | Job:
        """Run `task` on every rank of the platform and return what each returned.

        On SLURM the job is queued, and its handle returned at once.
        """
        with own_frames_hidden():
            return self._start(task, args, kwargs, is_decorated=False)

    def _start(
        self,
        task: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_decorated: bool,
    ) -> Results[Any] | Job:
        convention = choose_convention(
            task, args, kwargs, asked=self._convention, is_decorated=is_decorated
        )
        platform = self.platform
        if platform.seed_per_rank is None:  # equal weights and splits everywhere, as DDPW has it
            platform = platform.but(seed_per_rank=False)
        request = checked_request(
            task,
            args,
            kwargs,
            on=platform,
            ranks=None,
            nodes=None,
            timeout_s=None,
            max_restarts=None,
            logs=None,
            is_called_plainly=False,
        )
        request.platform.print()
        if request.place == "slurm" and not request.joins_world:
            return submit_request(request, convention)
        if request.ranks == 1 and not request.joins_world:
            with telling(request.platform):
                return run_in_process(request, convention)
        return execute(request, convention)


def wrapper(
    platform: Platform,
) -> Callable[[Callable[..., Any]], Callable[..., Results[Any] | Job]]:
    """Decorate a function so that calling it runs it on every rank of `platform`."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Results[Any] | Job]:
        @functools.wraps(fn)
        def launch(*args: Any, **kwargs: Any) -> Results[Any] | Job:
            with own_frames_hidden():
                return Wrapper(platform)._start(fn, args, kwargs, is_decorated=True)

        return launch

    return decorate
