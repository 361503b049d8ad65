"""What a machine may lack: a test of it is skipped there, and fails with ``LOOM_TEST_ALL``, as CI sets it."""

from __future__ import annotations

import os

import pytest

__all__ = ["skip_because", "skipped_if"]


def skip_because(reason: str) -> None:
    """Skip the running test; with ``LOOM_TEST_ALL`` fail it."""
    if os.environ.get("LOOM_TEST_ALL"):
        pytest.fail(f"{reason}, and LOOM_TEST_ALL is set")
    pytest.skip(reason)


def skipped_if(reason: str | None) -> pytest.MarkDecorator:
    """Return the mark of tests that are skipped for a reason, if there is one; with ``LOOM_TEST_ALL`` they run."""
    return pytest.mark.skipif(bool(reason) and not os.environ.get("LOOM_TEST_ALL"), reason=reason or "-")
