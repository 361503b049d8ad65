"""``/metrics``: the gateway, its weaver, replicas and devices in numbers, for Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import Any

from loom._version import __version__
from loom.errors import LoomError
from loom.weaver.client import WeaverClient
from loom.weaver.states import ReplicaState
from loom_gateway.rest.prometheus import Exposition
from loom_gateway.sessions.sessions import SessionManager, SessionState

__all__ = ["metrics_text"]

_DEVICE_FAMILIES = (
    ("utilization", "loom_device_utilization_ratio", "Use of a device, from 0 to 1."),
    ("memory_used", "loom_device_memory_used_bytes", "Memory in use on a device."),
    ("temperature", "loom_device_temperature_celsius", "Temperature of a device."),
    ("power", "loom_device_power_watts", "Power that a device takes."),
)


async def metrics_text(manager: SessionManager, weaver: WeaverClient) -> str:
    """The numbers as they are now. While the weaver is away, ``loom_weaver_up`` is 0 and its own are missing."""
    page = Exposition()
    page.family("loom_gateway_info", "gauge", "The gateway; 1.")
    page.sample(1, version=__version__)
    _sessions(page, manager)
    try:
        numbers = await weaver.ask("numbers")
    except LoomError:
        numbers = None
    page.family("loom_weaver_up", "gauge", "Whether the weaver answers.")
    page.sample(0 if numbers is None else 1)
    if numbers is not None:
        _weaver(page, numbers)
        _calls(page, manager, numbers.get("call_latency") or {})
        _goodput(page, numbers.get("of_jobs") or [])
        _replicas(page, numbers.get("of_replicas") or {})
        _devices(page, numbers.get("of_devices") or {})
    return page.text()


def _sessions(page: Exposition, manager: SessionManager) -> None:
    sessions = manager.sessions()
    states = Counter(session.state for session in sessions)
    page.family("loom_sessions", "gauge", "Sessions, by state.")
    for state in SessionState:
        if state is not SessionState.ENDED:
            page.sample(states[state], state=state.value)
    page.family("loom_sessions_ended_remembered", "gauge", "Sessions that ended lately, as far as remembered.")
    page.sample(len(manager.ended.all()))
    page.family("loom_session_clients", "gauge", "Clients connected to a session.")
    for session in sessions:
        page.sample(session.clients, session=session.name)
    page.family("loom_session_frames_total", "counter", "Frames that clients sent to this gateway for a session.")
    for session in sessions:
        page.sample(session.operations, session=session.name)
    page.family("loom_session_sent_bytes_total", "counter", "Bytes from clients that were passed on to a driver.")
    for session in sessions:
        page.sample(session.traffic.bytes_in, session=session.name)
    page.family("loom_session_received_bytes_total", "counter", "Bytes from a driver that were passed on.")
    for session in sessions:
        page.sample(session.traffic.bytes_out, session=session.name)


def _weaver(page: Exposition, numbers: dict[str, Any]) -> None:
    page.family("loom_weaver_start_time_seconds", "gauge", "When the weaver started, since the epoch.")
    page.sample(numbers["started"])
    states = numbers.get("replicas") or {}
    page.family("loom_replicas", "gauge", "Replicas, by state.")
    for state in ReplicaState:  # each has a sample, also while no replica is in it, or a graph would have holes
        page.sample(states.get(state.value, 0), state=state.value)
    page.family("loom_devices", "gauge", "Devices that are known.")
    page.sample(numbers.get("devices", 0))
    page.family("loom_commands_waiting", "gauge", "Commands that some replica has not acknowledged.")
    page.sample(numbers.get("commands", 0))
    page.family("loom_status_reports_total", "counter", "Status reports taken since the weaver started.")
    page.sample(numbers.get("reports", 0))
    page.family("loom_events_total", "counter", "Events logged, ever.")
    page.sample(numbers.get("event", 0))
    if isinstance(numbers.get("history_bytes"), (int, float)):
        page.family("loom_history_bytes", "gauge", "Bytes of metrics' history.")
        page.sample(numbers["history_bytes"])
    latency = numbers.get("command_latency")
    if latency:
        about = "From giving a command to its acknowledgement by a replica."
        page.family("loom_command_latency_seconds", "histogram", about)
        page.histogram(latency["bounds"], latency["counts"], latency["sum"])


def _calls(page: Exposition, manager: SessionManager, latencies: dict[str, dict[str, Any]]) -> None:
    about = "From a call's arrival in a session's driver to its answer, as told by the driver every few seconds."
    page.family("loom_call_latency_seconds", "histogram", about)
    for session in manager.sessions():
        latency = latencies.get(session.name)
        if latency is not None:
            page.histogram(latency["bounds"], latency["counts"], latency["sum"], session=session.name)


def _goodput(page: Exposition, jobs: list[dict[str, Any]]) -> None:
    page.family("loom_goodput_ratio", "gauge", "The share of a job's time that was spent on steps that count.")
    for job in jobs:
        if job["ratio"] is not None:
            page.sample(job["ratio"], job=job["job"])
    about = "Seconds of a job's replicas, by what they were spent on. One that is corrected may fall."
    page.family("loom_goodput_seconds_total", "gauge", about)
    for job in jobs:
        for reason, seconds in job["seconds"].items():
            page.sample(seconds, job=job["job"], reason=reason)


def _replicas(page: Exposition, replicas: dict[str, dict[str, Any]]) -> None:
    page.family("loom_replica_step", "gauge", "The training step that a replica has reached.")
    for id, replica in replicas.items():
        if replica["step"] is not None:
            page.sample(replica["step"], replica=id, group=replica["group"])
    page.family("loom_replica_metric", "gauge", "The newest value of a metric that a replica reports, as its loss.")
    for id, replica in replicas.items():
        for name, value in replica["metrics"].items():
            page.sample(value, replica=id, group=replica["group"], metric=name)


def _devices(page: Exposition, devices: dict[str, dict[str, Any]]) -> None:
    for name, family, about in _DEVICE_FAMILIES:
        page.family(family, "gauge", about)
        for uuid, status in devices.items():
            if status.get(name) is not None:
                page.sample(status[name], device=uuid)
