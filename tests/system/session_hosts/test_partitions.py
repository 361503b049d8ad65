"""Gateways, session hosts, the weaver and laptops are cut off from each other, at random.

LOOM_PARTITIONS times, by default 20, with the seed LOOM_SEED, by default 4.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.errors import GatewayUnreachable, NotAGateway
from tests.support.actors import Counter
from tests.support.gateways import BOUND, await_true
from tests.support.history import Added, contradiction, overlap
from tests.support.needs import skipped_if
from tests.support.network.namespaces import Hosts, missing
from tests.support.session_hosts import OTHERS, HostedCluster

PARTITIONS = int(os.environ.get("LOOM_PARTITIONS", "20"))

SEED = int(os.environ.get("LOOM_SEED", "4"))

LAPTOPS = ("laptop0", "laptop1", "laptop2")

GATEWAYS, HOSTS = ("gateway0", "gateway1"), ("host0", "host1")

PAIRS = [
    GATEWAYS,
    HOSTS,
    *((gateway, other) for gateway in GATEWAYS for other in (*HOSTS, "service", "weaver")),
    *((host, "weaver") for host in HOSTS),
    *((laptop, "service") for laptop in LAPTOPS),
]

LONGEST = 8.0
"""Seconds of a cut."""

ISOLATED = 16.0
"""Seconds for which now and then a session host reaches neither the weaver nor the other host."""

PAUSE = 1.5
"""Seconds between two cuts, on average. Most of them overlap."""

CLIENTS = 3
"""Clients of a session: one that drives it, and others that come and go."""

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(600 + 3 * PARTITIONS)]


@dataclass(frozen=True)
class Cut:
    """Two hosts that are cut off from each other from a time to another one, in seconds since the first cut."""

    begin: float
    end: float
    hosts: tuple[str, str]
    how: str

    def of(self, network: Hosts) -> contextlib.AbstractContextManager[None]:
        if self.how == "one way":
            return network.one_way(*self.hosts)
        return network.cut(*self.hosts, "refuse" if self.how == "refuse" else "drop")


def cuts(chance: random.Random) -> Iterator[Cut]:
    """The cuts in the order of their beginnings."""
    begin = 0.0
    for number in range(PARTITIONS):
        hosts = chance.sample(chance.choice(PAIRS), 2)
        yield Cut(
            begin,
            begin + chance.uniform(0.5, LONGEST),
            (hosts[0], hosts[1]),
            chance.choice(("drop", "one way", "refuse")),
        )
        if number % 20 == 10:
            host = chance.choice(HOSTS)
            for other in ("weaver", *(one for one in HOSTS if one != host)):
                yield Cut(begin, begin + ISOLATED, (host, other), "drop")
        begin += chance.uniform(0.0, 2 * PAUSE)


class Client(threading.Thread):
    """Counts from a laptop until it is told to end, and notes what it saw."""

    def __init__(self, hosted: HostedCluster, laptop: str, number: int) -> None:
        super().__init__(name=f"{type(self).__name__} {number} on {laptop}")
        self.hosted = hosted
        self.laptop = laptop
        self.chance = random.Random(f"{SEED} {self.name}")
        self.over = threading.Event()
        self.calls: list[Added] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.hosted.on(self.laptop):
                self.work()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def work(self) -> None:
        raise NotImplementedError

    def come(self, session: str | None = None, mode: str = "drive") -> loom.Job:
        """Connect, again while neither gateway can be reached: who connects is told so at once."""
        while True:
            try:
                return self.hosted.connect(session, mode=mode, timeout=4 * BOUND)
            except (GatewayUnreachable, NotAGateway):
                time.sleep(0.1)

    def count(self, counter: Any, batches: int) -> None:
        """Make so many batches of calls, each of a few at once."""
        for _ in range(batches):
            if self.over.wait(0.05):
                return
            made = [(time.monotonic(), counter.add.call_one(1)) for _ in range(self.chance.randint(1, 3))]
            for start, future in made:
                answer = future.get(timeout=4 * BOUND)
                self.calls.append(Added(self.name, start, time.monotonic(), answer))


class Driving(Client):
    """The client that drives a session."""

    def __init__(self, hosted: HostedCluster, laptop: str, number: int) -> None:
        super().__init__(hosted, laptop, number)
        self.session = ""
        self.begun = threading.Event()
        self.last = threading.Event()
        """Set when no other client counts any more."""
        self.value = 0

    def work(self) -> None:
        try:
            with self.hosted.connect(timeout=BOUND) as job:
                procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1})
                counter = procs.spawn("counter", Counter, 0)
                counter.value.call_one().get(timeout=BOUND)
                self.session = job.session
                self.begun.set()
                while not self.over.is_set():
                    self.count(counter, 100)
                assert self.last.wait(10 * BOUND)
                self.value = counter.value.call_one().get(timeout=BOUND)
        finally:
            self.begun.set()


class Calling(Client):
    """A client that comes to a session beside the one that drives it, leaves, and comes again."""

    def __init__(self, driving: Driving, laptop: str, number: int) -> None:
        super().__init__(driving.hosted, laptop, number)
        self._driving = driving

    def work(self) -> None:
        while not self.over.is_set():
            with self.come(self._driving.session, "call") as job:
                self.count(job.meshes["counter"], self.chance.randint(1, 30))


class Opening(Client):
    """A client that opens a new session again and again."""

    opened = 0

    def work(self) -> None:
        while not self.over.wait(1.0):
            with self.come() as job:
                assert job.run(lambda: 5) == 5
            self.opened += 1


def step_on(file: str) -> int:
    """Note all the time which process goes on, until a file beside is there; return its id."""
    with Path(file).open("a") as steps:
        while not Path(f"{file}.go").exists():
            steps.write(f"{time.monotonic()} {os.getpid()}\n")
            steps.flush()
            time.sleep(0.02)
    return os.getpid()


class Restarting(Client):
    """A client whose function goes on on another session host when its own is cut off for long."""

    def __init__(self, hosted: HostedCluster, laptop: str, number: int) -> None:
        super().__init__(hosted, laptop, number)
        self.file = hosted.folder / f"steps{number}"
        self.ended_by = 0

    def work(self) -> None:
        with self.hosted.connect(timeout=BOUND) as job:
            run = job.run(step_on, str(self.file), detach=True, name="steps", restarts=100)
            self.over.wait()
            Path(f"{self.file}.go").touch()
            while not self.ended_by:
                with contextlib.suppress(loom.SessionRestarted):
                    self.ended_by = run.result(4 * BOUND)

    def steps(self) -> list[tuple[float, str]]:
        """When which process went on."""
        lines = [line.split() for line in self.file.read_text().splitlines()] if self.file.exists() else []
        return [(float(at), pid) for at, pid in lines]


def partition(network: Hosts, chance: random.Random) -> None:
    """Make all cuts, each for its time."""
    with contextlib.ExitStack() as made:
        began = time.monotonic()
        under_way: list[tuple[float, contextlib.ExitStack]] = []

        def wait_until(moment: float) -> None:
            while under_way and (first := min(under_way, key=lambda one: one[0]))[0] <= moment:
                time.sleep(max(0.0, began + first[0] - time.monotonic()))
                under_way.remove(first)
                first[1].close()
            if moment < float("inf"):
                time.sleep(max(0.0, began + moment - time.monotonic()))

        for cut in cuts(chance):
            wait_until(cut.begin)
            one = made.enter_context(contextlib.ExitStack())
            one.enter_context(cut.of(network))
            under_way.append((cut.end, one))
        wait_until(float("inf"))


@pytest.mark.guarantees(
    "nothing lost",
    "While gateways, session hosts, the weaver and laptops are cut off from each other at random, each call of a "
    "session's clients is carried out once, in an order that they agree on, and no two drivers have a session",
)
def test_each_call_is_carried_out_once_however_hosts_are_cut_off() -> None:
    chance = random.Random(SEED)
    with (
        Hosts(workers=2, others=(*OTHERS, *LAPTOPS)) as network,
        HostedCluster((), peers=True, network=network) as hosted,
    ):
        driving = [Driving(hosted, laptop, number) for number, laptop in enumerate(LAPTOPS)]
        restarting = [Restarting(hosted, laptop, number) for number, laptop in enumerate(LAPTOPS)]
        opening = Opening(hosted, LAPTOPS[0], 0)
        calling = {
            one: [
                Calling(one, LAPTOPS[(place + number) % len(LAPTOPS)], 10 * place + number)
                for number in range(1, CLIENTS)
            ]
            for place, one in enumerate(driving)
        }
        others = [opening, *restarting, *(one for some in calling.values() for one in some)]
        for client in (*driving, *restarting):
            client.start()
        for one in driving:
            assert one.begun.wait(4 * BOUND)
            assert one.error is None
        await_true(lambda: all(one.steps() for one in restarting))
        for client in others:
            if client not in restarting:
                client.start()

        partition(network, chance)

        for client in (*driving, *others):
            client.over.set()
        for client in others:
            client.join(8 * BOUND)
        for one in driving:
            one.last.set()
            one.join(8 * BOUND)
        assert not [client.name for client in threading.enumerate() if isinstance(client, Client)]

        histories = {one: [*one.calls, *(call for each in calling[one] for call in each.calls)] for one in driving}
        waits = sorted(call.end - call.start for calls in histories.values() for call in calls)
        starts = [len({pid for _, pid in one.steps()}) for one in restarting]
        print(
            f"{PARTITIONS} partitions, seed {SEED}: {len(waits)} answers, longest waits "
            f"{[round(wait, 1) for wait in waits[-3:]]} s; opened {opening.opened} sessions; drivers of the "
            f"functions with restarts: {starts}"
        )
        for one, calls in histories.items():
            assert contradiction(calls, one.value) == "", one.name
        for one in restarting:
            assert overlap(one.steps()) == ""
        assert [(client.name, client.error) for client in (*driving, *others) if client.error is not None] == []
        for one, calls in histories.items():
            assert {call.client for call in calls} == {one.name, *(each.name for each in calling[one])}
        for one in restarting:
            assert one.steps()[-1][1] == str(one.ended_by)
        assert opening.opened
