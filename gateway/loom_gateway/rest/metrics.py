"""The page ``/metrics`` for Prometheus: numbers about the gateway, its weaver, replicas and devices."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import msgpack
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from loom._version import __version__
from loom.control.latencies import LatencyCounts
from loom.control.operations import GetNumbers
from loom.errors import LoomError
from loom.process import tasks
from loom.process.tasks import Turns
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom.weaver.states import ReplicaState
from loom_gateway.offload import OFFLOAD, Work
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.sessions.session import SessionState, UserSession

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SESSION_COUNTERS = (
    ("operations", "loom_session_frames", "Frames that clients sent to this gateway for a session."),
    ("traffic.bytes_in", "loom_session_sent_bytes", "Bytes from clients that were passed on to a driver."),
    ("traffic.bytes_out", "loom_session_received_bytes", "Bytes from a driver that were passed on."),
)
_WEAVER_NUMBERS = (
    ("devices", GaugeMetricFamily, "loom_devices", "Devices that are known."),
    ("commands", GaugeMetricFamily, "loom_commands_waiting", "Commands that some replica has not acknowledged."),
    ("reports", CounterMetricFamily, "loom_status_reports", "Status reports taken since the weaver started."),
    ("event", CounterMetricFamily, "loom_events", "Events logged, ever."),
    ("history_bytes", GaugeMetricFamily, "loom_history_bytes", "Bytes of metrics' history."),
)
_DEVICE_GAUGES = (
    ("utilization", "loom_device_utilization_ratio", "Use of a device, from 0 to 1."),
    ("memory_used", "loom_device_memory_used_bytes", "Memory in use on a device."),
    ("temperature", "loom_device_temperature_celsius", "Temperature of a device."),
    ("power", "loom_device_power_watts", "Power that a device takes."),
    ("sm_clock", "loom_device_sm_clock_hertz", "Clock of a GPU's multiprocessors."),
    ("memory_clock", "loom_device_memory_clock_hertz", "Clock of a GPU's memory."),
    ("ecc_corrected", "loom_device_ecc_corrected", "Memory errors corrected since the GPU's driver was loaded."),
    ("ecc_uncorrected", "loom_device_ecc_uncorrected", "Memory errors that could not be corrected, likewise."),
    ("xid", "loom_device_last_xid", "The last Xid of a GPU that has had one since its replica started."),
)


async def metrics_text(
    manager: SessionDirectory,
    weaver: WeaverClient,
    only: str | None,
    refusals: Mapping[str, int] = MappingProxyType({}),
    connections: Sequence[tuple[str, int]] = (),
) -> bytes:
    """Return the page, of all users or of ``only`` one.

    ``refusals`` by reason are for who sees all users; ``connections`` are the number of each user's. While the
    weaver is away, ``loom_weaver_up`` is 0 and its own numbers are missing. The page is made in another process,
    because this one relays every session's calls.
    """
    try:
        packed: bytes | None = await weaver.ask_for(GetNumbers(), user=EVERYONE)
    except LoomError:
        packed = None
    turns, rows = Turns(), list[list[Any]]()
    for session in manager.sessions():
        if only in (None, session.user):
            one = _SessionNumbers.of(session)
            rows.append([*one[:2], one.state.value, *one[3:]])
            await turns.rest()
    ended = sum(only in (None, session.user) for session in manager.ended.all())
    refused = [(reason, count) for reason, count in sorted(refusals.items()) if only is None]
    died = sum(tasks.died.values())
    connected = [(user, count) for user, count in connections if only in (None, user)]
    return await OFFLOAD.do(Work.METRICS, packed, rows, ended, only, refused, died, connected)


def page(
    packed: bytes | None,
    rows: Sequence[Sequence[Any]],
    ended: int,
    only: str | None,
    refused: Sequence[tuple[str, int]],
    died: int,
    connections: Sequence[tuple[str, int]],
) -> bytes:
    """Return the page, given sessions as rows of the values of a `_SessionNumbers`.

    Args:
        died: the number of the gateway's tasks that have died.
        connections: the number of each user's connections.
    """
    sessions = [
        _SessionNumbers(user, name, SessionState(state), clients, tuple(counters))
        for user, name, state, clients, counters in rows
    ]
    return _page(packed, sessions, ended, only, refused, died, connections)


class _SessionNumbers(NamedTuple):
    """The numbers of a session at one time."""

    user: str
    name: str
    state: SessionState
    clients: int
    counters: tuple[int, ...]

    @classmethod
    def of(cls, session: UserSession) -> _SessionNumbers:
        counters = tuple(attrgetter(attribute)(session) for attribute, _, _ in _SESSION_COUNTERS)
        return cls(session.user, session.name, session.state, session.clients, counters)


Numbers = Mapping[str, Mapping[str, Any]]
"""The weaver's numbers by user."""


def _page(
    packed: bytes | None,
    sessions: Sequence[_SessionNumbers],
    ended: int,
    only: str | None,
    refused: Sequence[tuple[str, int]],
    died: int,
    connections: Sequence[tuple[str, int]],
) -> bytes:
    numbers: Numbers | None = None
    if packed is not None:
        every: Numbers = msgpack.unpackb(packed)
        numbers = {user: one for user, one in every.items() if only in (None, user)}
    about = "What the gateway refused since it started: codes of errors, and connections without a good token."
    by_reason = _labelled(CounterMetricFamily, "loom_refused", about, ["reason"], refused)
    about = "Connections to this gateway with a request under way, or a WebSocket."
    connected = _labelled(GaugeMetricFamily, "loom_connections", about, ["user"], connections)
    families = _families(sessions, ended, numbers, only or ADMIN, died)
    return generate_latest(_Page([connected, by_reason, *families]))


class _Page(Collector):
    """A collector of numbers that are counted elsewhere: prometheus_client would count them again."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _families(
    sessions: Sequence[_SessionNumbers], ended: int, numbers: Numbers | None, reader: str, died: int
) -> Iterator[Metric]:
    yield _labelled(GaugeMetricFamily, "loom_gateway_info", "The gateway; 1.", ["version"], [(__version__, 1)])
    yield from _sessions(sessions, ended, reader)
    yield _tasks_died(sessions, numbers or {}, died)
    yield GaugeMetricFamily("loom_weaver_up", "Whether the weaver answers.", numbers is not None)
    if numbers:  # a user of whom the weaver knows nothing has none
        yield from _weaver(numbers)
        yield _calls(sessions, numbers)
        yield from _goodput(numbers)
        yield from _replicas(numbers)
        yield from _devices(numbers)
        about = "Replicas, metrics, devices and jobs without samples here, because their user has too many names."
        left_out = [
            (what, user, count) for user, one in numbers.items() for what, count in one.get("left_out", {}).items()
        ]
        yield _labelled(GaugeMetricFamily, "loom_names_left_out", about, ["what", "user"], left_out)


def _sessions(sessions: Sequence[_SessionNumbers], ended: int, reader: str) -> Iterator[Metric]:
    states = Counter((session.user, session.state) for session in sessions)
    users = sorted({session.user for session in sessions}) or [reader]  # without a sample, a graph has a gap
    shown = [state for state in SessionState if state is not SessionState.ENDED]
    by_state = [(state.value, user, states[user, state]) for user in users for state in shown]
    yield _labelled(GaugeMetricFamily, "loom_sessions", "Sessions, by state.", ["state", "user"], by_state)
    about = "Sessions that ended lately, as far as remembered."
    yield GaugeMetricFamily("loom_sessions_ended_remembered", about, ended)
    clients = [(one.name, one.user, one.clients) for one in sessions]
    about = "Clients connected to a session."
    yield _labelled(GaugeMetricFamily, "loom_session_clients", about, ["session", "user"], clients)
    for place, (_, name, about) in enumerate(_SESSION_COUNTERS):
        counts = [(one.name, one.user, one.counters[place]) for one in sessions]
        yield _labelled(CounterMetricFamily, name, about, ["session", "user"], counts)


def _tasks_died(sessions: Sequence[_SessionNumbers], numbers: Numbers, died: int) -> Metric:
    about = "Background tasks of the gateway and of drivers that died. Those that have to go on were started again."
    samples = [("gateway", "", "", died)]
    for one in sessions:
        calls = numbers.get(one.user, {}).get("call_latency", {})
        samples.append(("driver", one.name, one.user, calls.get(one.name, {}).get("tasks_died", 0)))
    return _labelled(CounterMetricFamily, "loom_tasks_died", about, ["process", "session", "user"], samples)


def _weaver(numbers: Numbers) -> Iterator[Metric]:
    about = "When the weaver started, since the epoch."
    yield GaugeMetricFamily(
        "loom_weaver_start_time_seconds", about, min(one["started"] for one in numbers.values())
    )
    about = "Whether the weaver stores what is reported: 0 while its disk is full, when it refuses commands."
    durable = all(one.get("undurable_since") is None for one in numbers.values())
    yield GaugeMetricFamily("loom_weaver_durable", about, durable)
    for key, family, name, about in _WEAVER_NUMBERS:
        yield _labelled(family, name, about, ["user"], [(user, one[key]) for user, one in numbers.items()])
    # Each state has a sample, even if no replica is in it: otherwise a graph would have gaps.
    by_state = [
        (state.value, user, one["replicas"].get(state.value, 0))
        for user, one in numbers.items()
        for state in ReplicaState
    ]
    yield _labelled(GaugeMetricFamily, "loom_replicas", "Replicas, by state.", ["state", "user"], by_state)
    about = "From giving a command to its acknowledgement by a replica."
    latencies = HistogramMetricFamily("loom_command_latency_seconds", about, labels=["user"])
    for user, one in numbers.items():
        latencies.add_metric([user], _buckets(one["command_latency"]), one["command_latency"]["sum"])
    yield latencies


def _calls(sessions: Sequence[_SessionNumbers], numbers: Numbers) -> Metric:
    about = "From a call's arrival in a session's driver to its answer, as told by the driver every few seconds."
    family = HistogramMetricFamily("loom_call_latency_seconds", about, labels=["session", "user"])
    for session in sessions:
        latency = numbers.get(session.user, {}).get("call_latency", {}).get(session.name)
        if latency is not None:
            family.add_metric([session.name, session.user], _buckets(latency), latency["sum"])
    return family


def _goodput(numbers: Numbers) -> Iterator[Metric]:
    about = "The share of a job's time that was spent on steps that count."
    jobs = [(user, job) for user, one in numbers.items() for job in one["of_jobs"]]
    ratios = [(job["job"], user, job["ratio"]) for user, job in jobs if job["ratio"] is not None]
    yield _labelled(GaugeMetricFamily, "loom_goodput_ratio", about, ["job", "user"], ratios)
    about = (
        "Seconds of a job's replicas, by what they were spent on. One that is corrected stays until it is made up."
    )
    spent = [
        (job["job"], reason, user, seconds)
        for user, job in jobs
        for reason, seconds in job.get("counters", job["seconds"]).items()  # those of an older weaver may fall
    ]
    yield _labelled(CounterMetricFamily, "loom_goodput_seconds", about, ["job", "reason", "user"], spent)


def _replicas(numbers: Numbers) -> Iterator[Metric]:
    about = "The training step that a replica has reached."
    replicas = [(user, id, found) for user, one in numbers.items() for id, found in one["of_replicas"].items()]
    steps = [(id, one["group"], user, one["step"]) for user, id, one in replicas if one["step"] is not None]
    yield _labelled(GaugeMetricFamily, "loom_replica_step", about, ["replica", "group", "user"], steps)
    about = "The newest value of a metric that a replica reports, as its loss."
    labels = ["replica", "group", "metric", "user"]
    metrics = [
        (id, one["group"], metric, user, value)
        for user, id, one in replicas
        for metric, value in one["metrics"].items()
    ]
    yield _labelled(GaugeMetricFamily, "loom_replica_metric", about, labels, metrics)


def _devices(numbers: Numbers) -> Iterator[Metric]:
    devices = [(user, uuid, status) for user, one in numbers.items() for uuid, status in one["of_devices"].items()]
    for key, name, about in _DEVICE_GAUGES:
        known = [(uuid, user, status[key]) for user, uuid, status in devices if status.get(key) is not None]
        yield _labelled(GaugeMetricFamily, name, about, ["device", "user"], known)
    about = "Processes that compute on a GPU."
    running = [(uuid, user, len(status.get("processes", ()))) for user, uuid, status in devices]
    yield _labelled(GaugeMetricFamily, "loom_device_processes", about, ["device", "user"], running)
    about = "1 for each reason why a device runs below its clock."
    slowed = [(uuid, reason, user, 1) for user, uuid, status in devices for reason in status.get("throttled", ())]
    yield _labelled(GaugeMetricFamily, "loom_device_throttled", about, ["device", "reason", "user"], slowed)
    about = "Whether a device answers."
    answers = [(uuid, user, status.get("error") is None) for user, uuid, status in devices]
    yield _labelled(GaugeMetricFamily, "loom_device_up", about, ["device", "user"], answers)
    about = "1 for the state that a device is in."
    states = [
        (uuid, state, user, 1) for user, one in numbers.items() for uuid, state in one["device_states"].items()
    ]
    yield _labelled(GaugeMetricFamily, "loom_device_state", about, ["device", "state", "user"], states)


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    about: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Any, ...]],
) -> Metric:
    """Return a family of samples. Each sample is the values of its labels, followed by its own."""
    family = kind(name, about, labels=labels)
    seen = set()
    for *values, number in samples:
        # Prometheus refuses a page with a sample twice, or with something else than text and numbers.
        texts = tuple(str(value).encode(errors="backslashreplace").decode() for value in values)
        with contextlib.suppress(OverflowError, TypeError, ValueError):  # an integer may be too large for a double
            if texts not in seen:
                family.add_metric(texts, float(number))
                seen.add(texts)
    return family


def _buckets(latency: LatencyCounts) -> list[tuple[str, int]]:
    """Return the upper bound and the cumulative count of each bucket of `Latencies.to_dict`."""
    bounds = map(floatToGoString, [*latency["bounds"], math.inf])
    return list(zip(bounds, itertools.accumulate(latency["counts"]), strict=True))
