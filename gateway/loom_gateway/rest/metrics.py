"""``/metrics``: the gateway, its weaver, replicas and devices in numbers, for Prometheus."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from loom._version import __version__
from loom.errors import LoomError
from loom.weaver.client import WeaverClient
from loom.weaver.states import ReplicaState
from loom_gateway.sessions.sessions import SessionManager, SessionState

__all__ = ["CONTENT_TYPE", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_DEVICE_FAMILIES = (
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
    """Numbers that others have counted; prometheus_client's own counters would count them again."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _families(manager: SessionManager, numbers: dict[str, Any] | None) -> Iterator[Metric]:
    yield _gauge("loom_gateway_info", "The gateway; 1.", [(1, {"version": __version__})])
    yield from _sessions(manager)
    yield _gauge("loom_weaver_up", "Whether the weaver answers.", [(numbers is not None, {})])
    if numbers is not None:
        yield from _weaver(numbers)
        yield _calls(manager, numbers["call_latency"])
        yield from _goodput(numbers["of_jobs"])
        yield from _replicas(numbers["of_replicas"])
        yield from _devices(numbers["of_devices"])


def _sessions(manager: SessionManager) -> Iterator[Metric]:
    sessions = [(session, {"session": session.name}) for session in manager.sessions()]
    states = Counter(session.state for session, _ in sessions)
    living = [state for state in SessionState if state is not SessionState.ENDED]
    by_state: list[_Sample] = [(states[state], {"state": state.value}) for state in living]
    yield _gauge("loom_sessions", "Sessions, by state.", by_state)
    ended = len(manager.ended.all())
    yield _gauge(
        "loom_sessions_ended_remembered", "Sessions that ended lately, as far as remembered.", [(ended, {})]
    )
    clients = [(session.clients, labels) for session, labels in sessions]
    yield _gauge("loom_session_clients", "Clients connected to a session.", clients)
    frames = [(session.operations, labels) for session, labels in sessions]
    yield _counter("loom_session_frames", "Frames that clients sent to this gateway for a session.", frames)
    sent = [(session.traffic.bytes_in, labels) for session, labels in sessions]
    yield _counter("loom_session_sent_bytes", "Bytes from clients that were passed on to a driver.", sent)
    received = [(session.traffic.bytes_out, labels) for session, labels in sessions]
    yield _counter("loom_session_received_bytes", "Bytes from a driver that were passed on.", received)


def _weaver(numbers: dict[str, Any]) -> Iterator[Metric]:
    about = "When the weaver started, since the epoch."
    yield _gauge("loom_weaver_start_time_seconds", about, [(numbers["started"], {})])
    states = numbers["replicas"]
    # Each state has a sample, also while no replica is in it, or a graph would have holes.
    by_state: list[_Sample] = [(states.get(state.value, 0), {"state": state.value}) for state in ReplicaState]
    yield _gauge("loom_replicas", "Replicas, by state.", by_state)
    yield _gauge("loom_devices", "Devices that are known.", [(numbers["devices"], {})])
    about = "Commands that some replica has not acknowledged."
    yield _gauge("loom_commands_waiting", about, [(numbers["commands"], {})])
    yield _counter(
        "loom_status_reports", "Status reports taken since the weaver started.", [(numbers["reports"], {})]
    )
    yield _counter("loom_events", "Events logged, ever.", [(numbers["event"], {})])
    yield _gauge("loom_history_bytes", "Bytes of metrics' history.", [(numbers["history_bytes"], {})])
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
    ratios = [(job["ratio"], {"job": job["job"]}) for job in jobs if job["ratio"] is not None]
    yield _gauge("loom_goodput_ratio", "The share of a job's time that was spent on steps that count.", ratios)
    about = "Seconds of a job's replicas, by what they were spent on. One that is corrected may fall."
    spent = [
        (seconds, {"job": job["job"], "reason": reason})
        for job in jobs
        for reason, seconds in job["seconds"].items()
    ]
    yield _gauge("loom_goodput_seconds_total", about, spent)


def _replicas(replicas: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    labelled = [({"replica": id, "group": replica["group"]}, replica) for id, replica in replicas.items()]
    steps = [(replica["step"], labels) for labels, replica in labelled if replica["step"] is not None]
    yield _gauge("loom_replica_step", "The training step that a replica has reached.", steps)
    metrics = [
        (value, {**labels, "metric": name})
        for labels, replica in labelled
        for name, value in replica["metrics"].items()
    ]
    about = "The newest value of a metric that a replica reports, as its loss."
    yield _gauge("loom_replica_metric", about, metrics)


def _devices(devices: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    for name, family, about in _DEVICE_FAMILIES:
        known = [(uuid, status[name]) for uuid, status in devices.items() if status.get(name) is not None]
        yield _gauge(family, about, [(value, {"device": uuid}) for uuid, value in known])


_Sample = tuple[float, dict[str, str]]
"""A value and its labels."""


def _gauge(name: str, about: str, samples: Iterable[_Sample]) -> Metric:
    family = GaugeMetricFamily(name, about)
    for value, labels in samples:
        family.add_sample(name, labels, value)
    return family


def _counter(name: str, about: str, samples: Iterable[_Sample]) -> Metric:
    """Return a counter, to whose name ``_total`` is added."""
    family = CounterMetricFamily(name, about)
    for value, labels in samples:
        family.add_sample(f"{name}_total", labels, value)
    return family


def _buckets(latency: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the upper bound of each bucket and how many are up to it, of `loom.latencies.Latencies.to_dict`."""
    bounds = map(floatToGoString, [*latency["bounds"], math.inf])
    return list(zip(bounds, itertools.accumulate(latency["counts"]), strict=True))
