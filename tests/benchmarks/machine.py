"""The machine and the software that figures were measured with."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from loom.devices import local_devices

__all__ = ["Machine", "cpu_seconds", "describe_machine"]

PACKAGES = ("torchmonarch", "monarch-loom", "websockets", "uvicorn", "uvloop")


@dataclass(frozen=True)
class Machine:
    cores: int
    """Cores that this process may use."""

    cpu: str
    python: str
    packages: dict[str, str]
    """Versions; ``"none"`` for what is not installed."""

    gpus: tuple[str, ...] = ()
    """The model of each GPU."""

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        gpus = "".join(f"{model}, " for model in self.gpus)
        return f"{self.cores} cores, {self.cpu}, {gpus}Python {self.python}, {packages}"


def describe_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = tuple(device.type for device in local_devices() if device.kind == "gpu")
    packages = {name: _version(name) for name in PACKAGES}
    return Machine(cores, _cpu_model(), platform.python_version(), packages, gpus)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, with the kernel's finest clock for it (Linux)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
