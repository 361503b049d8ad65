"""Requests to the keepers of a job's pods, and the proofs by which both sides know each other."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loom.errors import LoomError, PodUnreachable
from loom.process.listen import bracketed
from loom.process.state_file import replace_file
from loom_gateway.pod.settings import PodSettings

NONCE_HEADER = "x-loom-nonce"
PROOF_HEADER = "x-loom-proof"
"""Proves that the sender knows the key, without the key: the job's is the SHA-256 of its token."""

CONFIGURE = "/configure"
"""The path for new settings, for which the key is the pod's own: the job's may be another from then on."""

MAX_ANSWER = 1 << 20
"""Bytes of an answer at most."""

COMMAND_TIMEOUT = 60.0
"""Seconds that a keeper has to carry out a command."""


def proof_of_request(key: str, nonce: str, method: str, path: str, host: str) -> str:
    """Return the proof for a request to a host, given as in the header ``Host``."""
    return hmac.new(key.encode(), "\n".join(("ask", nonce, method, path, host)).encode(), "sha256").hexdigest()


def proof_of_answer(key: str, nonce: str, body: bytes) -> str:
    """Return the proof for the answer to the request with a nonce."""
    return hmac.new(
        key.encode(), f"answer\n{nonce}\n".encode() + hashlib.sha256(body).digest(), "sha256"
    ).hexdigest()


def same(shown: str, proof: str) -> bool:
    """Compare in a time that says nothing about the proof."""
    return hmac.compare_digest(shown.encode(), proof.encode())


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
    nonce, host = secrets.token_hex(16), f"{bracketed(address)}:{settings.keeper_port}"
    proof = proof_of_request(key, nonce, method, path, host)
    headers = {"host": host, NONCE_HEADER: nonce, PROOF_HEADER: proof, "content-type": "application/json"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read(MAX_ANSWER)
        proven = same(response.headers.get(PROOF_HEADER, ""), proof_of_answer(key, nonce, content))
        if not proven and response.status == 403:
            raise PodUnreachable(f"the keeper of pod {address} is another job's, or has another token")
        answer: Any = json.loads(content) if proven else None
        if not isinstance(answer, dict):
            raise ValueError("it answers as no keeper of this job does")
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, PodUnreachable):
            raise
        reason = str(error) or type(error).__name__
        raise PodUnreachable(f"the keeper of pod {address} does not answer: {reason}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise LoomError(f"the keeper of pod {address}: {answer.get('detail') or f'status {response.status}'}")
    return answer
