"""A gateway is killed all the time under sessions that call, stream, run and train: nothing fails or is lost.

Two gateways are killed in turn: LOOM_GATEWAY_KILLS times, by default 6, under LOOM_SESSIONS sessions, by default 6,
with LOOM_PAUSE seconds between kills, by default 5.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.counting_laptop import KINDS, CountingReplica
from tests.support.gateways import BOUND, await_true
from tests.support.needs import skipped_if
from tests.support.network.namespaces import Hosts, missing
from tests.support.session_hosts import OTHERS, HostedCluster

KILLS = int(os.environ.get("LOOM_GATEWAY_KILLS", "6"))

SESSIONS = int(os.environ.get("LOOM_SESSIONS", "6"))

PAUSE = float(os.environ.get("LOOM_PAUSE", "5"))

LAPTOP = "laptop0"

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(300 + 4 * KILLS * PAUSE)]


class Session(threading.Thread):
    """A client that counts in one way until it is told to end."""

    def __init__(self, hosted: HostedCluster, count: Callable[..., Iterator[int]]) -> None:
        super().__init__(name=count.__name__)
        self._hosted = hosted
        self._count = count
        self.over = threading.Event()
        self.begun = threading.Event()
        self.answers: list[int] = []
        self.longest = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._hosted.on(LAPTOP), self._hosted.connect(timeout=BOUND) as job:
                procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1})
                counts = self._count(job, procs.spawn("counter", CountingReplica))
                while not self.over.wait(0.05):
                    began = time.monotonic()
                    self.answers.append(next(counts))
                    self.longest = max(self.longest, time.monotonic() - began)
                    self.begun.set()
                replicas = job.weaver.replicas  # whose last report may be on its way
                name = f"@{job.session}"
                await_true(
                    lambda: (
                        [one.step for id, one in replicas().items() if id.endswith(name)] == [len(self.answers) - 1]
                    )
                )
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        finally:
            self.begun.set()


@pytest.mark.guarantees(
    "nothing lost",
    "A gateway of several that is killed fails, loses and doubles no call of a session on a session host",
)
def test_no_call_fails_is_lost_or_doubled() -> None:
    with (
        Hosts(workers=2, others=(*OTHERS, LAPTOP)) as network,
        HostedCluster((), network=network) as hosted,
    ):
        sessions = [Session(hosted, list(KINDS.values())[number % len(KINDS)]) for number in range(SESSIONS)]
        for session in sessions:
            session.start()
        for session in sessions:
            assert session.begun.wait(4 * BOUND)
        opened = []
        for kill in range(KILLS):
            time.sleep(PAUSE)
            gateway = hosted.gateways[kill % 2]
            gateway.end()
            began = time.monotonic()
            with hosted.on(LAPTOP), hosted.connect() as job:
                assert job.run(lambda: 5) == 5
            opened.append(time.monotonic() - began)
            gateway.start()
        for session in sessions:
            session.over.set()
        for session in sessions:
            session.join(4 * BOUND)

    print(f"{KILLS} kills; {sum(len(one.answers) for one in sessions)} answers")
    print(
        f"longest waits: {sorted(round(one.longest, 2) for one in sessions)[-3:]} s, opened in {max(opened):.2f} s"
    )
    assert [session.error for session in sessions if session.error is not None] == []
    for session in sessions:
        assert session.answers == list(range(1, len(session.answers) + 1))
        assert len(session.answers) > KILLS
