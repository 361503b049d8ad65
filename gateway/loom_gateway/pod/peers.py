"""Requests to the keepers of a job's pods."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from loom.errors import LoomError, PodUnreachable
from loom_gateway.pod.settings import PodSettings

logger = logging.getLogger(__name__)

JOB_HEADER = "x-loom-job"
"""The header that proves membership of the job. Its value is the SHA-256 of the job's token."""

TIMEOUT = 2.0
"""Seconds that a keeper has to answer a question."""

COMMAND_TIMEOUT = 60.0
"""Seconds that a keeper has to carry out a command."""

ASKED_AT_ONCE = 32


def pod_states(settings: PodSettings, addresses: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the state of each pod whose keeper answers, by the pod's address."""

    def ask(address: str) -> dict[str, Any] | None:
        try:
            return ask_pod(settings, address, "GET", "/pod", timeout=TIMEOUT)
        except PodUnreachable as error:
            logger.debug("%s", error)
            return None

    asked = list(addresses)
    with concurrent.futures.ThreadPoolExecutor(ASKED_AT_ONCE, "peers") as pool:
        states = zip(asked, pool.map(ask, asked), strict=True)
        return {address: state for address, state in states if state is not None}


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
