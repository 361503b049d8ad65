"""Notices: messages to every client that answer no operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loom.wire.bodies import Notice
from loom.wire.messages import Message
from loom.wire.texts import pack_texts


def notice(name: str, details: Mapping[str, Any]) -> Message:
    """Return the message that reports an event."""
    return Notice(name).message(parts=[pack_texts(details)])
