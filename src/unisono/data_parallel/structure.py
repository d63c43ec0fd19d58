"""Noticing that a module is not the one that was bucketed: cheap enough for every forward."""

from __future__ import annotations

from torch import nn


class Structure:
    """The parameters of a module as they were: which objects, trainable or not, dtype, shape."""

    def __init__(self, module: nn.Module) -> None:
        tables = [part._parameters for part in module.modules()]
        children = [part._modules for part in module.modules()]
        self._sizes = [(table, len(table)) for table in (*tables, *children)]
        self._children = [
            (table, name, child) for table in children for name, child in table.items()
        ]
        # Plain dict access: a guarded table must not think that somebody reads its parameters.
        self._entries = [
            (
                table,
                name,
                param,
                param.requires_grad,
                param.dtype,
                param.device,
                param.shape,
                param.stride(),
            )
            for table in tables
            for name, param in dict.items(table)
            if param is not None
        ]

    def has_changed(self) -> bool:
        """Whether a parameter or module was added, replaced, frozen, moved or reshaped."""
        get = dict.get
        for table, size in self._sizes:
            if len(table) != size:
                return True
        for table, name, child in self._children:
            if get(table, name) is not child:
                return True
        for table, name, param, trainable, dtype, device, shape, strides in self._entries:
            if (
                get(table, name) is not param
                or param.requires_grad is not trainable
                or param.dtype is not dtype
                or param.device != device
                or param.shape != shape
                or param.stride() != strides
            ):
                return True
        return False
