"""The gateway's own part of what pages get: sessions, by who may see them, and workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from loom.token_file import Token
from loom_gateway.access.sessions import Principal
from loom_gateway.weaver_socket import page_feed
from loom_gateway.weaver_socket.page_feed import GatewayFeed, PageReader

BOUND = 20.0


def session(name: str, user: str, **given: Any) -> Any:
    known = {"state": "open", "client_connected": True, "created_at": 1.0, "pid": 5, "operations": 0}
    return SimpleNamespace(**{**known, "name": name, "user": user, "persist": False, "shared": {}, **given})


class Access:
    """Stands in for the access control: an admin sees all sessions, another user the own and the shared ones."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def sessions(self, principal: Principal) -> list[Any]:
        return [one for one in self.all if principal.is_admin or principal.user in (one.user, *one.shared)]


class Page:
    """A page's reader, and what it was sent."""

    def __init__(self, feed: GatewayFeed, user: str, scope: str = "view") -> None:
        self.reader: PageReader = feed.reader(Principal(Token("id", user, scope, "digest", 0.0, user=user), "::1"))
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sending = asyncio.ensure_future(self.reader.send_to(self._take))

    async def _take(self, message: Any) -> None:
        self.got.put_nowait(json.loads(message["text"]))

    async def next(self, name: str) -> Any:
        while True:
            message = await asyncio.wait_for(self.got.get(), BOUND)
            if name in message:
                return message[name]

    async def close(self) -> None:
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)


@pytest.fixture
async def feed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayFeed]:
    monkeypatch.setattr(page_feed, "SESSIONS_EVERY", 0.005)
    monkeypatch.setattr(page_feed, "WORKERS_EVERY", 0.005)
    manager: Any = SimpleNamespace(workers=["tcp://a:1"])
    access: Any = Access()
    made = GatewayFeed(manager, access)
    yield made
    assert not made._tasks


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Which workers answer."""
    found: dict[str, bool] = {}

    async def answers(address: str) -> bool:
        return found.get(address, True)

    monkeypatch.setattr(page_feed, "answers", answers)
    return found


def sees(feed: GatewayFeed) -> list[Any]:
    access: Any = feed._access
    sessions: list[Any] = access.all
    return sessions


def names(sessions: list[dict[str, Any]]) -> list[str]:
    return [one["name"] for one in sessions]


@pytest.mark.guarantees(
    "weaver", "A watcher is told of its user's replicas only, and a page also of the sessions that its user may see"
)
async def test_each_page_hears_of_the_sessions_that_its_user_may_see(
    feed: GatewayFeed, reachable: dict[str, bool]
) -> None:
    sees(feed).append(session("s-ann", "ann"))
    ann, bob, root = Page(feed, "ann"), Page(feed, "bob"), Page(feed, "root", "admin")
    with feed.reading(ann.reader), feed.reading(bob.reader), feed.reading(root.reader):
        first = [names(page.reader.own_part()["sessions"]) for page in (ann, bob, root)]
        sees(feed).append(session("s-bob", "bob"))
        of_bob, of_root = await bob.next("sessions"), await root.next("sessions")
        sees(feed)[0].shared = {"bob": "view"}
        shared = await bob.next("sessions")
        sees(feed)[0].shared = {}
        unshared = await bob.next("sessions")

        assert first == [["s-ann"], [], ["s-ann"]]
        assert (names(of_bob), names(of_root)) == (["s-bob"], ["s-ann", "s-bob"])
        assert (names(shared), names(unshared)) == (["s-ann", "s-bob"], ["s-bob"])
        assert not any("s-bob" in json.dumps(ann.got.get_nowait()) for _ in range(ann.got.qsize()))
    for page in (ann, bob, root):
        await page.close()


async def test_operations_alone_are_pushed_less_often(feed: GatewayFeed, reachable: dict[str, bool]) -> None:
    sees(feed).append(session("s-ann", "ann"))
    page = Page(feed, "ann")
    feed._pages[page.reader] = None
    await feed.look_at_sessions(page.reader.principal)
    page.reader.own_part()
    sees(feed)[0].operations = 7

    await feed.compare_sessions(also_operations=False)
    assert page.reader._size == 0
    await feed.compare_sessions(also_operations=True)

    assert (await page.next("sessions"))[0]["operations"] == 7
    await page.close()


async def test_operations_are_pushed_in_the_end(feed: GatewayFeed, reachable: dict[str, bool]) -> None:
    sees(feed).append(session("s-ann", "ann"))
    page = Page(feed, "ann")
    with feed.reading(page.reader):
        page.reader.own_part()
        sees(feed)[0].operations = 7

        assert (await page.next("sessions"))[0]["operations"] == 7
    await page.close()


async def test_a_worker_that_does_not_answer_any_more_is_pushed(
    feed: GatewayFeed, reachable: dict[str, bool]
) -> None:
    page = Page(feed, "ann")
    page.reader.own_part()
    with feed.reading(page.reader):
        assert await page.next("workers") == [{"address": "tcp://a:1", "reachable": True}]
        reachable["tcp://a:1"] = False
        assert await page.next("workers") == [{"address": "tcp://a:1", "reachable": False}]
        assert page.reader.own_part()["workers"] == [{"address": "tcp://a:1", "reachable": False}]
    await page.close()


async def test_a_page_without_a_snapshot_is_sent_nothing(feed: GatewayFeed, reachable: dict[str, bool]) -> None:
    early, other = Page(feed, "ann"), Page(feed, "ann")
    other.reader.own_part()
    with feed.reading(early.reader), feed.reading(other.reader):
        sees(feed).append(session("s-ann", "ann"))
        await other.next("sessions")

        assert early.got.empty()
    for page in (early, other):
        await page.close()
