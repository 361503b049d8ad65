"""The bench of the weaver's tests."""

from __future__ import annotations

from tests.unit.loom.weaver.conftest import bench

__all__ = ["bench"]
