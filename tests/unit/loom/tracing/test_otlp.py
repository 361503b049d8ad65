import http.server
import json
import threading

import pytest

from loom.tracing import event, otlp, span, trace
from loom.tracing.otlp import Exporter, endpoint, trace_of
from loom.tracing.spans import listen


@pytest.fixture
def collector():
    """A collector of OpenTelemetry's protocol: a real HTTP server that keeps the requests."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
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
    return [one for _, _, body in requests for one in body["resourceSpans"][0]["scopeSpans"][0]["spans"]]


def exported(url, **environment):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, **environment}
    exporter = Exporter(endpoint(environment), environment)
    exporter._thread = threading.current_thread()  # flushed here, and not at some time
    return exporter


def test_spans_and_events_reach_the_collector(collector):
    url, requests = collector
    exporter = exported(url, OTEL_SERVICE_NAME="rl", OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20x")
    end = listen(exporter.take)
    with trace("abc"), span("outer", rows=3, loss=0.5, ok=True):
        with pytest.raises(KeyError), span("inner"):
            raise KeyError("x")
        event("weights.client.done", queue_ms=3.0)
    end()
    exporter.flush(5)

    ((path, headers, body),) = requests
    assert path == "/v1/traces"
    assert headers["Authorization"] == "Bearer x"  # urllib writes it so
    assert {"key": "service.name", "value": {"stringValue": "rl"}} in body["resourceSpans"][0]["resource"][
        "attributes"
    ]
    inner, done, outer = spans_of(requests)
    assert inner["parentSpanId"] == outer["spanId"]
    assert inner["status"]["code"] == 2
    assert {one["traceId"] for one in (inner, done, outer)} == {trace_of({"trace": "abc"})}
    assert int(outer["startTimeUnixNano"]) <= int(outer["endTimeUnixNano"])
    assert {"key": "rows", "value": {"intValue": "3"}} in outer["attributes"]
    assert {"key": "queue_ms", "value": {"doubleValue": 3.0}} in done["attributes"]


def test_spans_without_a_trace_belong_to_that_of_the_outermost(collector):
    url, requests = collector
    exporter = exported(url)
    end = listen(exporter.take)
    with span("outer"), span("middle"), span("inner"):
        pass
    end()
    exporter.flush(5)
    assert len({one["traceId"] for one in spans_of(requests)}) == 1


def test_a_collector_that_is_away_costs_spans_and_nothing_else(caplog):
    exporter = exported("http://127.0.0.1:9")
    for _ in range(2):
        exporter.take({"name": "load", "time": 1.0})
        exporter.flush(1)
    assert exporter.lost == 2
    assert len(caplog.records) == 1


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(otlp, "MAX_WAITING", 5)
    exporter = exported("http://127.0.0.1:9")
    for i in range(8):
        exporter.take({"name": "load", "time": 1.0, "i": i})
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
