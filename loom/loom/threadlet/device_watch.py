"""The threads of a threadlet that report its devices, their health and their failures to the weaver.

NVML may hang on a broken GPU, so a thread asks for the status of the devices, another one waits for events, and
nothing waits for the two.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from loom.control.reports import DeviceReport
from loom.devices import DeviceFailure, LocalDevice, device_status
from loom.devices.failures import FailureWatch
from loom.threadlet.link import WeaverLink
from loom.threadlet.reports import now_of_system

_log = logging.getLogger("loom")

DEVICES_INTERVAL = 5.0  # seconds between two reports of the devices
CONNECTED_INTERVAL = 0.2  # seconds between two checks for a connection to the weaver
EVENT_TIMEOUT = 0.5  # seconds that one wait for an event takes; an event ends it at once


def watch_devices(devices: Callable[[], Sequence[LocalDevice]], link: WeaverLink, ended: threading.Event) -> None:
    """Report the present devices, and what fails of them, until the threadlet ends."""
    watched: Sequence[LocalDevice] | None = None
    watch, changed = FailureWatch(()), threading.Event()
    failed = False
    errors: dict[str, str | None] = {}
    pause = 0.0
    while not ended.wait(pause):
        if (present := devices()) is not watched:  # each change makes a new list
            changed.set()
            watched, watch, changed = present, FailureWatch(present), threading.Event()
            if watch.has_events:
                arguments = watch, link, ended, changed
                threading.Thread(
                    target=_await_events, args=arguments, name="loom-device-events", daemon=True
                ).start()
        if not link.connected:
            pause = CONNECTED_INTERVAL
            continue
        pause = DEVICES_INTERVAL
        try:
            status = device_status(present)
        except Exception:  # noqa: BLE001 - logged, and tried again
            if not failed:
                failed = True
                _log.exception("the devices cannot be looked at")
            continue
        for name, use in status.items():
            if use.error is not None and use.error != errors.get(name):
                _log.warning("the device %s does not answer: %s", name, use.error)
            errors[name] = use.error
        _report(watch.judge(status), link)
        xids = {name: {"xid": xid} for name, xid in watch.xids.copy().items()}
        found = {name: {**use.as_dict(), **xids.get(name, {})} for name, use in status.items()}
        link.report_devices(DeviceReport(now_of_system(), found))


def _await_events(watch: FailureWatch, link: WeaverLink, ended: threading.Event, changed: threading.Event) -> None:
    told = False
    while not (ended.is_set() or changed.is_set()):
        try:
            _report(watch.wait(EVENT_TIMEOUT), link)
        except Exception as error:  # noqa: BLE001 - such as of a GPU that is lost, which its status shows too
            if not told:
                told = True
                _log.warning("NVML's events cannot be waited for: %s", error)
            ended.wait(EVENT_TIMEOUT)
    watch.close()


def _report(failures: Sequence[DeviceFailure], link: WeaverLink) -> None:
    for failure in failures:
        _log.error("the device %s has failed: %s", failure.device, failure.reason)
        link.report_failure(failure)
