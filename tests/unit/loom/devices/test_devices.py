"""The devices that a process sees, which are its own, and how they are used: GPUs by the real pynvml, and CPUs."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys

import pytest

from loom.devices import (
    DeviceUse,
    LocalDevice,
    ProcessUse,
    device_status,
    local_devices,
    own_devices,
    own_torch_device,
)
from tests.unit.loom.devices.conftest import Install

HOST = socket.gethostname()
CPU = f"CPU-{HOST}-0"


def uuids() -> list[str]:
    return [device.uuid for device in local_devices()]


def test_gpus_are_described(install: Install) -> None:
    gpus = install(2)
    gpus[1].name, gpus[1].memory_total = b"Tesla V100", 16 << 30

    assert local_devices() == [
        LocalDevice("GPU-0", "gpu", HOST, "NVIDIA H200", 140 << 30),
        LocalDevice("GPU-1", "gpu", HOST, "Tesla V100", 16 << 30),
    ]
    assert local_devices()[0].to_body() == {
        "uuid": "GPU-0",
        "kind": "gpu",
        "server": HOST,
        "type": "NVIDIA H200",
        "memory": 140 << 30,
    }


def test_how_a_gpu_is_used_and_how_well_it_is(install: Install) -> None:
    gpu = install(1)[0]
    gpu.ecc_corrected, gpu.ecc_uncorrected = 12, 1
    gpu.throttled = 0x1 | 0x4 | 0x40  # idle, which slows nothing down, software's power cap, the hardware's heat
    gpu.run((101, 1 << 30, 5), (102, 6 << 30, 37))

    assert device_status() == {
        "GPU-0": DeviceUse(
            utilization=0.42,
            memory_used=7 << 30,
            temperature=61.0,
            power=350.5,
            sm_clock=1_980_000_000,
            memory_clock=3_201_000_000,
            ecc_corrected=12,
            ecc_uncorrected=1,
            throttled=("power_cap", "hw_thermal"),
            processes=(ProcessUse(102, 6 << 30, 0.37), ProcessUse(101, 1 << 30, 0.05)),
        )
    }


def test_a_report_has_all_numbers_and_what_there_is_of_the_rest(install: Install) -> None:
    gpu = install(1)[0]
    numbers = {"utilization": 0.42, "memory_used": 7 << 30, "temperature": 61.0, "power": 350.5}
    numbers |= {"sm_clock": 1_980_000_000, "memory_clock": 3_201_000_000, "ecc_corrected": 0, "ecc_uncorrected": 0}
    assert device_status()["GPU-0"].as_dict() == numbers

    gpu.throttled = 0x20
    gpu.run((7, 1024, 3))
    rest = {"throttled": ["thermal"], "processes": [{"pid": 7, "memory": 1024, "utilization": 0.03}]}
    assert device_status()["GPU-0"].as_dict() == numbers | rest

    gpu.lost = 1
    (lost,) = device_status([LocalDevice("GPU-0", "gpu", HOST, "", 0)]).values()
    assert lost.as_dict() == dict.fromkeys(numbers) | {"error": "GPU is lost"}


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
    gpus = install(0)
    for uuid in ("GPU-a1", "GPU-a2", "GPU-b1"):
        gpus.add(uuid)
    gpus.add("MIG-1", parent=0, slice_id=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert uuids() == expected


@pytest.mark.parametrize("visible", ["", "-1", "none"])
def test_if_no_gpu_is_visible_the_cpu_is_the_device(
    install: Install, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    install(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert uuids() == [CPU]


@pytest.mark.parametrize(
    ("rank", "visible", "own"),
    [
        (None, None, ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]),
        ("2", None, ["GPU-2"]),
        ("1", "3,2", ["GPU-2"]),
        ("5", None, ["GPU-1"]),
        ("3", "2", ["GPU-2"]),
        ("3", "MIG-a", ["MIG-a"]),
    ],
)
def test_the_local_rank_tells_a_process_its_own_gpu(
    install: Install, monkeypatch: pytest.MonkeyPatch, rank: str | None, visible: str | None, own: list[str]
) -> None:
    gpus = install(4)
    gpus.add("MIG-a", parent=1, slice_id=2)
    for name, value in {"LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": visible}.items():
        if value is not None:
            monkeypatch.setenv(name, value)

    assert [device.uuid for device in own_devices()] == own


@pytest.mark.parametrize(
    ("device", "rank", "visible", "own"),
    [
        ("cuda", "3", None, "cuda:3"),
        ("cuda", "3", "0,1,2,3", "cuda:3"),
        ("cuda", "3", "GPU-3", "cuda:0"),
        ("cuda", None, None, "cuda:0"),
        ("cuda:1", "3", None, "cuda:1"),
        ("cpu", "3", None, "cpu"),
    ],
)
def test_torch_gets_the_gpu_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, device: str, rank: str | None, visible: str | None, own: str
) -> None:
    for name, value in {"LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": visible}.items():
        if value is not None:
            monkeypatch.setenv(name, value)

    assert own_torch_device(device) == own


@pytest.mark.parametrize(("rank", "own"), [("1", "cuda:1"), ("2", "cuda:0"), ("5", "cuda:1")])
def test_processes_in_excess_of_the_gpus_share_them(
    install: Install, monkeypatch: pytest.MonkeyPatch, rank: str, own: str
) -> None:
    install(2)
    monkeypatch.setenv("LOCAL_RANK", rank)

    assert own_torch_device("cuda") == own
    assert own_devices()[0].uuid == f"GPU-{own[-1]}"


def test_a_mig_slice_has_its_own_memory_and_the_sensors_of_its_gpu(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = install(1)
    part = gpus.add("MIG-1", parent=0, slice_id=3)
    part.memory_used, gpus[0].ecc_uncorrected = 1 << 30, 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")

    use = device_status()["MIG-1"]

    assert (use.memory_used, use.utilization) == (1 << 30, None)
    assert (use.temperature, use.power, use.sm_clock, use.ecc_uncorrected) == (61.0, 350.5, 1_980_000_000, 2)


def test_what_a_gpu_does_not_know_is_none(install: Install) -> None:
    install(1)[0].lack("power", "temperature", "utilization", "clocks", "ecc", "throttling", "processes")

    assert device_status() == {"GPU-0": DeviceUse(memory_used=7 << 30)}


def test_a_gpu_that_does_not_say_its_name_is_a_gpu(install: Install) -> None:
    install(1)[0].lack("name", "memory")

    assert local_devices() == [LocalDevice("GPU-0", "gpu", HOST, "GPU", 0)]


def test_a_gpu_without_a_uuid_is_left_out(install: Install) -> None:
    install(2)[0].lack("uuid")

    assert uuids() == ["GPU-1"]


def test_a_gpu_that_falls_off_the_bus_is_lost(install: Install) -> None:
    gpus = install(2)
    known = local_devices()

    gpus[0].lost = 1

    status = device_status(known)
    assert status["GPU-0"] == DeviceUse(error="GPU is lost", lost=True)
    assert status["GPU-1"].utilization == 0.42
    assert uuids() == ["GPU-1"]


def test_a_gpu_that_nvml_no_longer_lists_is_lost(install: Install) -> None:
    gpus = install(1)
    known = local_devices()

    gpus[0].unlisted = 1

    assert device_status(known) == {"GPU-0": DeviceUse(error="Not Found", lost=True)}


def test_a_gpu_that_only_does_not_answer_this_time_is_not_lost(install: Install) -> None:
    gpus = install(1)
    known = local_devices()

    gpus[0].lack("memory")

    assert device_status(known) == {"GPU-0": DeviceUse(error="Not Supported")}


def test_without_a_list_of_gpus_the_cpu_is_the_device(install: Install) -> None:
    install(1).state.count_error = 999

    assert uuids() == [CPU]


def test_without_a_driver_the_cpu_is_the_device(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(1).state.init_error = 9

    with caplog.at_level(logging.DEBUG, "loom"):
        assert uuids() == [CPU]
        assert device_status([LocalDevice("GPU-a", "gpu", HOST, "", 0)])["GPU-a"].error == "NVML does not work here"

    assert caplog.text.count("Driver Not Loaded") == 1


def test_without_nvml_the_cpu_is_the_device() -> None:
    """In a process of its own, whose pynvml looks for the library of a real driver."""
    pytest.importorskip("pynvml")
    program = (
        "import json; from loom.devices import local_devices; print(json.dumps([d.kind for d in local_devices()]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LOOM_TEST_NVML"}

    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)

    assert json.loads(ended.stdout) == ["cpu"]


def test_without_pynvml_the_cpu_is_the_device(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(1)
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert uuids() == [CPU]


def test_a_fork_starts_nvml_for_itself(install: Install) -> None:
    install(1)
    assert uuids() == ["GPU-0"]

    pid = os.fork()
    if pid == 0:
        os._exit(0 if uuids() == ["GPU-0"] else 1)

    assert os.waitpid(pid, 0)[1] == 0


def test_a_cpu_slot_has_a_name_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = local_devices()
    assert device.uuid == CPU
    assert (device.kind, device.server) == ("cpu", HOST)
    assert device.type
    assert device.memory > 1 << 20
    assert local_devices() == [device]

    monkeypatch.setenv("LOCAL_RANK", "3")
    assert uuids() == [f"CPU-{HOST}-3"]
    assert [one.uuid for one in own_devices()] == [f"CPU-{HOST}-3"]


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

    assert device_status() == {CPU: DeviceUse()}
