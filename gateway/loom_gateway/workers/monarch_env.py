"""The environment that every Monarch process of Loom runs with."""

from __future__ import annotations

import os

MONARCH_ENVIRONMENT = {
    # Monarch looks for dead processes every 10 s by default; a caller is to know within a second.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "250ms",
    # What a host has not acknowledged when it goes (it takes 500 ms by default) is sent again to one that takes its
    # place on the same address. That one does not know the processes it is for, and what Monarch's controllers have
    # sent comes back to them: they end, and take the living rest of their meshes along.
    "HYPERACTOR_MESSAGE_ACK_TIME_INTERVAL": "5ms",
    # A worker may never answer a new root client, it seems if an earlier one had its port; see `WorkersSilent`.
    "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "8s",
}
"""Variables and their values, unless the user has set them."""


def set_monarch_environment() -> None:
    """Set the variables of `MONARCH_ENVIRONMENT` that are not set. Comes before Monarch is imported."""
    for name, value in MONARCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
