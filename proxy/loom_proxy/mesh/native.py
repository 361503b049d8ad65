"""Access to Monarch's own classes, which take the place of the proxies inside the cluster."""

from __future__ import annotations

import sys
from typing import Any


def in_cluster() -> bool:
    """Return whether this process is a driver or an actor's, rather than a program that holds a job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", "").startswith(("loom_gateway.driver", "monarch._src.actor."))


def monarchs() -> Any:
    """Return the module ``monarch.actor``. In the cluster only."""
    from loom.actor import monarch_actor  # imported late, since it imports Monarch if that is installed

    return monarch_actor()
