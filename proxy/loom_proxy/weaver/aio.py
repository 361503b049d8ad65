"""`AsyncWeaverProxy`: the methods of `WeaverProxy` for coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from loom.weaver.views import WeaverEvent, WeaverUpdate
from loom_proxy.weaver.command import CommandProxy
from loom_proxy.weaver.feed import WeaverFeed


class AsyncWeaverProxy:
    """The weaver of a gateway, for coroutines: every method of `WeaverProxy`, awaited or iterated over.

    Commands return their replicas' acknowledgements, not a `CommandProxy`; bound the wait with `asyncio.wait_for`.
    ``inject`` returns an `InjectionProxy`, which can be awaited.
    """

    def __init__(self, weaver: object, feed: WeaverFeed) -> None:
        self._weaver = weaver
        self._feed = feed

    def events(
        self,
        after: int | None = None,
        follow: bool = False,
        *,
        limit: int = 100,
        kind: str | None = None,
        replica: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> AsyncIterator[WeaverEvent]:
        """Read events, the oldest first; see `WeaverProxy.events`."""
        wanted: dict[str, Any] = {"kind": kind, "replica": replica, "since": since, "until": until}
        return self._feed.events_async(after, follow, limit=limit, **wanted)

    def watch(self, timeout: float | None = None) -> AsyncIterator[WeaverUpdate]:
        """Read the present state, then each change as it happens; see `WeaverProxy.watch`."""
        return self._feed.watch_async(timeout)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = None if name.startswith("_") else getattr(self._weaver, name, None)
        if not callable(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @functools.wraps(method)
        async def twin(*args: Any, **kwargs: Any) -> Any:
            found = await asyncio.to_thread(method, *args, **kwargs)
            return await found if type(found) is CommandProxy else found

        return twin

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in dir(self._weaver) if name[0] != "_" and name != "aio")]
