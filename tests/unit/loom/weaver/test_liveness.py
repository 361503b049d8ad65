"""The weaver's core: who lives, and who makes progress."""

from __future__ import annotations

import pytest

from loom.control.commands import CommandKind
from loom.control.operations import ReportEnded
from loom.weaver.views import WeaverEvent
from tests.unit.loom.weaver.bench import START, Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import GPU


def test_a_replica_that_is_back_within_the_grace_was_never_gone(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    threadlet.lose()
    bench.wait(0.75)
    again = Threadlet(bench, "train_0", instance=threadlet.instance)
    bench.wait(10, again)

    assert "recovering" not in bench.kinds()
    assert bench.event("reconnected")["replica"] == "train_0"
    assert bench.state() == "running"


def test_a_replica_without_a_connection_recovers_or_fails(bench: Bench) -> None:
    bench.now += 100
    threadlet = Threadlet(bench, "train_0")
    lost = bench.now
    threadlet.lose()

    bench.wait(1.25)
    recovering = bench.state()
    bench.wait(2)

    assert recovering == "recovering"
    assert bench.state() == "failed"
    event = bench.event("failed")
    assert event["time"] - lost == 3.0
    assert (event["from"], event["why"], event["devices"]) == ("recovering", "silent", ["GPU-0"])
    assert "not connected for 3.0 s" in event["reason"]


def test_a_replica_that_is_silent_on_its_connection_fails_with_the_seconds_of_its_silence(bench: Bench) -> None:
    bench.now += 100
    Threadlet(bench, "train_0")
    last = bench.now

    bench.wait(10)

    event = bench.event("failed")
    assert event["time"] - last > 5  # a while until it is cut off, and a while without a connection
    assert f"nothing heard for {event['time'] - last:.1f} s" in event["reason"]


def test_while_the_weaver_was_held_up_nobody_is_silent_or_stalled(bench: Bench) -> None:
    bench.now += 100
    silent, lost = Threadlet(bench, "train_0"), Threadlet(bench, "train_1")
    for step in range(8):
        bench.wait(0.5, silent, lost)
        silent.step(step)
    lost.lose()

    bench.now += 60  # in which its process does not run
    bench.weaver.note_held_up(60, bench.now)
    bench.weaver.tick(bench.now)
    bench.commit()
    assert not silent.closed
    assert (bench.state("train_0"), bench.state("train_1")) == ("running", "recovering")

    bench.wait(3.25)
    assert silent.closed
    assert bench.state("train_1") == "failed"


@pytest.mark.parametrize("seconds", [0.5, 15.0, 4000.0])
def test_a_replica_of_a_bridge_fails_with_the_seconds_in_which_the_bridge_heard_nothing(
    bench: Bench, seconds: float
) -> None:
    threadlet = Threadlet(bench, "train_0")

    threadlet.say("silent", seconds)
    closed = threadlet.closed
    bench.wait(12)

    assert closed
    failed = bench.event("failed")
    assert failed["ending"] == "lost"
    silent = failed["time"] - bench.now + 12 + seconds
    assert failed["reason"] == f"nothing heard for {silent:.1f} s"


def test_a_replica_without_a_connection_that_is_heard_again_goes_on(bench: Bench) -> None:
    first = Threadlet(bench, "train_0", state="running")
    first.say("silent", 15.0)
    bench.wait(2)

    Threadlet(bench, "train_0", instance=first.instance, state="running")

    assert bench.state() == "running"


def test_a_replica_that_has_not_begun_is_registering_until_it_steps(bench: Bench) -> None:
    first = Threadlet(bench, "train_0", state="registering")
    first.lose()
    bench.wait(2)
    again = Threadlet(bench, "train_0", instance=first.instance, state="registering")
    before = bench.state()
    again.step(1)

    assert (before, bench.state()) == ("registering", "running")


def test_a_replica_that_was_thought_dead_and_says_hello_runs(bench: Bench) -> None:
    bench.now += 100
    threadlet = Threadlet(bench, "train_0")
    threadlet.lose()
    bench.wait(5)
    before = bench.state()

    Threadlet(bench, "train_0", instance=threadlet.instance)

    assert (before, bench.state()) == ("failed", "running")
    assert bench.weaver.known.replicas["train_0"].died_of is None


def test_a_connection_on_which_nothing_comes_is_given_up(bench: Bench) -> None:
    bench.now += 100
    threadlet = Threadlet(bench, "train_0")

    bench.wait(3.5)
    closed = threadlet.closed
    bench.wait(1)
    recovering = bench.state()
    bench.wait(2)

    assert (closed, recovering, bench.state()) == (True, "recovering", "failed")


def test_a_replica_to_which_the_weaver_comes_late_is_neither_silent_nor_stalled(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(1, 30):
        threadlet.step(step)
        bench.wait(0.1)
    threadlet.unheard = True

    bench.wait(60)

    assert (threadlet.closed, bench.state()) == (False, "running")
    assert "stalled" not in bench.kinds()
    threadlet.unheard = False
    bench.wait(4.25)
    assert threadlet.closed


def test_a_process_that_is_dead_has_failed_at_once_and_only_once(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0", session="s", procs="trainers", rank=3)
    Threadlet(bench, "train_1", session="s", procs="trainers", rank=4)

    ended = bench.weaver.supervision(
        ReportEnded.read(
            {
                "session": "s",
                "procs": "trainers",
                "rank": 3,
                "host": "h",
                "what": "dead",
                "reason": "killed by signal 9",
            }
        ),
        bench.now,
    )
    threadlet.lose()
    bench.wait(10)

    assert ended == ["train_0"]
    failed = next(event for event in bench.events if event["kind"] == "failed")
    assert failed["cause"] == bench.event("supervision")["id"]
    assert (failed["why"], failed["reason"], failed["time"]) == ("died", "killed by signal 9", START)
    assert [event["replica"] for event in bench.events if event["kind"] == "failed"].count("train_0") == 1


def test_the_death_of_a_process_that_another_has_replaced_changes_nothing(bench: Bench) -> None:
    first = Threadlet(bench, "train_0")
    first.lose()
    Threadlet(bench, "train_0")

    bench.weaver.died(bench.weaver.known.replicas["train_0"], first.instance, "its process is gone", bench.now)

    assert bench.state() == "running"


def test_a_mesh_that_was_stopped_has_finished(bench: Bench) -> None:
    Threadlet(bench, "train_0", session="s", procs="trainers", rank=0)

    bench.weaver.supervision(
        ReportEnded.read({"session": "s", "procs": "trainers", "rank": None, "what": "stopped"}), bench.now
    )

    assert bench.state() == "finished"


def test_news_of_processes_without_replicas_are_only_logged(bench: Bench) -> None:
    assert (
        bench.weaver.supervision(
            ReportEnded.read({"session": "s", "procs": "p", "rank": 0, "what": "dead"}), bench.now
        )
        == []
    )
    bench.commit()
    assert bench.event("supervision")["replicas"] == []


@pytest.mark.parametrize(
    ("ending", "state"), [("finished", "finished"), ("stopped", "finished"), ("failed", "failed")]
)
def test_a_goodbye_says_how_it_ended(bench: Bench, ending: str, state: str) -> None:
    threadlet = Threadlet(bench, "train_0")

    threadlet.say("bye", "all steps done", ending)
    threadlet.lose()
    bench.wait(10)

    assert bench.state() == state
    assert bench.event(state)["reason"] == "all steps done"
    assert threadlet.closed


def test_a_new_process_takes_over_from_one_that_is_gone(bench: Bench) -> None:
    first = Threadlet(bench, "train_0")
    first.step(10, loss=1.0)
    first.lose()

    second = Threadlet(bench, "train_0", devices=[{**GPU, "uuid": "GPU-1"}])

    replica = bench.weaver.known.replicas["train_0"]
    assert (replica.instance, replica.step, replica.seq) == (second.instance, None, 0)
    assert bench.weaver.known.devices.devices_of("train_0") == ["GPU-1"]
    assert "GPU-0" not in bench.weaver.known.devices


def test_a_new_process_takes_over_from_one_that_is_silent(bench: Bench) -> None:
    first = Threadlet(bench, "train_0")
    bench.now += 3.0

    second = Threadlet(bench, "train_0")

    assert first.closed
    assert second.told[0][0] == "welcome"


def test_a_replica_that_has_made_its_last_step_is_not_stalled(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")

    def train() -> None:
        for step in range(1, 11):
            bench.wait(0.5)
            threadlet.seq += 1
            threadlet.say("status", [[threadlet.seq, bench.now, step, None, 10, {}, None]])

    train()
    bench.wait(60, threadlet)
    after = bench.state()
    train()
    threadlet.step(3)  # another training of the process
    bench.wait(60, threadlet)

    assert (after, bench.state()) == ("running", "stalled")


def test_a_replica_that_takes_no_step_while_it_beats_is_stalled_until_it_does(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(10):
        bench.wait(0.5)
        threadlet.step(step)
    stopped = bench.now

    bench.wait(4.75, threadlet)
    before = bench.state()
    bench.wait(0.75, threadlet)
    stalled = bench.state()
    id, replica = bench.stacks[-1]
    bench.weaver.stacks.take(id, "in all_reduce()")
    bench.commit()
    bench.wait(30, threadlet)
    threadlet.step(10)

    event = next(event for event in bench.events if event["kind"] == "stalled")
    assert (before, stalled, bench.state()) == ("running", "stalled", "running")
    assert event["time"] - stopped == pytest.approx(5.0, abs=0.3)
    assert (event["step"], event["usual_step_time"], event["phase"]) == (9, 0.5, "step")
    assert replica == "train_0"
    assert bench.weaver.known.events.after(event["id"] - 1, 1)[0].data["stack"] == "in all_reduce()"
    assert bench.kinds().count("stalled") == 2  # once more with its stack


def test_short_steps_are_waited_for_two_seconds(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(40):
        bench.now += 0.01
        threadlet.step(step)

    bench.wait(1.75, threadlet)
    before = bench.state()
    bench.wait(0.5, threadlet)

    assert (before, bench.state()) == ("running", "stalled")


def test_a_replica_that_is_paused_is_not_stalled(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(10):
        bench.wait(0.25)
        threadlet.step(step)
    bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "test", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())
    for _ in range(40):
        bench.wait(0.5)
        threadlet.beat(phase="paused")
    paused = bench.state()

    bench.weaver.dispatcher.give(CommandKind.RESUME, {}, "train_0", "test", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())
    bench.wait(1, threadlet)

    assert (paused, bench.state()) == ("paused", "running")
    assert "stalled" not in bench.kinds()


def test_steps_in_heartbeats_are_progress_too(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(60):
        bench.wait(0.5)
        threadlet.beat(step)

    assert bench.state() == "running"


def test_a_replica_that_reports_no_steps_is_never_stalled(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")

    bench.wait(60, threadlet)

    assert bench.state() == "running"


def test_checks_of_one_tenth_of_a_second_come_in_their_order_and_not_early(bench: Bench) -> None:
    threadlets = [Threadlet(bench, f"train_{number}", devices=[]) for number in range(4)]
    for number, threadlet in enumerate(threadlets):
        bench.now = START + 0.5 + 0.01 * (3 - number)
        threadlet.lose()

    bench.now = START + 1.515  # a second after two of them
    bench.weaver.tick(bench.now)
    assert [event.replica for event in moved(bench)] == ["train_3", "train_2"]
    bench.now = START + 1.54
    bench.weaver.tick(bench.now)
    assert [event.replica for event in moved(bench)] == ["train_3", "train_2", "train_1", "train_0"]


def moved(bench: Bench) -> list[WeaverEvent]:
    return bench.weaver.known.events.after(0, 100, None, "recovering")
