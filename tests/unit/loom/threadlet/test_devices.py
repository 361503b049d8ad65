"""Devices: GPUs as NVML tells of them (a stand-in here: there may be no GPU), and CPUs."""

from __future__ import annotations

import logging
import socket
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from loom import devices
from loom.devices import DeviceUse, LocalDevice, device_status, local_devices

HOST = socket.gethostname()


class NVMLError(Exception):
    """As pynvml's."""


@dataclass
class FakeGpu:
    uuid: str
    name: Any = "NVIDIA H200"
    total: int = 140 << 30
    used: int = 7 << 30
    busy: int = 42
    celsius: int = 61
    milliwatts: int = 350_500
    broken: set[str] = field(default_factory=set)


class FakeNvml(types.ModuleType):
    """The functions of pynvml that are used, for GPUs that a test can break."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, init_error: str = "") -> None:
        super().__init__("pynvml")
        self.gpus = list(gpus)
        self.init_error = init_error
        self.inits = 0

    def nvmlInit(self) -> None:
        self.inits += 1
        if self.init_error:
            raise NVMLError(self.init_error)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._answer("handle", self.gpus[index], lambda gpu: gpu)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return self._answer("handle", gpu, lambda gpu: gpu)
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return self._answer("uuid", gpu, lambda gpu: gpu.uuid)

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> Any:
        return self._answer("name", gpu, lambda gpu: gpu.name)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return self._answer("memory", gpu, lambda gpu: types.SimpleNamespace(total=gpu.total, used=gpu.used))

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return self._answer("utilization", gpu, lambda gpu: types.SimpleNamespace(gpu=gpu.busy))

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return self._answer("temperature", gpu, lambda gpu: gpu.celsius)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return self._answer("power", gpu, lambda gpu: gpu.milliwatts)

    def _answer(self, what: str, gpu: FakeGpu, answer: Callable[[FakeGpu], Any]) -> Any:
        if "lost" in gpu.broken:
            raise NVMLError("GPU is lost")
        if what in gpu.broken:
            raise NVMLError("Not Supported")
        return answer(gpu)


Install = Callable[..., FakeNvml]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    devices._started.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(*gpus: FakeGpu, **options: Any) -> FakeNvml:
        nvml = FakeNvml(*gpus, **options)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return install


def uuids() -> list[str]:
    return [device.uuid for device in local_devices()]


def test_gpus_are_described(install: Install) -> None:
    install(FakeGpu("GPU-a"), FakeGpu("GPU-b", name=b"Tesla V100", total=16 << 30))

    assert local_devices() == [
        LocalDevice("GPU-a", "gpu", HOST, "NVIDIA H200", 140 << 30),
        LocalDevice("GPU-b", "gpu", HOST, "Tesla V100", 16 << 30),
    ]
    assert local_devices()[0].to_body() == {
        "uuid": "GPU-a",
        "kind": "gpu",
        "server": HOST,
        "type": "NVIDIA H200",
        "memory": 140 << 30,
    }


def test_how_gpus_are_used(install: Install) -> None:
    install(FakeGpu("GPU-a"))

    assert device_status() == {"GPU-a": DeviceUse(0.42, 7 << 30, 61.0, 350.5)}
    assert device_status()["GPU-a"].as_dict() == {
        "utilization": 0.42,
        "memory_used": 7 << 30,
        "temperature": 61.0,
        "power": 350.5,
    }


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", ["GPU-a1"]),
        ("2,0", ["GPU-b1", "GPU-a1"]),
        (" 1 , 2 ", ["GPU-a2", "GPU-b1"]),
        ("GPU-b1", ["GPU-b1"]),
        ("GPU-b", ["GPU-b1"]),
        ("0,7,1", ["GPU-a1"]),
        ("0,-1,1", ["GPU-a1"]),
        ("1,GPU-nowhere,0", ["GPU-a2"]),
        ("1,GPU-a,0", ["GPU-a2"]),
        ("MIG-1", ["MIG-1"]),
    ],
)
def test_cuda_visible_devices_is_honoured(
    install: Install, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]
) -> None:
    install(FakeGpu("GPU-a1"), FakeGpu("GPU-a2"), FakeGpu("GPU-b1"), FakeGpu("MIG-1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert uuids() == expected


@pytest.mark.parametrize("visible", ["", "-1", "none"])
def test_where_no_gpu_is_visible_the_cpu_is_the_device(
    install: Install, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    install(FakeGpu("GPU-a"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert uuids() == [f"CPU-{HOST}-0"]


def test_what_a_gpu_does_not_know_is_none(install: Install) -> None:
    install(FakeGpu("GPU-a", broken={"power", "temperature", "utilization"}))

    assert device_status() == {"GPU-a": DeviceUse(None, 7 << 30, None, None)}


def test_a_gpu_that_does_not_say_its_name_is_a_gpu(install: Install) -> None:
    install(FakeGpu("GPU-a", broken={"name", "memory"}))

    assert local_devices() == [LocalDevice("GPU-a", "gpu", HOST, "GPU", 0)]


def test_a_gpu_that_falls_off_the_bus_is_told_of(install: Install) -> None:
    nvml = install(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    known = local_devices()

    nvml.gpus[0].broken.add("lost")

    status = device_status(known)
    assert status["GPU-a"] == DeviceUse(error="GPU is lost")
    assert status["GPU-a"].as_dict() == dict.fromkeys(["utilization", "memory_used", "temperature", "power"])
    assert status["GPU-b"].utilization == 0.42
    assert uuids() == ["GPU-b"]


def test_a_gpu_that_nvml_no_longer_lists_is_told_of(install: Install) -> None:
    nvml = install(FakeGpu("GPU-a"))
    known = local_devices()

    nvml.gpus.clear()

    assert device_status(known) == {"GPU-a": DeviceUse(error="Not Found")}


def test_a_list_of_gpus_that_cannot_be_had_is_none(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(FakeGpu("GPU-a"))

    def fail() -> int:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", fail)

    assert uuids() == [f"CPU-{HOST}-0"]


def test_without_a_driver_the_cpu_is_the_device(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    nvml = install(FakeGpu("GPU-a"), init_error="Driver Not Loaded")

    with caplog.at_level(logging.DEBUG, "loom"):
        assert uuids() == [f"CPU-{HOST}-0"]
        assert device_status([LocalDevice("GPU-a", "gpu", HOST, "", 0)])["GPU-a"].error == "NVML does not work here"

    assert nvml.inits == 1
    assert "Driver Not Loaded" in caplog.text


def test_nvml_is_started_again_in_a_fork(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(FakeGpu("GPU-a"))
    local_devices()
    local_devices()
    assert nvml.inits == 1

    monkeypatch.setattr(devices.os, "getpid", lambda: 12345)
    local_devices()

    assert nvml.inits == 2


def test_a_cpu_slot_has_a_name_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = local_devices()
    assert device.uuid == f"CPU-{HOST}-0"
    assert (device.kind, device.server) == ("cpu", HOST)
    assert device.type
    assert device.memory > 1 << 20
    assert local_devices() == [device]

    monkeypatch.setenv("LOCAL_RANK", "3")
    assert uuids() == [f"CPU-{HOST}-3"]


def test_how_a_cpu_is_used() -> None:
    pytest.importorskip("psutil")
    device_status()

    (use,) = device_status().values()

    assert use.utilization is not None
    assert 0 <= use.utilization <= 1
    assert use.memory_used is not None
    assert use.memory_used > 1 << 20


def test_without_psutil_a_cpu_is_still_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)

    assert device_status() == {f"CPU-{HOST}-0": DeviceUse()}
