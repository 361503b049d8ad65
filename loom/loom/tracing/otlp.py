"""Spans for OpenTelemetry, where its environment variables name a collector: OTLP over HTTP, as JSON.

The format: https://opentelemetry.io/docs/specs/otlp/#otlphttp, the variables:
https://opentelemetry.io/docs/specs/otel/protocol/exporter. Nothing needs to be installed for it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from loom.process.threads import keep_going
from loom.tracing.files import HOST

Record = dict[str, object]

MAX_WAITING = 10_000
"""Spans that wait to be sent; beyond it the oldest are dropped."""
BATCH = 512
EVERY = 2.0
"""Seconds between two batches."""
TIMEOUT = 5.0
"""Seconds that the collector has to take a batch."""
LAST = 2.0
"""Seconds for what is left when the process ends."""

_OWN = frozenset({"name", "t", "time", "host", "pid", "role", "trace", "dur_ms", "span", "parent", "root"})
_OTLP_TRACE = re.compile(r"[0-9a-f]{32}")
_log = logging.getLogger("loom.tracing")


def endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the URL to send spans to; None if none is configured, or only one for gRPC."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", ""
    )
    if protocol == "grpc":
        return None
    url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not url and (base := environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        url = base.rstrip("/") + "/v1/traces"
    return url if url and url.startswith(("http://", "https://")) else None


class Exporter:
    """Sends spans in batches, from a thread of its own. What cannot be sent is counted, and said once."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        self.lost = 0
        """Spans that the collector did not take, or for which there was no room."""
        self._url = url
        self._headers = {"Content-Type": "application/json", **_headers(environment)}
        service = environment.get("OTEL_SERVICE_NAME", "loom")
        self._resource = [_attribute("service.name", service), _attribute("host.name", HOST)]
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._waiting: deque[Record] = deque(maxlen=MAX_WAITING)
        self._wake = threading.Event()
        self._said = False
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, record: Record) -> None:
        """Take an event or a span."""
        if self._pid != os.getpid():
            self._begin()  # what waits is the parent's to send
        if len(self._waiting) == MAX_WAITING:
            self.lost += 1
        self._waiting.append(record)
        if self._thread is None:
            sending = "send spans", self._run
            self._thread = threading.Thread(target=keep_going, args=sending, name="loom-otlp", daemon=True)
            self._thread.start()
            atexit.register(self.flush, LAST)

    def _run(self) -> None:
        while True:
            self._wake.wait(EVERY)
            self.flush(TIMEOUT)

    def flush(self, timeout: float) -> None:
        """Send what waits, until a batch fails."""
        if self._pid != os.getpid():
            return
        with self._sending:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                if not self._send(batch, timeout):
                    return

    def _send(self, batch: list[Record], timeout: float) -> bool:
        import urllib.request  # the laptop's `import loom` does without it

        class Straight(urllib.request.HTTPRedirectHandler):
            """Follows no redirect, which would show the headers to wherever it leads."""

            def redirect_request(self, *_: object) -> None:
                return None

        request = urllib.request.Request(self._url, self._body(batch), self._headers)
        try:
            with urllib.request.build_opener(Straight).open(request, timeout=timeout) as response:
                response.read()
            return True
        except (OSError, ValueError) as error:
            self.lost += len(batch)
            if not self._said:
                self._said = True
                _log.warning("cannot send spans to %s, and leaves them out: %s", self._url, error)
            return False

    def _body(self, batch: list[Record]) -> bytes:
        spans = [_span(record) for record in batch]
        scope = {"scope": {"name": "loom.timing"}, "spans": spans}
        return json.dumps(
            {"resourceSpans": [{"resource": {"attributes": self._resource}, "scopeSpans": [scope]}]}
        ).encode()


def _headers(environment: Mapping[str, str]) -> dict[str, str]:
    name = "OTEL_EXPORTER_OTLP_HEADERS"
    given = environment.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or environment.get(name, "")
    pairs = [pair.partition("=") for pair in given.split(",") if "=" in pair]
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}


def trace_of(record: Record) -> str:
    """Return the 32 hexadecimal digits of a record's trace: of its id, or else of the outermost span around it."""
    id = record.get("trace") or record.get("root") or record.get("span") or os.urandom(8).hex()
    return str(id) if _OTLP_TRACE.fullmatch(str(id)) else hashlib.sha256(str(id).encode()).hexdigest()[:32]


def _span(record: Record) -> dict[str, Any]:
    start = int(float(str(record["time"])) * 1e9)
    took = int(float(str(record.get("dur_ms") or 0.0)) * 1e6)
    attributes = [_attribute(key, value) for key, value in record.items() if key not in _OWN]
    attributes += [_attribute(f"loom.{key}", record[key]) for key in ("role", "pid", "trace") if record.get(key)]
    span: dict[str, Any] = {
        "traceId": trace_of(record),
        "spanId": record.get("span") or os.urandom(8).hex(),
        "name": record["name"],
        "kind": 1,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start + took),
        "attributes": attributes,
    }
    if record.get("parent"):
        span["parentSpanId"] = record["parent"]
    if record.get("error"):
        span["status"] = {"code": 2, "message": str(record["error"])}
    return span


def _attribute(key: str, value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        typed: dict[str, Any] = {"boolValue": value}
    elif isinstance(value, int) and abs(value) < 1 << 63:
        typed = {"intValue": str(value)}
    elif isinstance(value, float) and abs(value) < float("inf"):
        typed = {"doubleValue": value}
    else:
        typed = {"stringValue": str(value)[:1000]}
    return {"key": key, "value": typed}
