"""A threadlet's devices: their status, health and failures, as the weaver gets them; GPUs by the real pynvml."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loom.devices import DeviceUse
from loom.threadlet import Threadlet, reporting
from tests.support.nvml import Gpus, loaded
from tests.unit.loom.threadlet.fake_weaver import BOUND, FakeWeaver

Make = Callable[..., Threadlet]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "DEVICES_INTERVAL", 0.01)
    monkeypatch.setattr(reporting, "EVENT_TIMEOUT", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpus]:
    """Eight GPUs, of which a process of local rank 3 has the fourth."""
    made = Gpus(8, tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with loaded(monkeypatch, made):
        yield made


def watched(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_devices_are_reported(weaver: FakeWeaver, threadlet: Make) -> None:
    threadlet()
    connection, _ = weaver.welcome(health=True)

    _, moment, used = connection.expect("devices")

    assert abs(moment - time.time()) < BOUND
    assert set(used) == {"GPU-a"}
    assert {"utilization", "memory_used", "temperature", "power", "sm_clock"} <= set(used["GPU-a"])


def test_a_process_registers_and_reports_the_gpu_of_its_local_rank_alone(
    gpus: Gpus, weaver: FakeWeaver, threadlet: Make
) -> None:
    gpus[3].throttled = 0x40
    threadlet(devices=None)
    connection, hello = weaver.welcome(health=True)

    status = connection.expect("devices")[2]

    assert [device["uuid"] for device in hello["devices"]] == ["GPU-3"]
    assert status.keys() == {"GPU-3"}
    assert status["GPU-3"]["throttled"] == ["hw_thermal"]
    assert status["GPU-3"]["sm_clock"] == 1_980_000_000


def test_a_weaver_that_takes_no_health_gets_four_numbers_and_no_failure(
    gpus: Gpus, weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    gpus[3].throttled = 0x40
    threadlet(devices=None)
    connection, _ = weaver.welcome()
    gpus[3].lost = 1
    while "has failed" not in caplog.text:
        status = connection.expect("devices")[2]
        assert status["GPU-3"].keys() == {"utilization", "memory_used", "temperature", "power"}

    for _ in range(3):
        connection.expect("devices")
    assert "device_failed" not in [frame[0] for frame in connection.skipped]


def test_an_xid_is_reported_at_once_and_shown_in_the_status(
    gpus: Gpus, weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    threadlet(devices=None)
    connection, _ = weaver.welcome(health=True)
    connection.expect("devices")
    gpus[2].report_xid(79)  # another process's
    gpus[3].report_xid(79)

    _, ident, device, reason = connection.expect("device_failed")

    assert (device, reason) == ("GPU-3", "Xid 79: GPU has fallen off the bus")
    connection.send("failure_noted", ident)
    while (status := connection.expect("devices")[2])["GPU-3"].get("xid") is None:
        pass
    assert status["GPU-3"]["xid"] == 79


def test_a_gpu_that_is_lost_is_reported_with_the_reason(gpus: Gpus, weaver: FakeWeaver, threadlet: Make) -> None:
    threadlet(devices=None)
    connection, _ = weaver.welcome(health=True)
    connection.expect("devices")

    gpus[3].lost = 1

    assert connection.expect("device_failed")[2:] == ["GPU-3", "it does not answer: GPU is lost"]
    assert connection.expect("devices")[2]["GPU-3"]["error"] == "GPU is lost"


def test_a_failure_is_reported_on_each_connection_until_it_is_noted(
    gpus: Gpus, weaver: FakeWeaver, threadlet: Make
) -> None:
    threadlet(devices=None)
    connection, _ = weaver.welcome(health=True)
    connection.expect("devices")
    gpus[3].report_double_bit_error()
    failed = connection.expect("device_failed")
    connection.close()  # before the weaver has noted it

    connection, _ = weaver.welcome(health=True)
    assert connection.expect("device_failed") == failed
    connection.send("failure_noted", failed[1])
    connection.send("stack", "s1")
    connection.expect("stack")  # so that the threadlet has read what came before
    connection.close()

    connection, _ = weaver.welcome(health=True)
    for _ in range(3):
        connection.expect("devices")
    assert "device_failed" not in [frame[0] for frame in connection.skipped]


def test_a_failure_while_the_weaver_is_away_is_reported_when_it_is_back(
    gpus: Gpus, weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    threadlet(devices=None)
    connection, _ = weaver.welcome(health=True)
    connection.expect("devices")
    weaver.stop()
    gpus[3].report_xid(95)
    deadline = time.monotonic() + BOUND
    while "has failed: Xid 95" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.005)

    weaver.start()

    connection, _ = weaver.welcome(health=True)
    assert connection.expect("device_failed")[2:] == ["GPU-3", "Xid 95: uncontained memory error"]


def test_events_that_cannot_be_waited_for_are_said_once_and_waited_for_again(
    gpus: Gpus,
    weaver: FakeWeaver,
    threadlet: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import pynvml

    wait, failures = pynvml.nvmlEventSetWait, iter(range(3))

    def fail(*arguments: Any) -> Any:
        if next(failures, None) is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return wait(*arguments)

    monkeypatch.setattr(pynvml, "nvmlEventSetWait", fail)
    threadlet(devices=None)
    connection, _ = weaver.welcome(health=True)
    connection.expect("devices")
    gpus[3].report_xid(79)

    assert connection.expect("device_failed")[2] == "GPU-3"
    assert caplog.text.count("NVML's events cannot be waited for: GPU is lost") == 1


def test_the_watch_ends_with_the_threadlet(gpus: Gpus, weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(devices=None)
    connection, _ = weaver.welcome(health=True)
    connection.expect("devices")
    assert watched("loom-device-events")

    made.close()

    deadline = time.monotonic() + BOUND
    while watched("loom-device-events") or watched("loom-devices"):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_device_that_does_not_answer_is_said_once(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporting, "device_status", lambda devices: {"GPU-a": DeviceUse(error="no answer")})
    threadlet()
    connection, _ = weaver.welcome()

    for _ in range(3):
        assert connection.expect("devices")[2]["GPU-a"]["utilization"] is None
    assert caplog.text.count("the device GPU-a does not answer: no answer") == 1


def test_devices_that_cannot_be_looked_at_are_said_once(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = threading.Semaphore(0)

    def fail(devices: Any) -> Any:
        looked.release()
        raise RuntimeError("driver/library mismatch")

    monkeypatch.setattr(reporting, "device_status", fail)
    with caplog.at_level(logging.ERROR, "loom"):
        threadlet()
        connection, _ = weaver.welcome()
        for _ in range(3):
            assert looked.acquire(timeout=BOUND)

    assert connection.expect("beat")
    assert caplog.text.count("the devices cannot be looked at") == 1
