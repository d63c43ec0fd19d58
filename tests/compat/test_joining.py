"""accelerate, unchanged, in a script of `unisono run`."""

from __future__ import annotations

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator({arguments})
rank = accelerator.process_index
assert accelerator.num_processes == dist.get_world_size() == 2
total = accelerator.reduce(torch.tensor([rank + 1.0]))
accelerator.print(dist.get_backend(), accelerator.device.type, total.item())
"""


@pytest.mark.parametrize("arguments", ["", "cpu=True"])
def test_accelerate_joins_the_world_of_the_ranks(arguments, interpreter, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(arguments=arguments))
    words = ["-m", "unisono", "run", "--ranks", "2", str(script)]
    done = interpreter.run(words, cwd=tmp_path, timeout_s=110.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "shm cpu 3.0" in done.stdout
