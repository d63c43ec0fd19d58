"""One collective call: what trace, check mode and deadline reports say about it.

The process keeps its latest call here, so that another rank's report can tell where this one
stands. Keeping it costs one assignment per call.
Where in the user's program it was made is found by leaving frames of installed packages aside.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from dataclasses import dataclass, field
from types import FrameType

import torch

from unisono.frames import folded, is_user_file


@dataclass(slots=True, eq=False)
class Call:
    """A collective, as one rank made it."""

    op: str
    """Verb, as the user spelled it."""
    group: str
    """Name of the group, for people."""
    key: str
    """Name of the group, unique in the world."""
    shape: tuple[int, ...] | None = None
    """Shape of the tensor this rank brought, None if it brought none."""
    dtype: torch.dtype | None = None
    """Its dtype."""
    kind: str = ""
    """Reduction, or other words that must agree over ranks."""
    root: int | None = None
    """Source or destination, as rank of the group."""
    dim: int | None = None
    """Tensor dim along which blocks are joined or cut."""
    sizes: tuple[int, ...] | None = None
    """Sizes of all blocks, where the caller gave them."""
    recv_sizes: tuple[int, ...] | None = None
    """Rows expected from each rank (all_to_all)."""
    device: str | None = None
    """Kind of device whose backend carries it; None where this rank brought no tensor."""
    signature: tuple[int, ...] | None = None
    """What ranks compare of a call on a device (`engines.signature`)."""
    requires_grad: bool | None = None
    """Whether the tensor takes part in autograd; None where it does not matter."""
    is_async: bool = False
    """Whether the caller waits later."""
    sends_to: tuple[int, ...] = ()
    """Ranks of the group that get a message."""
    receives_from: tuple[int, ...] = ()
    """Ranks of the group of which a message is expected."""
    awaits: tuple[tuple[int, int, int], ...] = ()
    """World rank, tag and number of each of these messages, from 1 for every rank and tag."""
    sent: int = 0
    """Bytes this rank hands to others."""
    received: int = 0
    """Bytes this rank gets from others."""
    algorithm: str = ""
    """Way chosen to do it."""
    t_start: int = 0
    """`time.perf_counter_ns` at the start."""
    wait_ns: int = 0
    """Time blocked in waits."""
    done: bool = False
    """Whether it has ended on this rank."""
    is_queued: bool = False
    """Whether a stream carries it out: the thread that looks after it says when it has ended."""
    number: int = 0
    """Number of the collective in its group, from 1; 0 for messages, which not all ranks make."""
    _site: str | None = field(default=None, repr=False)

    @property
    def site(self) -> str:
        """Source line of the call; looked up when first asked for, so ask inside the call."""
        if self._site is None:
            self._site = call_site(2)
        return self._site

    def describe(self) -> str:
        """Return the call in one line, e.g. `all_reduce(sum) #3 on world, float32 [4, 2]`."""
        inner = ", ".join(
            word
            for word in (
                self.kind,
                f"root {self.root}" if self.root is not None else "",
                f"dim {self.dim}" if self.dim is not None else "",
                f"to {_listed(self.sends_to)}" if self.sends_to else "",
                f"from {_listed(self.receives_from)}" if self.receives_from else "",
            )
            if word
        )
        number = f" #{self.number}" if self.number else ""
        text = f"{self.op}({inner}){number} on {self.group}"
        if self.dtype is not None and self.shape is not None:
            text += f", {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        return text if self.device in (None, "cpu") else f"{text} on {self.device}"


def sent_to(rank: int, tag: int) -> str:
    """Return the name in what a rank has made of the messages to a world rank."""
    return f"messages to {rank}, tag {tag}"


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


latest_call: Call | None = None
"""The latest call of this process."""
waited_call: Call | None = None
"""The call that is waited for, where that is not the latest."""


def waited() -> Call | None:
    """Return the call that this process waits for, None where it is not known to be in any."""
    if waited_call is not None:
        return waited_call
    return latest_call if latest_call is not None and not latest_call.done else None


def call_site(depth: int = 1) -> str:
    """Return `file:line` of the innermost frame of this thread that is the user's.

    `depth` frames above this one are known to be ours; each one not looked at saves time.
    """
    return _innermost(sys._getframe(depth))


def thread_site(ident: int) -> str:
    """Return the same for a thread of this process, which must not have gone on."""
    return _innermost(sys._current_frames().get(ident))


_is_user_file = functools.cache(is_user_file)


def _innermost(frame: FrameType | None) -> str:
    last = frame
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        last, frame = frame, frame.f_back
    return f"{last.f_code.co_filename}:{last.f_lineno}" if last is not None else "?"


def thread_stacks() -> str:
    """Return the Python stacks of the threads that run the user's code, main thread first.

    Threads of libraries alone are left out; the form is that of `unisono.frames.folded`.
    """
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda t: (t[0] != main, t[0])):
        stack = [
            (f.f_code.co_filename, n, f.f_code.co_name) for f, n in traceback.walk_stack(frame)
        ]
        if ident == main:
            parts.append(folded(stack))
        elif any(_is_user_file(file) for file, _, _ in stack):
            parts.append(f"  in thread {names.get(ident, '?')}:\n{folded(stack)}")
    return "\n".join(parts)
