"""Requests to the keepers of a job's pods."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from loom.errors import LoomError, PodUnreachable
from loom_gateway.pod.settings import PodSettings

JOB_HEADER = "x-loom-job"
"""The header that proves membership of the job. Its value is the SHA-256 of the job's token."""

COMMAND_TIMEOUT = 60.0  # seconds that a keeper has to carry out a command


def ask_pod(
    settings: PodSettings,
    address: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    timeout: float = COMMAND_TIMEOUT,
) -> dict[str, Any]:
    """Send one request to the keeper of a pod. Raise `PodUnreachable` if no keeper of the job answers."""
    connection = http.client.HTTPConnection(address, settings.keeper_port, timeout=timeout)
    headers = {JOB_HEADER: settings.token_sha256, "content-type": "application/json"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        answer: Any = json.loads(response.read())
        if not isinstance(answer, dict):
            raise ValueError("it answers as no keeper does")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise PodUnreachable(f"the keeper of pod {address} does not answer: {reason}") from error
    finally:
        connection.close()
    if response.status == 403:
        raise PodUnreachable(f"the keeper of pod {address} is another job's, or has another token")
    if response.status != 200:
        raise LoomError(f"the keeper of pod {address}: {answer.get('detail') or f'status {response.status}'}")
    return answer
