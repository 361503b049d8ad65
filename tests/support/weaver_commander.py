"""Commands for a weaver that comes and goes: ``python -m tests.support.weaver_commander PLACE SECRET COUNT``.

It gives one learning rate after the other to so many replicas, each under an id, until standard input ends. A
command whose answer was lost is given again under its id. A line of JSON for each that all replicas have
acknowledged has its number, its id and its value.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

from loom.errors import WeaverUnavailable
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import Keys, secret_in

__all__ = ["value_of"]

RETRY = 0.1
"""Seconds."""


def value_of(number: int) -> float:
    """The learning rate of a command, which no other has."""
    return round(0.1 + number * 1e-6, 6)


async def _until_answered(client: WeaverClient, operation: str, **arguments: Any) -> Any:
    while True:
        try:
            return await client.ask(operation, user=ADMIN, **arguments)
        except WeaverUnavailable:
            await asyncio.sleep(RETRY)


async def _give(place: str, secret: str, replicas: int, ended: threading.Event) -> None:
    client = WeaverClient(place, Keys(secret_in(Path(secret))).gateway)
    client.came()
    number = 0
    while not ended.is_set():
        number += 1
        id, value = f"command-{number}", value_of(number)
        given = {"kind": "update_config", "params": {"learning_rate": value}, "target": "trainers", "id": id}
        await _until_answered(client, "command", by="commander", **given)
        while True:
            outcomes = (await _until_answered(client, "command_state", id=id, timeout=5.0))["outcomes"]
            if len(outcomes) == replicas and all(one["ok"] for one in outcomes.values()):
                break
        print(json.dumps({"number": number, "id": id, "value": value}), flush=True)


def main() -> None:
    """Give commands until standard input ends."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    asyncio.run(_give(sys.argv[1], sys.argv[2], int(sys.argv[3]), ended))


if __name__ == "__main__":
    main()
