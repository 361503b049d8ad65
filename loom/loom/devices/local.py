"""The devices that this process sees, and which of them are its own."""

from __future__ import annotations

import functools
import logging
import os
import platform
import socket
from collections.abc import Sequence
from typing import Any

from loom.control.introduction import Device as LocalDevice
from loom.devices.use import DeviceUse, cpu_use, gpu_use, nvml, query, text, visible

_log = logging.getLogger("loom")


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
