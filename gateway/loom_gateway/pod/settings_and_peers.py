"""The settings of a pod's keeper, and requests to the keepers of a job's pods.

Either side proves that it knows the SHA-256 of the job's token.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from loom.control.address import MONARCH_PORT
from loom.errors import LoomError, PodUnreachable, ProtocolMismatch, WrongArguments
from loom.mutual_auth import Purpose
from loom.mutual_auth.over_http import ask
from loom.process.state_file import replace_file, write_json

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
    """All meshes of the job. Clients come to the pods of the first, which also have the sessions."""
    token_sha256: str
    """The SHA-256 of the token that the gateways accept. The keys by which pods know each other come from it."""
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
    def serves(self) -> bool:
        """Whether the pod has a gateway and a session host, and may have the weaver."""
        return self.mesh == self.first.mesh

    @property
    def weaver_port(self) -> int:
        return self.gateway_port + 1

    @property
    def session_host_port(self) -> int:
        return self.gateway_port + 2

    @property
    def gateways_port(self) -> int:
        """Where gateways connect to each other."""
        return self.gateway_port + 3

    @property
    def weaver(self) -> str:
        """Where the weaver is, in whichever pod: only that one listens on the port."""
        return f"{self.first.service}:{self.weaver_port}"

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


CONFIGURE = "/configure"
"""The path for new settings, for which the key is the pod's own: the job's may be another from then on."""


class KeptWorker(TypedDict):
    """The state of a pod's worker."""

    address: str
    pid: int | None
    starts: int
    listening: bool
    state: str
    """A `ProcessState`."""
    problem: str


class KeptPod(TypedDict):
    """The state of a pod, as its keeper reports it."""

    name: str
    address: str
    mesh: str
    gateway: bool
    """Whether clients can come to the pod: it has a gateway and a session host."""
    gateway_listening: bool
    """Whether both listen and, in the pod that has it, the weaver."""
    gateway_starts: int
    """Of what does not listen."""
    gateway_problem: str
    weaver: bool
    worker: KeptWorker
    versions: dict[str, str]


class KeptPods(TypedDict):
    """The states of the pods of a job that answer."""

    pods: list[KeptPod]


MAX_ANSWER = 1 << 20
"""Bytes of an answer at most."""

COMMAND_TIMEOUT = 60.0
"""Seconds that a keeper has to carry out a command."""


def body_digest(body: bytes) -> str:
    """Return what stands for the body of an answer in its proof."""
    return hashlib.sha256(body).hexdigest()


def make_pod_key(folder: Path) -> str:
    """Return a new key of a pod, kept in a file in the keeper's folder that only this user can read."""
    key = secrets.token_hex(32)
    replace_file(folder / "key", key)
    return key


def pod_key(folder: Path) -> str:
    """Return the key that the pod's keeper has made; empty if there is none."""
    try:
        return (folder / "key").read_text()
    except OSError:
        return ""


def ask_pod(
    settings: PodSettings,
    address: str,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
    timeout: float = COMMAND_TIMEOUT,
    key: str | None = None,
) -> Any:
    """Send one request to the keeper of a pod, and return its answer, a dict.

    Raise `PodUnreachable` if no keeper of the job answers.

    Args:
        key: the pod's own, for `CONFIGURE`; otherwise the job's.
    """
    key = settings.token_sha256 if key is None else key
    connection = http.client.HTTPConnection(address, settings.keeper_port, timeout=timeout)
    try:
        asked = ask(connection, Purpose.POD, key, method, path, None if body is None else json.dumps(body))
        content = asked.response.read(MAX_ANSWER)
        status, proven = asked.response.status, asked.proves(body_digest(content))
        if not proven and status == 403:
            raise PodUnreachable(f"the keeper of pod {address} is another job's, or has another token")
        answer: Any = json.loads(content) if proven else None
        if not isinstance(answer, dict):
            raise ValueError("it answers as no keeper of this job does")
    except (OSError, http.client.HTTPException, ProtocolMismatch, ValueError) as error:
        if isinstance(error, PodUnreachable):
            raise
        reason = str(error) or type(error).__name__
        raise PodUnreachable(f"the keeper of pod {address} does not answer: {reason}") from error
    finally:
        connection.close()
    if status != 200:
        raise LoomError(f"the keeper of pod {address}: {answer.get('detail') or f'status {status}'}")
    return answer
