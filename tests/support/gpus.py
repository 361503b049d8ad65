"""The real GPUs of this machine, for tests that are skipped without one, also with ``LOOM_TEST_ALL``."""

from __future__ import annotations

import pytest

from loom.devices import local_devices

__all__ = ["GPUS", "needs_gpus"]

GPUS = tuple(device for device in local_devices() if device.kind == "gpu")


def needs_gpus(count: int = 1) -> pytest.MarkDecorator:
    """Return the mark of tests that are skipped without so many GPUs."""
    return pytest.mark.skipif(len(GPUS) < count, reason=f"needs {count} GPU{'s' if count > 1 else ''}")
