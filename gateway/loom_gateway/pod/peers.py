"""Requests to the keepers of a job's pods. Either side proves that it knows the SHA-256 of the job's token."""

from __future__ import annotations

import hashlib
import http.client
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loom.errors import LoomError, PodUnreachable, ProtocolMismatch
from loom.mutual_auth.exchange import Purpose
from loom.mutual_auth.over_http import ask
from loom.process.state_file import replace_file
from loom_gateway.pod.settings import PodSettings

CONFIGURE = "/configure"
"""The path for new settings, for which the key is the pod's own: the job's may be another from then on."""

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
    body: Mapping[str, Any] | None = None,
    timeout: float = COMMAND_TIMEOUT,
    key: str | None = None,
) -> dict[str, Any]:
    """Send one request to the keeper of a pod. Raise `PodUnreachable` if no keeper of the job answers.

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
