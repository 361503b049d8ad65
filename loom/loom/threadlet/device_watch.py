"""The reports of a training process's devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from loom.control.reports import DeviceReport
from loom.devices import LocalDevice, device_status
from loom.threadlet.link import WeaverLink
from loom.threadlet.reports import now_of_system

_log = logging.getLogger("loom")

DEVICES_INTERVAL = 5.0
"""Seconds between two reports of the devices."""

CONNECTED_INTERVAL = 0.2
"""Seconds between two checks for a connection to the weaver."""


def watch_devices(devices: Sequence[LocalDevice], link: WeaverLink, ended: threading.Event) -> None:
    """Report devices until the threadlet ends.

    The function has its own thread, because NVML may hang on a broken GPU.
    """
    failed = False
    errors: dict[str, str | None] = {}
    pause = 0.0
    while not ended.wait(pause):
        if not link.connected:
            pause = CONNECTED_INTERVAL
            continue
        pause = DEVICES_INTERVAL
        try:
            status = device_status(devices)
        except Exception:  # noqa: BLE001 - logged, and tried again
            if not failed:
                failed = True
                _log.exception("the devices cannot be looked at")
            continue
        for name, use in status.items():
            if use.error is not None and use.error != errors.get(name):
                _log.warning("the device %s does not answer: %s", name, use.error)
            errors[name] = use.error
        link.send_if_idle(DeviceReport(now_of_system(), {name: use.as_dict() for name, use in status.items()}))
