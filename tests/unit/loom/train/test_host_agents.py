"""A host counts as silent while its agent does not answer, and not before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from loom.train.controller import host_agents
from loom.train.controller.host_agents import HostAgents

BOUND = 10.0


class Answer:
    """An answer that comes when the test has it come."""

    def __init__(self) -> None:
        self._come = threading.Event()
        self.awaited = threading.Event()

    def give(self) -> None:
        self._come.set()

    def get(self, timeout: float) -> None:
        self.awaited.set()
        if not self._come.wait(timeout):
            raise TimeoutError


class Host:
    """Stands in for the processes of a host's agent."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.gone: Callable[[int], object] = lambda rank: None
        self.stopped: list[str] = []
        self.name, self.mesh, self.stop = "agent", self, self.stopped.append
        self.answer = SimpleNamespace(call_one=self._ask)
        devices = SimpleNamespace(get=lambda timeout: ["CPU-three-0"])
        self.cpus = SimpleNamespace(call_one=lambda members: devices)

    def hosts(self) -> list[int]:
        return [3]

    def spawn(self, name: str, cls: type) -> Host:
        return self

    def spawn_procs(self, name: str, host: int, per_host: Any, gone: Callable[[int], object]) -> Host:
        self.gone = gone
        return self

    def _ask(self) -> Answer:
        self.asked.put(answer := Answer())
        return answer

    def next(self) -> Answer:
        """The next question, once it is being waited for."""
        answer = self.asked.get(timeout=BOUND)
        assert answer.awaited.wait(BOUND)
        return answer


def agents_of(host: Host) -> HostAgents:
    session: Any = host
    job: Any = SimpleNamespace(name="train", silence=0.04, uses_gpus=False, members=1)
    agents = HostAgents(session, job, lambda call: call())
    agents.tick([3])
    return agents


def await_silence(agents: HostAgents, hosts: set[int]) -> None:
    waited = threading.Event()
    for _ in range(1000):
        if agents.silent() == hosts:
            return
        waited.wait(0.01)
    raise AssertionError(agents.silent())


def test_a_host_is_silent_while_an_answer_is_missing() -> None:
    host = Host()
    agents = agents_of(host)

    host.next().give()  # the agent has started
    missing = host.next()
    await_silence(agents, {3})
    missing.give()
    await_silence(agents, set())
    last = host.next()

    agents.close()
    last.give()
    assert host.stopped == ["the job is over"]


def test_a_host_is_not_silent_because_its_agent_takes_long_to_start() -> None:
    host = Host()
    agents = agents_of(host)

    starts = host.next()
    assert not threading.Event().wait(0.1)
    assert agents.silent() == set()

    agents.close()
    starts.give()


def test_a_lost_host_is_not_silent_and_gets_another_agent_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agents, "RETRY", 0.0)
    host = Host()
    agents = agents_of(host)
    host.next().give()
    missing = host.next()
    await_silence(agents, {3})

    host.gone(0)

    assert agents.silent() == set()
    agents.tick([3])
    host.next().give()
    agents.close()
    missing.give()


def test_a_host_whose_agent_has_ended_is_not_used_until_the_next_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_agents, "RETRY", 0.0)
    host = Host()
    agents = agents_of(host)
    host.next().give()
    assert agents.ending() == set()

    host.gone(0)

    assert agents.ending() == {3}
    agents.tick([])
    starts = host.next()
    assert agents.ending() == {3}
    starts.give()
    while agents.ending():
        assert not threading.Event().wait(0.01)
    agents.close()


def test_an_agent_whose_start_never_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agents, "RETRY", 0.0)
    monkeypatch.setattr(host_agents, "FIRST_ANSWER", 0.0)
    host = Host()
    agents = agents_of(host)
    host.next()  # the worker has ended meanwhile, and nobody says so

    agents.tick([3])

    assert host.stopped == ["it did not start in time"]
    monkeypatch.setattr(host_agents, "FIRST_ANSWER", 60.0)
    agents.tick([3])
    host.next().give()
    while agents.ending():
        assert not threading.Event().wait(0.01)
    agents.close()
