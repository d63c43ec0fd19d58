"""`PlannedModule`: a layer whose every message follows from a plan, and plans from shapes alone.

Set-up gathers one table of shapes; `_make_plan` turns it into what this rank does. Plans are frozen
and kept: going back to known shapes costs the table only, and a backward uses the plan of its own
forward whatever was called since.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError, UnisonoError, an
from unisono.nn.agreement import INPUTS, NO_GRAD, Agreement, Question
from unisono.nn.module import Module
from unisono.nn.structure import Structure, Table
from unisono.nn.tables import gather_tables
from unisono.operators import attach
from unisono.operators.halo import HaloExchange, HaloOnGroup, start_window
from unisono.operators.linear import identity
from unisono.operators.plans import Flight
from unisono.topology.halo import HaloPlan

P = TypeVar("P")
KEPT_PLANS = 8


class Droppable(Protocol):
    """Something started by a plan that may turn out to be old."""

    def drop(self) -> None:
        """End it without using what it brings."""
        ...


F = TypeVar("F", bound=Droppable)


class PlannedModule(Module, Generic[P]):
    """Base of unisono's own layers.

    A subclass has `_describe` (arguments that must be equal on all ranks), `_make_plan` (pure: the
    same table gives every rank its part of one plan) and `forward`, which carries out `self._plan`
    on inputs that went through `self._tied`.
    """

    _word_travels: ClassVar[Literal["before", "beside", "behind", "inside"]] = "before"
    """When ranks agree on a call: before it; beside its first messages, which `forward` starts
    through `_under_way` and computes meanwhile; behind them, where there is nothing to compute; or
    inside its first collective (`_take_question`)."""
    _plan: P

    def __init__(self) -> None:
        super().__init__()
        self._structures: tuple[Structure, ...] = ()
        self._plans: OrderedDict[tuple[Table, ...], P] = OrderedDict()
        self._question: Question | None = None
        self._exchange: HaloOnGroup | None = None
        """What `_halo` gave for the current plan."""
        self._comm: Communicator | None = None
        """The root of the partitions, kept from set-up."""
        self._takes_part = False
        """Whether this rank is in any of the layer's partitions; known once set up."""
        self._setups = 0
        """How often set-up has run."""

    @abstractmethod
    def _describe(self) -> tuple[object, ...]:
        """Return what must be equal on all ranks of the layer."""

    @abstractmethod
    def _make_plan(self, tables: Sequence[Table]) -> P:
        """Return what this rank does for inputs of these structures."""

    def _problem_of(self, input: tuple[Any, ...]) -> UnisonoError | None:
        wrong = [x for x in input if not isinstance(x, Tensor)]
        expected = len(self._structures) if self._distdl_is_setup else len(input)
        is_hollow = self._agreeing is not None and any(
            x.device.type == "meta" for x in input if isinstance(x, Tensor)
        )
        if input and not wrong and not is_hollow and len(input) == expected:
            return None
        found = f"{len(input)} tensors, {expected} expected" if input else "nothing"
        if is_hollow:
            found = "a tensor on meta, without data to send"
        if wrong:
            found = "None" if wrong[0] is None else an(type(wrong[0]).__name__)
        return PartitionError.because(
            f"forward of {type(self).__name__}", found, None, "call it with tensors"
        )

    def _distdl_module_requires_reset(self, input: tuple[Any, ...]) -> bool:
        if self._word_travels == "before" or not self._distdl_is_setup:
            return super()._distdl_module_requires_reset(input)
        question = self._ask(input, is_sent=self._sends_its_word_first)
        if question.is_open and (self._word_travels != "inside" or not question.is_inner):
            self._question = question
            if question.is_refused:  # forward may not even be callable; all ranks raise
                self._stand_in()
            return False
        self._gradients = question.answer().gradients
        return question.answer().changed

    @property
    def _sends_its_word_first(self) -> bool:
        """Whether the word is on its way while messages are posted; gloo has threads for it."""
        if self._word_travels == "behind":
            return self._agreeing is not None and self._agreeing.backend == "gloo"
        return self._word_travels == "beside"

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:
        return _structures(input) != self._structures

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:
        problem = self._problem_of(input)
        self._comm = root = self._root()
        members = self._members()
        self._takes_part = root is not None and root.rank in members
        if not self._takes_part:
            if problem is not None:
                raise problem
            self._structures = _structures(input)
            return
        tables, self._gradients = gather_tables(
            self._agreeing,
            [x for x in input if isinstance(x, Tensor)],
            (type(self).__name__, *self._describe()),
            problem,
            self._wanted_gradients(input),
            members,
        )
        self._setups += 1
        key = tuple(tables)
        if key not in self._plans:
            self._plans[key] = self._make_plan(tables)
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        self._plan = self._plans[key]
        self._structures = _structures(input)
        self._exchange = self._halo()

    def _take_question(self) -> Question | None:
        """Return the question of this call if it is still open; the caller sees to its answer."""
        question, self._question = self._question, None
        return question

    def _answer_first(self, input: tuple[Tensor, ...]) -> None:
        """Hear the other ranks before going on, where the word has not travelled otherwise."""
        question = self._take_question()
        if question is not None:
            self._heeded(question.answer(), input)

    def _under_way(self, start: Callable[[bool], F], input: tuple[Tensor, ...]) -> F:
        """Start a call by the current plan while ranks agree on it; start anew if they do not.

        Args:
            start: posts the first messages of `self._plan`, with zeros if its argument is False:
                this rank's input fits another plan only, but the others may expect messages.
            input: of the call.
        """
        question = self._take_question()
        if question is None:
            return start(True)
        flight = start(not question.stands_in)
        try:
            agreement = question.answer()
        except BaseException:
            flight.drop()
            raise
        if agreement.changed:
            flight.drop()
        return start(True) if self._heeded(agreement, input) else flight

    def _heeded(self, agreement: Agreement, input: tuple[Tensor, ...]) -> bool:
        """Act on what ranks have agreed on; return whether the plan is another one now."""
        self._gradients = agreement.gradients
        if agreement.changed:
            self._set_up(input)
        return agreement.changed

    def _halo(self) -> HaloOnGroup | None:
        """Return the exchange with which the current plan begins; None for none."""
        return None

    def _on_ranks(self, plan: HaloPlan, ranks: tuple[int, ...] | None) -> HaloOnGroup | None:
        """Return an exchange between ranks of the root; None where there is nothing to do."""
        if plan.is_identity or self._comm is None:
            return None
        return HaloOnGroup(self._comm, plan, ranks, plan.fill)

    def _window(self, x: Tensor) -> Tensor:
        """Return the own window by `_halo`, tied to the graph; messages go before agreement."""
        flight = self._under_way(lambda fits: self._start_window(x if fits else None), (x,))
        return self._finish_window(self._tied(x), flight)

    def _start_window(self, x: Tensor | None) -> Flight:
        """Post the messages of `_halo`, of zeros for None."""
        if self._exchange is None:
            return Flight()
        given = None if x is None else x.detach()
        return start_window(given, self._exchange, self._structures[0].dtype)

    def _finish_window(self, x: Tensor, flight: Flight) -> Tensor:
        """Return the own window once the messages are there."""
        if self._exchange is None:
            return identity(x)
        return HaloExchange.apply(x, replace(self._exchange, flight=flight))

    def _tied(self, x: Tensor, *, least: int = NO_GRAD + 1) -> Tensor:
        """Return `x` as part of the graph wherever some rank needs gradients.

        Then the backward of every rank enters the layer's messages, in the same order. `least` is
        `INPUTS` where those of parameters do not depend on it.
        """
        if self._gradients < least or x.requires_grad or not torch.is_grad_enabled():
            return x
        if not (x.is_floating_point() or x.is_complex()):
            return x
        return attach(x, torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True))

    def _outside(self, x: Tensor, *, preserve_batch: bool = True) -> Tensor:
        """Return what a rank that takes no part gets: no elements, tied to the graph in grad mode.

        Such a rank cannot know whether the others need gradients; a tie without use costs nothing.
        """
        self._gradients = INPUTS if torch.is_grad_enabled() else NO_GRAD
        if x.numel() == 0:
            return self._tied(x.view_as(x))
        rows = zero_volume(x, preserve_batch=preserve_batch)[:-1]
        return self._tied(x.reshape(*rows, -1)[..., :0])

    def _nothing(self, number: int = 0) -> Tensor:
        """Return zeros like the input for which the current plan was made."""
        s = self._structures[number]
        return torch.zeros(s.shape, dtype=s.dtype, device=s.device)

    @torch.no_grad()
    def _stand_in(self) -> None:
        self.forward(*(self._nothing(number) for number in range(len(self._structures))))

    def _described(self, input: tuple[Any, ...] | None) -> str:
        found = self._structures if input is None else _structures(input)
        return ", ".join(f"{list(s.shape)} {str(s.dtype).removeprefix('torch.')}" for s in found)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plans behind: they are made anew where the copy is called."""
        state = super().__getstate__()
        state.pop("_plan", None)
        return state | {
            "_plans": OrderedDict(),
            "_structures": (),
            "_comm": None,
            "_exchange": None,
        }


def _structures(input: tuple[Any, ...]) -> tuple[Structure, ...]:
    return tuple(Structure.of(x) for x in input if isinstance(x, Tensor))


def zero_volume(x: Tensor, *, preserve_batch: bool = True) -> tuple[int, ...]:
    """Return the shape of what a rank outside of the destination gets."""
    return (x.shape[0], 0) if preserve_batch and x.dim() > 0 else (0,)
