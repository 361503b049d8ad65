"""The threadlet: a training process's connection to the weaver, which watches and changes a running training.

The package imports neither Monarch nor torch, so that any training program can use it, however it was started.
"""

from __future__ import annotations

from loom.terminal_text import fit_log_records
from loom.threadlet.handlers import Deferred, HandlerRegistry
from loom.threadlet.step import Step
from loom.threadlet.threadlet import Threadlet

__all__ = ["Deferred", "HandlerRegistry", "Step", "Threadlet"]

fit_log_records()
