"""Starts, restarts, respawns, cuts and deaths of the weaver in any order: each point is in its run, once.

The processes here keep their reports until the weaver has stored them, as threadlets do. The model knows of which
start each step was: all steps of a start are in one run, in the order in which they were made, and in no other run.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from loom.control.frame import pack_value
from loom.control.handshake import ThreadletHello
from loom.weaver.commit_output import CommittedOutput, OutboxPeer
from loom.weaver.runs.run import RUNNING
from tests.unit.loom.weaver.bench import Bench
from tests.unit.loom.weaver.raw_threadlet import hello_of

RANKS = 3


class Peer(OutboxPeer):
    """One connection of a process."""

    def __init__(self) -> None:
        self.stored = 0
        """The number of the last report that the weaver has got."""


class Process:
    """A rank's process: it reports steps, and again those that a weaver has not stored."""

    def __init__(self, rank: int, start: int, instance: str, hello: dict[str, Any]) -> None:
        self.rank, self.start, self.instance, self.hello = rank, start, instance, hello
        self.reports: list[list[Any]] = []
        self.peer: Peer | None = None
        self.stored = 0
        """The number of its last report that a weaver has stored, which it does not send again."""

    @property
    def replica(self) -> str:
        return f"train_{self.rank}"


class Trainings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="loom-runs-")
        self.bench = Bench(Path(self.folder.name) / "store")
        self.numbers = itertools.count()
        self.starts = 0
        self.key: str | None = None
        self.processes: dict[int, Process] = {}
        self.steps: dict[tuple[int, str], list[int]] = {}
        """The steps of each start, by replica."""
        self.removed: set[int] = set()
        self.ended_in_order = False

    def teardown(self) -> None:
        self.come_back()
        self.deliver_all()
        self.restart()
        self.check()
        self.bench.weaver.known.store.close()
        self.folder.cleanup()

    @rule(number=st.integers(0, 1 << 20), pick=st.integers(0, 1 << 10))
    def act(self, number: int, pick: int) -> None:
        """Let something happen that can now. Of several rules, hypothesis would leave out some altogether."""
        actions: list[Callable[[], object]] = [
            self.come_back,
            self.kill_the_weaver,
            lambda: self.wait([0.5, 2.0, 30.0, 100.0][pick % 4]),
        ]
        if self.processes:
            actions += [
                lambda: self.train(pick, 1 + pick % 140),
                lambda: self.kill_one(pick, noticed=pick % 2 == 0),
                lambda: self.kill_all(noticed=pick % 2 == 0),
                self.kill_everything,
                lambda: self.cut(pick),
            ]
        else:
            actions += [lambda: self.begin(keyed=pick % 2 == 0), lambda: self.remove_a_run(pick)]
            if self.starts and not self.ended_in_order and self.starts not in self.removed:
                actions += [lambda: self.restart_all(says_so=self.key is None or pick % 2 == 0)] * 2
        if 0 < len(self.processes) < RANKS and any(one.peer for one in self.processes.values()):
            actions += [self.respawn_one] * 2
        if len(self.processes) == RANKS:
            actions.append(self.finish)
        actions[number % len(actions)]()

    # What happens

    def begin(self, keyed: bool) -> None:
        self.starts += 1
        self.key = f"start-{self.starts}" if keyed else None
        self.ended_in_order = False
        self.bench.now += 4.0  # until then a death that nobody has noticed holds a start up
        # Just after the weaver's death, a process of a start without an id may be one of those before.
        if not keyed:
            self.wait(12.0)
        self.launch_all()

    def restart_all(self, says_so: bool) -> None:
        self.launch_all(restarted=RANKS if says_so else 0)

    def respawn_one(self) -> None:
        self.launch(next(rank for rank in range(RANKS) if rank not in self.processes))

    def train(self, pick: int, count: int) -> None:
        self.make_steps(self.one_of(pick), count)

    def kill_one(self, pick: int, noticed: bool) -> None:
        self.kill(self.one_of(pick), noticed)

    def kill_all(self, noticed: bool) -> None:
        for process in list(self.processes.values()):
            self.kill(process, noticed)
        if not noticed:
            self.bench.now += 4.0

    def kill_everything(self) -> None:
        self.kill_all(noticed=False)
        self.restart()

    def finish(self) -> None:
        self.come_back()
        for process in list(self.processes.values()):
            self.say(process, "bye", "done", "finished")
            del self.processes[process.rank]
        self.commit()
        self.ended_in_order = True

    def cut(self, pick: int) -> None:
        process = self.one_of(pick)
        self.unplug(process)

    def come_back(self) -> None:
        for process in self.processes.values():
            self.connect(process)

    def wait(self, seconds: float) -> None:
        for _ in range(4):
            self.bench.now += seconds / 4
            for process in self.processes.values():
                if process.peer is not None:
                    self.say(process, "beat", self.bench.now, None, "step")
            self.bench.weaver.tick(self.bench.now)
            self.commit()

    def kill_the_weaver(self) -> None:
        self.restart()
        self.come_back()

    def remove_a_run(self, pick: int) -> None:
        runs = self.bench.weaver.known.runs
        ended = [run for run in runs if not run.living]
        if ended:
            run = sorted(ended, key=lambda one: (one.began, one.id))[pick % len(ended)]
            of = {start for start in range(1, self.starts + 1) if self.run_of(start) == run.id}
            if self.starts in of:  # the launcher may start it again, as another one
                return
            runs.remove(run, self.bench.now)
            self.commit()
            self.removed |= of

    # What holds

    def check(self) -> None:
        history, runs = self.bench.weaver.known.history, self.bench.weaver.known.runs
        of_start = {start: self.run_of(start) for start in range(1, self.starts + 1) if start not in self.removed}
        known = [run for run in of_start.values() if run is not None]
        assert len(known) == len(set(known)), "two starts are in one run"
        for (start, replica), steps in self.steps.items():
            if start in self.removed:
                assert self.run_of(start) is None
                continue
            points = history.between(replica, "loss", points=1 << 30, run=of_start[start])
            assert [step for _, step, _ in points] == steps, (start, replica)
        for run in runs:
            lives = any(
                one.run == run.id and one.state.value not in ("failed", "finished") for one in run.there.values()
            )
            assert lives is (run.state == RUNNING) is (run.ended is None)

    def run_of(self, start: int) -> str | None:
        """The one run that has points of a start; None if there is none."""
        history, found = self.bench.weaver.known.history, set()
        for run in self.bench.weaver.known.runs:
            for (one, replica), steps in self.steps.items():
                if one == start:
                    points = history.between(replica, "loss", points=1 << 30, run=run.id)
                    if {step for _, step, _ in points} & set(steps):
                        found.add(run.id)
        assert len(found) < 2, f"start {start} is in {found}"
        return next(iter(found), None)

    # The parts of it

    def one_of(self, pick: int) -> Process:
        living = list(self.processes.values())
        return living[pick % len(living)]

    def launch_all(self, restarted: int = 0) -> None:
        for rank in range(RANKS):
            self.launch(rank, restarted)

    def launch(self, rank: int, restarted: int = 0) -> None:
        hello = {"rank": rank, "start": self.key, "restarted": restarted}
        process = Process(rank, self.starts, f"instance-{next(self.numbers)}", hello)
        self.processes[rank] = process
        self.connect(process)
        self.make_steps(process, 1)

    def make_steps(self, process: Process, count: int) -> None:
        for _ in range(count):
            step = next(self.numbers)
            process.reports.append(
                [len(process.reports) + 1, self.bench.now, step, None, None, {"loss": 1.0}, None]
            )
            self.steps.setdefault((process.start, process.replica), []).append(step)
        self.deliver(process)

    def connect(self, process: Process) -> None:
        if process.peer is not None:
            return
        peer = process.peer = Peer()
        frame = ["hello", hello_of("any", process.replica, process.instance, devices=[], **process.hello)]
        self.bench.weaver.registration.register(peer, ThreadletHello.from_body(frame), self.bench.now)
        output = self.commit()
        (welcome,) = [one.to_body() for to, one in output.frames if to is peer and one is not None][:1]
        assert welcome[0] == "welcome", welcome
        peer.stored = max(process.stored, welcome[1]["seq"])  # a weaver that has forgotten it says 0
        self.deliver(process)

    def deliver(self, process: Process) -> None:
        """Send what is not stored, in parts, and without a commit."""
        if (peer := process.peer) is not None:
            rows = [row for row in process.reports if row[0] > peer.stored]
            for at in range(0, len(rows), 50):
                self.say(process, "status", rows[at : at + 50])
            peer.stored = len(process.reports)

    def deliver_all(self) -> None:
        for process in self.processes.values():
            self.deliver(process)
        self.commit()

    def commit(self) -> CommittedOutput:
        output = self.bench.weaver.commit(self.bench.now)
        for process in self.processes.values():
            if process.peer is not None:
                process.stored = max(process.stored, process.peer.stored)
        return output

    def say(self, process: Process, *frame: Any) -> None:
        assert process.peer is not None
        self.bench.weaver.receive(process.peer, pack_value(list(frame)), self.bench.now)

    def unplug(self, process: Process) -> None:
        if process.peer is not None:
            self.bench.weaver.lost(process.peer, self.bench.now)
            process.peer = None

    def kill(self, process: Process, noticed: bool) -> None:
        """End a process, whose reports the weaver has all got: others are lost with it."""
        self.connect(process)
        peer = process.peer
        assert peer is not None
        replica = peer.replica
        self.commit()
        self.unplug(process)
        if noticed and replica is not None:
            self.bench.weaver.died(replica, process.instance, "killed", self.bench.now)
        self.commit()
        del self.processes[process.rank]

    def restart(self) -> None:
        """Kill the weaver: what it has not committed is lost."""
        self.bench.restart()
        for process in self.processes.values():
            process.peer = None
        self.bench.now += 0.5


Trainings.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


TestTrainings = Trainings.TestCase


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_point_is_lost_or_doubled_or_in_another_run_over_hundreds_of_histories() -> None:
    case = Trainings.TestCase("runTest")  # type: ignore[no-untyped-call]
    case.settings = settings(Trainings.TestCase.settings, max_examples=500, stateful_step_count=60)
    case.runTest()  # type: ignore[no-untyped-call]
