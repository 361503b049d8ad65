"""The threadlet: what a training process runs to be seen and changed from outside while it trains.

It imports neither Monarch nor torch, so that any program that trains can use it, whoever started it.
"""

from __future__ import annotations

from loom.threadlet.deferred import Deferred
from loom.threadlet.handlers import HandlerRegistry
from loom.threadlet.step import Step
from loom.threadlet.threadlet import Threadlet

__all__ = ["Deferred", "HandlerRegistry", "Step", "Threadlet"]
