"""What was logged, whatever else the process of the tests has imported."""

from __future__ import annotations

import re

import pytest

__all__ = ["messages"]

_PREFIX = re.compile(r"^(\[actor=[^]]*\] )+")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The texts of all records, without the prefix that Monarch gives each one once it has been imported."""
    return [_PREFIX.sub("", record.getMessage()) for record in caplog.records]
