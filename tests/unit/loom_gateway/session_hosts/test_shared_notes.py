"""Two gateways of a session host: what one of them knows, the other one goes by."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from loom.errors import AuthenticationError, LoomError, RateLimited, SessionHostUnreachable, TokenRevoked
from loom.token_file import TokenFile
from loom_gateway.access.audit import Audit
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.access.sign_ins import SignIns
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.session_hosts.host import SessionHost
from loom_gateway.session_hosts.hosts import SessionHosts
from loom_gateway.session_hosts.shared_notes import SharedNotes
from loom_gateway.sessions.ended_sessions import SessionEnd
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.settings import Limits
from loom_gateway.workers.sources import WorkerHosts, parse_source

KEY = "k" * 32

BOUND = 20.0


class Host:
    """A session host without a session."""

    def __init__(self) -> None:
        self.manager = SessionManager(WorkerHosts([parse_source("tcp://127.0.0.1:1")]), 1.0, None, True)
        self.host = SessionHost(self.manager, KEY)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    async def start(self) -> Host:
        await self.host.start(self._listener)
        return self

    def close(self) -> None:
        self.host.server.close()


class Gateway:
    """A gateway with a token file and an audit of its own."""

    def __init__(self, folder: Path, *hosts: Host) -> None:
        self.tokens = TokenFile(folder / "tokens.json")
        self.audit = folder / "audit"
        self.hosts = SessionHosts(WorkerHosts([parse_source(host.address) for host in hosts]), KEY)
        sign_ins = SignIns(secret=self.hosts.secret_of("page"))
        authority = TokenAuthority("own", self.tokens)
        limits = Limits(login_failures=4)
        self.access = AccessControl(authority, limits, Audit(self.audit), sign_ins=sign_ins)
        self.hosts.shared = sign_ins.codes = SharedNotes(self.access, self.hosts.answering)
        self.hosts.on_end = self.access.session_ended

    def principal(self, token: str) -> Principal:
        scope = {"type": "websocket", "headers": [(b"authorization", f"Bearer {token}".encode())], "path": "/ws/v1"}
        return self.access.admit({**scope, "client": ("10.0.0.1", 1)})

    def ends(self) -> list[str]:
        """The sessions whose end is in the audit."""
        lines = [json.loads(line) for line in self.audit.read_text().splitlines()]
        return [line["session"] for line in lines if line["event"] == "ended"]


@contextlib.asynccontextmanager
async def gateways(tmp_path: Path, *hosts: Host) -> AsyncIterator[tuple[Gateway, Gateway]]:
    for host in hosts:
        await host.start()
    made = []
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            made.append(Gateway(tmp_path / name, *hosts))
            await made[-1].hosts.adopt(lambda owner: owner)
        yield made[0], made[1]
    finally:
        for gateway in made:
            await gateway.hosts.close()
            await gateway.access.audit.close()
        for host in hosts:
            host.close()


async def until(condition: Callable[[], Any]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), BOUND)


def raises(error: type[LoomError], do: Callable[[], Any]) -> bool:
    try:
        do()
    except error:
        return True
    except LoomError:
        pass
    return False


@pytest.mark.guarantees(
    "page access", "A code signs in once, also if two gateways of a session host are shown it at once"
)
async def test_a_code_signs_in_once_at_one_of_the_gateways(tmp_path: Path) -> None:
    async with gateways(tmp_path, Host(), Host()) as (first, second):
        for gateway in (first, second):
            code, _ = await first.access.new_code(first.principal("own"), "view", True)
            both = await asyncio.gather(
                gateway.access.exchange("10.0.0.1", None, code),
                second.access.exchange("10.0.0.2", None, code),
                return_exceptions=True,
            )
            (admitted,) = [one for one in both if not isinstance(one, BaseException)]
            (refused,) = [one for one in both if isinstance(one, BaseException)]

            assert (admitted[0].user, admitted[0].token.scope) == ("admin", "view")
            assert isinstance(refused, AuthenticationError)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_code_is_good_at_the_gateway_that_gave_it_if_no_session_host_keeps_it(
    tmp_path: Path, number: int
) -> None:
    hosts = [Host() for _ in range(number)]
    for older in hosts:
        del older.host._methods["note"], older.host._methods["take"]
    async with gateways(tmp_path, *hosts) as (first, second):
        code, _ = await first.access.new_code(first.principal("own"), None, True)
        with pytest.raises(AuthenticationError):
            await second.access.exchange("10.0.0.1", None, code)

        assert (await first.access.exchange("10.0.0.1", None, code))[0].user == "admin"


async def test_a_code_that_a_lost_host_may_have_is_given_to_nobody(tmp_path: Path) -> None:
    host = Host()

    async def vanish(about: Any) -> None:
        host.close()

    host.host._methods["note"] = vanish
    async with gateways(tmp_path, host) as (first, _):
        with pytest.raises(SessionHostUnreachable):
            await first.access.new_code(first.principal("own"), None, True)


@pytest.mark.guarantees("strangers", "Wrong tokens count at all gateways of a session host together")
async def test_wrong_tokens_count_at_both_gateways_together(tmp_path: Path) -> None:
    async with gateways(tmp_path, Host(), Host()) as (first, second):
        for gateway in (first, second, first):
            with pytest.raises(AuthenticationError):
                gateway.principal("wrong")
        counted = second.access.allowances.shared["failures"]
        await until(lambda: counted._left("10.0.0.1") < 1.1)  # the first one's have come

        with pytest.raises(AuthenticationError):
            second.principal("wrong")
        with pytest.raises(RateLimited, match="--login-failures 4"):
            second.principal("wrong")
        second.principal("own")  # a good token always comes in


@pytest.mark.guarantees(
    "users", "A token that is revoked in one gateway's file is refused at all gateways of a session host"
)
async def test_a_token_that_one_file_says_is_revoked_is_refused_at_both(tmp_path: Path) -> None:
    async with gateways(tmp_path, Host()) as (first, second):
        record, token = first.tokens.create("ann", "view")
        (tmp_path / "second" / "tokens.json").write_bytes((tmp_path / "first" / "tokens.json").read_bytes())
        (tmp_path / "second" / "tokens.json").chmod(0o600)
        cut_off: list[LoomError] = []

        async def disconnect(error: LoomError) -> None:
            cut_off.append(error)

        with second.access.connected(second.principal(token), disconnect):
            first.tokens.revoke(record.id)
            assert raises(TokenRevoked, lambda: first.principal(token))
            await until(lambda: cut_off)
            assert raises(TokenRevoked, lambda: second.principal(token))


async def test_what_has_ended_before_a_gateway_began_is_known_to_it(tmp_path: Path) -> None:
    host = Host()
    async with gateways(tmp_path, host) as (first, _):
        begun, text = first.access.sign_ins.begin(first.principal("own").token, "", False)
        await first.access.sign_ins.end(begun)
        (tmp_path / "third").mkdir()
        third = Gateway(tmp_path / "third", host)
        await third.hosts.adopt(lambda owner: owner)
        await until(lambda: raises(TokenRevoked, lambda: third.access.sign_ins.read(text)))
        await third.hosts.close()
        await third.access.audit.close()


@pytest.mark.guarantees("users", "The end of a session is in the audit of one gateway of a session host")
async def test_the_end_of_a_session_is_in_one_audit(tmp_path: Path) -> None:
    host = Host()
    async with gateways(tmp_path, host) as (first, second):
        for name in ("a", "b"):
            host.manager.on_end(SessionEnd("token", "ann", name, "a user ended it", 0))
        await until(lambda: not host.host._ends)

        assert sorted([*first.ends(), *second.ends()]) == ["a", "b"]


@pytest.mark.guarantees("users", "The end of a session is in the audit of one gateway of a session host")
async def test_another_gateway_writes_what_one_that_dies_has_not_written(tmp_path: Path) -> None:
    host = Host()
    async with gateways(tmp_path, host) as (first, second):
        told: list[Gateway] = []
        for gateway in (first, second):
            gateway.hosts.on_end = lambda end, gateway=gateway: told.append(gateway)  # type: ignore[misc]
            gateway.hosts._hosts.all()[0].tell = _nothing  # type: ignore[method-assign]
        host.manager.on_end(SessionEnd("token", "ann", "a", "a user ended it", 0))
        await until(lambda: told)
        (dies,) = told
        other = second if dies is first else first
        del other.hosts._hosts.all()[0].tell
        other.hosts.on_end = other.access.session_ended
        await dies.hosts.close()
        await until(lambda: not host.host._ends)

        assert other.ends() == ["a"]


async def _nothing(method: str, **about: Any) -> None:
    """Send nothing, as a gateway that has just died."""
