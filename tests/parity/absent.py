"""Public names of ``monarch.actor`` that `loom` does not have, and why."""

from __future__ import annotations

__all__ = ["ABSENT"]

_ROOT_CLIENT = "the driver is the root client and attaches to the gateway's workers: `loom.connect`, `job.hosts`"
_WORKER = "a worker is started by `loom serve worker`, or by `loom.local`"

ABSENT = {
    "ChannelTransport": "how Monarch's processes reach each other is for the driver and the workers to choose",
    "attach": _ROOT_CLIENT,
    "attach_to_workers": _ROOT_CLIENT,
    "config": "settings of one process: an actor sets `monarch.actor.config` of its own",
    "debug_controller": "its console is a terminal of the root client, and the driver has none",
    "enable_transport": "how Monarch's processes reach each other is for the driver and the workers to choose",
    "run_worker_loop_forever": _WORKER,
    "run_worker_loop_until_shutdown": _WORKER,
    "shutdown_context": "`job.close()` ends the session and with it the driver, which is the context",
    "start_worker_loop_forever": _WORKER,
}
"""Name and reason. An actor that needs one imports it from ``monarch.actor``."""
