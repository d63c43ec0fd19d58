"""One torch thread, so that tests of small nets do not fight over cores."""

from __future__ import annotations

import pytest
import torch

from unisono.bayes import manual_seed


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    manual_seed(0)
    yield
    torch.set_num_threads(before)
