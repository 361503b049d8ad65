"""The devices of this process: GPUs through NVML, or else the CPU.

Loom queries NVML through ``pynvml`` (the ``gpu`` extra), which needs neither torch nor CUDA and sees what a
training process does not: temperature, power, errors, and the use by other processes. psutil reports the same for a
CPU; without psutil a CPU is still a device, with fewer numbers.
"""

from __future__ import annotations

from loom.control.handshake import Device as LocalDevice
from loom.devices.failures import DeviceFailure
from loom.devices.use import DeviceUse, ProcessUse, device_status, local_devices, own_devices, own_torch_device

__all__ = [
    "DeviceFailure",
    "DeviceUse",
    "LocalDevice",
    "ProcessUse",
    "device_status",
    "local_devices",
    "own_devices",
    "own_torch_device",
]
