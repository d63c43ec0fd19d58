"""Errors where gp_utils asserted: handlers written for it, `except AssertionError`, still work."""

from __future__ import annotations

from unisono.errors import MeshError, PartitionError


class AssertedMeshError(MeshError, AssertionError):
    """A `MeshError` that is an `AssertionError` too."""


class AssertedPartitionError(PartitionError, AssertionError):
    """A `PartitionError` that is an `AssertionError` too."""
