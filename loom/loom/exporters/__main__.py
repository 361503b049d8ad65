"""A gateway's export to one tracker: ``python -m loom.exporters``, a process that ends with the gateway.

It asks the weaver, as the gateway does, for all users. Its standard input is a line with the
gateway's key, and then a pipe that the gateway holds open.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from argparse import ArgumentParser
from concurrent.futures import TimeoutError as TooLong
from pathlib import Path
from typing import Any

from loom.control.operations import GetUsers
from loom.errors import LoomError, WeaverUnavailable
from loom.exporters.exporter import export_to
from loom.exporters.tracker import Destination, TrackerKind
from loom.process.error_exit import report
from loom.process.parent_pipe import when_parent_ends
from loom.weaver.client import ANSWER_TIMEOUT, WeaverClient
from loom.weaver.keys import EVERYONE

_BY = "export"
"""Who asks, for the weaver's events."""


class WeaverSource:
    """The weaver at a place, as for `WeaverClient`, for every user."""

    def __init__(self, place: str, key: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="weaver", daemon=True).start()
        self._client = asyncio.run_coroutine_threadsafe(self._connect(place, key), self._loop).result()

    async def _connect(self, place: str, key: str) -> WeaverClient:
        client = WeaverClient(place, lambda: key)
        client.came()  # whether it has is seen by a request
        return client

    def ask(self, operation: str, user: str | None = None, **arguments: Any) -> Any:
        if operation == "replicas":
            users = self._result(self._client.ask_for(GetUsers(), user=EVERYONE))
            asked = [self._result(self._client.do("replicas", _BY, user=one)) for one in users]
            return [one for replicas in asked for one in replicas]
        return self._result(self._client.do(operation, _BY, user=user, **arguments))

    def _result(self, answer: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(answer, self._loop).result(2 * ANSWER_TIMEOUT)
        except TooLong:
            raise WeaverUnavailable("the weaver did not answer") from None


def main() -> None:
    """Export until the gateway ends, or a signal comes."""
    options = ArgumentParser(prog="loom.exporters")
    options.add_argument("--to", type=TrackerKind, required=True)
    options.add_argument("--weaver", required=True)
    options.add_argument("--project", required=True)
    options.add_argument("--folder", type=Path, required=True)
    given = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    key, ended = sys.stdin.readline().strip(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    when_parent_ends(ended.set)
    source, to = WeaverSource(given.weaver, key), Destination(given.project, given.folder)
    export_to(given.to, to, source, given.folder / f"{given.to.value}-state", ended)


if __name__ == "__main__":
    try:
        main()
    except LoomError as error:
        sys.exit(report(error))
