"""Where a job's lighthouse is started, when hosts do not take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import LoomError
from loom.train.controller.lighthouse import Support

Gone = Callable[[int], object]


class Procs:
    """Processes of a host that starts none, where there is a reason."""

    def __init__(self, name: str, host: int, reason: Exception | None, gone: Gone) -> None:
        self.name, self.host, self.reason, self.gone = name, host, reason, gone
        self.stopped = ""
        self.mesh = self

    def spawn(self, name: str, cls: type, *args: Any) -> Any:
        return SimpleNamespace(open=self.endpoint(f"http://host{self.host}:1"), pid=self.endpoint(1))

    def endpoint(self, value: Any) -> Any:
        return SimpleNamespace(call_one=lambda: SimpleNamespace(get=lambda timeout: self.get(value)))

    def get(self, value: Any) -> Any:
        if self.reason is not None:
            raise self.reason
        return value

    def stop(self, reason: str) -> None:
        self.stopped = reason


class Hosts:
    """A session whose hosts start processes, or raise."""

    name = "session"

    def __init__(self, *reasons: Exception | None) -> None:
        self.reasons = list(reasons)
        self.spawned: list[Procs] = []

    def hosts(self) -> list[int]:
        return list(range(len(self.reasons)))

    def spawn_procs(
        self, name: str, host: int, per_host: Mapping[str, int], gone: Callable[[int], object]
    ) -> Procs:
        self.spawned.append(Procs(name, host, self.reasons[host], gone))
        return self.spawned[-1]


def support_of(hosts: Hosts) -> tuple[Support, list[tuple[str, dict[str, Any]]]]:
    told: list[tuple[str, dict[str, Any]]] = []
    events: Any = SimpleNamespace(record=lambda kind, **about: told.append((kind, about)))
    job: Any = SimpleNamespace(name="train", timeouts=None)
    session: Any = hosts
    return Support(session, job, lambda call: call(), events), told


# What Monarch raises where a host is lost while a process is started on it, and what a wait for it may.
@pytest.mark.parametrize("reason", [ValueError("error spawning proc mesh"), TimeoutError(), RuntimeError("lost")])
def test_a_host_that_does_not_start_the_lighthouse_is_passed_over(reason: Exception) -> None:
    hosts = Hosts(reason, None)
    support, told = support_of(hosts)

    support.open()

    assert support.lighthouse == "http://host1:1"
    assert [kind for kind, _ in told] == ["lighthouse"]
    failed, opened = hosts.spawned
    assert failed.stopped
    assert not opened.stopped
    failed.gone(0)  # that these processes are gone is no loss of the lighthouse
    assert [kind for kind, _ in told] == ["lighthouse"]


def test_the_host_that_lost_the_lighthouse_is_asked_last() -> None:
    hosts = Hosts(None, None)
    support, told = support_of(hosts)
    support.open()
    moved: list[str] = []
    support.moved = lambda: moved.append(support.lighthouse)

    hosts.spawned[0].gone(0)
    support.tick([0, 1])

    assert [procs.host for procs in hosts.spawned if procs.name == "train_lighthouse"] == [0, 1]
    assert moved == ["http://host1:1"]
    assert [kind for kind, _ in told] == ["lighthouse", "lighthouse_lost", "lighthouse"]


def test_where_no_host_takes_the_lighthouse_every_reason_is_told() -> None:
    support, _ = support_of(Hosts(ValueError("no memory"), TimeoutError("no answer")))

    with pytest.raises(LoomError, match="host 0: no memory; host 1: no answer"):
        support.open()
    with pytest.raises(LoomError, match=r"no host is there for the job's lighthouse$"):
        support_of(Hosts())[0].open()


def test_a_lost_lighthouse_waits_for_a_host() -> None:
    hosts = Hosts(None)
    support, _ = support_of(hosts)
    support.open()
    moved: list[str] = []
    support.moved = lambda: moved.append(support.lighthouse)

    hosts.spawned[0].gone(0)
    support.tick([])
    assert moved == []
    support.tick([0])

    assert moved == ["http://host0:1"]


def test_the_lighthouse_leaves_a_host_that_is_about_to_end() -> None:
    hosts = Hosts(None, None)
    support, _ = support_of(hosts)
    support.open()

    support.evict(1)
    assert not hosts.spawned[0].stopped
    support.evict(0)

    assert hosts.spawned[0].stopped
