"""The settings of a pod's keeper: the other pods of the job, and the ports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loom.control.address import MONARCH_PORT
from loom.errors import WrongArguments
from loom.process.state_file import write_json

GATEWAY_PORT = 8470
KEEPER_PORT = 26599  # below Monarch's port, because processes of a worker may take ports above it


@dataclass(frozen=True)
class MeshPods:
    """The pods whose workers form one host mesh."""

    mesh: str
    service: str
    """The DNS name of a headless service, which resolves to the addresses of all its pods."""
    pods: int
    """The number of pods."""


@dataclass(frozen=True)
class PodSettings:
    """One pod's part in a job."""

    mesh: str
    """The name of the pod's mesh."""
    meshes: tuple[MeshPods, ...]
    """All meshes of the job. The pods of the first may have the gateway."""
    token_sha256: str
    """The SHA-256 of the token that the gateway accepts. It is also the key by which keepers know each other."""
    monarch_port: int = MONARCH_PORT
    gateway_port: int = GATEWAY_PORT
    keeper_port: int = KEEPER_PORT
    session_linger: float = 3600.0
    """Seconds that a session lives on when nothing goes on in it."""
    session_max: float = 0.0
    """Seconds that a session lives at most, whatever goes on in it. 0 means any time."""

    def __post_init__(self) -> None:
        if self.mesh not in [mesh.mesh for mesh in self.meshes]:
            named = ", ".join(mesh.mesh for mesh in self.meshes) or "none"
            raise WrongArguments(f"a pod of the mesh {self.mesh!r} in a job that has {named}")

    @property
    def first(self) -> MeshPods:
        return self.meshes[0]

    @property
    def may_have_gateway(self) -> bool:
        return self.mesh == self.first.mesh

    @classmethod
    def from_json(cls, given: Any) -> PodSettings:
        """Read settings in the form of `dataclasses.asdict`. Ignore names that a newer version has added."""
        # pydantic is not in every image; `LoomPod` reports missing dependencies
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_python(given)
        except ValidationError as error:
            raise WrongArguments(f"these are no settings of a pod: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the settings to a folder that only this user can open."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(folder / "settings.json", self)

    @classmethod
    def read(cls, folder: Path) -> PodSettings:
        try:
            return cls.from_json(json.loads((folder / "settings.json").read_text()))
        except (OSError, ValueError) as error:
            raise WrongArguments(f"no settings of a pod in {folder}: {error}") from error
