"""Where the workers are: their addresses, and how they are found."""

from __future__ import annotations

import re
from typing import NamedTuple

from loom.errors import InvalidAddress

__all__ = ["WorkerAddress", "parse_worker_address"]

_ADDRESS = re.compile(r"tcp://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")


class WorkerAddress(NamedTuple):
    """Host and port of a Monarch worker."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_worker_address(text: str) -> WorkerAddress:
    """Read ``tcp://HOST:PORT``.

    Raises:
        InvalidAddress: the text has another form, or the port is not in 1 to 65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise InvalidAddress(
            f"{text!r} is not a worker address: write tcp://HOST:PORT, such as tcp://10.0.0.5:26600"
        )
    return WorkerAddress(match["host"].strip("[]"), int(match["port"]))
