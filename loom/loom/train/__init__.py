"""Training that survives failures: jobs of replica groups, actors that train, checkpoints.

Names are imported on first use, because most of them need torch: extra ``train``.
"""

from __future__ import annotations

from loom._lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
