"""`ReplicaLink`: a connection with the weaver for a replica whose process has no threadlet.

A program, such as a bridge, speaks the threadlets' protocol in that process's place, for a replica like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from loom.control.address import WeaverAddress
from loom.control.commands import Acknowledged, Acknowledgement, Command, UnknownCommandKind
from loom.control.frame import MAX_FRAME, Frame, pack, unpack_all
from loom.control.handshake import Refusal, Silent, ThreadletHello, ThreadletWelcome
from loom.control.profiles import Profile, ProfileRequest
from loom.control.reports import Stack, StackRequest
from loom.errors import ProtocolMismatch, TooLarge, error_for_code
from loom.wire.length_prefix import FrameSplitter

CONNECT_TIMEOUT = 5.0  # seconds that connecting may take
WELCOME_TIMEOUT = 10.0  # seconds that the weaver has to answer a hello
MAX_UNREAD = 4 << 20  # bytes that may wait for a weaver that does not read

_CHUNK = 1 << 16


class ReplicaLink:
    """A connection over which a program speaks for a replica.

    Args:
        take: gets each command, and returns the acknowledgement, or None if that follows.
        note: gets each frame that is neither a command nor a question for the process's stacks.
        blind: why nobody can look into the process.
    """

    def __init__(
        self,
        take: Callable[[Command], Acknowledged | None],
        note: Callable[[list[Any]], object],
        blind: str,
    ) -> None:
        self._take = take
        self._note = note
        self._blind = blind
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._splitter = FrameSplitter(MAX_FRAME)
        self._early: list[list[Any]] = []
        """Frames that came with the welcome."""
        self._takes_silence = False
        """True if the weaver takes `Silent`."""
        self.beat: float | None = None
        """Seconds between two heartbeats, from the weaver's welcome until the end."""

    @property
    def is_open(self) -> bool:
        """True if the weaver takes frames."""
        return self.beat is not None

    async def connect(self, address: WeaverAddress, hello: Callable[[str], ThreadletHello]) -> ThreadletWelcome:
        """Introduce the replica with the hello that is made for the weaver's key.

        Raises:
            LoomError: the weaver refuses the replica, such as with `Conflict`, or what answers is no weaver.
            OSError, TimeoutError: there is no weaver.
        """
        connecting = asyncio.open_connection(address.host, address.port)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT)
        self._reader, self._writer = reader, writer
        try:
            writer.write(pack(hello(address.key).to_body()))
            first = await asyncio.wait_for(self._first(reader), WELCOME_TIMEOUT)
            welcome = ThreadletWelcome.from_body(first[0])
        except BaseException:
            self.abort()
            raise
        self.beat, self._takes_silence, self._early = welcome.beat, welcome.exits, first[1:]
        return welcome

    async def serve(self) -> None:
        """Take commands until the connection is over. Raise as `connect`."""
        assert self._reader is not None
        try:
            for body in self._early:
                self._receive(body)
            while data := await self._reader.read(_CHUNK):
                for body in unpack_all(self._splitter.feed(data)):
                    self._receive(body)
        finally:
            self.abort()

    def send(self, frame: Frame) -> None:
        """Send a frame, if the connection stands. A frame that is too large for the link is left out."""
        if self._writer is None:
            return
        with contextlib.suppress(TooLarge):
            self._writer.write(pack(frame.to_body()))
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            self._writer.transport.abort()

    def tell_silence(self, seconds: float) -> None:
        """Tell for how long nothing was heard of the process; the weaver then ends the connection."""
        if self._takes_silence:
            self.send(Silent(seconds))

    def abort(self) -> None:
        """End the connection."""
        self.beat = None
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    async def _first(self, reader: asyncio.StreamReader) -> list[list[Any]]:
        """Return the weaver's answer to the hello, and the frames that came with it."""
        while data := await reader.read(_CHUNK):
            if frames := unpack_all(self._splitter.feed(data)):
                if frames[0][0] == Refusal.KIND:
                    self._receive(frames[0])
                return frames
        raise ConnectionResetError("the weaver closed the connection")

    def _receive(self, frame: list[Any]) -> None:
        match frame[0]:
            case Command.KIND:
                try:
                    acknowledged = self._take(Command.from_body(frame))
                except UnknownCommandKind as error:
                    acknowledged = Acknowledged(error.id, Acknowledgement.failed(str(error)))
                if acknowledged is not None:
                    self.send(acknowledged)
            case StackRequest.KIND:
                self.send(Stack(StackRequest.from_body(frame).id, f"{self._blind}\n"))
            case ProfileRequest.KIND:
                self.send(Profile(ProfileRequest.from_body(frame).id, "", 0, 0, self._blind))
            case Refusal.KIND:
                refusal = Refusal.from_body(frame)
                raise error_for_code(refusal.code, refusal.text)
            case ThreadletWelcome.KIND:
                raise ProtocolMismatch("a second welcome came")
            case _:
                self._note(frame)
