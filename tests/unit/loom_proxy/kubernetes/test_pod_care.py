"""When pods are looked after that do not come back. That it helps is tested in tests/cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import DeploymentFailed
from loom_proxy.kubernetes import rollout as pod_care
from loom_proxy.kubernetes.rollout import look_after_pods
from loom_proxy.session.events import Event, SessionEvents

BOUND = 10.0


class OpenJob:
    """What `look_after_pods` uses of a job, with the log of events that a job has."""

    session = "a-b-c"

    def __init__(self) -> None:
        self.log = SessionEvents()
        self.events = self.log.read
        self._connection = SimpleNamespace(ended=threading.Event())

    def tell(self, name: str, host: int) -> None:
        self.log.add(Event(name, {"host": host, "address": f"tcp://10.0.0.{host}:26600"}))

    def close(self) -> None:
        self._connection.ended.set()
        self.log.close(Event("ended", {"reason": "closed"}))


class Starts:
    """Counts the starts that it makes, which fail with the errors that it is given, one after the other."""

    def __init__(self, *errors: Exception) -> None:
        self.begun = threading.Semaphore(0)
        self.count = 0
        self._errors = list(errors)

    def __call__(self) -> Any:
        return self

    def wait(self) -> None:
        self.count += 1
        self.begun.release()
        if self._errors:
            raise self._errors.pop(0)


@pytest.fixture
def job() -> Iterator[OpenJob]:
    job = OpenJob()
    yield job
    job.close()


def look_after(job: OpenJob, starts: Starts) -> threading.Thread:
    return look_after_pods(job, starts)  # type: ignore[arg-type]


def end(job: OpenJob, care: threading.Thread) -> None:
    job.close()
    care.join(BOUND)
    assert not care.is_alive()


def test_a_host_that_does_not_come_back_is_looked_after(job: OpenJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_care, "PATIENCE", 0.05)
    starts = Starts()
    care = look_after(job, starts)

    job.tell("host_lost", 1)

    assert starts.begun.acquire(timeout=BOUND)
    end(job, care)


def test_the_pod_of_the_session_is_looked_after(job: OpenJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_care, "PATIENCE", 0.05)
    job.log.add(Event("disconnected", {"url": "ws://here"}))
    job.log.add(Event("resumed", {"seconds": 0.1}))
    starts = Starts()
    care = look_after(job, starts)

    job.log.add(Event("disconnected", {"url": "ws://here"}))  # and not back

    assert starts.begun.acquire(timeout=BOUND)
    end(job, care)
    assert starts.count == 1


def test_hosts_that_come_back_by_themselves_are_left_alone(job: OpenJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_care, "PATIENCE", 0.05)
    for host in (1, 2):
        job.tell("host_lost", host)
        job.tell("host_back", host)
    starts = Starts()
    care = look_after(job, starts)

    job.tell("host_lost", 3)  # and none before it

    assert starts.begun.acquire(timeout=BOUND)
    end(job, care)
    assert starts.count == 1


def test_it_ends_with_the_job_though_a_host_is_lost(job: OpenJob) -> None:
    starts = Starts()
    care = look_after(job, starts)
    job.tell("host_lost", 1)

    end(job, care)

    assert starts.count == 0


def test_pods_that_do_not_start_are_told_and_the_next_loss_is_looked_after(
    job: OpenJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pod_care, "PATIENCE", 0.05)
    starts = Starts(DeploymentFailed("loom in namespace default does not start: no room for it"))
    care = look_after(job, starts)

    job.tell("host_lost", 1)
    assert starts.begun.acquire(timeout=BOUND)
    job.tell("host_lost", 2)
    assert starts.begun.acquire(timeout=BOUND)
    end(job, care)

    assert "tcp://10.0.0.1:26600 is lost, and does not come back: loom in namespace default" in caplog.text
