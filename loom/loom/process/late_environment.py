"""Variables that a process gets after it has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_OF_SPANS = frozenset(("LOOM_TIMING_DIR", "LOOM_TIMING_LINES", "LOOM_TIMING_ROLE"))


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Add variables to the environment of this process, for what it has imported already, too."""
    os.environ.update(variables)
    spans = sys.modules.get("loom.tracing.spans")
    if spans is not None and not _OF_SPANS.isdisjoint(variables):
        spans.recorder.read_environment()
