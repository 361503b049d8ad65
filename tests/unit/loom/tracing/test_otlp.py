import http.server
import sys
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from loom.tracing import event, otlp, span, trace
from loom.tracing.otlp import Exporter, endpoint, trace_of
from loom.tracing.spans import listen


@pytest.fixture
def collector():
    """A collector of OpenTelemetry's protocol: a real HTTP server that keeps the requests."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, dict(self.headers), body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()
        thread.join()


def spans_of(requests):
    return [one for _, _, body in requests for one in body.resource_spans[0].scope_spans[0].spans]


def attributes_of(something):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in something.attributes}


def exported(url):
    exporter = Exporter(endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": url}))
    exporter._thread = threading.current_thread()  # flushed here, and not at some time
    return exporter


def test_spans_and_events_reach_the_collector(collector, monkeypatch):
    url, requests = collector
    monkeypatch.setenv("OTEL_SERVICE_NAME", "rl")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    exporter = exported(url)
    end = listen(exporter.put)
    with trace("abc"), span("outer", rows=3, loss=0.5, ok=True, far=float("inf"), many=1 << 80):
        with pytest.raises(KeyError), span("inner"):
            raise KeyError("x")
        event("weights.client.done", queue_ms=3.0)
    end()
    exporter.flush(5)

    ((path, headers, body),) = requests
    assert path == "/v1/traces"
    assert headers["authorization"] == "Bearer x"
    assert attributes_of(body.resource_spans[0].resource)["service.name"] == "rl"
    inner, done, outer = spans_of(requests)
    assert inner.parent_span_id == outer.span_id
    assert inner.status.code == 2
    assert {one.trace_id.hex() for one in (inner, done, outer)} == {trace_of({"trace": "abc"})}
    assert outer.start_time_unix_nano <= outer.end_time_unix_nano
    about = {"rows": 3, "loss": 0.5, "ok": True, "far": "inf", "many": str(1 << 80)}
    assert attributes_of(outer).items() >= about.items()
    assert attributes_of(done)["queue_ms"] == 3.0


def test_without_the_exporter_it_is_said_once_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    exporter = exported("http://127.0.0.1:9")
    for _ in range(2):
        exporter.put({"name": "load", "time": 1.0})
        exporter.flush(1)
    assert exporter.lost == 2
    (said,) = caplog.messages
    assert "pip install 'monarch-loom[otel]'" in said


def test_spans_without_a_trace_belong_to_that_of_the_outermost(collector):
    url, requests = collector
    exporter = exported(url)
    end = listen(exporter.put)
    with span("outer"), span("middle"), span("inner"):
        pass
    end()
    exporter.flush(5)
    assert len({one.trace_id for one in spans_of(requests)}) == 1


@pytest.mark.guarantees(
    "tracing", "A full disk, a closed output or a collector that is away costs events and nothing else"
)
def test_a_collector_that_is_away_costs_spans_and_nothing_else(caplog):
    exporter = exported("http://127.0.0.1:9")
    for _ in range(2):
        exporter.put({"name": "load", "time": 1.0})
        exporter.flush(1)
    assert exporter.lost == 2
    assert [record.name for record in caplog.records].count("loom.tracing") == 1


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(otlp, "MAX_WAITING", 5)
    exporter = exported("http://127.0.0.1:9")
    for i in range(8):
        exporter.put({"name": "load", "time": 1.0, "i": i})
    assert [record["i"] for record in exporter._waiting] == [3, 4, 5, 6, 7]
    assert exporter.lost == 3


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x"}, "http://c/x"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "file:///etc"}, None),
    ],
)
def test_the_environment_says_where(environment, url):
    assert endpoint(environment) == url
