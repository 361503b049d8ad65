"""Faults inside training processes: each has happened, and is gone without a trace where it can be removed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loom.chaos import training_faults
from loom.chaos.injected import Injected
from loom.control.fault_kinds import check_fault
from loom.errors import FaultRefused
from loom.threadlet import Threadlet
from tests.integration.chaos.conftest import Struck
from tests.unit.loom.threadlet.fake_weaver import BOUND, FakeWeaver, Loop, eventually

Start = Callable[..., Struck]


# -- those that end the process -----------------------------------------------------------------------------


def test_an_exception_in_a_step_ends_the_training_with_it(struck: Start) -> None:
    train = struck()

    evidence = train.injected("exception", text="on purpose")

    assert evidence == {"pid": train.pid, "raises": "InjectedFault: on purpose"}
    assert train.goodbye() == ["InjectedFault: on purpose", "failed"]
    assert train.wait() == 1


def test_a_segfault_is_a_real_one(struck: Start) -> None:
    train = struck()

    assert train.injected("segfault")["pid"] == train.pid

    assert train.wait() == -signal.SIGSEGV
    assert train.goodbye() is None


def test_memory_that_an_rlimit_bounds_runs_out(struck: Start) -> None:
    train = struck()

    evidence = train.injected("out_of_memory", megabytes=64)

    assert evidence["limit"] > 64 << 20
    goodbye = train.goodbye()
    assert goodbye is not None
    assert goodbye[0].startswith("MemoryError: injected: ")
    assert train.wait() == 1


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no memory cgroup can be made here")
def test_memory_that_a_cgroup_bounds_ends_with_the_kernels_kill(struck: Start) -> None:
    train = struck()

    evidence = train.injected("out_of_memory", megabytes=64, bound="cgroup")

    assert train.wait() == -signal.SIGKILL
    eventually(lambda: not Path(evidence["cgroup"]).exists(), "the removal of the cgroup")


# -- those that hold it up ----------------------------------------------------------------------------------


def test_a_gil_deadlock_stops_every_thread_and_then_no_more(struck: Start) -> None:
    train = struck()

    train.injected("gil_deadlock", duration=0.6)

    longest, held, before = 0.0, 0.0, time.monotonic()
    while longest < 0.5 or not held:  # heartbeats come 20 times a second, but for then
        frame = train.connection.receive()
        assert frame is not None
        if frame[0] == "fault":
            held = frame[2]["held"]
        if frame[0] == "beat":
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
    assert 0.5 < held < BOUND
    steps = [row[2] for row in train.connection.rows(3)]
    assert steps == sorted(steps)


def test_a_slow_rank_is_slow_and_then_no_more(struck: Start) -> None:
    train = struck()

    evidence = train.injected("slow_rank", duration=0.5, seconds=0.1)

    assert evidence == {"pid": train.pid, "seconds": 0.1}
    _, _, removal = train.connection.expect("fault")
    assert removal["slow_steps"] >= 3
    rows = [row for frame in train.connection.skipped if frame[0] == "status" for row in frame[1]]
    removed_at = time.time()
    while not rows or rows[-1][1] < removed_at:  # reports come later than what is told at once
        rows += train.connection.rows(1)
    gaps = [after[1] - before[1] for before, after in pairwise(rows)]
    assert sum(gap > 0.09 for gap in gaps) >= 2
    fast = train.connection.rows(10)[-5:]
    assert max(after[1] - before[1] for before, after in pairwise(fast)) < 0.09


def test_a_fault_is_removed_before_its_time(struck: Start) -> None:
    train = struck()
    ident = train.inject("slow_rank", 600.0, seconds=0.05)
    assert train.connection.ack(ident)[1]["ok"]

    removed = train.weaver.command(train.connection, "remove_fault", injection=ident)

    assert train.connection.ack(removed)[1]["evidence"]["pid"] == train.pid
    again = train.weaver.command(train.connection, "remove_fault", injection=ident)
    assert "no fault with the id" in train.connection.ack(again)[1]["reason"]


def test_a_process_that_is_not_marked_refuses(struck: Start) -> None:
    train = struck(injectable="")

    ident = train.inject("exception")

    outcome = train.connection.ack(ident)[1]
    assert not outcome["ok"]
    assert "not injectable" in outcome["reason"]
    assert train.process.poll() is None


# -- in this process ----------------------------------------------------------------------------------------


@pytest.fixture
def steps() -> Iterator[training_faults.EachStep]:
    each: training_faults.EachStep = []
    yield each
    assert each == [], "something is left behind"


def begin(kind: str, each: training_faults.EachStep, duration: float | None = None, /, **params: Any) -> Injected:
    _, checked, seconds = check_fault(kind, params, duration)
    return training_faults.begin(kind, checked, seconds, each)


def test_the_clock_jumps_and_is_right_again(steps: training_faults.EachStep) -> None:
    clock, nanoseconds = time.time, time.time_ns
    before = clock()

    with begin("clock_jump", steps, seconds=-86400.0) as injected:
        assert time.time() - before == pytest.approx(-86400.0, abs=5.0)
        assert time.time_ns() / 1e9 - before == pytest.approx(-86400.0, abs=5.0)
        assert injected.evidence["after"] - injected.evidence["before"] == pytest.approx(-86400.0, abs=1.0)

    assert (time.time, time.time_ns) == (clock, nanoseconds)
    assert injected.removal is not None


def test_reports_have_the_systems_time_while_the_clock_jumps(
    weaver: FakeWeaver, steps: training_faults.EachStep
) -> None:
    made = Threadlet("train_0", weaver=weaver.address, devices=[])
    connection, _ = weaver.welcome()
    with begin("clock_jump", steps, seconds=1e6):
        made.publish_status(step=1)
    (row,) = connection.rows(1)
    weaver.stop()
    made.close()

    assert row[1] == pytest.approx(time.time(), abs=60.0)


def test_a_fault_ends_by_itself_when_its_time_is_over(steps: training_faults.EachStep) -> None:
    clock = time.time

    injected = begin("clock_jump", steps, 0.02)

    assert injected.wait(BOUND)
    assert time.time is clock


def test_the_loss_is_nan_for_as_many_steps_as_asked_for(steps: training_faults.EachStep) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    batch = torch.ones(1, 2)

    def losses(count: int) -> list[bool]:
        found = []
        for _ in range(count):
            for each in list(steps):
                each()
            found.append(bool(torch.isnan(model(batch).sum())))
        return found

    injected = begin("nan_loss", steps, steps=2)

    assert losses(4) == [True, True, False, False]
    assert injected.removal == {"pid": os.getpid(), "spoiled_outputs": 2}
    assert not torch.nn.modules.module._global_forward_hooks


def test_evaluation_is_not_spoiled(steps: training_faults.EachStep) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1).eval()

    with begin("nan_loss", steps):
        assert not torch.isnan(model(torch.ones(1, 2))).any()


def test_a_process_group_that_is_aborted_fails_here_and_at_its_peers() -> None:
    distributed = pytest.importorskip("torch").distributed
    torch, store = pytest.importorskip("torch"), distributed.HashStore()
    with ThreadPoolExecutor(2) as threads:

        def on_both(work: Callable[[Any], Any], *given: Any) -> list[Any]:
            return [done.exception(BOUND) or done.result() for done in [threads.submit(work, one) for one in given]]

        groups = on_both(lambda rank: distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=BOUND)), 0, 1)
        assert not any(isinstance(one, Exception) for one in groups)

        def reduce(group: Any) -> float:
            values = torch.ones(1)
            group.allreduce([values]).wait()
            return float(values)

        assert on_both(reduce, *groups) == [2.0, 2.0]

        said = training_faults.abort(groups[0])

        assert "Timed out" in said
        assert [type(error) for error in on_both(reduce, *groups)] == [RuntimeError, RuntimeError]


def test_a_process_without_process_groups_refuses_their_abort(steps: training_faults.EachStep) -> None:
    with pytest.raises(FaultRefused, match="no process group"):
        begin("pg_abort", steps)


def test_the_training_says_itself_how_a_fault_is_carried_out(weaver: FakeWeaver) -> None:
    made = Threadlet("train_0", weaver=weaver.address, devices=[], injectable=True)
    connection, hello = weaver.welcome()
    assert hello["injectable"] is True
    said: list[Any] = []

    @made.on_fault("pg_abort")
    def abort(params: dict[str, Any]) -> Callable[[], None]:
        said.append(params)
        return lambda: said.append("undone")

    loop = Loop(lambda number: made.check_and_apply_updates())
    ident = weaver.command(connection, "inject", fault="pg_abort")
    eventually(lambda: made._pending)
    loop.step()
    outcome = connection.ack(ident)[1]
    removal = weaver.command(connection, "remove_fault", injection=ident)
    assert connection.ack(removal)[1]["ok"]
    loop.end()
    weaver.stop()
    made.close()

    assert outcome["evidence"] == {"pid": os.getpid(), "by": "abort"}
    assert said == [{}, "undone"]
