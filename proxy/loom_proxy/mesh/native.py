"""Whether this program runs in the cluster, where Monarch's own classes take the place of the proxies."""

from __future__ import annotations

import sys
from typing import Any


def in_cluster() -> bool:
    """Whether this process is a driver or an actor's, rather than a program that holds a job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", "").startswith(("loom_gateway.driver", "monarch._src.actor."))


def monarchs() -> Any:
    """The module ``monarch.actor``. In the cluster only."""
    from loom.actor import monarch_actor  # which imports Monarch where it is installed

    return monarch_actor()
