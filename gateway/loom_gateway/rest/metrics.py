"""The page ``/metrics`` for Prometheus: numbers about the gateway, its weaver, replicas and devices."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from loom._version import __version__
from loom.errors import LoomError
from loom.process import tasks
from loom.weaver.client import WeaverClient
from loom.weaver.states import ReplicaState
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import SessionState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SESSION_COUNTERS = (
    ("operations", "loom_session_frames", "Frames that clients sent to this gateway for a session."),
    ("traffic.bytes_in", "loom_session_sent_bytes", "Bytes from clients that were passed on to a driver."),
    ("traffic.bytes_out", "loom_session_received_bytes", "Bytes from a driver that were passed on."),
)
_WEAVER_NUMBERS = (
    ("started", GaugeMetricFamily, "loom_weaver_start_time_seconds", "When the weaver started, since the epoch."),
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
)


async def metrics_text(manager: SessionManager, weaver: WeaverClient) -> bytes:
    """Return the page. While the weaver is away, ``loom_weaver_up`` is 0 and its own numbers are missing."""
    try:
        numbers = await weaver.ask("numbers")
    except LoomError:
        numbers = None
    families = list(_families(manager, numbers))
    return await asyncio.to_thread(generate_latest, _Page(families))


class _Page(Collector):
    """A collector of numbers that are counted elsewhere: prometheus_client would count them again."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _families(manager: SessionManager, numbers: dict[str, Any] | None) -> Iterator[Metric]:
    yield _labelled(GaugeMetricFamily, "loom_gateway_info", "The gateway; 1.", ["version"], [(__version__, 1)])
    yield from _sessions(manager)
    yield _tasks_died(manager, {} if numbers is None else numbers["call_latency"])
    yield GaugeMetricFamily("loom_weaver_up", "Whether the weaver answers.", numbers is not None)
    if numbers is not None:
        yield from _weaver(numbers)
        yield _calls(manager, numbers["call_latency"])
        yield from _goodput(numbers["of_jobs"])
        yield from _replicas(numbers["of_replicas"])
        yield from _devices(numbers["of_devices"])


def _sessions(manager: SessionManager) -> Iterator[Metric]:
    sessions = manager.sessions()
    states = Counter(session.state for session in sessions)
    by_state = [(state.value, states[state]) for state in SessionState if state is not SessionState.ENDED]
    yield _labelled(GaugeMetricFamily, "loom_sessions", "Sessions, by state.", ["state"], by_state)
    about = "Sessions that ended lately, as far as remembered."
    yield GaugeMetricFamily("loom_sessions_ended_remembered", about, len(manager.ended.all()))
    clients = [(session.name, session.clients) for session in sessions]
    about = "Clients connected to a session."
    yield _labelled(GaugeMetricFamily, "loom_session_clients", about, ["session"], clients)
    for attribute, name, about in _SESSION_COUNTERS:
        count = attrgetter(attribute)
        counts = [(session.name, count(session)) for session in sessions]
        yield _labelled(CounterMetricFamily, name, about, ["session"], counts)


def _tasks_died(manager: SessionManager, calls: dict[str, dict[str, Any]]) -> Metric:
    about = "Background tasks of the gateway and of drivers that died. Those that have to go on were started again."
    samples = [("gateway", "", sum(tasks.died.values()))]
    samples += [("driver", one.name, calls.get(one.name, {}).get("tasks_died", 0)) for one in manager.sessions()]
    return _labelled(CounterMetricFamily, "loom_tasks_died", about, ["process", "session"], samples)


def _weaver(numbers: dict[str, Any]) -> Iterator[Metric]:
    for key, family, name, about in _WEAVER_NUMBERS:
        yield family(name, about, numbers[key])
    # Each state has a sample, even if no replica is in it: otherwise a graph would have gaps.
    by_state = [(state.value, numbers["replicas"].get(state.value, 0)) for state in ReplicaState]
    yield _labelled(GaugeMetricFamily, "loom_replicas", "Replicas, by state.", ["state"], by_state)
    latency = numbers["command_latency"]
    about = "From giving a command to its acknowledgement by a replica."
    yield HistogramMetricFamily("loom_command_latency_seconds", about, _buckets(latency), latency["sum"])


def _calls(manager: SessionManager, latencies: dict[str, dict[str, Any]]) -> Metric:
    about = "From a call's arrival in a session's driver to its answer, as told by the driver every few seconds."
    family = HistogramMetricFamily("loom_call_latency_seconds", about, labels=["session"])
    for session in manager.sessions():
        if (latency := latencies.get(session.name)) is not None:
            family.add_metric([session.name], _buckets(latency), latency["sum"])
    return family


def _goodput(jobs: list[dict[str, Any]]) -> Iterator[Metric]:
    about = "The share of a job's time that was spent on steps that count."
    ratios = [(job["job"], job["ratio"]) for job in jobs if job["ratio"] is not None]
    yield _labelled(GaugeMetricFamily, "loom_goodput_ratio", about, ["job"], ratios)
    about = "Seconds of a job's replicas, by what they were spent on. One that is corrected may fall."
    spent = [(job["job"], reason, seconds) for job in jobs for reason, seconds in job["seconds"].items()]
    yield _labelled(GaugeMetricFamily, "loom_goodput_seconds_total", about, ["job", "reason"], spent)


def _replicas(replicas: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    about = "The training step that a replica has reached."
    steps = [(id, one["group"], one["step"]) for id, one in replicas.items() if one["step"] is not None]
    yield _labelled(GaugeMetricFamily, "loom_replica_step", about, ["replica", "group"], steps)
    about = "The newest value of a metric that a replica reports, as its loss."
    metrics = [(id, one["group"], *metric) for id, one in replicas.items() for metric in one["metrics"].items()]
    yield _labelled(GaugeMetricFamily, "loom_replica_metric", about, ["replica", "group", "metric"], metrics)


def _devices(devices: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    for key, name, about in _DEVICE_GAUGES:
        known = [(uuid, status[key]) for uuid, status in devices.items() if status.get(key) is not None]
        yield _labelled(GaugeMetricFamily, name, about, ["device"], known)


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    about: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Any, ...]],
) -> Metric:
    """Return a family of samples. Each sample is the values of its labels, followed by its own."""
    family = kind(name, about, labels=labels)
    for *values, number in samples:
        family.add_metric(values, number)
    return family


def _buckets(latency: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the upper bound and the cumulative count of each bucket of `loom.latencies.Latencies.to_dict`."""
    bounds = map(floatToGoString, [*latency["bounds"], math.inf])
    return list(zip(bounds, itertools.accumulate(latency["counts"]), strict=True))
