"""`ProcessState`: the state of a supervised process."""

from __future__ import annotations

from enum import Enum


class ProcessState(str, Enum):
    """The state of a process that listens on a port when it runs."""

    STARTING = "starting"
    """The process was started, or will be soon, and does not listen yet."""
    LISTENING = "listening"
    """The process listens."""
    ENDED = "ended"
    """The process has ended, and is restarted after a while."""
    PORT_TAKEN = "port_taken"
    """The process is not started, because another program listens on its port."""
