"""Launch tests are watched for leaks; failed runs leave their logs in the test's directory."""

from __future__ import annotations

import tempfile

import pytest


@pytest.fixture(autouse=True)
def watched(hygiene, tmp_path, monkeypatch):
    """Keep the directories of failed runs below `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
