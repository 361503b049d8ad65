"""Reinforcement learning of a language model: an orchestrator, generators, trainers, and a task by which it learns.

Names are imported on first use, because most of them need torch: extra ``train``.
"""

from __future__ import annotations

from loom._lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
