"""A device as a threadlet describes it and everybody else sees it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from loom.control.frame import check_count, optional_text, printable
from loom.errors import ProtocolMismatch


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU slot of a host that has none."""

    uuid: str
    """NVML's uuid of a GPU, ``CPU-host-slot`` of a CPU slot: the same again after a restart."""
    kind: str
    """``gpu`` or ``cpu``."""
    server: str
    """Name of the host."""
    type: str
    """The model, such as ``NVIDIA H100 80GB HBM3``."""
    memory: int
    """Bytes; 0 if it is not known."""

    def to_body(self) -> dict[str, Any]:
        """Return the object that stands for it on the link and in the store."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: Any) -> Device:
        """Check such an object and return what it stands for.

        Raises:
            ProtocolMismatch: it is something else.
        """
        if type(body) is not dict:
            raise ProtocolMismatch(f"a device is described by a map, not {body!r:.80}")
        kind = printable(body, "kind")
        if kind not in ("gpu", "cpu"):
            raise ProtocolMismatch(f"a device is a gpu or a cpu, not {kind!r:.80}")
        server, model = optional_text(body, "server") or "", optional_text(body, "type") or ""
        return cls(printable(body, "uuid"), kind, server, model, check_count("memory", body.get("memory")) or 0)
