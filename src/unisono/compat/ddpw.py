"""DDPW's names: `from unisono.compat.ddpw import Platform, Wrapper`.

Both spellings of the library work, the present one and that of its first releases.
"""

from __future__ import annotations

from importlib import metadata

from unisono import launch
from unisono.compat.modules import Module, build
from unisono.launch import context, functional


def _licence() -> str:
    for file in metadata.files("unisono") or ():
        if file.name == "LICENSE":
            return file.read_text()
    return str(metadata.metadata("unisono")["License-Expression"])


MODULES = {
    "": Module(
        "",
        (launch, "Device Platform Wrapper wrapper"),
        asked={"__licence__": _licence},
        version="6.1.3",
    ),
    "functional": Module(
        "DDPW's `functional`: seeds, devices, samplers, averages.",
        (launch, "Device Platform"),
        (functional, "average_params_grads device get_dataset_sampler has_batch_norm optimiser_to"),
        (functional, "seed_generators set_default_device set_device to"),
    ),
    "io": Module("DDPW's `io`: what it prints.", (launch, "IO")),
    "platform": Module("DDPW's `platform`: where ranks run.", (launch, "Device Platform")),
    "wrapper": Module(
        "DDPW's `wrapper`. The package's attribute of that name is the decorator.",
        (launch, "Wrapper wrapper"),
        (context, "setup"),
    ),
}

build(__name__, "ddpw", MODULES)
