"""The handlers for the client's options of its processes' output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.wire.bodies import SetLogOptions
from loom.wire.messages import Kind, Message
from loom_gateway.driver.output.collector import LogCollector
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.session.context import Context
from loom_gateway.driver.session.replies import Handler

_INFO = 20


class Logs:
    """The handlers for the logs of one session."""

    def __init__(self, context: Context, spool: LogSpool | None) -> None:
        self._context = context
        self._levels: dict[int, int] = {}
        self.collector = LogCollector(context.loop, context.send, self._describe, spool, context.has_room)
        self.handlers: dict[int, Handler] = {
            Kind.LOG_OPTIONS: self._set_options,
            Kind.FLUSH_LOGS: self._flush,
        }

    def _describe(self, procs: int) -> tuple[str, Sequence[str], Sequence[int]]:
        for ident, entry in self._context.meshes.whole("procs"):
            if ident == procs:
                labels, _, sizes, _ = self._context.meshes.shape(entry)
                return entry.name, labels, sizes
        return f"mesh {procs}", (), ()  # the client has dropped its proxy

    def _set_options(self, message: Message, started: float) -> None:
        options = SetLogOptions.from_body(message.body)
        procs, level = options.procs, options.level
        entry = self._context.meshes.entry(procs)
        self._context.loop.call_soon_threadsafe(self.collector.set_options, procs, options.stream, options.window)
        if level == self._levels.get(procs, _INFO):
            self._context.replies.succeed(message.id, started, None)
            return
        self._levels[procs] = level
        # Monarch sets the level in the processes, but forwards nothing: the driver does that.
        setting = entry.mesh.logging_option(stream_to_client=False, aggregate_window_sec=None, level=level)
        self._context.replies.answer_with(message, started, _set(setting))

    def _flush(self, message: Message, started: float) -> None:
        self._context.replies.answer_with(message, started, self.collector.flush())


async def _set(setting: Any) -> None:
    await setting
