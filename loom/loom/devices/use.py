"""The devices that this process sees, and the use and the health of a device at one time."""

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

from loom.control.handshake import Device as LocalDevice
from loom.control.reports import DEVICE_NUMBERS

_log = logging.getLogger("loom")

NO_MIG_SLICE = 0xFFFFFFFF
"""NVML's id of a GPU instance for a whole GPU."""


def nvml() -> Any:
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


def visible(pynvml: Any) -> Iterator[Any]:
    """Yield NVML's handles of the GPUs, or MIG slices of them, that CUDA would show this process.

    As in CUDA, the GPUs after a number or a uuid that names none are invisible:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    count = query(pynvml, pynvml.nvmlDeviceGetCount) or 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        for index in range(count):
            if (handle := query(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index)) is not None:
                yield handle
        return
    for name in (part.strip() for part in chosen.split(",")):
        if name.isdecimal():
            if int(name) >= count:
                return
            handle = query(pynvml, pynvml.nvmlDeviceGetHandleByIndex, int(name))
        else:
            handle = _by_uuid(pynvml, name, count)
        if handle is None:
            return
        yield handle


def _by_uuid(pynvml: Any, name: str, count: int) -> Any:
    """Return the handle of the only GPU or MIG slice whose uuid begins with a name, or None."""
    if name.startswith("MIG-"):
        return query(pynvml, pynvml.nvmlDeviceGetHandleByUUID, name)
    if not name.startswith("GPU-"):
        return None
    handles = [query(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    found = [
        handle
        for handle in handles
        if handle is not None and text(query(pynvml, pynvml.nvmlDeviceGetUUID, handle)).startswith(name)
    ]
    return found[0] if len(found) == 1 else None


def whole_gpu(pynvml: Any, handle: Any) -> tuple[Any, int]:
    """Return (the GPU of a handle, the id of its GPU instance): a MIG slice has its GPU's sensors and events."""
    if not query(pynvml, pynvml.nvmlDeviceIsMigDeviceHandle, handle):
        return handle, NO_MIG_SLICE
    slice_id = query(pynvml, pynvml.nvmlDeviceGetGpuInstanceId, handle)
    gpu = query(pynvml, pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
    return (handle if gpu is None else gpu), (NO_MIG_SLICE if slice_id is None else slice_id)


def query(pynvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if this GPU does not support the query, or does not answer."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        _log.debug("NVML: %s", error)
        return None


def text(answer: str | bytes | None) -> str:
    """Return a text of NVML as str; older releases of pynvml return bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer or ""


_MHZ = 1_000_000

_SLOWED_BY = {
    "SwPowerCap": "power_cap",
    "HwSlowdown": "hw_slowdown",
    "SwThermalSlowdown": "thermal",
    "HwThermalSlowdown": "hw_thermal",
    "HwPowerBrakeSlowdown": "power_brake",
}
"""Why a GPU runs below its clock, by NVML's names of the bits. Idleness and the user's own limits are left out."""

MOST_PROCESSES = 64
"""Processes of a device that are listed; those with the least memory are left out."""


@dataclass(frozen=True)
class ProcessUse:
    """A process's use of a GPU."""

    pid: int
    """As the host numbers it, which inside a container may be another number."""
    memory: int | None = None
    """Bytes."""
    utilization: float | None = None
    """Share of the last moments in which the process kept the GPU busy, 0 to 1."""


@dataclass(frozen=True)
class DeviceUse:
    """The current use and health of a device. None stands for an unknown value."""

    utilization: float | None = None
    """Share of the last moments in which the device was busy, 0 to 1."""
    memory_used: int | None = None
    """Bytes."""
    temperature: float | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts."""
    sm_clock: int | None = None
    """Hertz, of the multiprocessors."""
    memory_clock: int | None = None
    """Hertz."""
    ecc_corrected: int | None = None
    """Memory errors that ECC has corrected since the driver was loaded."""
    ecc_uncorrected: int | None = None
    """Memory errors that ECC could not correct since the driver was loaded."""
    throttled: tuple[str, ...] = ()
    """Why the device runs below its clock: power_cap, hw_slowdown, thermal, hw_thermal, power_brake."""
    processes: tuple[ProcessUse, ...] = ()
    """The processes that compute on a GPU, the one with the most memory first."""
    error: str | None = None
    """Why the use is unknown: the GPU is gone, or an error of NVML."""
    lost: bool = False
    """True if the error means that the device cannot be used any more, until somebody repairs it."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields for the weaver; those that are empty, as lists mostly are, are left out."""
        fields = asdict(self)
        del fields["lost"]
        fields["throttled"], fields["processes"] = list(self.throttled), list(fields["processes"])
        return {name: value for name, value in fields.items() if name in DEVICE_NUMBERS or value}


def gpu_use(uuid: str) -> DeviceUse:
    """Return the use of a GPU or a MIG slice of this host."""
    pynvml = nvml()
    if pynvml is None:
        return DeviceUse(error="NVML does not work here")
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return DeviceUse(error=str(error), lost=error.value in _lost_by(pynvml))
    gpu, _ = whole_gpu(pynvml, handle)
    rates = query(pynvml, pynvml.nvmlDeviceGetUtilizationRates, handle)
    temperature = query(pynvml, pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU)
    milliwatts = query(pynvml, pynvml.nvmlDeviceGetPowerUsage, gpu)
    return DeviceUse(
        utilization=None if rates is None else rates.gpu / 100,
        memory_used=int(memory.used),
        temperature=None if temperature is None else float(temperature),
        power=None if milliwatts is None else milliwatts / 1000,
        sm_clock=_clock(pynvml, gpu, pynvml.NVML_CLOCK_SM),
        memory_clock=_clock(pynvml, gpu, pynvml.NVML_CLOCK_MEM),
        ecc_corrected=_ecc(pynvml, gpu, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ecc_uncorrected=_ecc(pynvml, gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        throttled=_throttled(pynvml, gpu),
        processes=_processes(pynvml, handle),
    )


def _lost_by(pynvml: Any) -> tuple[int, ...]:
    """Return NVML's errors after which only a repair of the GPU, or a reset, helps."""
    return (
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_NOT_FOUND,  # one that was there
    )


def _clock(pynvml: Any, gpu: Any, of: int) -> int | None:
    megahertz = query(pynvml, pynvml.nvmlDeviceGetClockInfo, gpu, of)
    return None if megahertz is None else megahertz * _MHZ


def _ecc(pynvml: Any, gpu: Any, kind: int) -> int | None:
    # Without ECC, as on GPUs for desktops, NVML does not support the query.
    count: int | None = query(pynvml, pynvml.nvmlDeviceGetTotalEccErrors, gpu, kind, pynvml.NVML_VOLATILE_ECC)
    return count


def _throttled(pynvml: Any, gpu: Any) -> tuple[str, ...]:
    bits = query(pynvml, pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu) or 0
    names = _SLOWED_BY.items()
    return tuple(word for name, word in names if bits & getattr(pynvml, f"nvmlClocksEventReason{name}"))


def _processes(pynvml: Any, handle: Any) -> tuple[ProcessUse, ...]:
    memory = {
        one.pid: one.usedGpuMemory
        for one in query(pynvml, pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    }
    # Samples since the epoch: the newest of each process counts. A GPU without any answers "not found".
    samples = query(pynvml, pynvml.nvmlDeviceGetProcessUtilization, handle, 0) or ()
    busy = {one.pid: one.smUtil / 100 for one in sorted(samples, key=lambda one: one.timeStamp)}
    used = (ProcessUse(pid, None if size is None else int(size), busy.get(pid)) for pid, size in memory.items())
    return tuple(sorted(used, key=lambda one: -(one.memory or 0))[:MOST_PROCESSES])


def cpu_use() -> DeviceUse:
    """Return the use of this host's CPU."""
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


def local_devices() -> list[LocalDevice]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, or its CPU slot if there are none.

    GPUs are numbered as NVML does, in the order of the PCI bus (``CUDA_DEVICE_ORDER=PCI_BUS_ID``). The CPU slot is
    ``LOCAL_RANK``, or 0. A GPU that NVML lists but cannot describe is left out.
    """
    pynvml = nvml()
    if pynvml is not None:
        gpus = [gpu for handle in visible(pynvml) if (gpu := _described(pynvml, handle)) is not None]
        if gpus:
            return gpus
    return [_cpu()]


def own_devices() -> list[LocalDevice]:
    """Return the devices of this process among those that it sees: the one that ``LOCAL_RANK`` numbers.

    If it sees only one, as when each process has a ``CUDA_VISIBLE_DEVICES`` of its own, it is that one. Processes
    in excess of the GPUs share them, in turn. Without ``LOCAL_RANK`` all are its own.
    """
    devices = local_devices()
    rank = _local_rank()
    return devices if rank is None else [devices[rank % len(devices)]]


def own_torch_device(device: str) -> str:
    """Return the device that torch has for this process: ``cuda:N`` for ``"cuda"``, any other as it is.

    N is ``LOCAL_RANK``, or 0 where ``CUDA_VISIBLE_DEVICES`` leaves only one GPU to this process. As for
    `own_devices`, processes in excess of the GPUs share them, in turn.
    """
    if device != "cuda":
        return device
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and "," not in chosen:
        return "cuda:0"
    rank, gpus = _local_rank() or 0, sum(one.kind == "gpu" for one in local_devices())
    return f"cuda:{rank % gpus if gpus else rank}"


def device_status(devices: Sequence[LocalDevice] | None = None) -> dict[str, DeviceUse]:
    """Return the current use and health of devices of this host, by uuid; None stands for `local_devices`.

    The call queries the hardware, which may take long if a GPU is broken.
    """
    return {
        device.uuid: gpu_use(device.uuid) if device.kind == "gpu" else cpu_use()
        for device in (local_devices() if devices is None else devices)
    }


def _local_rank() -> int | None:
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() else None


def _described(pynvml: Any, handle: Any) -> LocalDevice | None:
    uuid = query(pynvml, pynvml.nvmlDeviceGetUUID, handle)
    if uuid is None:
        return None
    model = query(pynvml, pynvml.nvmlDeviceGetName, handle)
    memory = query(pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    return LocalDevice(
        text(uuid), "gpu", socket.gethostname(), text(model) or "GPU", 0 if memory is None else int(memory.total)
    )


def cpu_slots(count: int) -> list[str]:
    """Return the uuids of the CPU slots of this host's first processes, by ``LOCAL_RANK``."""
    return [f"CPU-{socket.gethostname()}-{rank}" for rank in range(count)]


def _cpu() -> LocalDevice:
    host, uuid = socket.gethostname(), cpu_slots((_local_rank() or 0) + 1)[-1]
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
