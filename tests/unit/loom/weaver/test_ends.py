"""The ends of replicas: how, by whom and why, as the weaver tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import CommandKind
from loom.control.operations import ReportEnded
from loom.process.identity import identity
from tests.unit.loom.weaver.bench import Bench, Threadlet

SEEN = {"signal": 9, "code": None, "out_of_memory": True, "last_lines": ["no room left"]}
MESH = {"session": "s", "procs": "trainers", "rank": 0}


def begin(bench: Bench, step: int | None = None, max_step: int | None = None, **hello: Any) -> Threadlet:
    threadlet = Threadlet(bench, "train_0", **{**MESH, **hello})
    if step is not None:
        threadlet.say("status", [[1, bench.now, step, None, max_step, {}, None]])
    return threadlet


def end(bench: Bench) -> tuple[str, str | None, str | None, str | None]:
    """The state, and how, by whom and why it ended; the same in the record and in the event."""
    replica = bench.weaver.known.replicas["train_0"]
    bench.commit()
    event = bench.event(replica.state.value)
    shown = replica.ending and replica.ending.value, replica.ended_by, replica.end_reason
    assert (event["ending"], event["ended_by"], event["reason"]) == shown
    assert replica.died_of == (replica.end_reason if replica.state.value == "failed" else None)
    return replica.state.value, *shown


@pytest.mark.parametrize(
    ("step", "max_step", "how", "why"),
    [
        (4255, 20000, "ended early", "its program ended at step 4,255 of 20,000"),
        (0, 20000, "ended early", "its program ended at step 0 of 20,000"),
        (19998, 20000, "ended early", "its program ended at step 19,998 of 20,000"),
        (19999, 20000, "completed", "it came to its end"),
        (20000, 20000, "completed", "it came to its end"),
        (4255, None, "completed", "it came to its end"),
        (None, None, "completed", "it came to its end"),
    ],
)
def test_a_training_is_completed_only_if_it_made_its_steps(
    bench: Bench, step: int | None, max_step: int | None, how: str, why: str
) -> None:
    begin(bench, step, max_step).say("bye", "it came to its end", "finished")

    assert end(bench) == ("finished", how, None, why)


@pytest.mark.parametrize(
    ("step", "max_step", "how", "why"),
    [
        (4255, 20000, "ended early", "its program ended at step 4,255 of 20,000"),
        (4255, None, "ended early", "its program ended at step 4,255"),
        (None, None, "ended early", "its program ended before its first step"),
        (19999, 20000, "completed", "its process ended within its training"),
    ],
)
def test_a_process_that_ends_within_its_training_has_ended_early(
    bench: Bench, step: int | None, max_step: int | None, how: str, why: str
) -> None:
    begin(bench, step, max_step).say("bye", "its process ended within its training", "early")

    assert end(bench) == ("finished", how, None, why)


def exit_code(code: int) -> bytes:
    return code.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("code", "ending", "state", "how", "why"),
    [
        (0, "finished", "finished", "completed", "it ends"),
        (3, "finished", "failed", "crashed", "exit code 3"),
        (300, "finished", "failed", "crashed", "exit code 44"),
        (0, "early", "finished", "ended early", "its program ended at step 7"),
        (1, "early", "failed", "crashed", "exit code 1"),
        (143, "evicted", "finished", "evicted", "it ends"),
        (None, "evicted", "finished", "evicted", "it ends"),
        (None, "finished", "finished", "unknown", "its program ended at step 7, without saying how"),
    ],
)
def test_one_that_leaves_is_judged_by_its_exit_code(
    bench: Bench, code: int | None, ending: str, state: str, how: str, why: str
) -> None:
    threadlet = begin(bench, 7)

    threadlet.say("leaving", "it ends", ending)
    before = bench.state()
    if code is None:
        threadlet.lose()
        bench.wait(2)
    else:
        threadlet.say("exit", exit_code(code))

    assert before == "running"
    assert end(bench) == (state, how, None, why)
    assert threadlet.closed or code is None
    replica = bench.weaver.known.replicas["train_0"]
    assert (replica.exit and replica.exit["code"]) == (None if code is None else code & 0xFF)


def test_one_that_leaves_and_does_not_end_is_not_waited_for_without_end(bench: Bench) -> None:
    begin(bench, 7).say("leaving", "it ends", "finished")

    bench.wait(50)
    before = bench.state()
    bench.wait(15)

    assert before == "running"
    assert end(bench)[:2] == ("finished", "unknown")


def test_one_that_leaves_and_obeyed_was_stopped_whatever_its_exit_code(bench: Bench) -> None:
    threadlet = begin(bench, 3, 100)
    bench.weaver.dispatcher.give(CommandKind.STOP, {}, "train_0", "alice", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())

    threadlet.say("leaving", "it was told to stop", "stopped")
    threadlet.say("exit", exit_code(3))

    assert end(bench) == ("finished", "stopped", "alice", "it was told to stop")


def test_a_session_may_see_that_one_failed_after_its_goodbye(bench: Bench) -> None:
    begin(bench, 3).say("bye", "it ends", "early")
    seen = {**SEEN, "signal": None, "code": 3, "out_of_memory": False}

    bench.weaver.supervision(
        ReportEnded.read({**MESH, "what": "died", "reason": "exit code 3", "exit": seen}), bench.now
    )

    assert end(bench) == ("failed", "crashed", None, "exit code 3")


@pytest.mark.parametrize("kind", ["stop", "drain"])
def test_one_that_was_told_to_end_says_by_whom(bench: Bench, kind: str) -> None:
    threadlet = begin(bench, 3, 100)
    bench.weaver.dispatcher.give(CommandKind(kind), {}, "train_0", "alice", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())

    threadlet.say("bye", "it was told to stop", "stopped")

    assert end(bench) == ("finished", "stopped", "alice", "it was told to stop")
    assert "(stopped by alice)" in bench.weaver.dispatcher.why_ended(bench.weaver.known.replicas["train_0"])


def test_a_command_to_an_earlier_process_has_stopped_no_later_one(bench: Bench) -> None:
    threadlet = begin(bench)
    bench.weaver.dispatcher.give(CommandKind.STOP, {}, "train_0", "alice", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())
    threadlet.say("bye", "it was told to stop", "stopped")
    bench.now += 1.0

    begin(bench, 5).say("bye", "it ends", "stopped")

    assert end(bench) == ("finished", "ended early", None, "it ends")


def test_an_eviction_is_told_as_one(bench: Bench) -> None:
    begin(bench, 3, 100).say("bye", "its worker was told to end", "evicted")

    assert end(bench) == ("finished", "evicted", None, "its worker was told to end")


def test_an_exception_is_told_with_its_text(bench: Bench) -> None:
    begin(bench, 3, 100).say("bye", "ValueError: no data", "failed")

    assert end(bench) == ("failed", "crashed", None, "ValueError: no data")


def test_silence_is_a_loss(bench: Bench) -> None:
    begin(bench, 3, 100).lose()
    bench.wait(20)

    assert end(bench)[:2] == ("failed", "lost")


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_one_whose_processes_were_stopped_is_cancelled_also_if_it_said_goodbye(
    bench: Bench, says_goodbye: bool
) -> None:
    threadlet = begin(bench, 4255, 20000)
    if says_goodbye:
        threadlet.say("bye", "its process ended within its training", "early")

    bench.weaver.supervision(
        ReportEnded.read({**MESH, "what": "stopped", "reason": "its session has ended"}), bench.now
    )

    assert end(bench) == ("finished", "cancelled", None, "its session has ended")


@pytest.mark.parametrize(("later", "how"), [(1.0, "cancelled"), (60.0, "ended early")])
def test_one_that_closed_its_threadlet_long_before_was_not_cancelled_with_its_session(
    bench: Bench, later: float, how: str
) -> None:
    begin(bench, 2, 100).say("bye", "it came to its end", "finished")
    bench.now += later

    bench.weaver.supervision(
        ReportEnded.read({**MESH, "what": "stopped", "reason": "its session has ended"}), bench.now
    )

    assert end(bench)[:2] == ("finished", how)


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_one_that_made_its_steps_is_completed_though_its_processes_were_stopped(
    bench: Bench, says_goodbye: bool
) -> None:
    threadlet = begin(bench, 99, 100)
    if says_goodbye:
        threadlet.say("bye", "it came to its end", "finished")

    bench.weaver.supervision(
        ReportEnded.read({**MESH, "what": "stopped", "reason": "its session has ended"}), bench.now
    )

    assert end(bench)[:2] == ("finished", "completed")


@pytest.mark.parametrize("noticed", [True, False])
def test_what_its_session_saw_of_a_death_is_told_also_if_the_weaver_noticed_it_first(
    bench: Bench, noticed: bool
) -> None:
    threadlet = begin(bench, 3)
    if noticed:
        bench.weaver.died(bench.weaver.known.replicas["train_0"], threadlet.instance, "its process 7 is gone", 0.0)

    bench.weaver.supervision(
        ReportEnded.read({**MESH, "what": "died", "reason": "killed by SIGKILL", "exit": SEEN}), bench.now
    )

    assert end(bench) == ("failed", "crashed", None, "killed by SIGKILL")
    assert bench.weaver.known.replicas["train_0"].exit == bench.event("failed")["exit"] == SEEN
    assert bench.event("supervision")["exit"] == SEEN


def test_an_exception_keeps_its_text_when_its_process_has_ended(bench: Bench) -> None:
    begin(bench, 3).say("bye", "ValueError: no data", "failed")
    seen = {**SEEN, "signal": None, "code": 1}

    bench.weaver.supervision(
        ReportEnded.read({**MESH, "what": "died", "reason": "exit code 1", "exit": seen}), bench.now
    )

    assert end(bench) == ("failed", "crashed", None, "ValueError: no data")
    assert bench.event("failed")["exit"] == seen


def test_a_lost_host_is_a_loss(bench: Bench) -> None:
    begin(bench, 3)

    bench.weaver.supervision(
        ReportEnded.read({**MESH, "what": "died", "reason": "its host is gone", "lost": True}), bench.now
    )

    assert end(bench) == ("failed", "lost", None, "its host is gone")


def test_the_end_is_known_after_a_restart_and_forgotten_when_another_process_comes(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.db")
    begin(bench, 3)
    bench.weaver.supervision(
        ReportEnded.read({**MESH, "what": "died", "reason": "killed", "exit": SEEN}), bench.now
    )
    bench.commit()

    bench.restart()
    replica = bench.weaver.known.replicas["train_0"]
    assert (replica.ending, replica.end_reason, replica.exit) == ("crashed", "killed", SEEN)
    info = replica.info("alice", [])
    assert (info["ending"], info["end_reason"], info["exit"]) == ("crashed", "killed", SEEN)

    begin(bench)
    assert (replica.ending, replica.ended_by, replica.end_reason, replica.exit) == (None, None, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells for sure")
@pytest.mark.parametrize(
    ("away", "ending", "reason"),
    [
        pytest.param(5.0, "crashed", "its process {} is gone", id="less than a goodbye waits"),
        pytest.param(60.0, "lost", "its process {} is gone, and nobody was there to hear how it ended", id="more"),
    ],
)
def test_a_process_of_the_weavers_machine_that_died_while_the_weaver_was_away_is_known_at_once(
    tmp_path: Path, away: float, ending: str, reason: str
) -> None:
    bench = Bench(tmp_path / "weaver.db")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for name, pid in (("train_0", child.pid), ("train_1", os.getpid())):
        Threadlet(bench, name, pid=pid, session="s").step(3)
        bench.weaver.known.replicas[name].process = identity(pid)
        bench.weaver.known.save(bench.weaver.known.replicas[name])
    bench.commit()

    child.kill()
    child.communicate()
    bench.now += away
    bench.restart()
    bench.wait(2)

    assert end(bench) == ("failed", ending, None, reason.format(child.pid))
    assert bench.state("train_1") == "recovering"


@pytest.mark.parametrize("respawns", [True, False])
def test_only_a_replica_that_something_respawns_costs_time_when_it_is_dead(bench: Bench, respawns: bool) -> None:
    threadlet = begin(bench, respawns=respawns)
    other = Threadlet(bench, "train_1", session="s")
    bench.weaver.died(bench.weaver.known.replicas["train_0"], threadlet.instance, "killed", bench.now)
    bench.wait(5, other)

    record = bench.weaver.known.goodput.record("train@s", bench.now)

    assert record.seconds["respawn"] == pytest.approx(5.0 if respawns else 0.0)


@pytest.mark.parametrize("goodbye", ["bye", "leaving"])
def test_a_goodbye_is_told_to_be_stored(goodbye: str, bench: Bench) -> None:
    threadlet = begin(bench, 7)
    threadlet.say(goodbye, "it ends", "finished")

    assert ["goodbye_stored"] in threadlet.told


def test_a_weaver_that_dies_while_an_exit_code_is_awaited_knows_the_goodbye(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.db")
    begin(bench, 9, 10).say("leaving", "it ends", "finished")
    bench.restart()
    bench.wait(60.0)

    assert end(bench)[:2] == ("finished", "completed")


def test_a_process_that_says_goodbye_again_has_not_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.db")
    first = begin(bench, 9, 10, instance="one")
    first.say("leaving", "it ends", "finished")
    bench.restart()
    again = begin(bench, instance="one")
    again.say("bye", "ValueError: no", "failed")

    assert end(bench)[:2] == ("failed", "crashed")
