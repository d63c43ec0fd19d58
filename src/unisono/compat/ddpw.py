"""DDPW's names: `from unisono.compat.ddpw import Platform, Wrapper`.

Both spellings of the library work, the present one and that of its first releases.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from unisono import launch
from unisono.compat.modules import Module, build
from unisono.errors import PlatformError
from unisono.launch import functional, in_process

OLD_NAMES = {"n_gpus": "n_gpus_per_node", "n_cpus": "n_cpus_per_node", "ram": "mem_per_node"}
"""Fields of a platform as the first releases of DDPW spelled them."""


class Platform(launch.Platform):
    """A platform as DDPW has it: it understands the old names, and its fields can be set.

    With GPUs `n_cpus` counts the CPUs of each rank, not those of a node.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        given = {new: named.pop(old) for old, new in OLD_NAMES.items() if old in named}
        for new, value in given.items():
            if named.setdefault(new, value) != value:
                old = next(old for old, name in OLD_NAMES.items() if name == new)
                raise PlatformError.because(
                    f"Platform({old}={value!r}, {new}={named[new]!r})",
                    f"two values for one thing: {old} is an old name of {new}",
                    hint=f"Platform({new}={named[new]!r})",
                )
        super().__init__(*args, **named)
        vars(self)["_is_per_rank"] = "n_cpus_per_node" in given

    def __setattr__(self, name: str, value: Any) -> None:
        field = OLD_NAMES.get(name, name)
        vars(self).update(vars(self.but(**{field: value})))
        if field == "n_cpus_per_node":
            vars(self)["_is_per_rank"] = name == "n_cpus"

    def __getattr__(self, name: str) -> Any:
        if name in OLD_NAMES:
            return getattr(self, OLD_NAMES[name])
        raise AttributeError(f"'Platform' object has no attribute {name!r}", name=name, obj=self)

    @property
    def _shared_cpus(self) -> int | None:
        cpus = super()._shared_cpus
        if cpus is None or not (vars(self).get("_is_per_rank") and self._counts_gpus):
            return cpus
        return cpus * self.ranks_per_node


def _licence() -> str:
    for file in metadata.files("unisono") or ():
        if file.name == "LICENSE":
            return file.read_text()
    return str(metadata.metadata("unisono")["License-Expression"])


MODULES = {
    "": Module(
        "",
        (launch, "Device Wrapper wrapper"),
        (sys.modules[__name__], "Platform"),
        asked={"__licence__": _licence},
        version="6.1.3",
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
        (in_process, "setup"),
    ),
}

build(__name__, "ddpw", MODULES)
