"""How a process finds the others, loses them, and joins the next quorum."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loom.errors import FaultRefused
from loom.process.listen import open_store
from loom.train import Timeouts, TrainerActor
from loom.train.loop.membership import Membership, _Moved
from loom.train.settings import Restore
from loom.train.spec import Assignment, JobSpec
from tests.support.gateways import await_true
from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # torchft's

BOUND = 60.0

TIMEOUTS = Timeouts(collective=4 * BOUND, quorum=BOUND, connect=10.0)

ATTEMPTS = 50
"""Attempts after which a membership gives up."""


class Attendance:
    """What a membership calls before it tries again."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.then: Callable[[], object] = lambda: None
        """What is done before it tries again."""
        self._count = 0

    def __call__(self) -> None:
        self.then()
        self.began.set()
        self._count += 1
        if self._count > ATTEMPTS:
            raise RuntimeError(f"no quorum after {ATTEMPTS} attempts")


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The URL of a lighthouse at which two groups make a quorum."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=20)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture
def next_lighthouse() -> Iterator[str]:
    """The URL of a lighthouse at which one group makes a quorum."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture
def attendance() -> Attendance:
    return Attendance()


@pytest.fixture
def memberships(
    request: pytest.FixtureRequest, lighthouse: str, attendance: Attendance
) -> Iterator[list[Membership]]:
    timeouts = getattr(request, "param", TIMEOUTS)
    stores = [open_store("127.0.0.1") for _ in range(2)]
    made = []
    for number, store in enumerate(stores):
        job = JobSpec(TrainerActor, timeouts=timeouts)
        place = ("127.0.0.1", store.port)
        assignment = Assignment(job, f"train_{number}", lighthouse, place, Restore.NOTHING, "the job's key")
        made.append(Membership(a_state(assignment), attendance))
    yield made
    for membership in made:
        membership.leave()


def a_state(assignment: Assignment) -> Any:
    """As much of a `TrainingState` as a membership needs."""
    return SimpleNamespace(
        assignment=assignment,
        job=assignment.job,
        rank=0,
        report=SimpleNamespace(step=0),
        take_from_peer=lambda state: None,
        save=lambda convert: {},
    )


def places(membership: Membership) -> tuple[int, int]:
    """Return a membership's place in the first step that it makes."""
    while True:
        membership.gather()
        membership.average(torch.ones(4), [1.0])
        if membership.commit():
            return membership.place


@pytest.mark.guarantees(
    "training",
    "A process that has found no quorum joins the next one; one that waits at a lost lighthouse goes on "
    "at the next",
)
@pytest.mark.parametrize("memberships", [replace(TIMEOUTS, collective=3.0)], indirect=True)
def test_a_failed_quorum_is_not_the_last(memberships: list[Membership], attendance: Attendance) -> None:
    first, second = memberships
    # Only the first attempt is short. If the second comes before the next one, torchft takes both for a quorum, of
    # which the first never hears: the second gives up after the timeout of a collective, and tries again.
    patience, first._manager._quorum_timeout = first._manager._quorum_timeout, timedelta(seconds=0.5)
    attendance.then = lambda: setattr(first._manager, "_quorum_timeout", patience)
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(places, first)
        assert attendance.began.wait(BOUND)
        together = pool.submit(places, second)

    assert sorted((alone.result(), together.result())) == [(0, 2), (1, 2)]


def gather(memberships: list[Membership], pool: ThreadPoolExecutor) -> None:
    for gathered in [pool.submit(membership.gather) for membership in memberships]:
        gathered.result(BOUND)


def test_a_membership_that_breaks_off_waits_no_longer_and_joins_the_next_quorum(
    memberships: list[Membership],
) -> None:
    first, second = memberships
    with ThreadPoolExecutor(2) as pool:
        gather(memberships, pool)
        waiting = pool.submit(first.average, torch.ones(4), [1.0])
        second.break_off()
        waiting.result(BOUND)
        assert not first.commit()

        second.average(torch.ones(4), [2.0])
        second.commit()
        gather(memberships, pool)
        flats = [torch.full((4,), value) for value in (1.0, 3.0)]
        rows = [
            pool.submit(membership.average, flat, [1.0])
            for membership, flat in zip(memberships, flats, strict=True)
        ]
        assert [row.result(BOUND) for row in rows] == [[[1.0], [1.0]]] * 2
        assert all(membership.commit() for membership in memberships)
        assert [flat.tolist() for flat in flats] == [[2.0] * 4] * 2


@pytest.mark.guarantees(
    "training",
    "A process that has found no quorum joins the next one; one that waits at a lost lighthouse goes on "
    "at the next",
)
def test_who_waits_at_a_lighthouse_waits_at_the_next_one_when_that_moves(
    lighthouse: str, next_lighthouse: str, attendance: Attendance
) -> None:
    store = open_store("127.0.0.1")
    job = JobSpec(TrainerActor, timeouts=Timeouts(collective=BOUND, quorum=4 * BOUND, connect=10.0))
    place = ("127.0.0.1", store.port)
    assignment = Assignment(job, "train_0", lighthouse, place, Restore.NOTHING, "the job's key")
    membership = Membership(a_state(assignment), attendance)
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(membership.gather)  # nobody else comes, as to a lighthouse whose host was lost
        await_true(lambda: membership._manager._quorum_future is not None, BOUND)
        assert not alone.done()
        membership.move(next_lighthouse, behind=False)
        alone.result(BOUND)

    assert membership.place == (0, 1)
    assert not attendance.began.is_set()
    membership.leave()


def test_a_quorum_that_is_left_behind_changes_no_step(
    next_lighthouse: str, memberships: list[Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = memberships[0]
    manager = membership._manager

    def start_quorum() -> None:
        membership.move(next_lighthouse, behind=False)
        manager._step = 7  # as the thread of a quorum does that takes over a state, which is not loaded then
        raise _Moved

    monkeypatch.setattr(manager, "start_quorum", start_quorum)
    membership.gather()

    assert membership._manager is not manager
    assert membership._manager.current_step() == 0


def test_alone_there_is_nothing_to_break_off(memberships: list[Membership]) -> None:
    assert not memberships[0].break_off()
    with pytest.raises(FaultRefused, match="no other group is connected"):
        memberships[0].abort()


_ENDS_WHILE_IT_GATHERS = """
import logging, threading
from torchft.coordination import LighthouseServer
from loom.train.loop.membership import Membership, _Moved
from loom.process.listen import open_store
from loom.train.settings import Restore
from loom.train.spec import Assignment, JobSpec
from tests.unit.loom.train.test_membership import TIMEOUTS, a_state, TrainerActor

logging.basicConfig(level=logging.WARNING, format="logged: %(name)s: %(message)s")
logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=20)
store = open_store("127.0.0.1")
url = "http://127.0.0.1:" + lighthouse.address().rpartition(":")[2]
job = JobSpec(TrainerActor, timeouts=TIMEOUTS)
assignment = Assignment(job, "train_0", url, ("127.0.0.1", store.port), Restore.NOTHING, "the job's key")
membership = Membership(a_state(assignment), lambda: exit("it tries again"))

def start_quorum():
    threading.main_thread().join()
    raise RuntimeError("cannot schedule new futures after shutdown")  # as the manager's executor does then

membership._manager.start_quorum = start_quorum
gathering = threading.Thread(target=membership.gather, daemon=True)
gathering.start()
threading.Thread(target=gathering.join).start()  # so that the process ends after it
print("ends")
"""


def test_a_process_that_ends_while_it_waits_for_others_says_nothing() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _ENDS_WHILE_IT_GATHERS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, cwd=ROOT, check=True)
    assert ended.stdout == "ends\n"
    assert "logged: loom" not in ended.stderr
    assert "Traceback" not in ended.stderr


ENDING = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from loom.train.loop.membership import process_ends

assert not process_ends()
pool, began = ThreadPoolExecutor(1), threading.Event()

def work():
    began.set()
    while True:
        try:
            pool.submit(int)
        except RuntimeError as error:
            print(process_ends(), error)
            return
        time.sleep(0.001)

pool.submit(int).result()
threading.Thread(target=work).start()
began.wait()
ThreadPoolExecutor(1).submit(time.sleep, 1)  # the main thread waits for it, and lives that long
"""


def test_a_process_whose_executors_have_ended_ends() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=BOUND, cwd=ROOT)

    assert done.stdout.startswith("True cannot schedule new futures after"), done.stderr
