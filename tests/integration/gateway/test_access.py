"""Who comes in at a real gateway, what for, and how those are put out whose token is not good any more."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

import loom
from loom import Actor, endpoint
from loom.rest_client import Gateway
from loom.token_file import SCOPES, TokenFile
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import AccessMiddleware
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.settings import Limits
from loom_proxy.local import LocalCluster
from tests.support.processes import read_json, run, run_loom
from tests.support.processes import start as start_program
from tests.support.raw_client import BOUND, exchange, refusal, status_of, websocket


class Waiter(Actor):
    @endpoint
    def wait_for(self, path: str) -> str:
        deadline = time.monotonic() + 60
        while not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return "done"


class Guarded:
    """A gateway with a file of tokens and an audit."""

    def __init__(self, cluster: LocalCluster, file: TokenFile, audit: Path) -> None:
        self.url = cluster.url
        self.token = cluster.token
        self.workers = cluster.workers
        self.file = file
        self._audit = audit

    def make(self, scope: str, expires_in: float | None = None, user: str = "admin") -> tuple[str, str]:
        """The id of a new token, by default of the user of the gateway's own token, and the token."""
        token, text = self.file.create(f"a {scope}", scope, expires_in, user)
        return token.id, text

    def audit(self, **wanted: Any) -> list[dict[str, Any]]:
        """The audit's lines that have these values."""
        lines = [json.loads(line) for line in self._audit.read_text().splitlines()]
        return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]

    def rest(self, method: str, path: str, token: str, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and answer of a request."""
        request = urllib.request.Request(self.url.replace("ws:", "http:") + path, method=method)
        for name, value in {"Authorization": f"Bearer {token}", **headers}.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=BOUND) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, {**json.load(error), "headers": dict(error.headers)}


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def start(folder: Path, *options: str) -> Iterator[Guarded]:
    file = TokenFile(folder / "tokens.json")
    files = ["--tokens", str(file.path), "--audit", str(folder / "audit")]
    with LocalCluster(1, gateway_options=[*files, *options]) as cluster:
        yield Guarded(cluster, file, folder / "audit")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    yield from start(tmp_path_factory.mktemp("guard"), "--allow-origin", "https://notebooks.example")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """With small limits, but for those on what comes from one address."""
    limits = ["--max-sessions", "1", "--max-in-flight", "4", "--max-message", "2000000"]
    yield from start(tmp_path_factory.mktemp("strict"), *limits)


@pytest.fixture
def tokens(guard: Guarded) -> dict[str, str]:
    """A new token of each scope."""
    return {scope: guard.make(scope)[1] for scope in SCOPES}


# -- scopes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
def test_every_scope_reads(guard: Guarded, tokens: dict[str, str], scope: str) -> None:
    for path in ("/api/v1/status", "/api/v1/sessions", "/api/v1/openapi.json"):
        assert guard.rest("GET", path, tokens[scope])[0] == 200


def test_ending_a_session_over_rest_needs_operate(guard: Guarded, tokens: dict[str, str]) -> None:
    with loom.connect(guard.url, tokens["drive"]) as job:
        path = f"/api/v1/sessions/{job.session}"

        status, answer = guard.rest("DELETE", path, tokens["view"])
        assert (status, answer["error"]["code"]) == (403, "scope")
        assert "operate" in answer["error"]["message"]
        assert "view" in answer["error"]["message"]
        with pytest.raises(loom.ScopeError):
            Gateway(guard.url, tokens["view"]).end_session(job.session)

        assert guard.rest("DELETE", path, tokens["operate"])[0] == 200
        assert guard.audit(event="commanded", path=path, status=200, name="a operate")
        until(lambda: guard.audit(event="ended", session=job.session, reason="it was ended over REST"))


@pytest.mark.parametrize("scope", ["view", "operate"])
def test_opening_and_driving_a_session_needs_drive(guard: Guarded, tokens: dict[str, str], scope: str) -> None:
    with pytest.raises(loom.ScopeError, match=f"needs a token of scope drive.*has scope {scope}"):
        loom.connect(guard.url, tokens[scope])
    with loom.connect(guard.url, tokens["drive"]) as job, pytest.raises(loom.ScopeError):
        loom.connect(guard.url, tokens[scope], session=job.session)


def test_watching_a_session_needs_view_only(guard: Guarded, tokens: dict[str, str]) -> None:
    with loom.connect(guard.url, tokens["drive"]) as job:
        watcher = loom.connect(guard.url, tokens["view"], session=job.session, mode="watch")
        try:
            assert watcher.runs() == {}
            with pytest.raises(loom.ReadOnlySession):
                watcher.run(max, 1, 2)
            until(lambda: guard.audit(event="watched", session=job.session, name="a view"))
        finally:
            watcher.detach()


@pytest.mark.parametrize("hello", [{"mode": "watch"}, {"mode": "reign"}, {"mode": "reign", "session": "x"}])
def test_a_hello_that_wants_what_is_absent(guard: Guarded, tokens: dict[str, str], hello: dict[str, str]) -> None:
    with websocket(guard.url, tokens["drive"]) as client:
        assert type(refusal(client, **hello)) is loom.ProtocolMismatch


def test_a_token_that_opens_a_session_is_in_the_audit_and_its_text_is_not(guard: Guarded) -> None:
    ident, text = guard.make("drive")
    with loom.connect(guard.url, text) as job:
        until(lambda: guard.audit(event="opened", session=job.session))
        (line,) = guard.audit(event="opened", session=job.session)
        assert (line["token"], line["name"], line["peer"]) == (ident, "a drive", "127.0.0.1")
        job.detach()
    until(lambda: guard.audit(event="left", session=job.session))
    with loom.connect(guard.url, guard.token, session=job.session):
        until(lambda: guard.audit(event="drove", session=job.session, token="gateway"))
    until(lambda: guard.audit(event="ended", session=job.session, opened_by=ident))
    assert text not in guard._audit.read_text()
    assert guard.token not in guard._audit.read_text()


def test_a_wrong_token_is_refused_and_told_of(guard: Guarded) -> None:
    with pytest.raises(loom.AuthenticationError, match="does not accept the token"):
        loom.connect(guard.url, "wrong")
    assert guard.rest("GET", "/api/v1/status", "wrong")[0] == 401
    until(lambda: guard.audit(event="refused", code="authentication", peer="127.0.0.1"))


# -- tokens that are not good any more ------------------------------------------------------------------------


@pytest.mark.guarantees("strangers", "What was refused is counted by reason, for who sees all users")
def test_what_was_refused_is_shown_by_reason_to_who_sees_all_users(guard: Guarded) -> None:
    before = Gateway(guard.url, guard.token).status()["refused"]
    assert guard.rest("GET", "/api/v1/status", "wrong")[0] == 401
    assert status_of(exchange(guard.url, b"\x16\x03\x01 no HTTP\r\n\r\n")) == 400

    _, of_another_user = guard.make("view", user="another")
    after = Gateway(guard.url, guard.token).status()["refused"]

    assert {reason: after[reason] - before.get(reason, 0) for reason in ("authentication", "no_http")} == {
        "authentication": 1,
        "no_http": 1,
    }
    assert Gateway(guard.url, of_another_user).status()["refused"] is None
    assert "refused since it started: " in run_loom("status", "--url", guard.url, "--token", guard.token).stdout
    request = urllib.request.Request(guard.url.replace("ws:", "http:") + "/metrics")
    request.add_header("Authorization", f"Bearer {guard.token}")
    with urllib.request.urlopen(request, timeout=BOUND) as response:
        assert 'loom_refused_total{reason="no_http"}' in response.read().decode()


def test_a_revoked_token_is_cut_off_and_its_sessions_end(guard: Guarded) -> None:
    ident, text = guard.make("drive")
    with loom.connect(guard.url, guard.token) as other:
        job = loom.connect(guard.url, text)
        waiter = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("waiter", Waiter)
        waiter.wait_for.call_one("/").get(BOUND)
        future = waiter.wait_for.call_one("/never")

        guard.file.revoke(ident)

        with pytest.raises(loom.TokenRevoked, match=r"'a drive'.*was revoked"):
            future.get(BOUND)
        until(lambda: guard.audit(event="ended", session=job.session))
        assert "was revoked" in guard.audit(event="ended", session=job.session)[0]["reason"]
        assert guard.audit(event="cut off", token=ident)
        with pytest.raises(loom.TokenRevoked):
            loom.connect(guard.url, text)
        assert guard.rest("GET", "/api/v1/status", text)[1]["error"]["code"] == "token_revoked"
        assert not other.closed


def test_a_token_that_expires_is_cut_off(guard: Guarded) -> None:
    ident, text = guard.make("drive", expires_in=3600.0)
    job = loom.connect(guard.url, text)

    with guard.file._changing() as tokens:  # as if it were an hour later
        tokens[:] = [replace(token, expires=time.time()) if token.id == ident else token for token in tokens]

    assert job._connection.ended.wait(BOUND)

    with pytest.raises(loom.TokenRevoked, match="has expired"):
        job.hosts.spawn_procs(per_host={"gpus": 1})
    until(lambda: guard.audit(event="ended", session=job.session))


@pytest.mark.guarantees(
    "users", "A user's token is replaced without ending the sessions that were driven with the new one"
)
def test_a_session_that_was_driven_with_a_new_token_outlives_the_old_one(guard: Guarded) -> None:
    (old, first), (new, second) = guard.make("drive", user="ann"), guard.make("drive", user="ann")
    kept, left = loom.connect(guard.url, first), loom.connect(guard.url, first)
    kept.detach()
    watched = loom.connect(guard.url, second, session=left.session, mode="watch")
    job = loom.connect(guard.url, second, session=kept.session, take_over=True)

    guard.file.revoke(old)

    until(lambda: guard.audit(event="ended", session=left.session))  # which was only watched with the new one
    assert job.run(len, "abc") == 3
    guard.file.revoke(new)
    until(lambda: guard.audit(event="ended", session=kept.session))
    assert watched.closed
    assert job.closed


def test_a_revoked_token_does_not_end_the_session_of_another(guard: Guarded) -> None:
    ident, text = guard.make("drive")
    job = loom.connect(guard.url, guard.token)
    job.detach()
    guest = loom.connect(guard.url, text, session=job.session)

    guard.file.revoke(ident)

    assert guest._connection.ended.wait(BOUND)
    until(lambda: guard.audit(event="left", token=ident))
    with loom.connect(guard.url, guard.token, session=job.session):
        pass


def test_who_follows_the_logs_is_cut_off_too(guard: Guarded) -> None:
    ident, text = guard.make("view")
    with loom.connect(guard.url, guard.token) as job:
        request = urllib.request.Request(
            f"{guard.url.replace('ws:', 'http:')}/api/v1/sessions/{job.session}/logs?follow=1",
            headers={"Authorization": f"Bearer {text}"},
        )
        with urllib.request.urlopen(request, timeout=BOUND) as following:
            guard.file.revoke(ident)
            following.read()  # ends
        assert not job.closed


# -- origins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://notebooks.example.evil", "file://"])
def test_a_page_of_another_origin_is_refused(guard: Guarded, origin: str) -> None:
    with pytest.raises(InvalidStatus) as refused, websocket(guard.url, guard.token, Origin=origin):
        pass
    assert refused.value.response.status_code == 403
    assert refused.value.response.body is not None
    assert json.loads(refused.value.response.body)["error"]["code"] == "origin"


def test_pages_of_the_gateways_host_and_of_those_allowed_come_in(guard: Guarded) -> None:
    for origin in (guard.url.replace("ws:", "http:"), "https://notebooks.example"):
        with websocket(guard.url, guard.token, Origin=origin) as client:
            assert type(refusal(client, session="nobody")) is loom.UnknownSession


@pytest.mark.guarantees("users", "A gateway on loopback answers to no name that a web page could take over")
@pytest.mark.parametrize("path", ["/healthz", "/api/v1/status", "/api/v1/sessions"])
def test_a_page_whose_name_leads_here_is_refused(guard: Guarded, path: str) -> None:
    status, answer = guard.rest("GET", path, guard.token, Host="evil.example:8470")
    assert (status, answer["error"]["code"]) == (403, "host_refused")
    assert "--allow-host" in answer["error"]["message"]
    assert guard.rest("GET", path, guard.token, Host="localhost:8470")[0] == 200


def test_a_page_whose_name_leads_here_opens_no_websocket(guard: Guarded) -> None:
    evil = {"Host": "evil.example:8470", "Origin": "http://evil.example:8470"}
    key = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    key["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    headers = {**evil, **key, "Authorization": f"Bearer {guard.token}"}
    lines = [f"{name}: {value}" for name, value in headers.items()]

    answer = exchange(guard.url, "\r\n".join(["GET /ws/v1 HTTP/1.1", *lines, "", ""]).encode())

    assert status_of(answer) == 403
    assert b'"host_refused"' in answer


# -- limits -------------------------------------------------------------------------------------------------


@pytest.mark.guarantees("users", "Sessions are limited by user")
def test_a_user_has_so_many_sessions_and_no_more(strict: Guarded) -> None:
    (_, text), (_, again) = strict.make("drive", user="ann"), strict.make("drive", user="ann")
    with loom.connect(strict.url, text) as job:
        with pytest.raises(loom.LimitReached, match="'ann' has 1 sessions, and --max-sessions allows 1"):
            loom.connect(strict.url, again)
        with loom.connect(strict.url, strict.make("drive", user="bob")[1]):
            pass  # another user has another one
    until(lambda: strict.audit(event="ended", session=job.session, user="ann"))
    with loom.connect(strict.url, text):
        pass


def test_a_session_has_so_many_operations_in_flight_and_lives_on(strict: Guarded, tmp_path: Path) -> None:
    with loom.connect(strict.url, strict.make("drive", user="carol")[1]) as job:
        waiter = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("waiter", Waiter)
        assert waiter.wait_for.call_one("/").get(BOUND) == "done"
        futures = [waiter.wait_for.call_one(str(tmp_path / "go")) for _ in range(4)]

        with pytest.raises(loom.LimitReached, match=r"4 operations.*--max-in-flight"):
            waiter.wait_for.call_one("/").get(BOUND)

        (tmp_path / "go").touch()
        assert [future.get(BOUND) for future in futures] == ["done"] * 4
        assert waiter.wait_for.call_one("/").get(BOUND) == "done"


def test_refused_calls_whose_futures_nobody_reads_are_reported(
    strict: Guarded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loom.connect(strict.url, strict.make("drive", user="dora")[1]) as job:
        waiter = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("waiter", Waiter)
        futures = [waiter.wait_for.call_one(str(tmp_path / "go")) for _ in range(4)]
        for _ in range(4):
            waiter.wait_for.call_one("/")  # gone at once
        dropped, read = waiter.wait_for.call_one("/"), waiter.wait_for.call_one("/")
        with pytest.raises(loom.LimitReached):
            read.get(BOUND)
        del read
        assert dropped.done()
        del dropped

        reported = [event for event in job.events(timeout=0) if event.name == "operation_failed"]
        assert [event.details["refused"] for event in reported] == [1, 2, 4]
        assert all(isinstance(event.error, loom.LimitReached) for event in reported)
        assert "--max-in-flight" in reported[0].details["error"]
        warnings = [text for text in caplog.messages if "nobody has read" in text]
        assert [text.partition(" not begun")[0] for text in warnings] == [
            "A call was",
            "2 calls were",
            "4 calls were",
        ]
        (tmp_path / "go").touch()
        assert [future.get(BOUND) for future in futures] == ["done"] * 4


@pytest.mark.guarantees(
    "users", "Operations in flight, and bytes of results that are kept, count in all sessions of a user"
)
@pytest.mark.slow
def test_operations_in_flight_count_in_all_sessions_of_a_user(tmp_path: Path) -> None:
    for guard in start(tmp_path, "--max-in-flight", "4"):
        tokens = [guard.make("drive", user=user)[1] for user in ("ann", "bob")]
        with (
            loom.connect(guard.url, tokens[0]) as busy,
            loom.connect(guard.url, tokens[0]) as other,
            loom.connect(guard.url, tokens[1]) as bobs,
        ):
            waiters = [
                job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("waiter", Waiter) for job in (busy, other, bobs)
            ]
            assert [waiter.wait_for.call_one("/").get(BOUND) for waiter in waiters] == ["done"] * 3
            futures = [waiters[0].wait_for.call_one(str(tmp_path / "go")) for _ in range(4)]

            await_refusal(waiters[1], "4 of the user's other sessions")
            assert refusal_of(waiters[2]) == ""
            (tmp_path / "go").touch()
            assert [future.get(BOUND) for future in futures] == ["done"] * 4
            await_refusal(waiters[1], "")


def refusal_of(waiter: Any) -> str:
    """Why a call is refused; empty if it is not."""
    try:
        waiter.wait_for.call_one("/").get(BOUND)
    except loom.LimitReached as error:
        return str(error)
    return ""


def await_refusal(waiter: Any, why: str) -> None:
    """Wait until a call is refused for a reason, or, if it is empty, until none is."""
    until(lambda: why in refusal_of(waiter) if why else not refusal_of(waiter))


def test_a_message_that_is_too_large_is_not_sent_and_the_session_lives_on(strict: Guarded) -> None:
    with loom.connect(strict.url, strict.make("drive", user="dan")[1]) as job:
        with pytest.raises(loom.TooLarge, match="--max-message 2000000"):
            job.run(len, b"x" * 2_000_001)
        assert job.run(len, b"x" * 1_900_000) == 1_900_000


@pytest.mark.guarantees("strangers", "A right token comes in, whatever the neighbours behind the same address show")
def test_right_tokens_come_in_beside_wrong_ones_of_the_same_address(tmp_path: Path) -> None:
    for guard in start(tmp_path, "--login-failures", "3", "--login-window", "3600", "--connection-rate", "0.01"):
        ident, text = guard.make("drive")
        assert [guard.rest("GET", "/api/v1/status", f"guess {n}")[0] for n in range(4)] == [429] * 4

        # Others behind the same address, who have not been here before, come in as often as they like.
        for _ in range(5):
            with websocket(guard.url, text) as client:
                assert type(refusal(client, session="nobody")) is loom.UnknownSession
        loom.connect(guard.url, text, transport="http").close()

        guard.file.revoke(ident)
        with pytest.raises(loom.TokenRevoked):
            loom.connect(guard.url, text)


@pytest.mark.guarantees("strangers", "A right token comes in, whatever the neighbours behind the same address show")
def test_too_many_wrong_tokens_of_one_address(tmp_path: Path) -> None:
    for guard in start(tmp_path, "--login-failures", "3", "--login-window", "3600"):
        answers = [guard.rest("GET", "/api/v1/status", f"guess {n}") for n in range(4)]
        assert [status for status, _ in answers] == [401, 401, 401, 429]
        assert "--login-failures 3 within 3600 s" in answers[3][1]["error"]["message"]
        assert 0 < int(answers[3][1]["headers"]["retry-after"]) <= 1200
        with pytest.raises(loom.RateLimited, match="--login-failures"):
            loom.connect(guard.url, "another guess")
        # Who comes for the first time with a right token is not kept out by somebody else's guesses.
        assert guard.rest("GET", "/api/v1/status", guard.make("view")[1])[0] == 200


def test_too_many_requests_of_one_user(tmp_path: Path) -> None:
    for guard in start(tmp_path, "--connection-rate", "0.2"):  # one at once, and then one in 5 s
        assert [guard.rest("GET", "/api/v1/status", guard.token)[0] for _ in range(2)] == [200, 429]
        answer = guard.rest("GET", "/api/v1/status", guard.token)[1]
        assert "--connection-rate 0.2 a second" in answer["error"]["message"]
        assert guard.rest("GET", "/api/v1/status", guard.make("view", user="ann")[1])[0] == 200  # each has its own
        with urllib.request.urlopen(guard.url.replace("ws:", "http:") + "/healthz", timeout=BOUND) as health:
            assert health.status == 200
        until(lambda guard=guard: guard.audit(event="refused", code="rate_limited"))


def test_a_tunnel_comes_in_as_a_websocket_does_and_its_requests_are_not_counted() -> None:
    came: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.append(f"{scope['method']} {scope['path']} {scope['loom.principal'].token.name}")

    async def refused(message: Any) -> None:
        came.append(str(message.get("status", "")))

    async def ask() -> None:
        limits = Limits(connection_rate=0.01)  # less than one
        guarded = AccessMiddleware(app, AccessControl(TokenAuthority("own"), limits))
        headers = [(b"authorization", b"Bearer own")]
        for path in ("/api/v1/tunnel", *["/api/v1/tunnel/abc/up"] * 100, "/api/v1/tunnels"):
            await guarded({"type": "http", "method": "POST", "path": path, "headers": headers}, None, refused)  # type: ignore[arg-type]

    asyncio.run(ask())
    assert came == ["POST /api/v1/tunnel gateway", *["POST /api/v1/tunnel/abc/up gateway"] * 100, "429", ""]


# -- a gateway that cannot start so ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--tokens", "{folder}/broken"], 1, "broken"),
        (["--audit", "{folder}/nowhere/audit"], 2, "nowhere/audit"),
        (["--max-sessions", "-1"], 2, "--max-sessions"),
    ],
)
def test_a_gateway_says_what_it_cannot_work_with(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    (tmp_path / "broken").write_text("nothing")
    options = [option.format(folder=tmp_path) for option in options]

    ended = run("-m", "loom_gateway", "--worker", "tcp://127.0.0.1:1", "--port", "0", *options)

    assert ended.returncode == code
    assert said in ended.stderr


def test_the_command_passes_its_options_on(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    _, text = file.create("a viewer", "view", user="admin")
    options = ["--tokens", str(file.path), "--audit", str(tmp_path / "audit"), "--audit-size", "1000000"]
    options += ["--allow-origin", "https://a.example", "--allow-origin", "https://b.example"]
    options += ["--max-message", "1000", "--max-sessions", "2", "--max-in-flight", "3", "--connection-rate", "50"]
    options += ["--login-failures", "1", "--login-window", "60", "--trusted-proxy", "127.0.0.1"]
    command = "import sys; from loom.cli import main; main()"
    arguments = ["serve", "gateway", "--port", "0", "--worker", "tcp://127.0.0.1:1", "--exit-with-parent", *options]
    gateway = start_program("-c", command, *arguments)
    try:
        url = read_json(gateway)["url"]
        with websocket(url, text, Origin="https://b.example") as client:
            assert type(refusal(client)) is loom.ScopeError
        # Each client of the proxy has its own count.
        for address, status in (("10.0.0.1", 401), ("10.0.0.1", 429), ("10.0.0.2", 401)):
            request = urllib.request.Request(url.replace("ws:", "http:") + "/api/v1/status")
            request.add_header("Authorization", "Bearer wrong")
            request.add_header("X-Forwarded-For", address)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=BOUND)
            assert refused.value.code == status
        assert '"peer": "10.0.0.1"' in (tmp_path / "audit").read_text()
    finally:
        gateway.communicate(timeout=BOUND)  # closes its standard input
