"""Networks of nvidia-physicsnemo, unmodified, on blocks: outputs and gradients of one process.

physicsnemo needs another torch than that of a CPU, so it is installed without what it requires, in
a folder of its own:

    python tests/nn/split_tensors/test_physics_networks.py FOLDER
    UNISONO_PHYSICSNEMO=FOLDER pytest tests/nn/split_tensors/test_physics_networks.py
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.split_tensors.test_networks import compare_cuts, drawn
from torch import nn

from unisono.testing.pool import RankPool

FOLDER = os.environ.get("UNISONO_PHYSICSNEMO", "")
NEEDED = """nvidia-physicsnemo aiobotocore aioitertools antlr4-python3-runtime==4.9.3 botocore
    cftime cloudpickle einops gitdb gitpython h5py hydra-core importlib-metadata jaxtyping jmespath
    nvtx omegaconf onnx orjson pyvers s3fs six smmap tensordict termcolor timm torchvision==0.28.*
    treelib wadler-lindig warp-lang wrapt zipp""".split()  # noqa: SIM905

# Module, arguments, shape of the input, first cut dim.
NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "UNet": (
        "unet",
        {"in_channels": 1, "out_channels": 2, "model_depth": 2, "num_conv_blocks": 2,
         "feature_map_channels": [4, 4, 8, 8]},
        (1, 1, 16, 16, 16),
    ),
    "AFNO": (
        "afno",
        {"inp_shape": [16, 32], "in_channels": 2, "out_channels": 1, "patch_size": [2, 2],
         "embed_dim": 16, "depth": 2, "num_blocks": 4},
        (2, 2, 16, 32),
    ),
    "FNO": (
        "fno",
        {"in_channels": 2, "out_channels": 1, "latent_channels": 8, "num_fno_layers": 2,
         "num_fno_modes": 4, "padding": 4},
        (2, 2, 16, 24),
    ),
    "DiT": (
        "dit",
        {"input_size": (16, 32), "in_channels": 2, "patch_size": (2, 2), "hidden_size": 16,
         "depth": 2, "num_heads": 2, "dit_initialization": False},
        (2, 2, 16, 32),
    ),
}  # fmt: skip


@pytest.mark.skipif(not FOLDER, reason="UNISONO_PHYSICSNEMO is not set; see the head of this file")
@pytest.mark.timeout(900)
def test_networks_of_physics_on_blocks_are_those_of_one_process():
    with RankPool() as pool:  # one run: the library takes a while to load
        pool.run(compare_physics, world=4, backend="shm", timeout=600)


def compare_physics() -> None:
    """Compare a step of each network with that of one process."""
    sys.path.append(FOLDER)
    torchvision = torch.library.Library("torchvision", "DEF")  # its kernels need a GPU
    for operator in ("nms", "qnms"):
        torchvision.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    for name, (module, arguments, shape) in NETWORKS.items():
        torch.manual_seed(0)
        library = importlib.import_module(f"physicsnemo.models.{module}")
        net: nn.Module = getattr(library, name)(**arguments)
        times = [drawn((2,), 3).abs()] if name == "DiT" else []
        # AFNO computes its spectra in float32, and writes them into tensors that all ranks have.
        is_single = name == "AFNO"
        limits = {"gathered": 1.0, "tolerance": 1e-4} if is_single else {}
        try:
            compare_cuts(net.float() if is_single else net.double(), shape, *times, **limits)
        except BaseException as error:
            error.add_note(name)
            raise


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *NEEDED], check=True)
