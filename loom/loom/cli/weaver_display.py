"""The look of replicas, devices and events on a terminal."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from loom.cli.output import cell, console, counted
from loom.errors import because
from loom.terminal_text import fit_line
from loom.weaver.states import LIVING, ReplicaState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from loom.weaver.views import DeviceInfo, ReplicaInfo, WeaverEvent, WeaverUpdate


WIDTH, HEIGHT = 72, 16
"""Characters of the drawing, without its axes."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a pattern, by row and column (Unicode, block Braille Patterns)."""

_EMPTY = 0x2800


def plot_lines(
    title: str, points: Sequence[tuple[int | None, float, float]], width: int = WIDTH, height: int = HEIGHT
) -> Iterator[str]:
    """Yield the lines of a drawing of ``width`` by ``height`` characters plus its axes.

    Each point is a step, a time in seconds and a value; the oldest comes first.
    """
    good = [point for point in points if math.isfinite(point[2])]
    left_out = len(points) - len(good)
    yield title + (f"  ({left_out} values are no numbers)" if left_out else "")
    if not good:
        yield "nothing to draw"
        return
    by_step = all(step is not None for step, _, _ in good)
    across = [float(step or 0) if by_step else at - good[0][1] for step, at, _ in good]
    values = [value for _, _, value in good]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    columns = _scaled(across, min(across), max(across), 2 * width - 1)
    rows = _scaled(values, high, low, 4 * height - 1)
    labels = [f"{high - (high - low) * row / (height - 1):.4g}" for row in range(height)]
    margin = max(map(len, labels))
    for row, line in enumerate(_draw(list(zip(columns, rows, strict=True)), width, height)):
        label = labels[row] if row % 5 == 0 or row == height - 1 else ""
        yield f"{label:>{margin}} ┤{line}".rstrip()
    yield f"{'':>{margin}} └{'─' * width}"
    begin, end = (f"{across[0]:g}", f"{across[-1]:g}") if by_step else ("0 s", f"{across[-1]:.1f} s")
    gap = max(1, width - len(begin) - len(end))
    yield f"{'':>{margin}}  {begin}{'step' if by_step else 'time':^{gap}}{end}"


def _scaled(values: Sequence[float], first: float, last: float, most: int) -> list[int]:
    """Return the places of values between two ends, from 0 to ``most``."""
    return [round((value - first) / ((last - first) or 1.0) * most) for value in values]


def _draw(places: list[tuple[int, int]], width: int, height: int) -> list[str]:
    """Return lines of characters with a line of dots from each place to the next."""
    cells = [[0] * width for _ in range(height)]
    for (x0, y0), (x1, y1) in itertools.pairwise([places[0], *places]):
        dots = max(abs(x1 - x0), abs(y1 - y0), 1)
        for dot in range(dots + 1):
            x, y = round(x0 + (x1 - x0) * dot / dots), round(y0 + (y1 - y0) * dot / dots)
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(_EMPTY + bits) if bits else " " for bits in line) for line in cells]


REPLICA_COLUMNS = ["replica", "state", "step", "epoch", "metrics", "s/step", "left", "group", "host", "devices"]

STYLES = {
    ReplicaState.FAILED: "bold red",
    ReplicaState.STALLED: "red",
    ReplicaState.RECOVERING: "magenta",
    ReplicaState.REGISTERING: "cyan",
    ReplicaState.PAUSED: "yellow",
    ReplicaState.DRAINING: "yellow",
    ReplicaState.RUNNING: "green",
    ReplicaState.FINISHED: "dim",
}
"""The styles of the states, the worst state first."""

EVENTS_SHOWN = 8
METRICS_SHOWN = 3

DRAWN_A_SECOND = 4
LOOK_EVERY = 1.0
"""Seconds between two requests for all replicas, after a change that updates do not describe completely."""


def replica_row(replica: ReplicaInfo) -> list[str]:
    """Return the cells of a replica's row; see `REPLICA_COLUMNS`."""
    from loom.weaver.views import how_ended

    return [
        replica.id,
        because(replica.state, how_ended(replica)),
        _steps([replica]),
        "" if replica.epoch is None else str(replica.epoch),
        _metrics(replica),
        "" if replica.step_time is None else f"{replica.step_time:.3g}",
        _left([replica]),
        replica.group,
        ":".join([replica.host, *([str(replica.pid)] if replica.pid else [])]) if replica.host else "",
        str(len(replica.devices)) if len(replica.devices) > 1 else "".join(replica.devices),
    ]


class TableRow(NamedTuple):
    """A row of the table of replicas: a replica, or a job of several ranks."""

    cells: list[str]
    """See `REPLICA_COLUMNS`."""
    state: ReplicaState
    """The state of the replica, or the worst in the job."""
    is_job: bool = False


def table_rows(replicas: Iterable[ReplicaInfo], most: int | None = None) -> Iterator[TableRow]:
    """Yield a row for each job of several ranks, with its ranks below it, and for each other replica.

    Args:
        replicas: in any order.
        most: rows, at most: the worst replicas and jobs come first then, and ranks have the room that jobs leave;
            None: all, by their places.
    """
    jobs: dict[tuple[str, str], list[ReplicaInfo]] = {}
    for one in sorted(replicas, key=lambda one: one.place if most is None else (_worst(one), *one.place)):
        jobs.setdefault((one.user, one.job), []).append(one)
    room = sys.maxsize if most is None else max(0, most - len(jobs))
    for ranks in itertools.islice(jobs.values(), most):
        if len(ranks) == 1:
            yield TableRow(replica_row(ranks[0]), ranks[0].state)
            continue
        yield TableRow(_job_cells(ranks), min(ranks, key=_worst).state, is_job=True)
        for rank in ranks[:room]:
            name, *cells = replica_row(rank)
            yield TableRow([f"  {name}", *cells], rank.state)
        room = max(0, room - len(ranks))


def _worst(replica: ReplicaInfo) -> int:
    return list(STYLES).index(replica.state)


def _job_cells(ranks: Sequence[ReplicaInfo]) -> list[str]:
    """Return the cells of a job of several ranks; its metrics are those of the first rank that has some."""
    first = min(ranks, key=lambda one: (not one.metrics, one.place))
    states = Counter(one.state for one in ranks)
    times = [one.step_time for one in ranks if one.step_time is not None]
    epochs = [one.epoch for one in ranks if one.epoch is not None]
    return [
        f"{first.job} ({len(ranks)} ranks)",
        ", ".join(f"{states[state]} {state}" for state in STYLES if states[state]),
        _steps(ranks),
        _span(epochs),
        _metrics(first),
        f"{median(times):.3g}" if times else "",
        _left(ranks),
        "",
        counted(len({one.host for one in ranks if one.host}), "host"),
        str(len({uuid for one in ranks for uuid in one.devices})),
    ]


def _metrics(replica: ReplicaInfo) -> str:
    shown = [f"{name} {value:.4g}" for name, value in itertools.islice(replica.metrics.items(), METRICS_SHOWN)]
    more = len(replica.metrics) - len(shown)
    return "  ".join(shown + [f"… {more} more"] * (more > 0))


def _steps(ranks: Sequence[ReplicaInfo]) -> str:
    """Return the steps that ranks are at, from the least to the greatest, and the last step of their training."""
    text = _span([one.step for one in ranks if one.step is not None])
    last = max((one.max_step for one in ranks if one.max_step is not None), default=None)
    return text if last is None or not text else f"{text}/{last}"


def _span(numbers: Sequence[int]) -> str:
    """Return the least and the greatest of some numbers as text, such as ``3`` or ``3 to 5``."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)}))) if numbers else ""


def _left(ranks: Sequence[ReplicaInfo]) -> str:
    """Return the time that a training takes to its last step at its present pace, by its slowest rank."""
    seconds = [
        (one.max_step - one.step) * one.step_time
        for one in ranks
        if one.state in LIVING
        if one.max_step is not None and one.step is not None and one.step_time is not None
    ]
    left = max(seconds, default=0.0)
    return f"{timedelta(seconds=math.ceil(left))}" if left > 0 else ""


DEVICE_COLUMNS = ["uuid", "state", "server", "type", "memory", "use", "°C", "health", "replicas"]


def device_row(device: DeviceInfo) -> list[str]:
    """Return the cells of a device's row; see `DEVICE_COLUMNS`."""
    status = device.status or {}
    use = status.get("utilization")
    used = status.get("memory_used")
    state = because(device.state, device.reason)
    known = [f"{size / (1 << 30):.1f}" for size in (used, device.memory or None) if size is not None]
    memory = f"{' of '.join(known)} GiB" if known else ""
    shown = "" if use is None else f"{use:.0%}"
    celsius = status.get("temperature")
    return [
        device.uuid,
        state,
        device.server,
        device.type,
        memory,
        shown,
        "" if celsius is None else f"{celsius:.0f}",
        "; ".join(ailments(device)),
        ", ".join(device.replicas),
    ]


def ailments(device: DeviceInfo) -> list[str]:
    """Return what the newest report on a device says against its health."""
    status = device.status or {}
    found = [] if status.get("error") is None else [str(status["error"])]
    if status.get("xid") is not None:
        found.append(f"Xid {status['xid']}")
    if status.get("ecc_uncorrected"):
        found.append(f"{status['ecc_uncorrected']} uncorrectable memory errors")
    if status.get("throttled"):
        found.append(f"throttled: {', '.join(status['throttled'])}")
    return found


def event_line(event: WeaverEvent) -> str:
    """Return a line about an event."""
    when = time.strftime("%H:%M:%S", time.localtime(event.time)) + f"{event.time % 1:.3f}"[1:]
    about = f"  {event.replica}" if event.replica else ""
    return f"{event.id:>6}  {when}  {event.kind}{about}  {_details(event)}".rstrip()


def _details(event: WeaverEvent) -> str:
    data = {name: value for name, value in event.data.items() if value not in (None, [], {}, "")}
    match event.kind:
        case "command":
            what = f"{data.get('do')} {_values(data.get('params', {}))}".rstrip()
            return f"{what} to {data.get('target')} by {data.get('by')}"
        case "applied" | "refused" | "unanswered":
            changes = {key: change["new"] for key, change in data.get("changes", {}).items()}
            at = f" at step {data['step']}" if "step" in data else ""
            return f"{data.get('do')}{at} {_values(changes)} {data.get('reason', '')}".replace("  ", " ")
        case "failed" | "finished" | "supervision":
            lines = data.pop("exit", {}).get("last_lines")
            return _values(data) + (f"; its last line: {lines[-1]}" if lines else "")
        case "device_failed":
            chain = [f"{one['replica']} ({one['action'] or one['state']})" for one in data.get("replicas", [])]
            on = ", ".join(chain) or "no replica"
            return f"{data['device']['uuid']}: {data.get('reason', 'no reason given')}; on it: {on}"
    stack = f"; {len(data.pop('stack').splitlines())} lines of stack" if "stack" in data else ""
    return _values(data) + stack


def _values(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def json_line(update: WeaverUpdate) -> str:
    """Return an update as a line of JSON."""
    from loom.weaver.views import WeaverEvent

    kind = "event" if isinstance(update, WeaverEvent) else type(update).__name__.lower()
    return json.dumps({"type": kind, **asdict(update)})


class Picture:
    """The current state, kept up to date with a watcher's updates."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.replicas: dict[str, ReplicaInfo] = {}
        self.devices: dict[str, DeviceInfo] = {}
        self.events: deque[WeaverEvent] = deque(maxlen=EVENTS_SHOWN)
        self.away: str | None = None

    def apply(self, update: WeaverUpdate) -> bool:
        """Apply an update; return whether to look again, because it does not describe all that has changed."""
        from loom.weaver.views import Away, Delta, Snapshot

        match update:
            case Snapshot():
                self.replicas, self.devices = dict(update.replicas), dict(update.devices)
                self.away = None
            case Away():
                self.away = update.reason
            case Delta():
                for id, changes in update.replicas.items():
                    if id not in self.replicas:
                        return True
                    self.replicas[id] = self.replicas[id].changed_by(changes)
                for uuid, status in update.devices.items():
                    if uuid in self.devices:
                        self.devices[uuid] = replace(self.devices[uuid], status=status)
            case _:
                if not self.events or update.id > self.events[-1].id:
                    self.events.append(update)
                return update.kind not in ("command", "applied", "refused", "unanswered", "config")
        return False

    def table(self, height: int) -> RenderableType:
        """Return the whole state in at most ``height`` lines."""
        from rich.console import Group
        from rich.table import Table

        states = Counter(one.state for one in self.replicas.values())
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no replicas"
        title = cell(f"{counts}; {counted(len(self.devices), 'device')} at {self._url}", style="bold")
        if self.away is not None:
            title.append(f"\naway: {fit_line(self.away)}", style="red")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for column in REPLICA_COLUMNS:
            table.add_column(column, no_wrap=True, justify="right" if column in ("step", "s/step") else "left")
        room = max(3, height - EVENTS_SHOWN - 6)
        rows = list(table_rows(self.replicas.values(), room))
        for row in rows:
            cells = [cell(each) for each in row.cells]
            cells[1].stylize(STYLES[row.state])
            table.add_row(*cells)
        parts: list[RenderableType] = [title, table]
        if hidden := len(self.replicas) - sum(not row.is_job for row in rows):
            parts.append(cell(f"… {hidden} more", style="dim"))
        failed = [device for device in self.devices.values() if device.state != "active"]
        parts += [
            cell(fit_line(because(f"device {one.uuid} {one.state}", one.reason)), style="red") for one in failed[:3]
        ]
        if self.events:
            parts.append(cell(""))
            parts += [cell(fit_line(event_line(event)), style="dim", no_wrap=True) for event in self.events]
        return Group(*parts)


Seen = tuple[dict[str, "ReplicaInfo"], dict[str, "DeviceInfo"]]


def live(updates: Iterator[WeaverUpdate], look: Callable[[], Seen], url: str) -> None:
    """Draw the current state again and again until there are no more updates; ``look`` once a second at most."""
    from rich.live import Live

    output = console()
    screen = _Screen(Picture(url), look)
    with Live(
        console=output,
        screen=output.is_terminal,
        refresh_per_second=DRAWN_A_SECOND,
        get_renderable=lambda: screen.draw(output.height),
    ):
        for update in updates:
            screen.apply(update)
        screen.look()


class _Screen:
    """A picture that one thread changes while another draws it."""

    def __init__(self, picture: Picture, look: Callable[[], Seen]) -> None:
        self._picture = picture
        self._look = look
        self._lock = threading.Lock()
        self._stale = False
        self._looked = 0.0

    def apply(self, update: WeaverUpdate) -> None:
        with self._lock:
            self._stale |= self._picture.apply(update)

    def look(self) -> None:
        """Request the state again if it is stale."""
        from loom.errors import LoomError

        if not self._stale:
            return
        self._stale = False
        self._looked = time.monotonic()
        try:
            replicas, devices = self._look()
        except LoomError:  # an update reports that the weaver is away, and a snapshot follows
            return
        with self._lock:
            self._picture.replicas, self._picture.devices = replicas, devices

    def draw(self, height: int) -> RenderableType:
        if time.monotonic() - self._looked > LOOK_EVERY:
            self.look()
        with self._lock:
            return self._picture.table(height)
