"""Commands that a function of the program carries out: save and evaluate."""

from __future__ import annotations

import threading

import pytest

from loom.control.handshake import EVERYTHING_OFFERED
from loom.threadlet import Deferred, Threadlet, time_accounting
from tests.unit.loom.threadlet.fake_weaver import BOUND, OK, FakeWeaver, Make, come

KINDS = ("save", "evaluate")


def offer(made: Threadlet, kind: str, function: object) -> None:
    getattr(made, f"on_{kind}")(function)


@pytest.mark.parametrize("kind", KINDS)
def test_the_function_runs_at_a_step_boundary_before_the_acknowledgement(
    weaver: FakeWeaver, threadlet: Make, kind: str
) -> None:
    made = threadlet()
    ran: list[tuple[str, ...]] = []
    offer(made, kind, lambda: ran.append(tuple(made._inbox.applied())))
    connection, _ = weaver.welcome()
    made.publish_status(step=3)
    command = weaver.command(connection, kind)
    come(made)
    assert ran == []

    made.check_and_apply_updates()

    assert connection.ack(command) == [3, OK]
    assert ran == [()]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_function_the_command_is_refused(weaver: FakeWeaver, threadlet: Make, kind: str) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    command = weaver.command(connection, kind)
    come(made)

    made.check_and_apply_updates()

    reason = f"nothing here {kind}s: the training offers no function for it, as @t.on_{kind} makes one"
    assert connection.ack(command)[1] == {**OK, "ok": False, "reason": reason}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_function_refuses_the_command_and_the_training_goes_on(
    weaver: FakeWeaver, threadlet: Make, kind: str
) -> None:
    def full() -> None:
        raise OSError("no space left on device")

    made = threadlet()
    offer(made, kind, full)
    connection, _ = weaver.welcome()
    command = weaver.command(connection, kind)
    come(made)

    assert made.check_and_apply_updates()

    answer = connection.ack(command)[1]
    assert not answer["ok"]
    assert answer["reason"] == f"the function for {kind} raised OSError: no space left on device"


@pytest.mark.parametrize("saved", [True, False])
def test_a_deferred_save_is_acknowledged_with_its_verdict(weaver: FakeWeaver, threadlet: Make, saved: bool) -> None:
    later = Deferred()
    made = threadlet()
    made.on_save(lambda: later)
    connection, _ = weaver.welcome()
    command = weaver.command(connection, "save")
    come(made)
    made.check_and_apply_updates()
    assert command not in made._inbox.applied()

    later.applied(7) if saved else later.refuse("the disk is full")

    why = "save: the disk is full"
    refused = {**OK, "ok": False, "reason": why, "refused": {"save": why}}
    assert connection.ack(command) == ([7, OK] if saved else [None, refused])


def test_a_deferred_save_is_refused_when_the_training_ends_first(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    made.on_save(Deferred)
    connection, _ = weaver.welcome()
    command = weaver.command(connection, "save")
    come(made)
    made.check_and_apply_updates()

    closing = threading.Thread(target=made.close)
    closing.start()

    assert connection.ack(command)[1]["reason"] == "save: the training ended before it was applied"
    connection.close()
    closing.join(BOUND)


def test_a_save_is_carried_out_during_a_pause(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    saved: list[bool] = []
    made.on_save(lambda: saved.append(made.paused))
    connection, _ = weaver.welcome()
    commands = [weaver.command(connection, kind) for kind in ("pause", "save", "resume")]
    come(made, 3)

    made.wait_while_paused()

    assert all(connection.ack(command)[1]["ok"] for command in commands[1:])
    assert saved == [True]


def test_a_loop_that_gets_its_commands_saves_by_itself(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    command = weaver.command(connection, "save")
    come(made)

    assert made.get_config_update() == {"command_type": "save", "params": {}, "_is_weaver_command": True}

    assert connection.ack(command)[1] == {**OK, "taken": ["save"]}


def test_the_time_of_a_save_counts_as_that_of_a_checkpoint(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time_accounting, "monotonic", lambda: now[0])
    made = threadlet()
    made.on_save(lambda: now.__setitem__(0, now[0] + 5))
    connection, _ = weaver.welcome()
    weaver.command(connection, "save")
    come(made)

    made.check_and_apply_updates()

    assert made._account().by_reason["checkpoint"] == 5


def test_what_nothing_does_is_said_beforehand_and_taken_back_when_a_function_comes(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    connection, hello = weaver.welcome(offers=True)
    for _ in range(2):
        made.check_and_apply_updates()
    _, refused, any_key = connection.expect("offers")
    made.on_save(lambda: None)
    _, later, _ = connection.expect("offers")

    assert hello["offers"] == [{}, True]  # its program has not begun
    assert set(refused) == set(KINDS)
    assert refused["save"] == "nothing here saves: the training offers no function for it, as @t.on_save makes one"
    assert not any_key
    assert set(later) == {"evaluate"}


def test_a_program_that_takes_commands_itself_refuses_none_beforehand(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    weaver.welcome(offers=True)
    for number in range(3):
        made.publish_status(number)
        made.get_config_update()

    assert made.offers() == EVERYTHING_OFFERED


def test_a_function_that_cannot_run_now_is_not_offered_and_not_called(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    reason: list[str | None] = ["this Trainer has no eval_dataset"]
    made.offer_action("evaluate", lambda: pytest.fail("called"), lambda: reason[0])
    connection, _ = weaver.welcome()
    for _ in range(2):
        made.check_and_apply_updates()
    refused = made.offers().refused["evaluate"]
    command = weaver.command(connection, "evaluate")
    come(made)
    made.check_and_apply_updates()
    reason[0] = None

    assert refused == connection.ack(command)[1]["reason"] == "this Trainer has no eval_dataset"
    assert "evaluate" not in made.offers().refused


def test_an_older_weaver_is_not_told_of_offers(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    for _ in range(3):
        made.check_and_apply_updates()
        connection.expect("beat")

    assert "offers" not in [frame[0] for frame in connection.skipped]
