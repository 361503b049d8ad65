"""What an acknowledgement says is so: for each command, and each way in which a loop may take part."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from loom.threadlet import Threadlet
from tests.support.logged import messages
from tests.unit.loom.threadlet.fake_weaver import BOUND, Connection, FakeWeaver, Make, come, eventually, told


@dataclass
class Program:
    """A training program: it makes steps until it ends, in a thread of its own."""

    threadlet: Threadlet
    way: Callable[[Program, int], bool]
    steps: int = 0
    lr: list[float] = field(default_factory=list)
    taken: list[dict[str, Any]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    pace: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Make a step, by one of `WAYS`, until that returns True or the test is over."""
        for number in itertools.count():
            if self.over.is_set() or self.way(self, number):
                break
            self.steps = number + 1
            self.pace.wait(0.002)
        self.over.set()


def steps(program: Program, number: int) -> bool:
    with program.threadlet.step(number):
        pass
    return program.threadlet.should_stop


def steps_without_a_look(program: Program, number: int) -> bool:
    with program.threadlet.step(number):
        pass
    return False


def calls(program: Program, number: int) -> bool:
    program.threadlet.check_and_apply_updates()
    program.threadlet.wait_while_paused()
    program.threadlet.publish_status(step=number)
    return program.threadlet.should_stop


def publishes_before_it_waits(program: Program, number: int) -> bool:
    program.threadlet.check_and_apply_updates()
    program.threadlet.publish_status(step=number)
    program.threadlet.wait_while_paused()
    return program.threadlet.should_stop


def only_checks(program: Program, number: int) -> bool:
    program.threadlet.check_and_apply_updates()
    program.threadlet.publish_status({"current_step": number})
    return False


def checks_in_each_part_of_a_step(program: Program, number: int) -> bool:
    for _ in range(4):
        program.threadlet.check_and_apply_updates()
    program.threadlet.publish_status(step=number)
    return False


def waits_by_asking(program: Program, number: int) -> bool:
    program.threadlet.check_and_apply_updates()
    while program.threadlet.paused and not program.over.is_set():
        program.pace.wait(0.002)
        program.threadlet.check_and_apply_updates()
    program.threadlet.publish_status(step=number)
    return program.threadlet.should_stop


def only_gets(program: Program, number: int) -> bool:
    if (command := program.threadlet.get_config_update()) is not None:
        program.taken.append(command)
    program.threadlet.publish_status(step=number)
    return False


def gets_and_dispatches(program: Program, number: int) -> bool:
    """As torchLoom's guide writes it."""
    command = program.threadlet.get_config_update()
    if command and command.get("_is_weaver_command"):
        program.taken.append(command)
        if command["command_type"] == "update_config":
            program.threadlet._dispatch_handlers(command["params"])
    elif command:
        program.threadlet._dispatch_handlers(command)
    program.threadlet.publish_status(step=number)
    return False


def gets_all_and_waits(program: Program, number: int) -> bool:
    while (command := program.threadlet.get_config_update()) is not None:
        program.taken.append(command)
    program.threadlet.wait_while_paused()
    program.threadlet.publish_status(step=number)
    return program.threadlet.should_stop


def does_by_itself_what_it_gets(program: Program, number: int) -> bool:
    """It waits and stops with no help of the threadlet's."""
    paused = False
    while not program.over.is_set():
        command = program.threadlet.get_config_update()
        if command is None and not paused:
            break
        kind = "" if command is None else command["command_type"]
        if kind in ("stop", "drain"):
            program.threadlet.close()
            return True
        paused = kind == "pause" or (paused and kind != "resume")
        program.pace.wait(0.002)
    program.threadlet.publish_status(step=number)
    return False


WAYS = (
    steps,
    steps_without_a_look,
    calls,
    publishes_before_it_waits,
    only_checks,
    checks_in_each_part_of_a_step,
    waits_by_asking,
    only_gets,
    gets_and_dispatches,
    gets_all_and_waits,
    does_by_itself_what_it_gets,
)
WAITING = {steps, steps_without_a_look, calls, publishes_before_it_waits, waits_by_asking, gets_all_and_waits}
WAITING |= {does_by_itself_what_it_gets}
ENDING = {steps, calls, publishes_before_it_waits, waits_by_asking, gets_all_and_waits, does_by_itself_what_it_gets}
GETTING = {only_gets, gets_and_dispatches, gets_all_and_waits, does_by_itself_what_it_gets}

of_each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)

Start = Callable[[Any], tuple[Program, Connection]]


@pytest.fixture
def start(weaver: FakeWeaver, threadlet: Make) -> Any:
    """Starts a program that trains in one of the ways, with a handler for lr."""
    programs: list[tuple[Program, threading.Thread]] = []

    def begin(way: Callable[[Program, int], bool]) -> tuple[Program, Connection]:
        program = Program(threadlet(config={"lr": 0.1}), way)
        program.threadlet.handler("lr")(_to(program.lr))
        connection, _ = weaver.welcome()
        thread = threading.Thread(target=program.run, daemon=True)
        programs.append((program, thread))
        thread.start()
        eventually(lambda: program.steps > 2, "three steps")
        return program, connection

    yield begin
    weaver.stop()
    for program, thread in programs:
        program.over.set()
        program.threadlet.evict()
        thread.join(BOUND)
        assert not thread.is_alive()


def _to(values: list[float]) -> Callable[[float], None]:
    def handle(value: float) -> None:
        values.append(value)

    return handle


def phases(connection: Connection, count: int) -> set[str]:
    """The phases in the next heartbeats."""
    return {connection.expect("beat")[3] for _ in range(count)}


@of_each_way
def test_a_pause_is_applied_exactly_if_the_loop_waits(start: Start, weaver: FakeWeaver, way: Any) -> None:
    program, connection = start(way)

    _, answer = connection.ack(weaver.command(connection, "pause"))

    assert answer["ok"] is (way in WAITING), answer
    before = program.steps
    assert ("paused" in phases(connection, 3)) is (way in WAITING)
    if way in WAITING:
        assert program.steps == before
        assert connection.ack(weaver.command(connection, "resume"))[1]["ok"]
    else:
        assert "it does not wait during a pause" in answer["reason"]
    eventually(lambda: program.steps > before, "a step")
    assert not program.threadlet.paused


@of_each_way
@pytest.mark.parametrize("kind", ["stop", "drain"])
def test_a_stop_is_applied_exactly_if_the_loop_looks(start: Start, weaver: FakeWeaver, way: Any, kind: str) -> None:
    program, connection = start(way)

    answer = connection.ack(weaver.command(connection, kind))[1]

    assert answer["ok"] is (way in ENDING), answer
    if way in ENDING:
        assert program.over.wait(BOUND)
        return
    assert "it does not look at t.should_stop" in answer["reason"]
    before = program.steps
    eventually(lambda: program.steps > before + 3, "steps")
    assert not program.threadlet.draining


@of_each_way
def test_a_value_is_applied_if_its_handler_was_called_or_the_program_took_it(
    start: Start, weaver: FakeWeaver, way: Any
) -> None:
    program, connection = start(way)

    with_handler = connection.ack(weaver.command(connection, "update_config", lr="0.5"))[1]
    assert with_handler["changes"] == {"lr": {"old": 0.1, "new": 0.5}}
    assert with_handler["ok"]
    assert program.lr == [0.5]
    refused = connection.ack(weaver.command(connection, "update_config", lr="quick"))[1]
    assert (refused["ok"], refused["changes"]) == (False, {})
    without = connection.ack(weaver.command(connection, "update_config", lr=0.25, beta=0.9))[1]
    takes = way in GETTING - {gets_and_dispatches}  # which hears that nothing here has a handler for it
    assert without["ok"] is takes
    assert without.get("taken") == (["beta"] if takes else None)
    eventually(lambda: program.lr == [0.5, 0.25], "the second value")
    connection.expect("beat")
    assert program.lr == [0.5, 0.25]  # and no value twice
    if way in (only_gets, gets_and_dispatches, gets_all_and_waits):
        assert program.taken[0] == told("update_config", lr="0.5")
        assert program.taken[-1] == told("update_config", lr=0.25, beta=0.9)


@of_each_way
@pytest.mark.parametrize("kind", ["device_failed", "deactivate_device", "reactivate"])
def test_what_is_said_of_a_device_needs_somebody_who_acts_on_it(
    start: Start, weaver: FakeWeaver, way: Any, kind: str
) -> None:
    program, connection = start(way)
    heard: list[Any] = []

    nobody = connection.ack(weaver.command(connection, kind, device="GPU-a", reason="ECC"))[1]
    program.threadlet.on_device_failure(lambda *said: heard.append(said))
    program.threadlet.on_device_change(lambda *said: heard.append(said))
    somebody = connection.ack(weaver.command(connection, kind, device="GPU-a", reason="ECC"))[1]

    assert nobody["ok"] is (way in GETTING)
    assert nobody.get("taken") == ([kind] if way in GETTING else None)
    assert way in GETTING or "nobody acts on it" in nobody["reason"]
    assert somebody["ok"]
    assert "taken" not in somebody
    assert len(heard) == 1


def test_a_pause_that_is_over_before_the_loop_waited_is_refused(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    pause, resume = (weaver.command(connection, kind) for kind in ("pause", "resume"))
    come(made, 2)

    made.check_and_apply_updates()

    assert connection.ack(pause)[1]["reason"] == "it ended before the loop waited"
    assert connection.ack(resume)[1]["ok"]
    late = weaver.command(connection, "pause")
    come(made)
    made.check_and_apply_updates()
    made.drain()
    made.check_and_apply_updates()
    assert connection.ack(late)[1]["reason"] == "the pause ended before the loop waited"


def test_what_the_loop_has_not_shown_is_answered_at_its_end(weaver: FakeWeaver, threadlet: Make) -> None:
    for error, ok in ((None, True), (SystemExit(0), True), (RuntimeError("no data"), False)):
        made = threadlet()
        connection, _ = weaver.welcome()
        stop, pause = weaver.command(connection, "stop"), weaver.command(connection, "pause")
        come(made, 2)
        made.check_and_apply_updates()

        closing = threading.Thread(target=made.close, args=(error,))
        closing.start()

        assert connection.ack(pause)[1]["reason"] == "the training ended before it waited"
        assert connection.ack(stop)[1]["ok"] is ok
        connection.close()
        closing.join(BOUND)


def test_news_of_a_configuration_is_no_command_of_the_weaver(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[float] = []
    made.handler("lr")(_to(got))
    connection, hello = weaver.welcome()
    assert hello["announced"] is True
    for ident, values in (("n1", {"lr": "0.5"}), ("n2", {"lr": 0.25, "beta": 1})):
        connection.send("command", ident, "update_config", values, True)
    come(made, 2)

    assert made.get_config_update() == {"lr": "0.5"}
    assert connection.ack("n1")[1]["changes"]["lr"]["new"] == 0.5
    made.check_and_apply_updates()
    assert connection.ack("n2")[1]["refused"].keys() == {"beta"}
    assert got == [0.5, 0.25]


def test_the_programs_own_values_are_dispatched_and_reported(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet(config={"lr": 0.1})
    got: list[float] = []
    made.handler("lr")(_to(got))
    connection, _ = weaver.welcome()

    assert made._dispatch_handlers({"lr": "0.5"}) == {}
    refused = made._dispatch_handlers({"lr": "quick", "beta": 1})

    assert got == [0.5]
    assert connection.rows(1)[0][2:] == [None, None, None, {}, {"lr": 0.5}]
    assert refused.keys() == {"lr", "beta"}
    assert len(messages(caplog)) == 2
    ident = weaver.command(connection, "update_config", lr=0.25)
    come(made)
    made.check_and_apply_updates()
    assert connection.ack(ident)[1]["changes"] == {"lr": {"old": 0.5, "new": 0.25}}


def test_a_status_says_what_it_is_about_to_a_weaver_that_takes_it(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome(status_types=True)
    made.publish_status({"status_type": "batch_update", "current_step": 3})
    made.publish_status(4)
    made.publish_status(5, status_type="e" * 300)

    rows = connection.rows(3)

    assert [row[2:] for row in rows] == [
        [3, None, None, {}, None, "batch_update"],
        [4, None, None, {}, None],
        [5, None, None, {}, None, "e" * 200],
    ]


def test_a_value_that_was_taken_and_then_dispatched_is_acknowledged_as_its_handler_had_it(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet(config={"lr": 0.1})
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", lr="0.5", beta=1, gamma=2)
    come(made)
    command = made.get_config_update()
    assert command is not None
    made.handler("lr")(_to([]))
    refused = made._dispatch_handlers({"lr": "0.5", "beta": 1})

    said = connection.ack(ident)[1]

    assert refused.keys() == said["refused"].keys() == {"beta"}
    assert (said["ok"], said["taken"]) == (False, ["gamma"])
    assert said["changes"]["lr"] == {"old": 0.1, "new": 0.5}


def test_a_value_that_the_program_took_is_acknowledged_without_another_call(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", beta=1)
    come(made)
    assert made.get_config_update() is not None
    assert connection.ack(ident)[1]["taken"] == ["beta"]
