"""Jobs that the commands start are known in the directory of the test only."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_registry(monkeypatch, tmp_path_factory):
    """Keep the links to jobs away from the user's home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
