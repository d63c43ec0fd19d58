"""How the ranks of a layer agree on a call: one word, on its way while the call goes on.

The word is the maximum over ranks of four numbers: has some input changed or gone wrong, does some
rank need gradients, and is grad mode alike. A layer asks when it is called and needs the answer
before it uses what other ranks have sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono import errors
from unisono.comm import Communicator
from unisono.comm.perform import Pending
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError, name_ranks
from unisono.nn.structure import current_mode

SAME, CHANGED, BAD = 0, 1, 2
NO_GRAD, PARAMETERS, INPUTS = 0, 1, 2
"""Whose gradients are needed: nobody's, only parameters', inputs' too."""

MOST_NOTES = 9
"""In shared memory groups up to this size write notes; larger ones meet."""

Word = tuple[int, int, int, int]
"""Level, whose gradients, grad mode, minus grad mode."""
Sent = Pending[Tensor] | Pending[list[tuple[int, ...]]]
"""A word under way: the maximum over ranks, or the words of all."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks of a layer know of this call."""

    changed: bool
    """Some rank's input has another structure than the current plan."""
    gradients: int
    """`NO_GRAD`, `PARAMETERS` or `INPUTS`, the most that some rank needs."""


class Question:
    """What one rank asks the others in a call.

    Args:
        comm: all ranks of the layer.
        word: own word.
        problem: an error this rank has found in its input.
        is_sent: whether the word goes on its way at once; else it waits for `answer`, or travels
            inside a message of the layer (`settle`).
    """

    def __init__(
        self,
        comm: Communicator | None,
        word: Word,
        problem: UnisonoError | None,
        *,
        is_sent: bool,
    ) -> None:
        self.comm = comm
        self.word = word
        self._problem = problem
        self._answer: Agreement | None = None
        self._sent: Sent | None = None
        if comm is not None and is_sent:
            self._sent = _send(comm, word)

    @property
    def is_open(self) -> bool:
        """Whether other ranks have still to be heard."""
        return self._answer is None

    @property
    def is_inner(self) -> bool:
        """Whether an enclosing chain asks for this layer: no word of its own is to travel."""
        return False

    @property
    def stands_in(self) -> bool:
        """Whether this rank can take part in the current plan with zeros only."""
        return self.word[0] != SAME

    @property
    def is_refused(self) -> bool:
        """Whether this rank's own input is bad: the answer will raise."""
        return self._problem is not None

    def answer(self) -> Agreement:
        """Return what all ranks agree on; raise alike on all if one has a problem."""
        if self._answer is None and self.comm is not None:
            heard = _meet(self.comm, self.word) if self._sent is None else self._sent.wait()
            if isinstance(heard, Tensor):
                self.settle(heard.tolist())
            else:
                self.settle([max(column) for column in zip(*heard, strict=True)])
        return self._settled()

    def settle(self, heard: list[int]) -> Agreement:
        """Take the maximum over ranks of their words, however it came."""
        top, gradients, on, off = heard
        if top == BAD:
            raise_together(self.comm, self._problem)
        if on != -off:
            refuse_mixed_grad_mode(self.comm, self.word[2])
        self._answer = Agreement(top != SAME, gradients)
        return self._answer

    def _settled(self) -> Agreement:
        if self._answer is None:
            raise PartitionError("a layer's question was asked of nobody")
        return self._answer


def _send(
    comm: Communicator, word: Word
) -> Pending[Tensor] | Pending[list[tuple[int, ...]]] | None:
    """Send a word on its way behind the caller's back; None where that would need a thread.

    In shared memory a reduction would; but notes are simply there when they are wanted, so that
    nobody has to be met.
    """
    if comm.backend == "gloo":
        return comm.start.all_reduce_(torch.tensor(word, dtype=torch.int32), "max")
    if comm.backend == "shm" and comm.size <= MOST_NOTES:
        return comm.post_ints(word)
    return None


def _meet(comm: Communicator, word: Word) -> Tensor | list[tuple[int, ...]]:
    """Hear all ranks now; in shared memory notes cost less than a maximum of tensors."""
    if comm.backend == "shm" and comm.size <= MOST_NOTES:
        return comm.post_ints(word).wait()
    return comm.all_reduce_(torch.tensor(word, dtype=torch.int32), "max")


class _Inner(Question):
    """The question of a layer inside a chain that has asked for all of its layers."""

    def __init__(self, chain: Question, changed: bool, problem: UnisonoError | None) -> None:
        super().__init__(None, (CHANGED if changed else SAME, 0, 0, 0), problem, is_sent=False)
        self._chain = chain
        if not chain.is_open:
            self.answer()

    @property
    def is_inner(self) -> bool:
        """Always."""
        return True

    def answer(self) -> Agreement:
        """Return the chain's answer; what this rank alone sees counts too."""
        if self._problem is not None:
            raise self._problem
        agreed = self._chain.answer()
        self._answer = Agreement(agreed.changed or self.stands_in, agreed.gradients)
        return self._answer


class _Chain:
    """The question of an enclosing chain, which speaks for the layers inside it."""

    current: Question | None = None


@contextmanager
def chained(question: Question) -> Iterator[None]:
    """Let the layers called inside take this question as theirs."""
    before, _Chain.current = _Chain.current, question
    try:
        yield
        question.answer()
    finally:
        _Chain.current = before


def ask(
    comm: Communicator | None,
    *,
    changed: bool,
    gradients: int,
    problem: UnisonoError | None,
    is_sent: bool = True,
) -> Question:
    """Ask all ranks of `comm` about this call. Collective over `comm` in mode "always".

    The question is answered at once, and a problem raised, where nobody else is to be heard: one
    rank alone, another mode, or a chain that has its answer.
    """
    if _Chain.current is not None:
        return _Inner(_Chain.current, changed, problem)
    grad_on = int(torch.is_grad_enabled())
    if comm is not None and current_mode() == "always":
        level = BAD if problem is not None else CHANGED if changed else SAME
        return Question(comm, (level, gradients, grad_on, -grad_on), problem, is_sent=is_sent)
    if problem is not None:
        raise problem
    if comm is not None:
        gradients = INPUTS if grad_on else NO_GRAD  # nobody tells what the others need
    question = Question(None, (int(changed), gradients, grad_on, -grad_on), None, is_sent=False)
    question.settle(list(question.word))
    return question


def raise_together(comm: Communicator | None, problem: UnisonoError | None) -> None:
    """Raise the first problem of any rank on all ranks, if there is one. Collective."""
    if comm is None:
        if problem is not None:
            raise problem
        return
    said = comm.all_gather_object(
        None if problem is None else (type(problem).__name__, str(problem))
    )
    at = next((rank for rank, word in enumerate(said) if word is not None), None)
    if at is None:
        return
    if problem is not None and at == comm.rank:
        raise problem
    name, text = said[at]
    kind = getattr(errors, name, PartitionError)
    raise kind(f"{text}\n  on rank {comm.ranks[at]}, so the call is refused on all ranks")


def refuse_mixed_grad_mode(comm: Communicator | None, grad_on: int) -> None:
    """Raise on all ranks, naming those with and without grad mode. Collective."""
    modes = [(grad_on,)] if comm is None else comm.all_gather_ints([grad_on])
    ranks = (0,) if comm is None else comm.ranks
    with_grad = [rank for rank, (on,) in zip(ranks, modes, strict=True) if on]
    without = [rank for rank, (on,) in zip(ranks, modes, strict=True) if not on]
    raise CollectiveMismatch.because(
        "a distributed layer called in different grad modes",
        f"grad on: {name_ranks(with_grad)}; off: {name_ranks(without)}",
        None,
        "torch.no_grad() on all ranks or on none",
    )
