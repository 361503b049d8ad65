"""`Device`: a device, as a threadlet describes it to the weaver."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from loom.control.frame import check_count, optional_text, printable
from loom.errors import ProtocolMismatch


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU slot of a host that has none."""

    uuid: str
    """NVML's uuid of a GPU, ``CPU-host-slot`` for a CPU slot: the same after a restart."""
    kind: str
    """``gpu`` or ``cpu``."""
    server: str
    """Name of the host."""
    type: str
    """The model, such as ``NVIDIA H100 80GB HBM3``."""
    memory: int
    """Bytes; 0 if unknown."""

    def to_body(self) -> dict[str, Any]:
        """Return the object for the link and the store."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: Any) -> Device:
        """Check an object and return the device that it describes."""
        if type(body) is not dict:
            raise ProtocolMismatch(f"a device is described by a map, not {body!r:.80}")
        kind = printable(body, "kind")
        if kind not in ("gpu", "cpu"):
            raise ProtocolMismatch(f"a device is a gpu or a cpu, not {kind!r:.80}")
        server, model = optional_text(body, "server") or "", optional_text(body, "type") or ""
        return cls(printable(body, "uuid"), kind, server, model, check_count("memory", body.get("memory")) or 0)
