"""The operations that users can ask of the weaver, over a session or by REST."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from loom.control.profiles import DEFAULT_SECONDS, MOST_SECONDS

MAX_WAIT = 300.0  # seconds that one request may wait for acknowledgements
STACK_WAIT = 30.0  # seconds that getting a stack or a profile may take, in addition to those that it is taken for


class Operation(NamedTuple):
    """The REST route of an operation. Arguments that are not in the path are in the query or the posted object."""

    method: str
    path: str
    """The path behind ``/api/v1/weaver/``; a name in braces stands for an argument."""
    has: str
    """A key that the object in the response has."""
    only: bool = False
    """Whether the result is only the value of that key, and not the whole object."""


OPERATIONS = {
    "status": Operation("GET", "status", "weaver"),
    "address": Operation("GET", "address", "address", only=True),
    "replicas": Operation("GET", "replicas", "replicas", only=True),
    "replica": Operation("GET", "replicas/{id}", "state"),
    "devices": Operation("GET", "devices", "devices", only=True),
    "events": Operation("GET", "events", "events", only=True),
    "metrics": Operation("GET", "replicas/{replica}/metrics", "metrics", only=True),
    "history": Operation("GET", "replicas/{replica}/metrics/{metric}", "points", only=True),
    "stacks": Operation("GET", "replicas/{replica}/stacks", "stacks", only=True),
    "profile": Operation("GET", "replicas/{replica}/profile", "folded"),
    "goodput": Operation("GET", "goodput", "jobs", only=True),
    "policies": Operation("GET", "policies", "policies", only=True),
    "policy": Operation("POST", "policies", "policies", only=True),
    "command": Operation("POST", "commands", "outcomes"),
    "command_state": Operation("GET", "commands/{id}", "outcomes"),
    "inject": Operation("POST", "inject", "outcomes"),
    "remove_fault": Operation("DELETE", "inject/{injection}", "outcomes"),
    "fail_device": Operation("POST", "devices/{device}/failure", "id"),
}


Ask = Callable[..., Any]
"""A function that does one of `OPERATIONS` and returns its result, as `loom.weaver.views` describes it.

It takes the operation's name, and its arguments by name; ``wait`` is the seconds to wait for acknowledgements. One
that is None counts as not given.
"""


def takes(operation: str, arguments: dict[str, Any]) -> float:
    """Return the seconds that an operation may take because of its arguments."""
    match operation:
        case "stacks":
            return STACK_WAIT
        case "profile":
            return STACK_WAIT + _profile_seconds(arguments)
    wait: float = arguments.get("wait", 0.0)
    return wait


def _profile_seconds(arguments: dict[str, Any]) -> float:
    seconds = arguments.get("seconds")
    return min(float(seconds), MOST_SECONDS) if isinstance(seconds, (int, float)) else DEFAULT_SECONDS
