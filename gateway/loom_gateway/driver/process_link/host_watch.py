"""The watch over a worker host: a connection to its worker that says nothing, and breaks when the worker ends."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable

from loom_gateway.driver.process_link.link import ATTEMPT, RETRY, Refusals, break_after
from loom_gateway.workers.sources import WorkerAddress

SAME_AFTER = 2 * ATTEMPT  # seconds after the network is back in which the processes of a worker are back too
LOOK_EVERY = 1.0  # seconds between two looks whether processes live


class HostEnd(enum.Enum):
    """Why the watch over a host has ended; the value is the text for people."""

    ENDED = "its worker has ended"
    SILENT = "its worker was silent for too long"
    UNREACHABLE = "its worker could not be reached for too long"
    RESTARTED = "another worker is in its place"


async def watch_host(address: WorkerAddress, patience: float, lives: Callable[[], bool]) -> HostEnd:
    """Return when a worker host is gone: its worker has ended, or has been silent for ``patience`` seconds.

    Monarch keeps a silent connection open, so an idle one reveals the worker's end. Process links do not suffice: a
    process that is still being spawned has none yet. An idle connection outlives a network that is away for less
    than ``patience``. If it was reset all the same, another one tells whether the worker still listens. It may be
    the next worker that does. That has none of the processes of the one before.

    Args:
        lives: tells whether a process of the host is connected.
    """
    loop = asyncio.get_running_loop()
    refusals = Refusals(address.host)
    gone_since = loop.time()
    suspicious = False
    while True:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), ATTEMPT)
        except ConnectionRefusedError:
            suspicious = True
            if refusals.refused(loop.time()):
                return HostEnd.ENDED
        except (OSError, asyncio.TimeoutError):
            refusals.other()
        else:
            connected_at = loop.time()
            end = asyncio.ensure_future(_ends_cleanly(reader, writer, patience))
            try:
                suspected = suspicious and await _done(end, SAME_AFTER)  # still, as it broke too soon to tell
                if suspicious and not suspected and not lives():
                    return HostEnd.RESTARTED
                lived = lives()
                while not await _done(end, LOOK_EVERY):
                    lived = lives()
                clean = end.result()
            except TimeoutError:
                return HostEnd.SILENT
            finally:
                end.cancel()
                await asyncio.wait([end])
                writer.close()  # also if it was cancelled before it began
            refusals = Refusals(address.host, clean)
            suspicious = clean or lived or suspected
            if loop.time() - connected_at >= ATTEMPT:  # else a proxy accepts in its place
                gone_since = loop.time()
                continue  # at once: a worker that has ended refuses the next connection
        if loop.time() - gone_since >= patience:
            return HostEnd.UNREACHABLE
        await asyncio.sleep(RETRY)


async def _done(task: asyncio.Future[bool], seconds: float) -> bool:
    return bool((await asyncio.wait([task], timeout=seconds))[0])


async def _ends_cleanly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> bool:
    """Wait for the end of a connection. Return whether the worker's machine closed it in order.

    Raises:
        TimeoutError: the worker was silent for ``patience`` seconds.
    """
    try:
        break_after(writer.get_extra_info("socket"), patience)  # may be closed already
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
