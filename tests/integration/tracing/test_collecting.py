"""`loom trace`: the spans of a session's processes on one time line, in one file."""

from __future__ import annotations

import json
import socket
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

import loom
from loom import tracing
from loom.cli.app import app
from loom.errors import LimitReached, NotAGateway, NotSupported
from loom.rest_client import Gateway
from loom.tracing.collecting import ProcessSpans
from loom_gateway.driver.handlers.spans import ANSWERS_WITHIN
from loom_proxy.local import LocalCluster
from loom_proxy.session.spans import collect_spans, correct_clock

SHIFT = 5000.0
"""Seconds by which the clock of a process differs."""


class Worker(loom.Actor):
    """Opens a span in its endpoint."""

    @loom.endpoint
    def work(self, seconds: float) -> float:
        with tracing.span("load", rows=3):
            time.sleep(seconds)
        return tracing.now()

    @loom.endpoint
    def multiply(self) -> float:
        import torch

        return float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())

    @loom.endpoint
    def end(self) -> None:
        import os

        os._exit(3)


def shift_clock() -> None:
    """Stand in for a host that was started at another time: this machine has only one clock."""
    from loom.tracing import clock

    clock.monotonic = lambda: time.monotonic() + SHIFT
    clock.adopt(clock.Offset(0.0, None))


def by_name(found: list[ProcessSpans], name: str) -> ProcessSpans:
    (one,) = [each for each in found if each["name"] == name]
    return one


def collect(job: loom.Job, seconds: float, work: Any, kernels: bool = False) -> list[ProcessSpans]:
    """Collect while work is done again and again."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        return collect_spans(job._calls, seconds, kernels)
    finally:
        stop.set()
        thread.join()


@pytest.mark.guarantees(
    "tracing", "A call is on one time line from the laptop to the span in the actor, and torch's operators with it"
)
def test_a_call_is_seen_from_here_to_the_span_in_the_actor_on_one_time_line(job: loom.Job) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(name="shifted", bootstrap=shift_clock)
    worker = procs.spawn("worker", Worker)
    worker.work.call_one(0.0).get()

    def work() -> None:
        with tracing.trace():
            worker.work.call_one(0.01).get()

    found = collect(job, 1.5, work)

    laptop, driver, actor = by_name(found, "laptop"), by_name(found, "driver"), by_name(found, "shifted[0]")
    assert [each["problem"] for each in (laptop, driver, actor)] == [None] * 3
    assert actor["error"] is not None
    assert actor["error"] < 0.5
    assert abs(actor["offset"] + SHIFT) <= 0.5
    calls = {span["trace"]: span for span in laptop["records"] if span["name"] == "call"}
    loads = [span for span in actor["records"] if span["name"] == "load" and span["trace"] in calls]
    assert loads
    slack = actor["error"] + (laptop["error"] or 0.0) + 1e-5
    for load in loads:
        trace = load["trace"]
        of_driver = [span for span in driver["records"] if span["trace"] == trace and span["name"] == "driver"]
        of_actor = [span for span in actor["records"] if span["trace"] == trace and span["name"] == "actor"]
        assert load["parent"] == of_actor[0]["span"]
        line = [calls[trace], of_driver[0], of_actor[0], load]
        for outer, inner in pairwise(line):
            assert outer["t"] - slack <= inner["t"]
        for outer in line[:3]:  # the actor's own goes on until it has sent its reply, which the others have then
            assert load["t"] + load["dur_ms"] / 1000 <= outer["t"] + outer["dur_ms"] / 1000 + slack


def test_processes_of_one_host_have_one_clock(job: loom.Job) -> None:
    worker = job.hosts.slice(hosts=0).spawn_procs(name="same").spawn("worker", Worker)
    offset = correct_clock(job._calls)
    assert offset.seconds == 0.0
    before = tracing.now()
    there = worker.work.call_one(0.0).get()
    assert before <= there <= tracing.now()


def test_calls_without_a_trace_are_seen_while_it_collects_and_cost_nothing_after(job: loom.Job) -> None:
    worker = job.hosts.slice(hosts=0).spawn_procs(name="plain").spawn("worker", Worker)
    found = collect(job, 0.5, lambda: worker.work.call_one(0.0).get())
    names = {span["name"] for span in by_name(found, "plain[0]")["records"]}
    assert names >= {"actor", "load"}
    assert not tracing.spans.recorder.listeners


def test_a_dead_process_is_named_and_the_others_are_there(job: loom.Job) -> None:
    worker = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2}, name="two").spawn("worker", Worker)
    worker.work.call(0.0).get()
    worker.slice(gpus=1).end.broadcast()
    wait_until_lost(job)
    found = collect_spans(job._calls, 0.2, False)
    assert by_name(found, "two[0]")["problem"] is None
    assert by_name(found, "two[1]")["problem"]


def wait_until_lost(job: loom.Job) -> None:
    assert any(event.name == "process_lost" for event in job.events(timeout=30.0))


def wait_for_refusal(job: loom.Job) -> None:
    """Collect until that is refused: the other collection may have to begin."""
    for _ in range(50):
        try:
            collect_spans(job._calls, 0.01, False)
        except LimitReached:
            return
    pytest.fail("no collection was refused")


def test_a_second_collection_is_refused_while_one_runs(job: loom.Job) -> None:
    first = threading.Thread(target=collect_spans, args=(job._calls, 1.5, False))
    first.start()
    try:
        wait_for_refusal(job)
    finally:
        first.join()


def test_the_gateway_says_when_calls_and_answers_passed(job: loom.Job, cluster: LocalCluster) -> None:
    worker = job.hosts.slice(hosts=0).spawn_procs(name="passed").spawn("worker", Worker)
    worker.work.call_one(0.0).get()
    relayed: list[ProcessSpans] = []
    gateway = Gateway(cluster.url, cluster.token)
    asking = threading.Thread(target=lambda: relayed.append(gateway.spans(job.session, 2.0)))
    asking.start()

    def work() -> None:
        with tracing.trace():
            worker.work.call_one(0.01).get()

    found = collect(job, 1.5, work)
    asking.join()

    calls = {span["trace"]: span for span in by_name(found, "laptop")["records"] if span["name"] == "call"}
    drivers = {span["trace"]: span for span in by_name(found, "driver")["records"] if span["name"] == "driver"}
    passed = {span["trace"]: span for span in relayed[0]["records"]}
    both = calls.keys() & drivers.keys() & passed.keys()
    assert both
    assert relayed[0]["problem"] is None
    for trace in both:
        outer, span, inner = calls[trace], passed[trace], drivers[trace]
        assert span["endpoint"] == "work"
        assert span["bytes_in"] > 0
        assert outer["t"] - 1e-5 <= span["t"] <= inner["t"] + 1e-5
        assert inner["t"] + inner["dur_ms"] / 1000 <= span["t"] + span["dur_ms"] / 1000 + 1e-5


def test_a_gateway_that_gives_no_answer_is_named(
    cluster: LocalCluster, job: loom.Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    over = threading.Event()
    monkeypatch.setattr(Gateway, "spans", lambda *_: over.wait(60))
    monkeypatch.setattr("loom.cli.trace.GATEWAY_WITHIN", 0.05)
    asked = ["--url", cluster.url, "--token", str(cluster.token), "--session", job.session, "--for", "100ms"]
    asked += ["--out", str(tmp_path / "trace.json"), "--json"]
    try:
        told = CliRunner().invoke(app, ["trace", *asked], catch_exceptions=False)
    finally:
        over.set()
    processes = {each["name"]: each["problem"] for each in json.loads(told.output)["processes"]}
    assert "no answer 0.05 s after" in processes["gateway"]
    assert processes["driver"] is None


def test_whoever_stops_asking_is_in_nobodys_way(job: loom.Job, cluster: LocalCluster) -> None:
    gateway = Gateway(cluster.url, cluster.token)
    address = urlsplit(cluster.url)
    request = f"GET /api/v1/sessions/{job.session}/spans?seconds=60 HTTP/1.1\r\nHost: {address.netloc}\r\n"
    request += f"Authorization: Bearer {cluster.token}\r\n\r\n"
    for _ in range(100):
        with socket.create_connection((address.hostname, address.port), 10) as asking:
            asking.sendall(request.encode())
            if refused := is_observed(gateway, job.session):
                break  # else this test was faster
    assert refused
    for _ in range(100):
        if not is_observed(gateway, job.session):
            return
        time.sleep(0.05)
    pytest.fail("the gateway observes for 5 s after its client has gone")


def is_observed(gateway: Gateway, session: str) -> bool:
    try:
        gateway.spans(session, 0.01)
    except LimitReached:
        return True
    return False


def test_an_older_gateway_is_named(
    cluster: LocalCluster, job: loom.Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> ProcessSpans:
        raise NotAGateway("no such path")

    monkeypatch.setattr(Gateway, "spans", refuse)
    asked = ["--url", cluster.url, "--token", str(cluster.token), "--session", job.session, "--for", "100ms"]
    asked += ["--out", str(tmp_path / "trace.json"), "--json"]
    told = CliRunner().invoke(app, ["trace", *asked], catch_exceptions=False)
    processes = {each["name"]: each["problem"] for each in json.loads(told.output)["processes"]}
    assert processes["gateway"] == "no such path"
    assert processes["driver"] is None


def test_an_older_driver_is_named(job: loom.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job._calls, "knows_traces", False)
    with pytest.raises(NotSupported):
        collect_spans(job._calls, 0.1, False)


@pytest.mark.guarantees(
    "tracing", "A call is on one time line from the laptop to the span in the actor, and torch's operators with it"
)
@pytest.mark.slow
def test_operators_of_torch_are_in_it(job: loom.Job) -> None:
    pytest.importorskip("torch")
    worker = job.hosts.slice(hosts=0).spawn_procs(name="torch").spawn("worker", Worker)
    worker.multiply.call_one().get()
    found = collect(job, 1.0, lambda: worker.multiply.call_one().get(), kernels=True)
    process = by_name(found, "torch[0]")
    assert process["problem"] is None
    operators = [record for record in process["records"] if record.get("kernel") == "cpu_op"]
    calls = [record for record in process["records"] if record["name"] == "actor"]
    multiplied = [record for record in operators if record["name"] == "aten::mm"]
    assert multiplied
    assert min(call["t"] for call in calls) - 0.1 <= multiplied[0]["t"] <= calls[-1]["t"] + 1.0


class SlowToProfile(Worker):
    """torch's profiler takes as long to start here, the first time, as for a GPU."""

    @loom.endpoint
    def be_slow(self) -> None:
        from loom.tracing import collecting

        start = collecting._started

        def slowly(torch: Any) -> Any:
            collecting._started = start
            time.sleep(ANSWERS_WITHIN + 1)
            return start(torch)

        collecting._started = slowly


@pytest.mark.slow
def test_a_profiler_that_is_slow_to_start_is_waited_for(job: loom.Job) -> None:
    pytest.importorskip("torch")
    worker = job.hosts.slice(hosts=0).spawn_procs(name="slow").spawn("worker", SlowToProfile)
    worker.multiply.call_one().get()
    worker.be_slow.call_one().get()
    found = collect(job, 0.5, lambda: worker.multiply.call_one().get(), kernels=True)
    process = by_name(found, "slow[0]")
    assert process["problem"] is None
    assert any(record["name"] == "aten::mm" for record in process["records"])
    laptop = by_name(found, "laptop")
    assert len([record for record in laptop["records"] if record["name"] == "call"]) > 0


def test_the_command_writes_a_file_that_only_its_user_reads(
    job: loom.Job, cluster: LocalCluster, tmp_path: Path
) -> None:
    worker = job.hosts.slice(hosts=0).spawn_procs(name="cli").spawn("worker", Worker)
    worker.work.call_one(0.0).get()
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            with tracing.trace("abc"):
                worker.work.call_one(0.0).get()

    thread = threading.Thread(target=repeat)
    thread.start()
    out = tmp_path / "trace.json"
    try:
        asked = [
            "--url",
            job.url,
            "--token",
            str(job.token),
            "--session",
            job.session,
            "--for",
            "500ms",
            "--out",
            str(out),
        ]
        result = CliRunner().invoke(app, ["trace", *asked], catch_exceptions=False)
    finally:
        stop.set()
        thread.join()
    assert result.exit_code == 0, result.output
    assert out.stat().st_mode & 0o777 == 0o600
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {
        "call work",
        "gateway work",
        "driver work",
        "actor work",
        "load",
    }
    assert {event["ph"] for event in events if event["name"] == "abc"} >= {"s", "f"}


def test_a_program_that_records_compares_its_clock_when_it_connects(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tracing.clock.offset()
    monkeypatch.setattr(tracing.clock, "monotonic", lambda: time.monotonic() + SHIFT)
    end = tracing.spans.listen(lambda record: None)
    try:
        with loom.connect(cluster.url, cluster.token):
            found = tracing.clock.offset()
        assert found.error is not None
        assert abs(found.seconds + SHIFT) <= found.error
    finally:
        end()
        tracing.clock.adopt(before)


def test_a_request_by_rest_is_in_its_trace_in_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_TIMING_DIR", str(tmp_path / "timing"))
    with LocalCluster(hosts=1) as own, tracing.trace("abc"):
        Gateway(own.url, own.token).status()
    lines = [line for path in (tmp_path / "timing").glob("*.jsonl") for line in path.read_text().splitlines()]
    found = [record for record in map(json.loads, lines) if record["name"] == "http"]
    assert [(record["trace"], record["path"]) for record in found] == [("abc", "/api/v1/status")]
