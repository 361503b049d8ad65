"""What the handlers of one session share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loom.wire.codec import Decoder, Encoder
from loom_gateway.driver.monarch.fast_call import ReplyChannels
from loom_gateway.driver.monarch.futures import Futures
from loom_gateway.driver.monarch.host_table import HostTable
from loom_gateway.driver.monarch.mesh_table import HOST_MESH, Entry, MeshTable
from loom_gateway.driver.monarch.returned_meshes import ReturnedMeshes
from loom_gateway.driver.monarch.translations import TRANSLATIONS
from loom_gateway.driver.session.failures import Failures, Losses
from loom_gateway.driver.session.replies import Replies, Send
from loom_gateway.driver.weaver_link import WeaverLink

__all__ = ["Context"]


@dataclass(frozen=True)
class Context:
    """The state of one session."""

    loop: asyncio.AbstractEventLoop
    """The driver's event loop."""
    send: Send
    """Takes a message for the client."""
    has_room: Callable[[], bool]
    """Whether lines that are printed may be added to what waits for the client."""
    weaver: WeaverLink
    lifeline: tuple[str, int]
    """Host and port that every process of the session holds on to; see `loom_gateway.driver.monarch.liveness`."""
    hosts: HostTable
    meshes: MeshTable
    decoder: Decoder
    passing_decoder: Decoder
    """For arguments that only pass through: arrays and tensors are not put together here."""
    encoder: Encoder
    replies: Replies
    """The operations that have not been answered."""
    futures: Futures
    """Answers an operation with what a future of Monarch's gives."""
    channels: ReplyChannels
    """The faster way to call single actors."""
    failures: Failures

    @classmethod
    def of_session(
        cls,
        host_mesh: Any,
        addresses: Sequence[str],
        lifeline: tuple[str, int],
        weaver: WeaverLink,
        loop: asyncio.AbstractEventLoop,
        send: Send,
        flush: Callable[[], None],
        has_room: Callable[[], bool],
    ) -> Context:
        """Make the state of a session.

        Args:
            host_mesh: the Monarch host mesh of the session's workers.
            addresses: of its hosts.
            lifeline: host and port that every process of the session holds on to.
            weaver: tells the weaver of the processes.
            loop: the driver's event loop.
            send: takes a message for the client.
            flush: sends the messages that were not eager.
            has_room: whether lines that are printed may be added to what waits for the client.
        """
        meshes = MeshTable()
        hosts = Entry("hosts", "hosts", host_mesh, HOST_MESH, ranks=tuple(range(len(host_mesh))))
        meshes.add(HOST_MESH, hosts)
        encoder = Encoder(swaps={**ReturnedMeshes(meshes).swaps, **TRANSLATIONS})
        losses = Losses(meshes)
        replies = Replies(loop, encoder, send, flush, losses.why_silent)
        channels = ReplyChannels(loop, replies, meshes)
        return cls(
            loop=loop,
            send=send,
            has_room=has_room,
            weaver=weaver,
            lifeline=lifeline,
            hosts=HostTable(addresses),
            meshes=meshes,
            decoder=Decoder(meshes.resolve),
            passing_decoder=Decoder(meshes.resolve, passing_on=True),
            encoder=encoder,
            replies=replies,
            futures=Futures(loop, replies),
            channels=channels,
            failures=Failures(loop, meshes, losses, replies, channels, send),
        )
