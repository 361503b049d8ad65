"""Calls, runs and commands through a line that is cut, while gateway and weaver are killed: each is done once."""

from __future__ import annotations

import builtins
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of
from tests.support.network.chaos_proxy import ChaosProxy, Schedule
from tests.support.weavers import await_weaver

BOUND = 90.0
"""Seconds that an operation may take, whatever was killed."""

WINDOW = 16  # calls under way


class Ledger(Actor):
    """Writes down the calls and the commands that reach it."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.commands: list[int] = []
        self._threadlet = loom.Threadlet("train_0", config={"number": 0})
        self._threadlet.handler("number")(self._set)
        threading.Thread(target=self._train, daemon=True).start()

    def _set(self, value: int) -> None:
        self.commands.append(value)

    def _train(self) -> None:
        number = 0
        while True:
            with self._threadlet.step(number):
                number += 1
            time.sleep(0.005)

    @endpoint
    def enter(self, number: int) -> int:
        self.calls.append(number)
        return number

    @endpoint
    def report(self) -> tuple[list[int], list[int]]:
        return self.calls, self.commands


def enter_run(number: int) -> int:
    entered: list[int] = builtins.__dict__.setdefault("_ledger_of_runs", [])
    entered.append(number)
    return number


def runs_entered() -> list[int]:
    return list(builtins.__dict__.get("_ledger_of_runs", []))


class Talker(threading.Thread):
    """Repeats an action, which gets its number, until it is told to end. ``failure`` is what was wrong, or None."""

    def __init__(self, act: Callable[[int], object]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self._over = threading.Event()
        self.count = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._act(self.count)
                self.count += 1
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self.failure = error

    def end(self) -> None:
        self._over.set()
        self.join(BOUND)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure


def strike(gateway: Gateway, choose: random.Random) -> None:
    if choose.random() < 0.5:
        gateway.end()
        time.sleep(choose.uniform(0, 0.5))
        gateway.start()
    else:
        for weaver in gateway.weavers():
            weaver.kill()


def went_on(talkers: list[Talker], before: list[int]) -> bool:
    """Whether each has done something since it had done so much, or has failed."""
    return all(each.failure or each.count > count for each, count in zip(talkers, before, strict=True))


@pytest.mark.guarantees(
    "nothing lost",
    "Whatever is killed, 50 times, no result is wrong and nothing is left behind; calls, runs and "
    "commands beside each other, on a line that is cut, are done once",
)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "cuts"), [(3, 5), (20, 40)], ids=["few", "many"])
def test_calls_runs_and_commands_are_done_once_whatever_is_killed(
    own_cluster: LocalCluster, kills: int, cuts: int
) -> None:
    choose = random.Random(kills)
    under_way: deque[tuple[int, Any]] = deque()
    applied: list[int] = []

    def call(number: int) -> None:
        under_way.append((number, ledger.enter.call_one(number)))
        if len(under_way) > WINDOW:
            expected, future = under_way.popleft()
            assert future.get(BOUND) == expected

    def command(number: int) -> None:
        try:
            answers = job.weaver.update_config("train_0", number=number + 1).get(BOUND)
        except loom.Unavailable:
            return  # it may have been applied, once
        if answers["train_0"].ok:
            applied.append(number + 1)

    with gateway_of(own_cluster) as gateway, ChaosProxy(int(gateway.url.rpartition(":")[2])) as proxy:
        job = loom.connect(f"ws://127.0.0.1:{proxy.port}", TOKEN)
        await_weaver(job.weaver)
        ledger = job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("ledger", Ledger)
        assert ledger.report.call_one().get(BOUND) == ([], [])
        await_true(lambda: "train_0" in job.weaver.replicas())
        calls, runs = Talker(call), Talker(lambda number: job.run(enter_run, number))
        talkers = [calls, runs, Talker(command)]
        for talker in talkers:
            talker.start()
        proxy.attack(Schedule(kills, cuts, gap=(2_000, 60_000)))
        for _ in range(kills):
            before = [talker.count for talker in talkers]
            time.sleep(choose.uniform(0, 0.5))  # somewhere in what is under way
            strike(gateway, choose)
            await_true(partial(went_on, talkers, before), BOUND)
        await_true(proxy.calm.is_set, BOUND)
        for talker in talkers:
            talker.end()
        for expected, future in under_way:
            assert future.get(BOUND) == expected
        called, commanded = ledger.report.call_one().get(BOUND)
        entered = job.run(runs_entered)
        job.close()

    print(f"{calls.count} calls, {runs.count} runs, {len(applied)} commands, {proxy.cuts} cuts, {kills} kills")
    assert called == list(range(calls.count))
    assert entered == list(range(runs.count))
    assert commanded == sorted(set(commanded))
    assert set(applied) <= set(commanded)
    assert proxy.cuts == cuts
