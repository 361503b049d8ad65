"""What threadlets say, checked: everything behind this is of the right types and of a bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loom.errors import ProtocolMismatch
from loom.weaver.device_map import Device
from loom.weaver.link import ENDINGS, PHASES, PROTOCOL
from loom.weaver.replicas import Cause

__all__ = [
    "MAX_STEP",
    "Hello",
    "read_ack",
    "read_beat",
    "read_bye",
    "read_devices",
    "read_fault",
    "read_handlers",
    "read_hello",
]

MAX_STEP = 1 << 53
"""Steps are below it, so that a double holds them."""

_MAX_DEVICES = 1024
_MAX_NAME = 200
_MAX_HANDLERS = 10_000

_STATES = {"running": Cause.RESUMED, "paused": Cause.PAUSED, "draining": Cause.DRAINED}
_DEVICE_NUMBERS = ("utilization", "memory_used", "temperature", "power")


@dataclass(frozen=True, slots=True)
class Hello:
    """The first thing that a threadlet says. ``says`` is what it does, as a cause; None where it has not begun."""

    key: str
    replica: str
    instance: str
    group: str
    pid: int
    host: str
    procs: str | None
    rank: int | None
    actors: str | None
    session: str | None
    devices: tuple[Device, ...]
    handlers: dict[str, str]
    config: dict[str, Any]
    says: Cause | None
    step: int | None
    injectable: bool
    removed: dict[str, dict[str, Any]]
    """Faults that are gone, with what shows it."""


def read_hello(frame: list[Any]) -> Hello:
    """Read a threadlet's first frame.

    Raises:
        ProtocolMismatch: it is none, or of another version.
    """
    if frame[0] != "hello" or len(frame) != 2 or type(frame[1]) is not dict:
        raise ProtocolMismatch(f"the first frame on the link is a hello, not {frame[0]!r:.40}")
    body = frame[1]
    if body.get("protocol") != PROTOCOL:
        raise ProtocolMismatch(f"the threadlet speaks version {body.get('protocol')!r:.20}, the weaver {PROTOCOL}")
    rank, step, procs = body.get("rank"), body.get("step"), body.get("procs")
    _check_count("rank", rank)
    _check_count("step", step)
    if procs is not None and type(procs) not in (int, str):
        raise ProtocolMismatch(f"procs is a name or a number, not {procs!r:.80}")
    devices = body.get("devices", [])
    if type(devices) is not list or len(devices) > _MAX_DEVICES:
        raise ProtocolMismatch(f"devices is a list of at most {_MAX_DEVICES}, not {devices!r:.80}")
    replica = _name(body, "replica")
    return Hello(
        key=_name(body, "key"),
        replica=replica,
        instance=_name(body, "instance"),
        group=_text(body, "group") or replica,
        pid=_number(body, "pid"),
        host=_text(body, "host") or "",
        procs=None if procs is None else str(procs),
        rank=rank,
        actors=_text(body, "actors"),
        session=_text(body, "session"),
        devices=tuple(map(_device, devices)),
        handlers=read_handlers(["handlers", body.get("handlers", {})]),
        config=_config(body.get("config", {})),
        says=_STATES.get(_text(body, "state") or ""),
        step=step,
        injectable=body.get("injectable") is True,
        removed=dict(read_fault(["fault", *one]) for one in _config(body.get("removed", {})).items()),
    )


def read_handlers(frame: list[Any]) -> dict[str, str]:
    """Read a threadlet's handlers: keys and the names of their types.

    Raises:
        ProtocolMismatch: they are not that, or too many.
    """
    match frame:
        case [_, dict(handlers)] if len(handlers) <= _MAX_HANDLERS:
            if all(type(key) is type(name) is str and len(key) <= _MAX_NAME for key, name in handlers.items()):
                return handlers
    raise ProtocolMismatch(f"handlers are names of keys and types, not {frame[1:]!r:.80}")


def read_beat(frame: list[Any]) -> tuple[float, int | None, str]:
    """Read a heartbeat: time, step, phase.

    Raises:
        ProtocolMismatch: it is none.
    """
    match frame:
        case ["beat", int() | float() as time, step, str(phase)] if phase in PHASES:
            _check_count("step", step)
            return time, step, phase
    raise ProtocolMismatch(f"not a heartbeat: {frame!r:.80}")


def read_ack(frame: list[Any]) -> tuple[str, dict[str, Any]]:
    """Read what a replica made of a command: the command's id and the outcome.

    Raises:
        ProtocolMismatch: it is no acknowledgement.
    """
    match frame:
        case ["ack", str(id), step, {"ok": bool(ok), **rest}]:
            _check_count("step", step)
            reason = rest.get("reason")
            changes, refused = rest.get("changes") or {}, rest.get("refused") or {}
            if (reason is None or type(reason) is str) and type(changes) is type(refused) is dict:
                if not all(type(change) is dict and "new" in change for change in changes.values()):
                    raise ProtocolMismatch(f"changes are old and new values, not {changes!r:.80}")
                outcome = {"ok": ok, "reason": reason, "step": step, "changes": changes, "refused": refused}
                evidence = rest.get("evidence")
                return id, {**outcome, "evidence": evidence} if type(evidence) is dict else outcome
    raise ProtocolMismatch(f"not an acknowledgement: {frame!r:.80}")


def read_fault(frame: list[Any]) -> tuple[str, dict[str, Any]]:
    """Read that a fault is gone: its id, and what shows it.

    Raises:
        ProtocolMismatch: it is not that.
    """
    match frame:
        case ["fault", str(id), dict(evidence)] if len(id) <= _MAX_NAME:
            return id, evidence
    raise ProtocolMismatch(f"not the end of a fault: {frame!r:.80}")


def read_bye(frame: list[Any]) -> tuple[str, str]:
    """Read a goodbye: the reason and one of `loom.weaver.link.ENDINGS`.

    Raises:
        ProtocolMismatch: it is none.
    """
    match frame:
        case ["bye", (str() | None) as reason, str(ending)] if ending in ENDINGS:
            return reason or ending, ending
    raise ProtocolMismatch(f"not a goodbye: {frame!r:.80}")


def read_devices(frame: list[Any]) -> dict[str, dict[str, float | None]]:
    """Read how devices are: by uuid, numbers or None by name.

    Raises:
        ProtocolMismatch: it is not that.
    """
    match frame:
        case ["devices", int() | float(), dict(devices)] if len(devices) <= _MAX_DEVICES:
            for status in devices.values():
                if type(status) is not dict or not all(map(_is_number_or_none, status.values())):
                    raise ProtocolMismatch(f"a device's status is made of numbers, not {status!r:.80}")
            return {uuid: {name: status.get(name) for name in _DEVICE_NUMBERS} for uuid, status in devices.items()}
    raise ProtocolMismatch(f"not the status of devices: {frame!r:.80}")


def _device(body: Any) -> Device:
    if type(body) is not dict:
        raise ProtocolMismatch(f"a device is described by a map, not {body!r:.80}")
    kind = _name(body, "kind")
    if kind not in ("gpu", "cpu"):
        raise ProtocolMismatch(f"a device is a gpu or a cpu, not {kind!r:.80}")
    server, model = _text(body, "server") or "", _text(body, "type") or ""
    return Device(_name(body, "uuid"), kind, server, model, _number(body, "memory"))


def _name(body: dict[str, Any], field: str) -> str:
    value = _text(body, field)
    if not value or not value.isprintable():
        raise ProtocolMismatch(f"{field} is a printable text, not {value!r:.80}")
    return value


def _text(body: dict[str, Any], field: str) -> str | None:
    value = body.get(field)
    if value is not None and (type(value) is not str or len(value) > _MAX_NAME):
        raise ProtocolMismatch(f"{field} is a text of at most {_MAX_NAME} characters, not {value!r:.80}")
    return value


def _number(body: dict[str, Any], field: str) -> int:
    value = body.get(field)
    _check_count(field, value)
    return value or 0


def _config(value: Any) -> dict[str, Any]:
    if type(value) is not dict or len(value) > _MAX_HANDLERS:
        raise ProtocolMismatch(f"config is keys and values, not {value!r:.80}")
    return value


def _check_count(field: str, value: Any) -> None:
    if value is not None and (type(value) is not int or not 0 <= value < MAX_STEP):
        raise ProtocolMismatch(f"{field} is a count or None, not {value!r:.80}")


def _is_number_or_none(value: Any) -> bool:
    return value is None or type(value) in (int, float)
