"""The lines of an update of weights as the investigation of prime-rl's bottleneck writes them.

Its "Log Flow Timeline" has them as examples, such as ``[weights][abc123] rpc.done t=1.457 rpc_ms=1219.0``. A tag, a
trace id, a name, and then fields, of which these read the ones that the examples have.
"""

from __future__ import annotations

import re

_TRACE = r"\[weights\]\[(?P<trace>[A-Za-z0-9_-]+)\]"
_T = r"\bt=(?P<t>\d+\.\d+)\b"
_RPC = r"\brpc_ms=(?P<rpc_ms>\d+\.\d+)\b"

SERVER_RECV = re.compile(rf"{_TRACE} server\.recv .*{_T}")
RPC_START = re.compile(rf"{_TRACE} rpc\.start .*{_T}")
RPC_DONE = re.compile(rf"{_TRACE} rpc\.done .*{_T} {_RPC}")
CLIENT_DONE = re.compile(
    rf"{_TRACE} client\.done wall_ms=(?P<wall_ms>\d+\.\d+) {_RPC} queue_ms=(?P<queue_ms>\d+\.\d+)\b"
)


def matches(pattern: re.Pattern[str], text: str) -> list[dict[str, str]]:
    """Return what a pattern reads of the lines of a log."""
    return [found.groupdict() for line in text.splitlines() if (found := pattern.search(line))]
