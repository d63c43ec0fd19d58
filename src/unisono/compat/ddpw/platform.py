"""DDPW's `platform` module."""

from __future__ import annotations

from unisono.launch import Device, Platform

__all__ = ["Device", "Platform"]
