"""The other pods of a job: where they are, and what their keepers say."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loom.errors import LoomError, PodUnreachable

__all__ = ["JOB_HEADER", "Peers"]

logger = logging.getLogger(__name__)

JOB_HEADER = "x-loom-job"
"""Who shows it belongs to the job: its value is the SHA-256 of the job's token."""

TIMEOUT = 2.0
"""Seconds that a keeper has to answer a question."""

ORDER_TIMEOUT = 60.0
"""Seconds that it has to do what it is told."""


class Peers:
    """Asks the keepers of pods.

    Args:
        port: where they listen.
        key: what they want to be shown.
    """

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._pool = concurrent.futures.ThreadPoolExecutor(32, "peers")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def states(self, addresses: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What each that answers says of itself, by address."""
        asked = list(addresses)
        return {
            address: state
            for address, state in zip(asked, self._pool.map(self._state, asked), strict=True)
            if state is not None
        }

    def _state(self, address: str) -> dict[str, Any] | None:
        try:
            return self.ask(address, "GET", "/pod", timeout=TIMEOUT)
        except PodUnreachable as error:
            logger.debug("%s", error)
            return None

    def ask(
        self,
        address: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Any] | None = None,
        timeout: float = ORDER_TIMEOUT,
    ) -> dict[str, Any]:
        """One question to one keeper.

        Raises:
            PodUnreachable: it does not answer, or is of another job.
            LoomError: it says that it cannot be done.
        """
        connection = http.client.HTTPConnection(address, self._port, timeout=timeout)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {JOB_HEADER: self._key, "content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise PodUnreachable(f"the keeper of pod {address} does not answer: {reason}") from error
        finally:
            connection.close()
        if response.status == 403:
            raise PodUnreachable(f"the keeper of pod {address} is another job's, or has another token")
        if response.status != 200 or not isinstance(answer, dict):
            detail = answer.get("detail") if isinstance(answer, dict) else None
            raise LoomError(f"the keeper of pod {address}: {detail or f'status {response.status}'}")
        return answer
