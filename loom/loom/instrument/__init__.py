"""Trainings that take part by themselves: ``loom run`` starts a command so that libraries in it are hooked.

Each library has a module here, which is imported when a program imports the library: `loom.instrument.bootstrap`
lists them. `loom.instrument.training` is all that they use of Loom. Names are imported on first use.
"""

from __future__ import annotations

from loom._lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
