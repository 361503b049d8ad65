"""The messages of clients of the WebSocket ``/ws/v1/weaver``, read and checked.

Those with the names of torchLoom, such as ``pause_training``, are aliases of commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from loom.control.operations import GiveCommand, InjectFault, Operation, RemoveFault, SetPolicy
from loom.errors import ProtocolMismatch, TooLarge, WrongArguments
from loom_gateway.rest.weaver_changes import ConfigUpdate, Name
from loom_gateway.rest.weaver_changes import checked_change as _read

MAX_MESSAGE = 64 << 10
"""Bytes of a client's message at most."""

MAX_ID = 200
"""Characters of a message's id at most."""

Id = str | int | None
"""The id of a message, of the client's choice; None if it has none."""

Reader = Callable[[Mapping[str, Any]], Operation]
"""Returns the change that the fields of a message ask for."""


class _OfReplica(BaseModel, extra="forbid"):
    replica_id: Name


class _OfDevice(BaseModel, extra="forbid"):
    device_id: Name


class _UICommand(BaseModel, extra="forbid"):
    command_type: str
    target_id: str = ""
    params: Mapping[str, Any] = {}


def read_message(text: str | None) -> Mapping[str, Any]:
    """Return the JSON object that is a message.

    Raises:
        TooLarge: it has more than `MAX_MESSAGE` bytes.
        ProtocolMismatch: it is no JSON object with a text as ``type``.
    """
    if text is None:
        raise ProtocolMismatch("a message is a text with a JSON object, not bytes")
    if len(text) > MAX_MESSAGE or len(text.encode()) > MAX_MESSAGE:
        raise TooLarge(f"a message has at most {MAX_MESSAGE >> 10} KiB")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolMismatch(f"a message is a JSON object: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolMismatch(f'a message is a JSON object with a "type", not {message!r:.80}')
    if "\\u" in text and not _is_unicode(message):
        raise ProtocolMismatch("a message has only whole characters, no half of a surrogate pair")
    return message


def read_id(message: Mapping[str, Any]) -> Id:
    """Return the id of a message, for the answers to it."""
    id = message.get("id")
    if id is None or type(id) is int or (isinstance(id, str) and len(id) <= MAX_ID):
        return id
    raise WrongArguments(f"an id is a number, or a text of at most {MAX_ID} characters")


def check_kind(message: Mapping[str, Any]) -> None:
    """Raise `WrongArguments` if a message's type is not that of a change."""
    if message["type"] not in _READERS:
        known = ", ".join(["ping", "subscribe", *_READERS])
        raise WrongArguments(f"there is no message of type {message['type']!r:.80}; known: {known}")


def read_change(message: Mapping[str, Any]) -> Operation:
    """Return the change that a message asks for. Raise `WrongArguments` if its fields make no sense."""
    kind = message["type"]
    fields = {name: value for name, value in message.items() if name != "type"}
    try:
        return _READERS[kind](fields)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise WrongArguments(f"the message {kind!r} makes no sense: {wrong[:2000]}") from None


def _is_unicode(message: Mapping[str, Any]) -> bool:
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _change(operation: type[Operation], takes_id: bool) -> Reader:
    """Return the reader of the message that is an operation; its id may be the operation's own."""

    def read(fields: Mapping[str, Any]) -> Operation:
        if operation is GiveCommand and fields.get("id") is None:
            raise WrongArguments(
                "a command needs an id, of 8 to 64 letters, digits, - and _: it makes a repetition safe"
            )
        if "wait" in fields:
            raise WrongArguments("wait is for REST: over the WebSocket each acknowledgement comes by itself")
        return _read(operation, fields if takes_id else _without_id(fields))

    return read


def _config_update(fields: Mapping[str, Any]) -> GiveCommand:
    return ConfigUpdate.model_validate(_without_id(fields)).to_command(id=fields.get("id"))


def _alias(name: str, field: str) -> Reader:
    """Return a reader of the message that is one of torchLoom's names; a field of it names what is meant."""
    asked = _OfReplica if field == "replica_id" else _OfDevice

    def read(fields: Mapping[str, Any]) -> GiveCommand:
        target = getattr(asked.model_validate(_without_id(fields)), field)
        return _read(GiveCommand, {"kind": name, "target": target, "id": fields.get("id")})

    return read


def _ui_command(fields: Mapping[str, Any]) -> GiveCommand:
    asked = _UICommand.model_validate(fields.get("data"))
    command = {"kind": asked.command_type, "target": asked.target_id or None, "params": asked.params}
    return _read(GiveCommand, {**command, "id": fields.get("id")})


def _without_id(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in fields.items() if name != "id"}


_OF_REPLICAS = ("pause_training", "resume_training", "stop_training", "reactivate_group")

_READERS: dict[str, Reader] = {
    "command": _change(GiveCommand, takes_id=True),
    "policy": _change(SetPolicy, takes_id=False),
    "inject": _change(InjectFault, takes_id=True),
    "remove_fault": _change(RemoveFault, takes_id=False),
    "update_config": _config_update,
    **{name: _alias(name, "replica_id") for name in _OF_REPLICAS},
    **{name: _alias(name, "device_id") for name in ("deactivate_device", "drain_device")},
    "ui_command": _ui_command,
}
