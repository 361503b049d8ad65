"""Sessions that go on with another driver after theirs has died, because it left functions with restarts.

What it left is in the file `DriverFiles.restart`, which only drivers decode. The next driver gets the file first,
then the order to take it up, and only then the session's name. If this gateway dies in between, the next one begins
anew with the file of the dead driver.
"""

from __future__ import annotations

import asyncio
import os

from loom.errors import DriverUnavailable, LoomError, SessionRestarted
from loom.process.backoff import Backoff
from loom.wire.bodies import OpenSession, RestoreSession
from loom.wire.frames import decode_frame
from loom.wire.handshake import error_from_refusal
from loom.wire.length_prefix import LENGTH, behind_length
from loom.wire.messages import Kind
from loom.wire.stream import unnumbered_frame
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord, open_regular

AGAIN = Backoff(0.5, 30.0)  # seconds between attempts to start another driver

ATTACH_WITHIN = 120.0  # seconds that a driver has to attach to the workers and to begin

MOST_BYTES = 80 << 20
"""Bytes of a driver's file, which is `restart_file.MOST_BYTES` at most."""

MOVED = "moved"
"""In place of the `boot_id` in the record of a driver that was another session host's."""


class MovedElsewhere(Exception):
    """Raised if another session host has a session now."""


class DepartedDriver(DriverProcess):
    """A driver that had ended before this gateway began, and whose session goes on."""

    def __init__(self, files: DriverFiles, record: DriverRecord) -> None:
        super().__init__(files, record)
        self.output = files.last_output()
        self.leaves_functions = True
        self.left_at = os.lstat(files.restart).st_mtime
        self.exited.set()

    @property
    def how_it_ended(self) -> str:
        if self.record.boot == MOVED:
            return "was on a session host that does not answer"
        return super().how_it_ended

    def signal(self, number: int) -> None:
        """Do nothing: it has ended."""

    def abandon(self) -> None:
        """Do nothing: it has ended."""


def pass_on(earlier: DriverFiles, to: DriverProcess) -> None:
    """Copy what a dead driver has left to where its successor reads it.

    Raises:
        OSError: it cannot be read, or written.
    """
    with open_regular(earlier.restart) as file:
        left = file.read(MOST_BYTES + 1)
    if len(left) > MOST_BYTES:
        raise OSError(f"{earlier.restart} has over {MOST_BYTES >> 20} MiB, which no driver writes")
    # The successor's folder is its own user id's, which could lead a known name elsewhere.
    descriptor = os.open(
        to.files.restart, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with open(descriptor, "wb") as file:
        file.write(left)
        file.flush()
        os.fsync(descriptor)
        if to.record.uid is not None:
            os.fchmod(descriptor, 0o640)  # its group is the gateway's, as the folder's
            os.fchown(descriptor, to.record.uid, -1)


async def take_up(driver: DriverProcess, opening: OpenSession, request: RestoreSession) -> None:
    """Have a driver open a session, and start again what its file says.

    Raises:
        LoomError: it cannot, as when the workers do not answer.
        OSError: it has ended.
    """
    reader, writer = await asyncio.wait_for(driver.connect(), ATTACH_WITHIN)
    try:
        for message in (opening.message(), request.message()):
            writer.write(behind_length(unnumbered_frame(message)))
        (length,) = LENGTH.unpack(await asyncio.wait_for(reader.readexactly(LENGTH.size), ATTACH_WITHIN))
        (answer,) = decode_frame(await asyncio.wait_for(reader.readexactly(length), ATTACH_WITHIN)).messages
        if answer.kind == Kind.REFUSE:
            raise error_from_refusal(answer)
    except (asyncio.TimeoutError, EOFError) as error:
        raise DriverUnavailable(f"the next driver has not taken up the session: {error!r}") from error
    finally:
        writer.close()


def restarted(name: str, how: str) -> LoomError:
    """Return the news for clients whose driver has died."""
    return SessionRestarted(
        f"the driver of session {name!r} {how}: its meshes and what was not answered are gone. Another driver "
        f"starts its functions with restarts again; attach to it with loom.connect(session={name!r})"
    )
