"""Imported by the tests under its own name, as a plain module."""

from __future__ import annotations


def doubled(x):
    return 2 * x


class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b
