"""`ReplicaLink`: the connection with the weaver of one replica whose process has no threadlet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from loom.control.address import WeaverAddress
from loom.control.commands import Acknowledged, Acknowledgement, Command, UnknownCommandKind
from loom.control.frame import MAX_FRAME, Frame, pack, unpack_all
from loom.control.introduction import Refusal, Silent, ThreadletWelcome
from loom.control.profiles import Profile, ProfileRequest
from loom.control.reports import FailureNoted, Stack, StackRequest
from loom.errors import ProtocolMismatch, TooLarge, error_for_code
from loom.nats.replicas import OutsideReplica
from loom.wire.framing import FrameSplitter

CONNECT_TIMEOUT = 5.0  # seconds that connecting may take
WELCOME_TIMEOUT = 10.0  # seconds that the weaver has to answer a hello
MAX_UNREAD = 4 << 20  # bytes that may wait for a weaver that does not read

_CHUNK = 1 << 16
_NO_PROFILE = "its process has no threadlet, and the bridge, which speaks for it, cannot look into it"
_NO_STACKS = "The process has no threadlet, and the bridge, which speaks for it, does not know its stacks.\n"


class ReplicaLink:
    """A connection over which a bridge speaks the threadlets' protocol for a replica.

    ``take`` gets each command, and ``welcomed`` is called when the weaver has welcomed the replica.
    """

    def __init__(
        self,
        replica: OutsideReplica,
        take: Callable[[OutsideReplica, Command], None],
        welcomed: Callable[[OutsideReplica], None],
    ) -> None:
        self._replica = replica
        self._take = take
        self._welcomed = welcomed
        self._writer: asyncio.StreamWriter | None = None
        self._takes_silence = False
        """Whether the weaver takes `Silent`."""
        self.beat: float | None = None
        """Seconds between two heartbeats, once the weaver has welcomed the replica."""

    @property
    def is_open(self) -> bool:
        """Whether the weaver takes frames."""
        return self.beat is not None

    async def serve(self, address: WeaverAddress) -> None:
        """Connect, and take commands until the connection is over.

        Raises:
            LoomError: the weaver refuses the replica, such as with `Conflict`, or what answers is no weaver.
            OSError, TimeoutError: there is no weaver, or not any more.
        """
        connecting = asyncio.open_connection(address.host, address.port)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT)
        splitter = FrameSplitter(MAX_FRAME)
        self._writer = writer
        try:
            writer.write(pack(self._replica.hello(address.key).to_body()))
            first = await asyncio.wait_for(self._first(reader, splitter), WELCOME_TIMEOUT)
            welcome = ThreadletWelcome.from_body(first[0])
            self.beat, self._takes_silence = welcome.beat, welcome.exits
            self._replica.takes_status_types = welcome.status_types
            for frame in self._replica.welcomed(welcome.seq):
                self.send(frame)
            self._welcomed(self._replica)
            for body in first[1:]:
                self._receive(body)
            while data := await reader.read(_CHUNK):
                for body in unpack_all(splitter.feed(data)):
                    self._receive(body)
        finally:
            self.beat = self._writer = None
            writer.transport.abort()

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

    async def _first(self, reader: asyncio.StreamReader, splitter: FrameSplitter) -> list[list[Any]]:
        """Return the weaver's answer to the hello, and the frames that came with it."""
        while data := await reader.read(_CHUNK):
            if frames := unpack_all(splitter.feed(data)):
                if frames[0][0] == Refusal.KIND:
                    self._receive(frames[0])
                return frames
        raise ConnectionResetError("the weaver closed the connection")

    def _receive(self, frame: list[Any]) -> None:
        match frame[0]:
            case Command.KIND:
                try:
                    self._take(self._replica, Command.from_body(frame))
                except UnknownCommandKind as error:
                    self.send(Acknowledged(error.id, Acknowledgement.failed(str(error))))
            case FailureNoted.KIND:
                noted = FailureNoted.from_body(frame).id
                failures = self._replica.failures
                for device in [device for device, failed in failures.items() if failed.id == noted]:
                    del failures[device]
            case StackRequest.KIND:
                self.send(Stack(StackRequest.from_body(frame).id, _NO_STACKS))
            case ProfileRequest.KIND:
                self.send(Profile(ProfileRequest.from_body(frame).id, "", 0, 0, _NO_PROFILE))
            case Refusal.KIND:
                refusal = Refusal.from_body(frame)
                raise error_for_code(refusal.code, refusal.text)
            case ThreadletWelcome.KIND:
                raise ProtocolMismatch("a second welcome came")
