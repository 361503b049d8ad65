"""What the weaver has to say: it is put aside here, and leaves when what it is about is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from loom.control.frame import Frame
from loom.control.introduction import Refusal
from loom.weaver.commands import GivenCommand
from loom.weaver.replicas import Replica
from loom.weaver.views import WeaverEvent


class Peer:
    """A connection with a threadlet, as the weaver sees it. ``replica`` is None until it has said hello."""

    replica: Replica | None = None


@dataclass(slots=True)
class Output:
    """What the weaver says after a commit, when all that it is about is stored."""

    frames: list[tuple[Peer, Frame | None]] = field(default_factory=list)
    """For threadlets, in order; None: close the connection."""
    events: list[WeaverEvent] = field(default_factory=list)
    """For watchers."""
    done: list[GivenCommand] = field(default_factory=list)
    """For those that wait for them."""
    stacks: list[tuple[str, Replica]] = field(default_factory=list)
    """Stacks to get: the id to give to `loom.weaver.stacks.Stacks.take`, and the replica."""


class Outbox:
    """The output of the next commit."""

    def __init__(self) -> None:
        self.output = Output()
        self.urgent = False
        """Whether a peer or a caller waits for the next commit."""

    def send(self, replica: Replica, frame: Frame) -> None:
        """Send a frame to a replica that is connected."""
        self.output.frames.append((replica.link, frame))

    def refuse(self, peer: Peer, code: str, text: str) -> None:
        """Say why a connection is closed, and close it."""
        self.output.frames += [(peer, Refusal(code, text)), (peer, None)]
        self.urgent = True

    def close(self, peer: Peer) -> None:
        """Close a connection, behind the frames for it."""
        self.output.frames.append((peer, None))

    def take(self) -> Output:
        """Return the output, and begin again with nothing."""
        output, self.output, self.urgent = self.output, Output(), False
        return output
