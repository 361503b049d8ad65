"""The spans of the calls that a session's relay passes on, for ``loom trace``.

The relay decodes no frame. While a collection goes on, an observer reads the headers of one session's frames, and
never what users have pickled. REST alone asks for it; it is here because it observes the relay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from loom.errors import LimitReached, ProtocolMismatch
from loom.tracing import clock
from loom.tracing.collecting import ProcessSpans, SpanRecords
from loom.tracing.files import HOST
from loom.tracing.spans import recorder
from loom.tracing.trace_ids import checked_trace
from loom.wire.frames import decode_frame
from loom.wire.messages import ADVERBS, Buffer, Kind, Message
from loom.wire.websocket import joined
from loom_gateway.sessions.session import Traffic

MOST_OPEN = 10_000
"""Calls, and large messages on their way, that are remembered at a time."""

LONGEST_NAME = 200
"""Characters of an endpoint's name."""

_CALLS = frozenset(ADVERBS.values()) - {Kind.BROADCAST}  # which has no answer
_ANSWERS = frozenset({Kind.RESULT, Kind.ERROR})


class RelayedCalls:
    """An observer of the calls of one session, from now until `stop`.

    A span lasts from the frame that ends a call to the frame that ends its answer; of a streaming call, each answer
    has one.

    Raises:
        LimitReached: another one observes the session.
    """

    def __init__(self, traffic: Traffic) -> None:
        if traffic.observer is not None:
            raise LimitReached("the calls of this session are being observed: ask again when that is done")
        self._traffic = traffic
        self._records = SpanRecords()
        self._calls: dict[tuple[str, int], tuple[float, _Head]] = {}
        """The calls that are not answered, by stream and id, each with the time when it had come."""
        self._moving: dict[tuple[str, bool, int], _Head] = {}
        """Large messages on their way, by stream, direction and number."""
        traffic.observer = self._observe

    def stop(self) -> None:
        """Observe no more."""
        self._traffic.observer = None

    def spans(self) -> ProcessSpans:
        """Return the spans. Their clock is the driver's, on the same host. Safe on any thread after `stop`."""
        return self._records.of("gateway", clock.Offset(0.0, 0.0), None)

    def _observe(self, stream: str, to_driver: bool, pieces: Sequence[Buffer]) -> None:
        try:
            frame = decode_frame(pieces[0] if len(pieces) == 1 else joined(pieces))
            for head in self._whole(stream, to_driver, frame.messages):
                if to_driver and head.kind in _CALLS:
                    self._called(stream, head)
                elif not to_driver and head.kind in _ANSWERS:
                    self._answered(stream, head)
        except (ProtocolMismatch, ValueError, TypeError):
            pass  # the side that it is for will say so

    def _whole(self, stream: str, to_driver: bool, messages: Sequence[Message]) -> Iterator[_Head]:
        """Yield the head of each message that a frame ends."""
        for message in messages:
            if message.kind != Kind.CHUNK:
                yield _Head.of(message.size, message.kind, message.id, message.body)
                continue
            offset, total, head = message.body
            place = (stream, to_driver, message.id)
            if head is not None:
                first = _Head.of(total, *head[:3])
                if place in self._moving or len(self._moving) < MOST_OPEN:
                    self._moving[place] = first
                elif to_driver and first.kind in _CALLS:
                    self._records.leave_out()
            if offset + message.size >= total and (whole := self._moving.pop(place, None)) is not None:
                yield whole

    def _called(self, stream: str, call: _Head) -> None:
        if (stream, call.id) in self._calls:
            return  # its frame is sent again after a cut: the first time counts
        if len(self._calls) < MOST_OPEN:
            self._calls[stream, call.id] = clock.monotonic(), call
        else:
            self._records.leave_out()

    def _answered(self, stream: str, answer: _Head) -> None:
        began, call = self._calls.get((stream, answer.id), (0.0, None))
        if call is None:
            return  # of another operation, or of a call from before
        if call.kind != Kind.STREAM:
            del self._calls[stream, answer.id]
        took = clock.monotonic() - began
        self._records.append(
            {
                "name": "gateway",
                "t": round(began, 6),
                "time": round(time.time() - took, 6),
                "host": HOST,
                "pid": os.getpid(),
                "role": recorder.role,
                "trace": call.trace,
                "dur_ms": round(took * 1000, 4),
                "span": recorder.span_id(),
                "parent": None,
                "endpoint": call.endpoint,
                "bytes_in": call.size,
                "bytes_out": answer.size,
            }
        )


class _Head(NamedTuple):
    """The remembered part of a message: little, whatever a peer sends."""

    kind: int
    id: int
    size: int
    endpoint: str
    trace: str | None

    @classmethod
    def of(cls, size: int, kind: int, ident: int, body: Sequence[Any]) -> _Head:
        if kind not in _CALLS:
            return cls(kind, ident, size, "", None)
        _, endpoint, *trace = body
        return cls(kind, ident, size, str(endpoint)[:LONGEST_NAME], checked_trace(trace[0]) if trace else None)
