"""DDPW's names: `from unisono.compat.ddpw import Platform, Wrapper`.

Both spellings of the library work, the present one and that of its first releases.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any, Self

from unisono import launch
from unisono.compat import ddpw_functional as functional
from unisono.compat.modules import Module, build
from unisono.errors import PlatformError
from unisono.launch import tasks
from unisono.launch.platform import check_names

OLD_NAMES = {"n_gpus": "n_gpus_per_node", "n_cpus": "n_cpus_per_node", "ram": "mem_per_node"}
"""Fields of a platform as the first releases of DDPW spelled them."""


_DEFAULTS: dict[str, Any] = {
    "name": "ddpw",
    "device": launch.Device.GPU,
    "partition": "general",
    "n_nodes": 1,
    "n_gpus_per_node": 1,
    "n_cpus_per_node": 1,
    "mem_per_node": 32,
    "spawn_method": "auto",
    "ipc_protocol": "tcp",
    "master_addr": None,
    "master_port": None,
    "ipc_groups": [],
    "backend": None,
    "seed": 1889,
    "timeout_min": 2880,
    "slurm_additional_parameters": None,
    "console_logs": "./.output/logs",
    "verbose": True,
    "upon_finish": None,
}
"""DDPW's fields in their order, with its defaults."""


class Platform(launch.Platform):
    """A platform as DDPW has it: its defaults, its old names, and fields that can be set.

    Its fields may be given by position. With GPUs `n_cpus` counts the CPUs of each rank, not those
    of a node.
    """

    _explicit: frozenset[str]
    """Fields that the caller gave, by DDPW's present names."""
    _is_per_rank: bool

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        """Leave the names of fields to `__init__`, which knows the old ones."""
        return object.__new__(cls)

    def __init__(self, *args: Any, **named: Any) -> None:
        renamed = {new: named.pop(old) for old, new in OLD_NAMES.items() if old in named}
        for new, value in renamed.items():
            if named.setdefault(new, value) != value:
                old = next(old for old, name in OLD_NAMES.items() if name == new)
                raise PlatformError.because(
                    f"Platform({old}={value!r}, {new}={named[new]!r})",
                    f"two values for one thing: {old} is an old name of {new}",
                    hint=f"Platform({new}={named[new]!r})",
                )
        named |= dict(zip(_DEFAULTS, args, strict=False))
        check_names(named)
        values = {**_DEFAULTS, "ipc_groups": [], **named}
        if launch.Device.from_str(values["device"]) is launch.Device.RAY:
            values["n_gpus_per_node"] = named.get("n_gpus_per_node", 0)  # not a place of DDPW's
        super().__init__(**values)
        vars(self).update(_explicit=frozenset(named), _is_per_rank="n_cpus_per_node" in renamed)

    def __setattr__(self, name: str, value: Any) -> None:
        field = OLD_NAMES.get(name, name)
        vars(self).update(vars(self.but(**{field: value})))
        if field == "n_cpus_per_node":
            vars(self)["_is_per_rank"] = name == "n_cpus"

    def __getattr__(self, name: str) -> Any:
        if name in OLD_NAMES:
            return getattr(self, OLD_NAMES[name])
        raise AttributeError(f"'Platform' object has no attribute {name!r}", name=name, obj=self)

    def but(self, **changes: Any) -> Self:
        """Return a copy with these fields changed; they count as given."""
        twin = super().but(**changes)
        explicit = self._explicit.union(changes)
        vars(twin).update(_explicit=explicit, _is_per_rank=self._is_per_rank)
        return twin

    def is_explicit(self, name: str) -> bool:
        """Whether the caller gave this field."""
        return name in self._explicit

    @property
    def counts_gpus(self) -> bool:
        """Whether the ranks of a node are its GPUs: on CPUs only if their number was given."""
        is_asked = self.kind in (launch.Device.GPU, launch.Device.SLURM)
        return super().counts_gpus and (is_asked or self.is_explicit("n_gpus_per_node"))

    @property
    def shared_cpus(self) -> int | None:
        """The CPUs that the ranks of a node share; None if their number was not given."""
        cpus = self.n_cpus_per_node if self.is_explicit("n_cpus_per_node") else None
        if cpus is None or not (self._is_per_rank and self.counts_gpus):
            return cpus
        return cpus * self.ranks_per_node


def _licence() -> str:
    for file in metadata.files("unisono") or ():
        if file.name == "LICENSE":
            return file.read_text()
    return str(metadata.metadata("unisono")["License-Expression"])


__version__ = "6.1.3"

MODULES = {
    "": Module(
        "",
        (launch, "Device Wrapper wrapper"),
        (sys.modules[__name__], "Platform"),
        computed={"__licence__": _licence},
    ),
    "functional": Module(
        "DDPW's `functional`: seeds, devices, samplers, averages.",
        (launch, "Device"),
        (sys.modules[__name__], "Platform"),
        (functional, "average_params_grads device get_dataset_sampler has_batch_norm optimiser_to"),
        (functional, "seed_generators set_default_device set_device to"),
    ),
    "io": Module("DDPW's `io`: what it prints.", (launch, "IO")),
    "platform": Module(
        "DDPW's `platform`: where ranks run.",
        (launch, "Device"),
        (sys.modules[__name__], "Platform"),
    ),
    "wrapper": Module(
        "DDPW's `wrapper`. The package's attribute of that name is the decorator.",
        (launch, "Wrapper wrapper"),
        (tasks, "setup"),
    ),
}

build(__name__, MODULES)
