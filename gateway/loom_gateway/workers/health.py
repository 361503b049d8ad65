"""Whether a worker answers: Monarch's port has no question for that."""

from __future__ import annotations

import asyncio

from loom_gateway.workers.sources import WorkerAddress, parse_worker_address

ANSWERS_WITHIN = 2.0  # seconds


async def answers(address: str) -> bool:
    """Return whether a worker reads from its connections, within `ANSWERS_WITHIN` seconds.

    The kernel accepts connections also for a process that is stopped or stuck. So this closes one direction of a
    connection, on which no byte was sent, and waits until the worker closes the other. Monarch takes no notice of
    it otherwise. ``images/healthy`` does the same.
    """
    try:
        await asyncio.wait_for(_ask(parse_worker_address(address)), ANSWERS_WITHIN)
    except (OSError, asyncio.TimeoutError):
        return False
    return True


async def _ask(worker: WorkerAddress) -> None:
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    try:
        writer.write_eof()
        while await reader.read(4096):
            pass
    finally:
        writer.close()
