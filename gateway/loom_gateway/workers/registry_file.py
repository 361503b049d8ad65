"""The file by which a gateway tells its drivers, those of an earlier gateway too, where the workers are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loom_gateway.sessions.driver_files import write_atomically


@dataclass(frozen=True)
class WorkerList:
    """The workers of a gateway."""

    addresses: Sequence[str]
    """``tcp://HOST:PORT`` of each, in the order of the dimension ``hosts``."""
    meshes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The numbers of the hosts of each named mesh."""
    sizes: Sequence[int] = ()
    """How many of them each of the gateway's sources has, in their order."""

    def write(self, path: str) -> None:
        """Write it, so that a reader finds the old list or this one."""
        write_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> WorkerList | None:
        """What was written; None where there is nothing, or nothing that can be read."""
        try:
            found = json.loads(Path(path).read_text())
            meshes = {str(name): [int(number) for number in numbers] for name, numbers in found["meshes"].items()}
            sizes = [int(size) for size in found.get("sizes", ())]
            return cls([str(address) for address in found["addresses"]], meshes, sizes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
