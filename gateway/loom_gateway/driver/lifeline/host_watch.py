"""The watch over a worker host: a connection to its worker that says nothing, and breaks when the worker ends."""

from __future__ import annotations

import asyncio
import contextlib

from loom_gateway.driver.lifeline.silence import ATTEMPT, RETRY, Refusals, break_after
from loom_gateway.workers.sources import WorkerAddress


async def watch_host(address: WorkerAddress, patience: float) -> None:
    """Return when a worker host is gone: its worker has ended, or has been silent for ``patience`` seconds.

    Monarch keeps a silent connection open, so an idle one reveals the worker's end. The lifelines do not suffice: a
    process that is still being spawned has none yet. An idle connection outlives a network that is away for less
    than ``patience``. If it was reset all the same, another one tells whether the worker still listens.
    """
    loop = asyncio.get_running_loop()
    refusals = Refusals(clean=False)
    gone_since = loop.time()
    while True:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), ATTEMPT)
        except ConnectionRefusedError:
            if refusals.refused(loop.time()):
                return
        except (OSError, asyncio.TimeoutError):
            refusals.other()
        else:
            connected_at = loop.time()
            try:
                refusals = Refusals(clean=await _ends_cleanly(reader, writer, patience))
            except TimeoutError:
                return
            if loop.time() - connected_at >= ATTEMPT:  # else a proxy accepts in its place
                gone_since = loop.time()
                continue  # at once: a worker that has ended refuses the next connection
        if loop.time() - gone_since >= patience:
            return
        await asyncio.sleep(RETRY)


async def _ends_cleanly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> bool:
    """Wait for the end of a connection. Return whether the worker's machine closed it in order.

    Raises:
        TimeoutError: the worker was silent for ``patience`` seconds.
    """
    break_after(writer.get_extra_info("socket"), patience)
    try:
        while await reader.read(4096):
            pass
        return True
    except TimeoutError:
        raise
    except OSError:
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
