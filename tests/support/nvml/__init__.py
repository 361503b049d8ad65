"""`Gpus`: GPUs for the real ``pynvml``, from a library that is compiled of ``nvml.c`` and told what to answer."""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STATE_VARIABLE = "LOOM_TEST_NVML"

PROCESSES = 4
XID, DOUBLE_BIT_ECC = 8, 2  # NVML's kinds of event
WHOLE_GPU = 0xFFFFFFFF

UNSUPPORTED = {
    name: 1 << bit
    for bit, name in enumerate(
        [
            "uuid",
            "name",
            "memory",
            "utilization",
            "temperature",
            "power",
            "clocks",
            "ecc",
            "throttling",
            "processes",
            "events",
        ]
    )
}
"""What a GPU may not answer."""

_NUMBERS = [
    "memory_total",
    "memory_used",
    "utilization",
    "temperature",
    "power",
    "sm_clock",
    "memory_clock",
    "throttled",
    "ecc_corrected",
    "ecc_uncorrected",
    "process_count",
    "lost",
    "unlisted",
    "unsupported",
]


class _Process(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("pid", "memory", "utilization")]


class Gpu(ctypes.Structure):
    """A GPU in the shared file. A value that is set holds at once, in every process."""

    _fields_ = [
        ("uuid", ctypes.c_char * 64),
        ("name", ctypes.c_char * 64),
        *((name, ctypes.c_uint64) for name in _NUMBERS),
        ("parent", ctypes.c_int64),
        ("slice_id", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in ("events", "event_type", "event_data", "event_slice")),
        ("processes", _Process * PROCESSES),
    ]

    def lack(self, *what: str) -> None:
        """Answer these questions with "Not Supported"; see `UNSUPPORTED`."""
        self.unsupported = sum(UNSUPPORTED[one] for one in what)

    def run(self, *processes: tuple[int, int, int]) -> None:
        """Run processes, each of a pid, bytes and percent."""
        for place, one in enumerate(processes):
            self.processes[place] = _Process(*one)
        self.process_count = len(processes)

    def report_xid(self, xid: int, slice_id: int = WHOLE_GPU) -> None:
        self._report(XID, xid, slice_id)

    def report_double_bit_error(self) -> None:
        self._report(DOUBLE_BIT_ECC, 0, WHOLE_GPU)

    def _report(self, kind: int, data: int, slice_id: int) -> None:
        self.event_type, self.event_data, self.event_slice = kind, data, slice_id
        self.events += 1  # last: by this the library sees that there is one


class _State(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("count", "init_error", "count_error")]
    _fields_ += [("gpus", Gpu * 16)]  # type: ignore[list-item]


class Gpus:
    """GPUs ``GPU-0``, ``GPU-1``, … in a shared file; ``environment`` shows them to a program and its children."""

    def __init__(self, count: int, folder: Path) -> None:
        self.path = folder / "gpus"
        self.path.write_bytes(bytes(ctypes.sizeof(_State)))
        with self.path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        self.state = _State.from_buffer(self._mapped)
        for place in range(count):
            self.add(f"GPU-{place}")
        self.environment = {STATE_VARIABLE: str(self.path), "LD_LIBRARY_PATH": str(library().parent)}

    def add(self, uuid: str, parent: int = -1, slice_id: int = 0) -> Gpu:
        """Add a GPU, or a slice of the one with the number ``parent``."""
        gpu = self[self.state.count]
        gpu.uuid, gpu.name = uuid.encode(), b"NVIDIA H200"
        gpu.memory_total, gpu.memory_used, gpu.utilization = 140 << 30, 7 << 30, 42
        gpu.temperature, gpu.power, gpu.sm_clock, gpu.memory_clock = 61, 350_500, 1980, 3201
        gpu.parent, gpu.slice_id = parent, slice_id
        self.state.count += 1
        return gpu

    def __getitem__(self, place: int) -> Gpu:
        gpu: Gpu = self.state.gpus[place]
        return gpu


@functools.cache
def library() -> Path:
    """Return the compiled library, which is made once in each run of the tests."""
    folder = Path(tempfile.mkdtemp(prefix="loom-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    return made


@contextmanager
def loaded(patch: Any, gpus: Gpus) -> Iterator[None]:
    """Show GPUs to this process, whose pynvml finds the library because one of its name is loaded already.

    Args:
        patch: pytest's ``monkeypatch``.
    """
    import pynvml

    from loom.devices import use as nvml

    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    patch.setenv(STATE_VARIABLE, str(gpus.path))
    nvml._started.cache_clear()
    yield
    nvml._started.cache_clear()
    while pynvml._nvmlLib_refcount:  # so that other tests start it again, and find no driver
        pynvml.nvmlShutdown()
