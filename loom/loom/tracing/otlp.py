"""Spans for OpenTelemetry, where its environment variables name a collector.

OpenTelemetry's exporter for OTLP over HTTP, of the extra ``otel``, is imported by the thread that sends. What waits
is bounded, and a batch that fails ends a round: the SDK's processor would try each of the others, also at the end.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loom.process.threads import keep_going
from loom.tracing.files import HOST

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

Record = dict[str, object]

MAX_WAITING = 10_000
"""Spans that wait to be sent; beyond it the oldest are dropped."""
BATCH = 512
EVERY = 2.0
"""Seconds between two batches."""
TIMEOUT = 5.0
"""Seconds that the collector has to take a batch."""
LAST = 2.0
"""Seconds for the remaining spans when the process ends."""

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
    """Sends spans in batches, from a thread of its own. Lost spans are counted, and logged once."""

    def __init__(self, url: str) -> None:
        self.lost = 0
        """Spans that the collector did not take, or for which there was no room."""
        self._url = url
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._waiting: deque[Record] = deque(maxlen=MAX_WAITING)
        self._said = False
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, record: Record) -> None:
        """Take an event or a span."""
        if self._pid != os.getpid():
            self._begin()  # the parent sends its own
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
            time.sleep(EVERY)
            self.flush(TIMEOUT)

    def flush(self, timeout: float) -> None:
        """Send what waits, until a batch fails."""
        if self._pid != os.getpid():
            return
        with self._sending:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                if (why := _send(batch, self._url, timeout)) is not None:
                    self.lost += len(batch)
                    if not self._said:
                        self._said = True
                        _log.warning("cannot send spans to %s, and leaves them out: %s", self._url, why)
                    return


def _send(batch: list[Record], url: str, timeout: float) -> str | None:
    """Send spans; return why they could not be sent, or None."""
    try:
        exporter = _exporter(url, timeout)
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        return f"{error}: pip install 'monarch-loom[otel]'"
    try:
        failed = exporter.export([_span(record) for record in batch]) is not SpanExportResult.SUCCESS
    except Exception as error:  # noqa: BLE001 - of a library; spans must not end the thread
        return repr(error)
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    return "the collector does not take them" if failed else None


def _exporter(url: str, timeout: float) -> OTLPSpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from requests import Session, TooManyRedirects

    class Straight(Session):
        """Follows no redirect, which would show the headers to wherever it leads."""

        def get_redirect_target(self, resp: Any) -> None:
            if resp.is_redirect:
                resp.close()
                raise TooManyRedirects(f"it leads to {resp.headers['location']:.200}")

    return OTLPSpanExporter(url, timeout=timeout, session=Straight())


def trace_of(record: Record) -> str:
    """Return the 32 hexadecimal digits of a record's trace: of its id, or else of the outermost span around it."""
    id = record.get("trace") or record.get("root") or record.get("span") or os.urandom(8).hex()
    return str(id) if _OTLP_TRACE.fullmatch(str(id)) else hashlib.sha256(str(id).encode()).hexdigest()[:32]


def _span(record: Record) -> ReadableSpan:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode

    def context(span: object) -> SpanContext:
        return SpanContext(int(trace_of(record), 16), int(str(span), 16), is_remote=False)

    start = int(float(str(record["time"])) * 1e9)
    about = {key: value for key, value in record.items() if key not in _OWN}
    about |= {f"loom.{key}": record[key] for key in ("role", "pid", "trace") if record.get(key)}
    return ReadableSpan(
        str(record["name"]),
        context(record.get("span") or os.urandom(8).hex()),
        context(record["parent"]) if record.get("parent") else None,
        Resource({"service.name": os.environ.get("OTEL_SERVICE_NAME", "loom"), "host.name": HOST}),
        {key: _plain(value) for key, value in about.items()},
        status=Status(StatusCode.ERROR, str(record["error"])) if record.get("error") else Status(),
        start_time=start,
        end_time=start + int(float(str(record.get("dur_ms") or 0.0)) * 1e6),
        instrumentation_scope=InstrumentationScope("loom.timing"),
    )


def _plain(value: object) -> bool | int | float | str:
    """Return a value as an attribute can have it."""
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    return value if isinstance(value, float) and abs(value) < float("inf") else str(value)[:1000]
