"""Lazy tensors: torch in the cluster, from a laptop without torch.

Names are imported on first use. `on` gives the tensors of a mesh, whose functions and methods are torch's.
"""

from __future__ import annotations

from loom._lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
