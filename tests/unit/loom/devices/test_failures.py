"""GPUs that have failed: by events of NVML, and by what their status says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loom.devices import DeviceFailure, device_status, local_devices
from loom.devices.failures import FailureWatch
from tests.unit.loom.devices.conftest import Install

BOUND = 30.0  # seconds; an event is known in milliseconds


@contextmanager
def watching(*uuids: str) -> Iterator[FailureWatch]:
    """Watch the local devices, or those of the uuids."""
    watch = FailureWatch([device for device in local_devices() if not uuids or device.uuid in uuids])
    yield watch
    watch.close()


@pytest.mark.parametrize(
    ("xid", "reason"),
    [(79, "Xid 79: GPU has fallen off the bus"), (95, "Xid 95: uncontained memory error"), (1234, "Xid 1234")],
)
def test_an_xid_fails_its_gpu_alone(install: Install, xid: int, reason: str) -> None:
    gpus = install(8)
    with watching() as watch:
        gpus[3].report_xid(xid)

        assert watch.wait(BOUND) == [DeviceFailure("GPU-3", reason)]
        assert watch.wait(0) == []
        assert watch.xids == {"GPU-3": xid}


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_an_xid_that_a_program_causes_is_noted_and_fails_nothing(
    install: Install, caplog: pytest.LogCaptureFixture, xid: int
) -> None:
    gpus = install(1)
    with watching() as watch, caplog.at_level(logging.WARNING, "loom"):
        gpus[0].report_xid(xid)

        assert watch.wait(BOUND) == []
        assert watch.xids == {"GPU-0": xid}
    assert f"Xid {xid} on GPU-0, which a program causes" in caplog.text


def test_a_user_can_have_further_xids_ignored(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_IGNORED_XIDS", "63, 94,")
    gpus = install(1)
    with watching() as watch:
        gpus[0].report_xid(94)
        assert watch.wait(BOUND) == []
        gpus[0].report_xid(95)
        assert [one.device for one in watch.wait(BOUND)] == ["GPU-0"]


def test_a_double_bit_error_fails_its_gpu(install: Install) -> None:
    gpus = install(2)
    with watching() as watch:
        gpus[1].report_double_bit_error()

        assert watch.wait(BOUND) == [DeviceFailure("GPU-1", "an ECC error that cannot be corrected")]


def test_of_a_gpu_in_slices_an_xid_fails_the_slice_that_it_names_or_all(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = install(1)
    gpus.add("MIG-1", parent=0, slice_id=1)
    gpus.add("MIG-2", parent=0, slice_id=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    with watching() as watch:
        gpus[0].report_xid(95, slice_id=2)
        assert [one.device for one in watch.wait(BOUND)] == ["MIG-2"]

        gpus[0].report_xid(79)
        assert [one.device for one in watch.wait(BOUND)] == ["MIG-1", "MIG-2"]


def test_a_gpu_that_is_lost_fails_once_each_time(install: Install) -> None:
    gpus = install(2)
    known = local_devices()
    with watching() as watch:
        assert watch.judge(device_status(known)) == []

        gpus[0].lost = 1
        assert watch.judge(device_status(known)) == [DeviceFailure("GPU-0", "it does not answer: GPU is lost")]
        assert watch.judge(device_status(known)) == []

        gpus[0].lost = 0
        assert watch.judge(device_status(known)) == []
        gpus[0].lost = 1
        assert [one.device for one in watch.judge(device_status(known))] == ["GPU-0"]


def test_new_uncorrectable_errors_fail_a_gpu_and_old_ones_do_not(install: Install) -> None:
    gpus = install(1)
    gpus[0].ecc_uncorrected = 5
    with watching() as watch:
        assert watch.judge(device_status()) == []

        gpus[0].ecc_uncorrected = 7
        assert watch.judge(device_status()) == [DeviceFailure("GPU-0", "2 ECC errors that cannot be corrected")]
        assert watch.judge(device_status()) == []


def test_of_a_gpu_without_events_only_the_status_is_judged(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = install(2)
    gpus[0].lack("events")
    with caplog.at_level(logging.INFO, "loom"), watching("GPU-0") as watch:
        assert not watch.has_events
        assert "GPU-0 reports no events" in caplog.text
    with watching() as watch:
        assert watch.has_events


def test_a_cpu_is_watched_for_nothing() -> None:
    with watching() as watch:
        assert not watch.has_events
        assert watch.judge(device_status()) == []
