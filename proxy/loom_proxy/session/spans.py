"""The spans of this program, for `loom trace`, and the correction of its clock to its session's time line."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from loom.errors import LoomError, NotSupported
from loom.tracing import clock
from loom.tracing.collecting import LONGEST, Collection, ProcessSpans
from loom.wire.bodies import CollectSpans, ReadClock, SendSpans
from loom_proxy.session.calls import Calls

EXCHANGES = 8
ANSWERS_WITHIN = 5.0
"""Seconds for each look at the driver's clock."""
SENT_WITHIN = 30.0
"""Seconds after the end of a collection until its result must be there."""
PROFILED_WITHIN = 150.0
"""The same with kernels: torch's profiler takes long to start for a GPU, and to tell what it has seen."""


def correct_clock(calls: Calls) -> clock.Offset:
    """Put this program on the time line of its session, and return the offset and its error."""
    exchanges = []
    for _ in range(EXCHANGES):
        before = clock.monotonic()
        there = float(calls.ask(ReadClock(), key=None).get(ANSWERS_WITHIN))
        exchanges.append(clock.ClockExchange(before, there, clock.monotonic()))
    found = clock.measured(exchanges)
    clock.adopt(found)
    return found


def collect_spans(calls: Calls, seconds: float, kernels: bool) -> list[ProcessSpans]:
    """Return the spans of a session's processes for so many seconds from now.

    Raises:
        NotSupported: the driver is of a version without spans.
        LimitReached: they are being collected already.
    """
    if not calls.knows_traces:
        raise NotSupported("this session's driver is of a version that knows no spans: open a new session")
    within = seconds + (PROFILED_WITHIN if kernels else SENT_WITHIN)
    found: list[ProcessSpans] = calls.ask(CollectSpans(seconds, kernels), key=None).get(within)
    return found


def send_spans(calls: Calls, wanted: Mapping[str, Any]) -> None:
    """Collect this program's spans, in a thread of its own, and send them to the driver, which asks for them."""
    seconds = min(float(wanted["seconds"]), LONGEST)
    thread = threading.Thread(target=_send, args=(calls, int(wanted["collection"]), seconds), name="loom-spans")
    thread.daemon = True
    thread.start()


def _send(calls: Calls, collection: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    collected = Collection()
    problem = None
    try:
        correct_clock(calls)
    except (LoomError, TimeoutError) as error:
        problem = f"this program's clock could not be compared with the driver's: {error!s:.200}"
    calls.ended.wait(max(0.0, until - time.monotonic()))
    spans = collected.end("laptop", problem)
    with contextlib.suppress(LoomError):  # the session has ended meanwhile
        calls.send(SendSpans(collection), [json.dumps(spans).encode()], key=None)
        calls.flush()
