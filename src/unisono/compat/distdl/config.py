"""The `config` of DistDL's forks: networks, and whether inputs are compared."""

from __future__ import annotations

import os

from unisono.errors import PlatformError
from unisono.expect import expect_choice
from unisono.nn import structure_check

CHECK_VARIABLE = "DISTDL_CHECK_INPUT_CHANGED"
"""0: the first plan of each layer is final, as `unisono.nn.structure_check("off")`."""

check_input_changed: bool = True
"""Whether layers notice that their input has changed."""


def set_backend(
    backend_comm: str | None = None,
    backend_array: str | None = None,
    check_input_changed: bool | None = None,
) -> None:
    """Say whether layers compare inputs; there is one back end, and ranks choose their network.

    Args:
        backend_comm: "mpi" or "nccl"; without effect: the network is that of the process group.
        backend_array: "numpy", "cupy" or "torch"; without effect: tensors stay where they are.
        check_input_changed: default: what `DISTDL_CHECK_INPUT_CHANGED` says, else True.
    """
    if backend_comm is not None:
        expect_choice("backend_comm", backend_comm, ("mpi", "nccl"), error=PlatformError)
    if backend_array is not None:
        expect_choice(
            "backend_array", backend_array, ("numpy", "cupy", "torch"), error=PlatformError
        )
    if check_input_changed is None:
        check_input_changed = os.environ.get(CHECK_VARIABLE, "1") not in ("0", "False")
    _compare_inputs(check_input_changed)


def _compare_inputs(enabled: bool) -> None:
    global check_input_changed
    if enabled != check_input_changed:
        structure_check("always" if enabled else "off")
        check_input_changed = enabled
