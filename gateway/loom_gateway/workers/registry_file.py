"""The file in which a gateway publishes the workers' addresses for its drivers and those of an earlier gateway."""

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
    """Each worker's ``tcp://HOST:PORT``, in the order of the dimension ``hosts``."""
    meshes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The numbers of the hosts of each named mesh."""
    sizes: Sequence[int] = ()
    """The number of workers from each of the gateway's sources, in the sources' order."""

    def write(self, path: str) -> None:
        """Replace the file atomically."""
        write_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> WorkerList | None:
        """Return the list in a file; None if it does not exist or cannot be read."""
        try:
            found = json.loads(Path(path).read_text())
            meshes = {str(name): [int(number) for number in numbers] for name, numbers in found["meshes"].items()}
            sizes = [int(size) for size in found.get("sizes", ())]
            return cls([str(address) for address in found["addresses"]], meshes, sizes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
