"""The devices of this process: GPUs through NVML, or else the CPU.

Loom queries NVML through ``pynvml`` (the ``gpu`` extra), which needs neither torch nor CUDA and sees what a
training process does not: temperature, power, and the use by other processes. psutil reports the same for a CPU;
without psutil a CPU is still a device, with fewer numbers.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loom.control.introduction import Device as LocalDevice

__all__ = ["DeviceUse", "LocalDevice", "device_status", "local_devices"]

_log = logging.getLogger("loom")


@dataclass(frozen=True)
class DeviceUse:
    """The current use of a device. None stands for an unknown value."""

    utilization: float | None = None
    """Share of the last moments in which the device was busy, 0 to 1."""
    memory_used: int | None = None
    """Bytes."""
    temperature: float | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts."""
    error: str | None = None
    """Why the use is unknown: the GPU is gone, or an error of NVML."""

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for the weaver, without the error."""
        numbers = asdict(self)
        del numbers["error"]
        return numbers


def local_devices() -> list[LocalDevice]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, or its CPU slot if there are none.

    GPUs are numbered as NVML does, in the order of the PCI bus (``CUDA_DEVICE_ORDER=PCI_BUS_ID``). The CPU slot is
    ``LOCAL_RANK``, which ``torchrun`` sets, or 0. A GPU that NVML lists but cannot describe is left out.
    """
    pynvml = _nvml()
    if pynvml is not None:
        gpus = [gpu for handle in _visible(pynvml) if (gpu := _described(pynvml, handle)) is not None]
        if gpus:
            return gpus
    return [_cpu()]


def device_status(devices: Sequence[LocalDevice] | None = None) -> dict[str, DeviceUse]:
    """Return the current use of devices of this host, by uuid; None stands for those of `local_devices`.

    The call queries the hardware, which may take long if a GPU is broken.
    """
    return {
        device.uuid: _gpu_use(device.uuid) if device.kind == "gpu" else _cpu_use()
        for device in (local_devices() if devices is None else devices)
    }


# -- GPUs ---------------------------------------------------------------------------------------------------


def _nvml() -> Any:
    """Return the module ``pynvml``, ready for use in this process; None if there is no NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml if _started(os.getpid(), pynvml) else None


@functools.lru_cache(maxsize=1)
def _started(pid: int, pynvml: Any) -> bool:
    """Start NVML once in each process: a fork cannot use its parent's NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.debug("no GPUs are looked for: %s", error)
        return False
    return True


def _visible(pynvml: Any) -> Iterator[Any]:
    """Yield NVML's handles of the GPUs that CUDA would show this process.

    As in CUDA, the GPUs after a number or a uuid that names none are invisible:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    count = _query(pynvml, pynvml.nvmlDeviceGetCount) or 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        for index in range(count):
            if (handle := _query(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index)) is not None:
                yield handle
        return
    for name in (part.strip() for part in chosen.split(",")):
        if name.isdecimal():
            if int(name) >= count:
                return
            handle = _query(pynvml, pynvml.nvmlDeviceGetHandleByIndex, int(name))
        else:
            handle = _by_uuid(pynvml, name, count)
        if handle is None:
            return
        yield handle


def _by_uuid(pynvml: Any, name: str, count: int) -> Any:
    """Return the handle of the only GPU or MIG slice whose uuid begins with a name, or None."""
    if name.startswith("MIG-"):
        return _query(pynvml, pynvml.nvmlDeviceGetHandleByUUID, name)
    if not name.startswith("GPU-"):
        return None
    handles = [_query(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    found = [
        handle
        for handle in handles
        if handle is not None and _text(_query(pynvml, pynvml.nvmlDeviceGetUUID, handle)).startswith(name)
    ]
    return found[0] if len(found) == 1 else None


def _described(pynvml: Any, handle: Any) -> LocalDevice | None:
    uuid = _query(pynvml, pynvml.nvmlDeviceGetUUID, handle)
    if uuid is None:
        return None
    model = _query(pynvml, pynvml.nvmlDeviceGetName, handle)
    memory = _query(pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    return LocalDevice(
        _text(uuid), "gpu", socket.gethostname(), _text(model) or "GPU", 0 if memory is None else int(memory.total)
    )


def _gpu_use(uuid: str) -> DeviceUse:
    pynvml = _nvml()
    if pynvml is None:
        return DeviceUse(error="NVML does not work here")
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return DeviceUse(error=str(error))
    rates = _query(pynvml, pynvml.nvmlDeviceGetUtilizationRates, handle)
    temperature = _query(pynvml, pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    milliwatts = _query(pynvml, pynvml.nvmlDeviceGetPowerUsage, handle)
    return DeviceUse(
        utilization=None if rates is None else rates.gpu / 100,
        memory_used=int(memory.used),
        temperature=None if temperature is None else float(temperature),
        power=None if milliwatts is None else milliwatts / 1000,
    )


def _query(pynvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if this GPU does not support the query, or does not answer."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        _log.debug("NVML: %s", error)
        return None


def _text(answer: str | bytes | None) -> str:
    """Return a text of NVML as str; older releases of pynvml return bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer or ""


# -- CPUs ---------------------------------------------------------------------------------------------------


def _cpu() -> LocalDevice:
    host = socket.gethostname()
    slot = os.environ.get("LOCAL_RANK", "")
    uuid = f"CPU-{host}-{int(slot) if slot.isdecimal() else 0}"
    return LocalDevice(uuid, "cpu", host, _cpu_model(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@functools.lru_cache(maxsize=1)
def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name" and value.strip():
                    return value.strip()
    except OSError as error:
        _log.debug("the CPU's model is not known: %s", error)
    return platform.processor() or platform.machine() or "CPU"


def _cpu_use() -> DeviceUse:
    try:
        import psutil
    except ImportError:
        return DeviceUse()
    percent = psutil.cpu_percent(interval=None)
    # psutil measures since the last call, and returns 0 at the first one.
    share = percent / 100 if _cpu_measured.is_set() else None
    _cpu_measured.set()
    return DeviceUse(share, int(psutil.virtual_memory().used))


_cpu_measured = threading.Event()  # set once this process has asked psutil for the CPU's use
