"""What a threadlet tells a training of its devices."""

from __future__ import annotations

from tests.unit.loom.threadlet.fake_weaver import (
    OK,
    FakeWeaver,
    Make,
    come,
)


def test_a_failed_device_is_told_at_the_boundary(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    told: list[tuple[str, str]] = []

    @made.on_device_failure
    def fail(device: str, reason: str) -> None:
        told.append((device, reason))

    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "device_failed", device="GPU-a", reason="ECC errors")
    come(made)
    assert told == []
    made.check_and_apply_updates()

    assert told == [("GPU-a", "ECC errors")]
    assert connection.ack(ident)[1] == OK


def test_a_failure_that_nobody_acts_on_is_refused(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "device_failed", device="GPU-a", reason="ECC errors")
    come(made)
    made.check_and_apply_updates()

    answer = connection.ack(ident)[1]
    assert not answer["ok"]
    assert "nobody acts on it: this replica has no function for device_failed" in answer["reason"]


def test_a_device_is_taken_out_of_use_and_back(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    first = weaver.command(connection, "deactivate_device", device="GPU-a")
    come(made)
    made.check_and_apply_updates()
    assert "no function for deactivate_device" in connection.ack(first)[1]["reason"]

    told: list[tuple[str, bool]] = []
    made.on_device_change(lambda device, active: told.append((device, active)))
    idents = [weaver.command(connection, kind, device="GPU-a") for kind in ("deactivate_device", "reactivate")]
    come(made, 2)
    made.check_and_apply_updates()

    assert told == [("GPU-a", False), ("GPU-a", True)]
    assert [connection.ack(ident)[1] for ident in idents] == [OK, OK]


def test_of_the_devices_of_a_group_a_replica_hears_of_its_own(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    told: list[tuple[str, bool]] = []
    made.on_device_change(lambda device, active: told.append((device, active)))
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "deactivate_device", group="train", devices=["GPU-a", "GPU-b"])
    come(made)
    made.check_and_apply_updates()

    assert connection.ack(ident)[1] == OK
    assert told == [("GPU-a", False)]


def test_what_a_callback_raises_is_answered_and_the_others_are_called(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    told: list[str] = []

    @made.on_device_failure
    def first(device: str, reason: str) -> None:
        raise RuntimeError("no spare")

    made.on_device_failure(lambda device, reason: told.append(device))
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "device_failed", device="GPU-a", reason="ECC errors")
    come(made)
    made.check_and_apply_updates()

    assert told == ["GPU-a"]
    assert connection.ack(ident)[1] == OK | {"ok": False, "reason": "first raised RuntimeError: no spare"}
