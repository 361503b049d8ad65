"""Faults that a weaver injects into this process: which are carried out, when they are told, and that they end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loom.chaos.injected import InjectedFault
from loom.chaos.injections import MAX_REMOVED, MAX_WITHDRAWN, Injections
from loom.control.commands import Command, CommandKind
from loom.errors import FaultRefused, NotFound
from loom.threadlet import Threadlet, command_applier
from tests.unit.loom.threadlet.fake_weaver import BOUND, Connection, FakeWeaver, eventually

Make = Callable[..., Threadlet]


@pytest.fixture(autouse=True)
def _own_agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only agents of the test are asked to remove faults, and only a hang makes a strike come unannounced."""
    monkeypatch.setenv("LOOM_CHAOS_DIR", str(tmp_path / "agents"))
    monkeypatch.setattr(command_applier, "FLUSH_TIMEOUT", BOUND)


@pytest.fixture
def made(threadlet: Make) -> Threadlet:
    return threadlet(injectable=True)


@pytest.fixture
def connection(weaver: FakeWeaver, made: Threadlet) -> Connection:
    return weaver.welcome()[0]


def inject(
    weaver: FakeWeaver, connection: Connection, fault: str, /, duration: float | None = None, **params: Any
) -> str:
    """Tell the threadlet to suffer a fault; return the command's id."""
    lasts = {} if duration is None else {"duration": duration}
    return weaver.command(connection, "inject", fault=fault, params=params, **lasts)


def remove(injections: Injections, ident: str) -> None:
    """Remove a fault that is not there yet."""
    with pytest.raises(NotFound):
        injections.inject(Command("removal", CommandKind.REMOVE_FAULT, {"injection": ident}))


def refusal(connection: Connection, ident: str) -> str:
    """Why a command was refused."""
    made = connection.ack(ident)[1]
    assert not made["ok"]
    return str(made["reason"])


@pytest.mark.parametrize("way", ["calls", "block"])
def test_a_slow_rank_is_slow_in_each_step_until_that_is_removed(
    weaver: FakeWeaver, made: Threadlet, connection: Connection, way: str
) -> None:
    slow = inject(weaver, connection, "slow_rank", 600.0, seconds=0.0)
    eventually(lambda: made._pending)
    made.check_and_apply_updates()
    assert connection.ack(slow)[1]["evidence"] == {"pid": os.getpid(), "seconds": 0.0}

    for step in range(3):
        if way == "calls":
            made.publish_status(step=step)
            made.check_and_apply_updates()
        else:
            with made.step(step):
                pass
    removal = weaver.command(connection, "remove_fault", injection=slow)

    evidence = {"pid": os.getpid(), "slow_steps": 3}
    assert connection.ack(removal)[1]["evidence"] == evidence
    assert ["fault", slow, evidence] in connection.skipped
    assert made._each_step == []


def test_an_exception_is_told_and_raised_before_the_step_is_made(
    weaver: FakeWeaver, made: Threadlet, connection: Connection
) -> None:
    ident = inject(weaver, connection, "exception", text="on purpose")
    eventually(lambda: made._pending)

    with pytest.raises(InjectedFault, match="on purpose"), made.step(7):
        pytest.fail("the step was made")

    assert connection.ack(ident)[1]["evidence"] == {"pid": os.getpid(), "raises": "InjectedFault: on purpose"}


def test_a_fault_strikes_though_the_weaver_is_gone_meanwhile(
    weaver: FakeWeaver, made: Threadlet, connection: Connection
) -> None:
    ident = inject(weaver, connection, "exception")
    eventually(lambda: made._pending)
    weaver.stop()
    eventually(lambda: not made.connected, "the loss of the connection")

    with pytest.raises(InjectedFault, match="a fault was injected into this step"):
        made.check_and_apply_updates()

    weaver.start()
    again, hello = weaver.welcome()
    assert hello["applied"] == [ident]
    again.send("command", ident, "inject", {"fault": "exception", "params": {}})
    assert again.ack(ident)[1]["ok"]


def test_a_fault_that_holds_the_training_up_is_told_before_it_and_after_it(
    weaver: FakeWeaver, made: Threadlet, connection: Connection
) -> None:
    ident = inject(weaver, connection, "gil_deadlock", 0.01)
    eventually(lambda: made._pending)
    made.check_and_apply_updates()

    assert connection.ack(ident)[1]["evidence"] == {"pid": os.getpid(), "seconds": 0.01}
    _, of, evidence = connection.expect("fault")
    assert of == ident
    assert evidence["held"] >= 0.01


def test_a_fault_of_the_host_waits_for_no_step(
    weaver: FakeWeaver, made: Threadlet, connection: Connection, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_1"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"weights" * 100)

    ident = inject(weaver, connection, "corrupt_checkpoint", 600.0, folder=str(checkpoint.parent))
    evidence = connection.ack(ident)[1]["evidence"]
    assert evidence["checkpoint"] == str(checkpoint)
    assert checkpoint.read_bytes() != b"weights" * 100
    removal = weaver.command(connection, "remove_fault", injection=ident)

    _, of, removed = connection.expect("fault")
    assert of == ident
    assert removed["after"] == evidence["before"]
    assert checkpoint.read_bytes() == b"weights" * 100
    acks = [frame for frame in connection.skipped if frame[0] == "ack" and frame[1] == removal]
    answer = acks[0][2:] if acks else connection.ack(removal)
    assert answer[1]["evidence"] == {"injection": ident, "there": False}


def test_a_removal_that_overtakes_its_injection_prevents_it() -> None:
    told: list[Any] = []
    each_step: list[Any] = []
    injections = Injections({}, each_step, lambda *removed: told.append(removed))

    remove(injections, "c0")
    with pytest.raises(FaultRefused, match="removed before it was injected"):
        injections.inject(Command("c0", CommandKind.INJECT, {"fault": "slow_rank"}))

    assert told == [("c0", {"pid": os.getpid(), "injected": False})]
    assert each_step == []


def test_a_removal_during_its_injection_ends_it() -> None:
    told: list[Any] = []
    undone: list[bool] = []

    def hook(params: Any) -> Callable[[], None]:
        remove(injections, "c0")
        return lambda: undone.append(True)

    injections = Injections({"slow_rank": hook}, [], lambda *removed: told.append(removed))
    injections.inject(Command("c0", CommandKind.INJECT, {"fault": "slow_rank"}))

    assert undone == [True]
    assert [injection for injection, _ in told] == ["c0"]


def test_only_so_many_removals_are_remembered() -> None:
    injections = Injections({}, [], lambda *removed: None)
    for number in range(MAX_WITHDRAWN + 1):
        remove(injections, f"c{number}")

    evidence, _ = injections.inject(Command("c0", CommandKind.INJECT, {"fault": "slow_rank", "duration": 0.01}))
    assert "injected" not in evidence
    with pytest.raises(FaultRefused):
        injections.inject(Command("c1", CommandKind.INJECT, {"fault": "slow_rank"}))


def test_a_kill_is_only_prepared_until_it_was_told() -> None:
    told: list[Any] = []
    injections = Injections({}, [], lambda *removed: told.append(removed))

    evidence, strike = injections.inject(Command("c0", CommandKind.INJECT, {"fault": "sigkill"}))

    assert evidence == {"pid": os.getpid()}
    assert strike is not None
    assert told == []


@pytest.mark.parametrize("returned", [None, {"groups": 2}])
def test_the_training_says_how_a_fault_is_carried_out_and_removed(
    weaver: FakeWeaver, made: Threadlet, connection: Connection, returned: dict[str, Any] | None
) -> None:
    @made.on_fault("pg_abort")
    def abort(params: dict[str, Any]) -> Callable[[], dict[str, Any] | None]:
        return lambda: returned

    ident = inject(weaver, connection, "pg_abort")
    eventually(lambda: made._pending)
    made.check_and_apply_updates()
    assert connection.ack(ident)[1]["evidence"] == {"pid": os.getpid(), "by": "abort"}
    removal = weaver.command(connection, "remove_fault", injection=ident)

    assert connection.ack(removal)[1] == {
        "ok": True,
        "reason": None,
        "changes": {},
        "refused": {},
        **({"evidence": returned} if returned else {}),
    }


def test_a_fault_that_the_training_cannot_undo_is_not_there_to_be_removed(
    weaver: FakeWeaver, made: Threadlet, connection: Connection
) -> None:
    made.on_fault("pg_abort")(lambda params: None)
    ident = inject(weaver, connection, "pg_abort")
    eventually(lambda: made._pending)
    made.check_and_apply_updates()
    assert connection.ack(ident)[1]["ok"]

    removal = weaver.command(connection, "remove_fault", injection=ident)

    assert "no fault with the id 'c0' is there on this host" in refusal(connection, removal)


def test_what_goes_wrong_with_a_fault_refuses_it_and_the_training_goes_on(
    weaver: FakeWeaver, made: Threadlet, connection: Connection
) -> None:
    @made.on_fault("nan_loss")
    def spoil(params: dict[str, Any]) -> None:
        raise KeyError("loss")

    failing = inject(weaver, connection, "nan_loss")
    unknown = inject(weaver, connection, "meteor")
    eventually(lambda: len(made._pending) == 2)
    made.check_and_apply_updates()

    assert refusal(connection, failing) == "KeyError: 'loss'"
    assert refusal(connection, unknown).startswith("WrongArguments: there is no fault 'meteor'")


@pytest.mark.parametrize(
    ("kind", "params"), [("inject", {"fault": "exception"}), ("remove_fault", {"injection": "c9"})]
)
def test_a_process_that_is_not_marked_takes_no_command_about_faults(
    weaver: FakeWeaver, threadlet: Make, kind: str, params: dict[str, Any]
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, kind, **params)
    eventually(lambda: made._pending)
    made.check_and_apply_updates()

    assert refusal(connection, ident) == "train_0 is not injectable: make its threadlet injectable=True"


def test_a_weaver_that_is_back_is_told_which_faults_are_gone_the_last_of_them(
    weaver: FakeWeaver, made: Threadlet, connection: Connection
) -> None:
    faults = [inject(weaver, connection, "slow_rank", 600.0, seconds=0.0) for _ in range(MAX_REMOVED + 1)]
    eventually(lambda: len(made._pending) == len(faults))
    made.check_and_apply_updates()
    for ident in faults:
        connection.ack(weaver.command(connection, "remove_fault", injection=ident))

    weaver.stop()
    weaver.start()
    _, hello = weaver.welcome()

    assert hello["removed"] == {ident: {"pid": os.getpid(), "slow_steps": 0} for ident in faults[1:]}
