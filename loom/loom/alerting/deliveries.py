"""`Deliveries`: the attempts to deliver a user's alerts, each on a thread and in a process of its own.

Nothing here waits for a receiver but those threads, of which a user has at most `AT_ONCE`. A receiver gets one
attempt at a time. After a failure all deliveries to it wait, twice as long each time; the one with the fewest
attempts comes first, so that an alert which a receiver always refuses holds up no other.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from pathlib import Path
from typing import Any, Protocol

from loom.alerting.alerts import Alerts, WaitingDelivery
from loom.alerting.attempts import AttemptOutcome, attempt
from loom.alerting.operator import AlertOperator
from loom.process.backoff import Backoff
from loom.process.threads import start_thread
from loom.weaver.alert_views import AlertKind
from loom.weaver.runs.run import Run

AT_ONCE = 4
"""Attempts of one user at the same time."""

BURST, PER_SECOND = 60, 2.0
"""Attempts of one user in quick succession, and a second after that: each starts a process."""

BETWEEN_ATTEMPTS = Backoff(2.0, 900.0)
"""Seconds between two attempts at a receiver that fails."""

TRIED_FOR = 86_400.0
"""Seconds after an alert in which its delivery is tried. A test is tried once."""

LOOK_EVERY = 15.0
"""Seconds between two looks at disks, and at what the operator allows."""

MAX_DISKS = 64
"""Folders of runs whose disks are looked at."""

_FOLDERS = ("output_dir", "checkpoint_dir", "checkpoint_folder", "checkpoints", "save_dir", "default_root_dir")
"""Keys of configurations that name the folder of a run's checkpoints."""

Try = Callable[[Path, bytes], AttemptOutcome]


class Later(Protocol):
    """Calls a function on the weaver's event loop, from any thread."""

    def __call__(self, call: Callable[..., object], *arguments: Any) -> object: ...


class Deliveries:
    """The deliveries of one user.

    Args:
        folder: where the attempts have their files; None: nothing is delivered.
        operator: the file in which the gateway says what its operator allows.
        clock: returns the seconds since the epoch.
        later: calls something on the event loop.
    """

    def __init__(
        self,
        alerts: Alerts,
        folder: Path | None,
        operator: Path | None,
        clock: Callable[[], float],
        later: Later,
        make: Try = attempt,
    ) -> None:
        self._alerts = alerts
        self._folder = folder
        self._operator = operator
        self._clock = clock
        self._later = later
        self._make = make
        self._under_way: dict[str, WaitingDelivery] = {}
        """The delivery that is tried, by receiver."""
        self._failed: Counter[str] = Counter()
        """Attempts at each receiver that failed since one succeeded."""
        self._not_before: dict[str, float] = {}
        self._room = float(BURST)
        """Attempts that the user may begin now."""
        self._ticked = 0.0
        self._looking = False
        self._looked = 0.0
        if operator is not None:
            alerts.operator = AlertOperator.read(operator)
        if folder is not None and (folder := folder / "alerts").is_dir():
            wanted = {self._file(folder, one).name for one in alerts.waiting()}
            for file in folder.iterdir():
                if file.name not in wanted:
                    file.unlink(missing_ok=True)

    def tick(self, now: float) -> None:
        """Begin the attempts that are due."""
        if now >= self._looked + LOOK_EVERY and not self._looking:
            self._looked = now
            self._look()
        self._room = min(float(BURST), self._room + PER_SECOND * max(0.0, now - self._ticked))
        self._ticked = now
        if self._folder is None:
            return
        for one in sorted(self._alerts.waiting(), key=lambda one: one.view.attempts):
            if len(self._under_way) >= AT_ONCE or self._room < 1.0:
                break
            to = one.to
            if to not in self._under_way and now >= self._not_before.get(to, 0.0):
                self._begin(self._folder / "alerts", to, one)

    def _begin(self, folder: Path, to: str, one: WaitingDelivery) -> None:
        self._under_way[to] = one
        self._room -= 1.0
        file = self._file(folder, one)

        def work() -> None:
            try:
                outcome = self._make(file, json.dumps(self._job(one)).encode())
            except Exception as error:  # noqa: BLE001 - told with the delivery, which is tried again
                outcome = AttemptOutcome(None, f"the attempt could not be made: {error}")
            with contextlib.suppress(RuntimeError):  # the weaver ends; the next one finds the outcome
                self._later(self._ended, to, one, file, outcome)

        start_thread("deliver an alert", work)

    def _ended(self, to: str, one: WaitingDelivery, file: Path, outcome: AttemptOutcome) -> None:
        now = self._clock()
        del self._under_way[to]
        if outcome.delivered:
            self._failed.pop(to, None)
            self._not_before.pop(to, None)
        else:
            self._not_before[to] = now + BETWEEN_ATTEMPTS.wait(self._failed[to])
            self._failed[to] += 1
        final = one.alert.view.test or now >= one.alert.view.time + TRIED_FOR
        remove = lambda: start_thread("remove an attempt", lambda: file.unlink(missing_ok=True))  # noqa: E731
        self._alerts.attempted(one, outcome.status, outcome.error, final, now, remove)

    def _file(self, folder: Path, one: WaitingDelivery) -> Path:
        return folder / f"{one.alert.view.id}-{one.number}-{one.view.attempts}"

    def _job(self, one: WaitingDelivery) -> Mapping[str, Any]:
        operator, id, told = self._alerts.operator, one.alert.view.id, self._payload(one)
        if one.is_mail:
            mail = base64.b64encode(mail_of(told, one.alert.rule.view.email)).decode()
            return {"id": id, "command": operator.mail, "body": mail}
        form = slack_of(told) if one.alert.rule.view.form == "slack" else told
        body = base64.b64encode(json.dumps(form).encode()).decode()
        return {"id": id, "url": one.to, "body": body, "networks": operator.networks}

    def _payload(self, one: WaitingDelivery) -> Mapping[str, Any]:
        """Return the JSON object that a webhook gets."""
        alert = one.alert.view
        names = ("id", "run", "run_name", "replica", "metric", "step", "value", "message", "time", "test")
        told = {name: getattr(alert, name) for name in names}
        return {**told, "rule": alert.rule.value, "url": self._alerts.operator.url_of(alert.run)}

    # ----- Disks, and the operator's file

    def _look(self) -> None:
        watched = list(self._watched_disks()) if self._alerts.rules_of(AlertKind.DISK) else []
        if self._operator is None and not watched:
            return
        self._looking = True

        def work() -> None:
            operator = None if self._operator is None else AlertOperator.read(self._operator)
            found = [(path, run, used) for path, run in watched if (used := _used(path)) is not None]
            with contextlib.suppress(RuntimeError):
                self._later(self._seen, operator, found)

        start_thread("look at disks", work)

    def _seen(self, operator: AlertOperator | None, found: list[tuple[str, Run | None, float]]) -> None:
        self._looking = False
        if operator is not None:
            self._alerts.operator = operator
        for path, run, used in found:
            self._alerts.take_disk(path, run, used, self._clock())

    def _watched_disks(self) -> Iterator[tuple[str, Run | None]]:
        """Yield the folder of the store, and those of the checkpoints of living runs on this host."""
        if self._folder is not None:
            yield str(self._folder), None
        here, count = socket.gethostname(), 0
        for run in self._alerts.living_runs():
            start = run.start or {}
            if start.get("host") != here or count >= MAX_DISKS:
                continue
            for name in _FOLDERS:
                folder = run.config.get(name)
                if isinstance(folder, str) and folder and "\0" not in folder:
                    count += 1
                    yield os.path.join(str(start.get("folder") or "/"), folder), run


def _used(path: str) -> float | None:
    """Return the used part of the disk of a folder, or of the first folder above it that exists."""
    for place in (path, *map(str, Path(path).parents)):
        try:
            found = shutil.disk_usage(place)
            return 1.0 - found.free / found.total if found.total else None
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return None


def slack_of(told: Mapping[str, Any]) -> Mapping[str, str]:
    """Return an alert in Slack's form. Its signs are escaped, so that no name mentions a channel."""
    text = str(told["message"])
    for sign, code in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(sign, code)
    link = f" <{told['url']}|{told['run_name'] or 'Loom'}>" if told["url"] and _plain(told) else ""
    return {"text": f"*{told['rule']}* {text}{link}"}


def _plain(told: Mapping[str, Any]) -> bool:
    return not set("<>|&") & set(f"{told['run_name']}{told['url']}")


def mail_of(told: Mapping[str, Any], to: tuple[str, ...]) -> bytes:
    """Return an alert as an e-mail."""
    mail = EmailMessage(SMTP)
    mail["To"] = [Address(addr_spec=one) for one in to]
    mail["Subject"] = (
        f"Loom: {told['rule']} {''.join(one if one.isprintable() else ' ' for one in told['message'])}"[:200]
    )
    mail["Message-ID"] = f"<{told['id']}@loom.invalid>"
    mail["Idempotency-Key"] = str(told["id"])
    lines = [f"{name}: {value}" for name, value in told.items() if value is not None and name != "message"]
    mail.set_content("\n".join([str(told["message"]), "", *lines, ""]).encode(errors="replace").decode())
    return mail.as_bytes()
