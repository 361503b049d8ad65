"""Events from the lines of JSON that ``loom events --json`` prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from loom.errors import WrongArguments
from loom.weaver.views import WeaverEvent

MOST = 200_000
"""Events that a file may have."""


def read_events(file: Path) -> list[WeaverEvent]:
    """Read events from a file, or from standard input if its name is ``-``.

    Raises:
        WrongArguments: a line is no event, or there are more than `MOST`.
    """
    if str(file) == "-":
        return parse_events(sys.stdin, "-")
    try:
        with file.open() as lines:
            return parse_events(lines, str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise WrongArguments(f"{file}: the events cannot be read: {error}") from error


def parse_events(lines: Iterable[str], file: str) -> list[WeaverEvent]:
    """Parse events, one a line; empty lines are left out."""
    events: list[WeaverEvent] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(events) == MOST:
            raise WrongArguments(f"{file}:{number}: there are more than {MOST} events: choose a shorter time")
        event: WeaverEvent | None
        try:
            event = WeaverEvent.from_body(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            event = None
        if event is None or not _is_one(event):
            text = f"{line.strip()!r:.80} is no event: write what `loom events --json` prints"
            raise WrongArguments(f"{file}:{number}: {text}")
        events.append(event)
    return events


def _is_one(event: WeaverEvent) -> bool:
    return (
        type(event.id) is int
        and type(event.time) in (int, float)
        and isinstance(event.kind, str)
        and isinstance(event.replica, (str, type(None)))
    )
