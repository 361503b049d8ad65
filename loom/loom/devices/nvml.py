"""NVML through ``pynvml``: its start in this process, and the GPUs that CUDA would show this process."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

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
