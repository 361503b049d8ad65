"""The output of the weaver's commits: it waits in the outbox until the state that it reports is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from loom.control.frame import Frame
from loom.control.handshake import Refusal
from loom.weaver.commands import GivenCommand
from loom.weaver.replicas import Replica
from loom.weaver.views import WeaverEvent


class OutboxPeer:
    """A connection with a threadlet, as the weaver sees it. ``replica`` is None until the threadlet's hello."""

    replica: Replica | None = None

    @property
    def has_unheard(self) -> bool:
        """True if something has come from the threadlet that the weaver has had no time to take yet."""
        return False


@dataclass(slots=True)
class CommittedOutput:
    """The output of the weaver after a commit, when everything that it reports is stored."""

    frames: list[tuple[OutboxPeer, Frame | None]] = field(default_factory=list)
    """Frames for threadlets, in order; None closes the connection."""
    events: list[WeaverEvent] = field(default_factory=list)
    acknowledged: dict[str, GivenCommand] = field(default_factory=dict)
    """Commands with a new acknowledgement, by id, for the callers that wait for one."""
    described: list[Replica] = field(default_factory=list)
    """Replicas that have new handlers, for watchers."""
    stacks: list[tuple[str, Replica]] = field(default_factory=list)
    """Stacks to get: the id for `Stacks.take`, and the replica."""
    profiles: list[tuple[str, Replica, float]] = field(default_factory=list)
    """Profiles to take: the id for `Profiles.take`, the replica, and the seconds."""


class Outbox:
    """The output of the next commit."""

    def __init__(self) -> None:
        self.output = CommittedOutput()
        self.urgent = False
        """True if a peer or a caller waits for the next commit."""

    def send(self, replica: Replica, frame: Frame) -> None:
        self.output.frames.append((replica.link, frame))

    def refuse(self, peer: OutboxPeer, code: str, text: str) -> None:
        self.output.frames += [(peer, Refusal(code, text)), (peer, None)]
        self.urgent = True

    def close(self, peer: OutboxPeer) -> None:
        """Close a connection after the frames for it are sent."""
        peer.replica = None
        self.output.frames.append((peer, None))

    def hurry(self) -> None:
        """Note that a caller waits for the next commit."""
        self.urgent = True

    def take(self) -> CommittedOutput:
        output, self.output, self.urgent = self.output, CommittedOutput(), False
        return output
