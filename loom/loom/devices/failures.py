"""`FailureWatch`: notices GPUs that have failed, by NVML's events and by what their status says."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.control.handshake import Device
from loom.devices.use import NO_MIG_SLICE, DeviceUse, nvml, query, whole_gpu

_log = logging.getLogger("loom")

IGNORED_VARIABLE = "LOOM_IGNORED_XIDS"
"""The environment variable with further Xids, separated by commas, after which a GPU counts as healthy."""

APPLICATION_XIDS = frozenset((13, 31, 43, 45, 68, 109))
"""Xids that a program causes, and not the GPU, which the next program can use.

As in https://github.com/NVIDIA/k8s-device-plugin/blob/main/internal/rm/health.go.
"""

_KNOWN_XIDS = {
    48: "double bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping event",
    64: "row remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""From https://docs.nvidia.com/deploy/xid-errors/."""


@dataclass(frozen=True)
class DeviceFailure:
    """The end of a device, until it is repaired or reset."""

    device: str
    """Its uuid."""
    reason: str
    """A text for users, such as ``Xid 79: GPU has fallen off the bus``."""


class FailureWatch:
    """A watch over the GPUs among some devices; the CPU slots never fail.

    `wait` is for one thread, `judge` for another.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._gpus = [device.uuid for device in devices if device.kind == "gpu"]
        self.xids: dict[str, int] = {}
        """The last Xid of each GPU that had one, also of those that do not mean the end of it."""
        self._lost: set[str] = set()
        self._ecc: dict[str, int] = {}  # uncorrectable errors at the last look
        self._events: Any = None
        self._watched: dict[tuple[int | None, int], list[str]] = {}
        """The uuids that an event concerns, by its GPU and its slice."""
        self._pynvml: Any = nvml() if self._gpus else None
        if self._pynvml is not None:
            self._register(self._pynvml)

    @property
    def has_events(self) -> bool:
        """True if NVML reports events of any of the GPUs here."""
        return bool(self._watched)

    def _register(self, pynvml: Any) -> None:
        self._events = query(pynvml, pynvml.nvmlEventSetCreate)
        if self._events is None:
            return
        kinds = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
        for uuid in self._gpus:
            handle = query(pynvml, pynvml.nvmlDeviceGetHandleByUUID, uuid)
            if handle is None:
                continue
            gpu, part = whole_gpu(pynvml, handle)
            try:
                pynvml.nvmlDeviceRegisterEvents(gpu, kinds, self._events)
            except pynvml.NVMLError as error:
                _log.info("%s reports no events, only its status is judged: %s", uuid, error)
                continue
            self._watched.setdefault((_same(gpu), part), []).append(uuid)
        if not self._watched:
            self.close()

    def wait(self, timeout: float) -> list[DeviceFailure]:
        """Wait for an event of NVML, for ``timeout`` seconds at most; return the failures that it means."""
        pynvml = self._pynvml
        try:
            event = pynvml.nvmlEventSetWait(self._events, int(timeout * 1000))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return []
            raise
        gpu, part = _same(event.device), event.gpuInstanceId
        concerned = [
            uuid
            for (where, which), uuids in self._watched.items()
            if where == gpu and (NO_MIG_SLICE in (part, which) or part == which)
            for uuid in uuids
        ]
        if event.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            return [DeviceFailure(uuid, "an ECC error that cannot be corrected") for uuid in concerned]
        xid = int(event.eventData)
        self.xids.update(dict.fromkeys(concerned, xid))
        if xid in APPLICATION_XIDS | _ignored():
            _log.warning("Xid %d on %s, which a program causes", xid, ", ".join(concerned))
            return []
        about = f": {_KNOWN_XIDS[xid]}" if xid in _KNOWN_XIDS else ""
        return [DeviceFailure(uuid, f"Xid {xid}{about}") for uuid in concerned]

    def judge(self, status: Mapping[str, DeviceUse]) -> list[DeviceFailure]:
        """Return the failures that a status shows and the one before it did not."""
        found = []
        for uuid, use in status.items():
            if use.lost and uuid not in self._lost:
                found.append(DeviceFailure(uuid, f"it does not answer: {use.error}"))
            (self._lost.add if use.lost else self._lost.discard)(uuid)
            if use.ecc_uncorrected is not None:
                new = use.ecc_uncorrected - self._ecc.setdefault(uuid, use.ecc_uncorrected)
                self._ecc[uuid] = use.ecc_uncorrected
                if new > 0:
                    found.append(DeviceFailure(uuid, f"{new} ECC errors that cannot be corrected"))
        return found

    def close(self) -> None:
        """Stop the events. Only when `wait` is not called any more."""
        if self._events is not None:
            query(self._pynvml, self._pynvml.nvmlEventSetFree, self._events)
            self._events = None


def _same(handle: Any) -> int | None:
    """Return what two of NVML's handles of a GPU have in common: it can be had of one that does not answer."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _ignored() -> frozenset[int]:
    words = os.environ.get(IGNORED_VARIABLE, "").split(",")
    return frozenset(int(word) for word in words if word.strip().isdecimal())
