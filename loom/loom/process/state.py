"""`ProcessState`: what has become of a process that a supervisor is to run."""

from __future__ import annotations

from enum import Enum


class ProcessState(str, Enum):
    """What has become of a process that is to listen on a port."""

    STARTING = "starting"
    """It has been started, or will be soon, and does not listen yet."""
    LISTENING = "listening"
    """It listens."""
    ENDED = "ended"
    """It has ended, and is started again after a while."""
    PORT_TAKEN = "port_taken"
    """It is not started, because another program listens on its port."""
