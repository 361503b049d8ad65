"""The half of a threadlet that reports to the weaver: the training's status, its devices and their failures.

NVML may hang on a broken GPU, so a thread asks for the status of the devices, another one waits for events, and
nothing waits for the two.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from loom.control.frame import MAX_COUNT, Frame
from loom.control.reports import MAX_KEPT_REPORTS, DeviceReport, Phase, Row
from loom.devices import DeviceFailure, LocalDevice, device_status
from loom.devices.failures import FailureWatch
from loom.errors import describe_error
from loom.threadlet.link import ROWS, WeaverLink
from loom.threadlet.status_rows import Given, KeptReports, RowMaker, now_of_system

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


_log = logging.getLogger("loom")

# Seconds between two collections of published reports, at least. Each interrupts the training for about half a
# millisecond, mostly for handing the interpreter over, and all processes that exchange gradients wait for it.
REPORT_INTERVAL = 0.5


STATUS_KEYS = {
    "replica_id": "",
    "status_type": "status_type",
    "current_step": "step",
    "epoch": "epoch",
    "max_step": "max_step",
    "metrics": "metrics",
    "config": "config",
}
"""The keys of a status that is one mapping, and the argument of `StatusReporter.publish_status` that each gives.

The first gives none: the replica is the threadlet's own.
"""

_MAPPINGS = ("metrics", "config")
_MOST_WARNINGS = 100


class StatusReporter:
    """The part of a threadlet that collects status reports, and sends them if there is a weaver."""

    replica_id: str

    def __init__(self, config: dict[str, Any], sent: bool) -> None:
        self._config = config
        self._link: WeaverLink | None = None
        self._step: Any = None  # the current or last reported step, as the loop gave it
        self._epoch: Any = None  # the epoch that was reported with it
        self._phase = Phase.BETWEEN
        self._in_steps = False  # whether the loop uses `step`, which marks steps better than `publish_status`
        self._numbers = itertools.count()
        self._published = -1  # the number of the last report
        self._given: deque[Given] = deque(maxlen=MAX_KEPT_REPORTS if sent else 0)
        """Published reports without a row yet. Appending takes no lock, so the training never waits for one."""
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread that makes rows; it is reentrant, so that signal handlers may publish too."""
        self._asleep = False  # whether the thread that makes rows waits for a wake
        self._rows = RowMaker()
        self._kept = KeptReports()
        self._ended = threading.Event()
        self._warned: set[str] = set()  # the keys and values of statuses that a warning has named

    def publish_status(
        self,
        step: int | Mapping[str, Any] | None = None,
        epoch: int | None = None,
        max_step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        status_type: str | None = None,
    ) -> None:
        """Publish the training's progress. Return at once, whatever the weaver does.

        Args:
            step: the step that was finished; or the whole status as one mapping, with the keys ``replica_id``,
                ``status_type``, ``current_step``, ``epoch``, ``max_step``, ``metrics`` and ``config``. A warning
                names a key that is not one of these, which is left out. A status of another replica is not sent.
            epoch: the epoch of the step.
            max_step: the total number of steps.
            metrics: numbers, also of torch and numpy: they are converted in the background, which waits for the
                device they are on. A tensor that the loop changes in place may be read after the change.
            config: the current values of the configuration.
            status_type: what the status is about, such as ``batch_update``; a text of the training's choice.
        """
        if step is not None:
            if type(step) is not int and isinstance(step, Mapping):
                beside = {"epoch": epoch, "max_step": max_step, "metrics": metrics, "config": config}
                return self._publish_mapping(step, {**beside, "status_type": status_type})
            self._step, self._epoch = step, epoch
            if self._phase is Phase.BETWEEN and not self._in_steps:
                self._phase = Phase.STEP
        if config is not None:
            config = dict(config)
            self._config.update(config)
        if metrics is not None:
            metrics = {**metrics}
        self._published = number = next(self._numbers)
        given = (number, now_of_system(), step, epoch, max_step, metrics, config)
        self._give(given if status_type is None else (*given, status_type))

    def _give(self, given: Given) -> None:
        self._given.append(given)
        if self._asleep:
            self._asleep = False
            self._wakes.put(None)

    def _publish_mapping(self, status: Mapping[str, Any], given: dict[str, Any]) -> None:
        """Publish a status that is one mapping; arguments that are given beside it take precedence."""
        taken: dict[str, Any] = {}
        for key, value in status.items():
            if key == "replica_id" and value not in (self.replica_id, self.replica_id.partition("@")[0]):
                return self._warn_once(
                    str(value), f"a status of {value!r:.80} is not sent: this threadlet is {self.replica_id!r:.80}"
                )
            if key not in STATUS_KEYS:
                known = ", ".join(STATUS_KEYS)
                self._warn_once(str(key), f"a status has no key {key!r:.80}; it is not sent. Keys are {known}")
            elif key in _MAPPINGS and not (value is None or isinstance(value, Mapping)):
                self._warn_once(f"{key}=", f"{key} is names and values, not {value!r:.80}; it is not sent")
            elif STATUS_KEYS[key]:
                taken[STATUS_KEYS[key]] = value
        if isinstance(taken.get("step"), Mapping):
            self._warn_once("current_step=", f"current_step is a count, not {taken.pop('step')!r:.80}")
        self.publish_status(**taken, **{name: value for name, value in given.items() if value is not None})

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(about)
            _log.warning("%s", text)

    @property
    def dropped(self) -> int:
        """Status reports that were dropped, the oldest first, because the weaver did not store them in time."""
        return self._kept.dropped + self._rows.missed

    @property
    def connected(self) -> bool:
        """True if the weaver is connected now."""
        return self._link is not None and self._link.connected

    def _send(self, frame: Frame) -> None:
        if self._link is not None:
            self._link.send(frame)

    def _whole_step(self) -> int | None:
        step = self._step
        return step if type(step) is int and 0 <= step < MAX_COUNT else self._kept.last_step

    def _make_rows(self, link: WeaverLink) -> None:
        """Make rows of the published reports until the end, on its own thread, because it waits for GPUs."""
        warned = False
        while True:
            self._await_reports()
            ending = self._ended.is_set()
            if given := self._given:
                while given:
                    self._kept.add(self._rows_of(given))
                link.wake()
            if self.dropped and not warned:
                warned = True
                _log.warning("status reports are dropped, the oldest first: the weaver does not take them")
            if ending:
                return
            self._ended.wait(REPORT_INTERVAL)

    def _rows_of(self, given: deque[Given]) -> list[Row]:
        """Take the next reports and return their rows, without unreadable reports, which are logged."""
        make = self._rows.make
        rows: list[Row] = []
        try:
            for _ in range(min(len(given), ROWS)):
                rows.append(make(given.popleft()))  # noqa: PERF401 - those before the error are kept
        except Exception as error:  # noqa: BLE001 - whatever the methods of a stranger's value raise
            self._warn_once("report", f"a status report cannot be read, and is not sent: {describe_error(error)}")
        return rows

    def _await_reports(self) -> None:
        # The training thread reads `_asleep` after appending a report; this thread checks the reports after setting
        # `_asleep`. At least one of them sees the other's write, so that no report is left without a wake.
        self._asleep = True
        if not self._given and not self._ended.is_set():
            self._wakes.get()
        self._asleep = False
