"""`Module`: the base of distributed layers, set up when called and anew when the input changes.

A layer learns shapes only when it is called, and a rank sees only its own block; the hook here
lets all ranks of the layer decide together whether to set up, so that none waits for ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import UnisonoError
from unisono.nn.agreement import agree
from unisono.topology import Partition

__all__ = ["Module"]


class Module(nn.Module):
    """A torch module that is set up lazily, together with the other ranks.

    A layer of your own overrides `_distdl_module_setup(input)` (and perhaps
    `_distdl_module_teardown` and `_distdl_input_changed`); `input` is the tuple of positional
    arguments. Before each forward: if some rank's input has changed, or the module is not set up,
    every rank tears down and sets up. The ranks are those of all partitions among the attributes.
    """

    _distdl_backend: Any = None
    """Kept for programs that read it."""

    def __init__(self) -> None:
        super().__init__()
        self._distdl_is_setup = False
        self._needs_grad = False
        self._agreeing: Communicator | None = None
        self.register_forward_pre_hook(self._distdl_forward_pre_hook, with_kwargs=True)

    def partitions(self) -> tuple[Partition, ...]:
        """Return the partitions over which set-up is collective: those among the attributes."""
        return tuple(value for value in self.__dict__.values() if isinstance(value, Partition))

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:
        """Make what the layer needs for inputs like these. Called by all ranks together."""

    def _distdl_module_teardown(self, input: tuple[Any, ...]) -> None:
        """Drop what set-up has made. Called by all ranks together."""

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:  # noqa: ARG002
        """Return whether this rank's input needs another set-up. Local."""
        return False

    def _distdl_module_requires_reset(self, input: tuple[Any, ...]) -> bool:
        """Return whether to set up now: the same answer on all ranks."""
        if not self._distdl_is_setup:
            self._needs_grad = self._wants_grad(input)
            return True
        agreement = agree(
            self._agreeing,
            changed=self._distdl_input_changed(input),
            needs_grad=self._wants_grad(input),
            problem=self._problem_of(input),
        )
        self._needs_grad = agreement.needs_grad
        return agreement.changed

    @staticmethod
    def _distdl_forward_pre_hook(
        module: Module,
        input: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Set the module up if it has to be."""
        seen = input if not kwargs else (*input, *kwargs.values())
        if not module._distdl_module_requires_reset(seen):
            return
        if module._distdl_is_setup:
            module._distdl_module_teardown(seen)
            module._distdl_is_setup = False
        module._agreeing = module._control()
        module._distdl_module_setup(seen)
        module._distdl_is_setup = True

    def _problem_of(self, input: tuple[Any, ...]) -> UnisonoError | None:  # noqa: ARG002
        """Return what is wrong with this rank's input, as far as this rank can tell. Local."""
        return None

    def _wants_grad(self, input: tuple[Any, ...]) -> bool:
        """Return whether this rank's call needs gradients."""
        if not torch.is_grad_enabled():
            return False
        return any(isinstance(x, Tensor) and x.requires_grad for x in input) or any(
            p.requires_grad for p in self.parameters()
        )

    def _members(self) -> tuple[int, ...]:
        """Return the ranks of all partitions, ascending, in the root communicator."""
        return tuple(sorted({rank for part in self.partitions() for rank in part.ranks}))

    def _root(self) -> Communicator | None:
        """Return the communicator whose ranks the partitions name; None without partitions."""
        parts = self.partitions()
        for part in parts[1:]:
            parts[0].check_same_root(part)
        return parts[0].root if parts else None

    def _control(self) -> Communicator | None:
        """Return the communicator of all ranks of the layer; None when there is nobody to ask.

        Collective over these ranks at its first use.
        """
        root = self._root()
        if root is None or root.size == 1:
            return None
        members = self._members()
        if root.rank not in members or len(members) == 1:
            return None
        return root.sub(members)
