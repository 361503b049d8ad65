"""Signing in to the page: tokens, codes, cookies and keys, and who may not use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loom.errors import AuthenticationError, LimitReached, LoomError, OriginRefused, RateLimited, TokenRevoked
from loom.token_file import TokenFile, digest
from loom_gateway import dashboard
from loom_gateway.access.control import AccessControl
from loom_gateway.access.credentials import RequestCredential, credential_of
from loom_gateway.access.middleware import MAX_UNKNOWN, AccessMiddleware
from loom_gateway.access.sign_ins import CODE_LASTS, LASTS, MAX_CODES, PREFIX, SignIns
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.app import create_app
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.settings import Limits
from loom_gateway.weaver_process import WeaverSupervisor

ORIGIN = "http://gateway"
PAGE = {"X-Loom-Page": "1", "Origin": ORIGIN}
BOUND = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


class Gateway:
    """A gateway's application, and the tokens of ann and bob."""

    def __init__(self, folder: Path, limits: Limits | None = None, path: str = "/") -> None:
        self.file = TokenFile(folder / "tokens.json")
        self.record, self.ann = self.file.create("ann", "drive")
        self.view = self.file.create("ann view", "view", user="ann")[1]
        self.manager = SessionManager([])
        self.clock = Clock()
        self.sign_ins = SignIns(str(folder / "page.json"))
        limits = limits or Limits(login_failures=0, connection_rate=0)
        origins = ["https://notebook"]
        self.access = AccessControl(TokenAuthority("own", self.file), limits, None, origins, self.sign_ins)
        supervisor = WeaverSupervisor(self.manager.folder.weaver, self.manager.worker_watch.there)
        app = create_app(self.manager, DriverLines(self.manager), self.access, supervisor, page_path=path)
        self.guarded = AccessMiddleware(app, self.access)

    def browser(self, origin: str = ORIGIN) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.guarded, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url=origin)

    async def sign_in(self, browser: httpx.AsyncClient, **shown: str) -> dict[str, Any]:
        answer = await browser.post("/api/v1/page/sign-in", json=shown, headers=PAGE)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def code(self, token: str, **asked: object) -> str:
        async with self.browser() as program:
            given = {"Authorization": f"Bearer {token}"}
            return str((await program.post("/api/v1/page/code", json=asked, headers=given)).json()["code"])

    def socket(self, *headers: tuple[str, str], path: str = "/ws/v1/weaver") -> dict[str, Any]:
        shown = [(name.lower().encode(), value.encode()) for name, value in (("Host", "gateway"), *headers)]
        return {"type": "websocket", "path": path, "headers": shown, "client": ("127.0.0.1", 1)}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    made = Gateway(tmp_path)
    yield made
    await made.manager.close()


def cookie_of(browser: httpx.AsyncClient) -> str:
    (cookie,) = browser.cookies.jar
    return f"{cookie.name}={cookie.value}"


def error_code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


@pytest.mark.guarantees(
    "page access", "A token is shown once; the cookie has neither it nor its hash, and scripts cannot read it"
)
async def test_a_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(gateway: Gateway) -> None:
    async with gateway.browser() as browser:
        answer = await browser.post("/api/v1/page/sign-in", json={"token": gateway.ann}, headers=PAGE)
        body, cookie = answer.json(), answer.headers["set-cookie"].lower()
        me = (await browser.get("/api/v1/page/me")).json()

    assert (body["user"], body["scope"], body["key"]) == ("ann", "drive", None)
    assert body["expires"] == me["expires"]
    assert me == {**body, "key": None}
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip() for part in cookie.split(";")}
    assert "secure" not in cookie
    assert gateway.ann not in cookie
    assert digest(gateway.ann) not in cookie


async def test_under_tls_the_cookie_is_of_this_host_alone(gateway: Gateway) -> None:
    async with gateway.browser("https://gateway") as browser:
        headers = {**PAGE, "Origin": "https://gateway"}
        answer = await browser.post("/api/v1/page/sign-in", json={"token": gateway.ann}, headers=headers)
        assert (await browser.get("/api/v1/page/me")).status_code == 200

    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"__Host-{gateway.sign_ins.cookie}=")
    assert "Secure" in cookie


@pytest.mark.guarantees("page access", "Where the origin is shared, or in a frame, no cookie is set")
async def test_a_page_under_another_path_keeps_its_sign_in_in_its_memory(gateway: Gateway) -> None:
    async with gateway.browser() as browser:
        body = await gateway.sign_in(browser, token=gateway.ann, path="/team/service:8470/")
        assert not browser.cookies
        assert body["key"].startswith(PREFIX)
        me = await browser.get("/api/v1/page/me", headers={"Authorization": f"Bearer {body['key']}"})
        assert me.json()["user"] == "ann"


async def test_a_page_under_the_gateways_own_path_has_a_cookie_of_that_path(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, path="/loom/")
    async with gateway.browser() as browser:
        shown = {"token": gateway.ann, "path": "/loom/"}
        answer = await browser.post("/api/v1/page/sign-in", json=shown, headers=PAGE)
    await gateway.manager.close()

    assert answer.json()["key"] is None
    assert "Path=/loom/" in answer.headers["set-cookie"]


@pytest.mark.guarantees(
    "page access", "A code signs in once, within its time, and with no larger scope than it is for"
)
async def test_a_code_signs_in_once_and_with_no_larger_scope_than_it_is_for(gateway: Gateway) -> None:
    code = await gateway.code(gateway.ann, scope="view")
    async with gateway.browser() as browser:
        assert (await gateway.sign_in(browser, code=code))["scope"] == "view"
        refused = await browser.delete("/api/v1/sessions/a", headers=PAGE)
        again = await browser.post("/api/v1/page/sign-in", json={"code": code}, headers=PAGE)

    assert (refused.status_code, error_code(refused)) == (403, "scope")
    assert (again.status_code, error_code(again)) == (401, "authentication")
    assert "loom dashboard" in again.json()["error"]["message"]


async def test_the_code_of_a_view_token_gives_no_more_than_view(gateway: Gateway) -> None:
    async with gateway.browser() as browser:
        assert (await gateway.sign_in(browser, code=await gateway.code(gateway.view)))["scope"] == "view"


@pytest.mark.guarantees("page access", "Where the origin is shared, or in a frame, no cookie is set")
async def test_a_code_for_a_frame_sets_no_cookie_and_its_key_opens_the_websocket(gateway: Gateway) -> None:
    code = await gateway.code(gateway.ann, cookie=False, scope="view")
    async with gateway.browser() as browser:
        key = (await gateway.sign_in(browser, code=code))["key"]
        assert not browser.cookies

    offered = ("Sec-WebSocket-Protocol", f"loom.page, loom.key.{key}")
    principal = gateway.access.admit(gateway.socket(offered, ("Origin", ORIGIN)))
    assert (principal.user, principal.token.scope) == ("ann", "view")


@pytest.mark.guarantees(
    "page access",
    "Another web page reads and changes nothing with the cookie, opens no WebSocket with it, and signs nobody in",
)
async def test_a_cookie_opens_the_websocket_for_the_gateways_own_page_alone(gateway: Gateway) -> None:
    async with gateway.browser() as browser:
        await gateway.sign_in(browser, token=gateway.ann)
        cookie = ("Cookie", cookie_of(browser))

    assert gateway.access.admit(gateway.socket(cookie, ("Origin", ORIGIN))).user == "ann"
    for origin in (["Origin", "http://evil"], ["Origin", "https://notebook"], ["Origin", "null"], []):
        headers = [cookie, (origin[0], origin[1])] if origin else [cookie]
        with pytest.raises(OriginRefused):
            gateway.access.admit(gateway.socket(*headers))


@pytest.mark.guarantees(
    "page access",
    "Another web page reads and changes nothing with the cookie, opens no WebSocket with it, and signs nobody in",
)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil", "X-Loom-Page": "1"},
        {"Origin": "https://notebook", "X-Loom-Page": "1"},
        {"Origin": ORIGIN},
        {"X-Loom-Page": "1"},
        {},
    ],
)
async def test_another_page_changes_nothing_with_the_cookie(gateway: Gateway, headers: dict[str, str]) -> None:
    async with gateway.browser() as browser:
        await gateway.sign_in(browser, token=gateway.ann)
        refused = await browser.post("/api/v1/page/sign-out", headers=headers)
        assert (refused.status_code, error_code(refused)) == (403, OriginRefused.code)
        assert (await browser.get("/api/v1/page/me")).status_code == 200


@pytest.mark.guarantees(
    "page access",
    "Another web page reads and changes nothing with the cookie, opens no WebSocket with it, and signs nobody in",
)
async def test_another_site_reads_nothing_with_the_cookie(gateway: Gateway) -> None:
    async with gateway.browser() as browser:
        await gateway.sign_in(browser, token=gateway.ann)
        for site in ("cross-site", "same-site"):
            refused = await browser.get("/api/v1/page/me", headers={"Sec-Fetch-Site": site})
            assert error_code(refused) == OriginRefused.code


@pytest.mark.guarantees(
    "page access",
    "Another web page reads and changes nothing with the cookie, opens no WebSocket with it, and signs nobody in",
)
async def test_another_page_signs_nobody_in(gateway: Gateway) -> None:
    async with gateway.browser() as browser:
        for headers in ({**PAGE, "Origin": "http://evil"}, {"Origin": ORIGIN}):
            answer = await browser.post("/api/v1/page/sign-in", json={"token": gateway.ann}, headers=headers)
            assert answer.status_code in (403, 422)
        assert not browser.cookies


@pytest.mark.guarantees("page access", "A page drives no session")
async def test_a_page_drives_no_session_and_gives_no_codes(gateway: Gateway) -> None:
    async with gateway.browser() as browser:
        await gateway.sign_in(browser, token=gateway.ann)
        for path in ("/api/v1/tunnel", "/api/v1/tunnel/x/up", "/api/v1/page/code"):
            refused = await browser.post(path, json={}, headers=PAGE)
            assert (refused.status_code, error_code(refused)) == (403, "scope"), path


@pytest.mark.guarantees("page access", 'A revoked or expired token, and "sign out", end the page and its WebSocket')
async def test_what_is_signed_out_is_refused_and_its_socket_closed(gateway: Gateway) -> None:
    why: asyncio.Future[LoomError] = asyncio.get_running_loop().create_future()

    async def disconnect(error: LoomError) -> None:
        why.set_result(error)

    async with gateway.browser() as browser:
        await gateway.sign_in(browser, token=gateway.ann)
        cookie = cookie_of(browser)
        socket = gateway.access.admit(gateway.socket(("Cookie", cookie), ("Origin", ORIGIN)))
        with gateway.access.connected(socket, disconnect):
            assert (await browser.post("/api/v1/page/sign-out", headers=PAGE)).status_code == 200
            assert isinstance(await asyncio.wait_for(why, BOUND), TokenRevoked)
        assert not browser.cookies
        answer = await browser.get("/api/v1/page/me", headers={"Cookie": cookie})

    assert (answer.status_code, error_code(answer)) == (401, "token_revoked")
    assert "signed out" in answer.json()["error"]["message"]


@pytest.mark.guarantees("page access", 'A revoked or expired token, and "sign out", end the page and its WebSocket')
async def test_a_revoked_token_ends_what_signed_in_with_it(gateway: Gateway) -> None:
    async with gateway.browser() as browser:
        await gateway.sign_in(browser, token=gateway.ann)
        socket = gateway.access.admit(gateway.socket(("Cookie", cookie_of(browser)), ("Origin", ORIGIN)))
        gateway.file.revoke(gateway.record.id)
        answer = await browser.get("/api/v1/page/me")
        with pytest.raises(TokenRevoked):
            gateway.access.confirm(socket)

    assert (answer.status_code, error_code(answer)) == (401, "token_revoked")


async def test_only_a_page_signs_out(gateway: Gateway) -> None:
    async with gateway.browser() as program:
        headers = {"Authorization": f"Bearer {gateway.view}"}
        answer = await program.post("/api/v1/page/sign-out", headers=headers)
    assert "loom token revoke" in answer.json()["error"]["message"]


@pytest.mark.guarantees("page access", "Who is signed in, and out, stays so when the gateway is replaced")
async def test_the_next_gateway_knows_who_is_signed_in_and_out(tmp_path: Path, gateway: Gateway) -> None:
    async with gateway.browser() as stays, gateway.browser() as leaves:
        await gateway.sign_in(stays, token="own")
        await gateway.sign_in(leaves, token=gateway.ann)
        kept, left = cookie_of(stays), cookie_of(leaves)
        await leaves.post("/api/v1/page/sign-out", headers=PAGE)

    following = Gateway(tmp_path)
    async with following.browser() as browser:
        assert (await browser.get("/api/v1/page/me", headers={"Cookie": kept})).json()["user"] == "admin"
        assert (await browser.get("/api/v1/page/me", headers={"Cookie": left})).status_code == 401
    await following.manager.close()


async def test_the_gateways_own_token_is_replaced() -> None:
    sign_ins = SignIns()
    before, after = TokenAuthority("before"), TokenAuthority("after")
    access = AccessControl(before, sign_ins=sign_ins)
    principal = access.admit({"type": "http", "headers": [(b"authorization", b"Bearer before")], "path": "/x"})
    sign_in, _ = await access.sign_in(principal, True)

    assert before.token_of(sign_in).user == "admin"
    with pytest.raises(TokenRevoked, match="replaced"):
        after.token_of(sign_in)


def test_a_sign_in_ends_with_its_time_and_with_its_token(tmp_path: Path) -> None:
    clock = Clock()
    sign_ins = SignIns(clock=clock)
    token, _ = TokenFile(tmp_path / "tokens.json").create("ann", "view")
    _, text = sign_ins.begin(token, "", True)
    clock.now += LASTS - 1
    assert sign_ins.read(text).user == "ann"
    clock.now += 2
    with pytest.raises(TokenRevoked, match="expired"):
        sign_ins.read(text)


@pytest.mark.parametrize("text", [PREFIX, PREFIX + "e30.x", PREFIX + "é.ü", "x" * 10_000])
def test_a_text_that_the_gateway_has_not_made_is_refused(text: str) -> None:
    with pytest.raises(AuthenticationError):
        SignIns().read(text)


@pytest.mark.guarantees("page access", "Guesses of codes and sign-ins count as wrong tokens")
async def test_guesses_of_codes_and_sign_ins_count_as_wrong_tokens(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, Limits(login_failures=3, login_window=1000, connection_rate=0))
    async with gateway.browser() as browser:
        for _ in range(3):
            await browser.post("/api/v1/page/sign-in", json={"code": "guess"}, headers=PAGE)
        answer = await browser.post("/api/v1/page/sign-in", json={"code": "guess"}, headers=PAGE)
        assert error_code(answer) == RateLimited.code
        forged = await browser.get("/api/v1/page/me", headers={"Authorization": f"Bearer {PREFIX}x.y"})
        assert error_code(forged) == RateLimited.code
        assert (await gateway.sign_in(browser, token=gateway.ann))["user"] == "ann"
    await gateway.manager.close()


@pytest.mark.guarantees(
    "page access", "A code signs in once, within its time, and with no larger scope than it is for"
)
async def test_codes_are_bounded_and_end_with_their_time(tmp_path: Path) -> None:
    clock = Clock()
    sign_ins = SignIns(clock=clock)
    token, _ = TokenFile(tmp_path / "tokens.json").create("ann", "view")
    codes = [(await sign_ins.new_code(token, "", None, True))[0] for _ in range(MAX_CODES)]
    with pytest.raises(LimitReached):
        await sign_ins.new_code(token, "", None, True)
    clock.now += CODE_LASTS + 1
    with pytest.raises(AuthenticationError):
        await sign_ins.use_code(codes[0])
    await sign_ins.new_code(token, "", None, True)


async def test_a_code_lasts_as_long_whatever_the_time_of_day_does(tmp_path: Path) -> None:
    wall, steady = Clock(), Clock()
    sign_ins = SignIns(clock=wall, steady=steady)
    token, _ = TokenFile(tmp_path / "tokens.json").create("ann", "view")
    for jump in (-86400.0, 86400.0):
        good, late = [(await sign_ins.new_code(token, "", None, True))[0] for _ in range(2)]
        wall.now += jump
        await sign_ins.use_code(good)
        steady.now += CODE_LASTS + 1
        with pytest.raises(AuthenticationError):
            await sign_ins.use_code(late)


def test_who_has_signed_out_stays_out_when_the_time_of_day_has_jumped(tmp_path: Path) -> None:
    wall, steady = Clock(), Clock()
    path = str(tmp_path / "page.json")
    sign_ins = SignIns(path, clock=wall, steady=steady)
    token, _ = TokenFile(tmp_path / "tokens.json").create("ann", "view")
    (first, text), (second, _) = (sign_ins.begin(token, "", True) for _ in range(2))
    asyncio.run(sign_ins.end(first))

    wall.now += 10 * LASTS
    asyncio.run(sign_ins.end(second))
    wall.now -= 10 * LASTS

    for reader in (sign_ins, SignIns(path, clock=wall, steady=steady)):
        with pytest.raises(TokenRevoked, match="signed out"):
            reader.read(text)


def test_a_damaged_file_of_sign_ins_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "page.json"
    path.write_text("{")
    before = SignIns(str(path))
    assert SignIns(str(path)).cookie == before.cookie


async def test_a_large_body_without_a_token_is_not_taken(gateway: Gateway) -> None:
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        yield b'{"token": "'
        while True:
            taken += 16384
            yield b"x" * 16384

    async with gateway.browser() as browser:
        answer = await asyncio.wait_for(
            browser.post(
                "/api/v1/page/sign-in", content=body(), headers={**PAGE, "Content-Type": "application/json"}
            ),
            BOUND,
        )

    assert answer.status_code == 422
    assert taken <= MAX_UNKNOWN + 2 * 16384


def test_a_sign_in_of_another_version_is_refused(tmp_path: Path) -> None:
    sign_ins = SignIns()
    said = "e30"  # {}
    with pytest.raises(AuthenticationError, match="another version"):
        sign_ins.read(f"{PREFIX}{said}.{sign_ins._mac(said)}")


@pytest.mark.parametrize("both", [{}, {"token": "a", "code": "b"}, {"token": "a", "path": "x"}])
async def test_a_sign_in_that_makes_no_sense(gateway: Gateway, both: dict[str, str]) -> None:
    async with gateway.browser() as browser:
        answer = await browser.post("/api/v1/page/sign-in", json=both, headers=PAGE)
    assert answer.status_code == 422


def test_cookies_of_others_are_passed_over() -> None:
    headers = [(b"cookie", b'a=b; bad cookie; c="; {"d": 1}; loom-x=1; loom-y=%s' % PREFIX.encode())]
    assert credential_of(headers, "loom-y") == RequestCredential(PREFIX, True, True)
    with pytest.raises(AuthenticationError):
        credential_of([(b"cookie", b"loom-x=1")], "loom-y")


async def test_the_pages_files_have_a_policy_and_need_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text("<p>page</p>")
    (static / "assets" / "page-abc.js").write_text("1")
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setattr(dashboard.file_routes, "__defaults__", (static,))
    gateway = Gateway(tmp_path)
    async with gateway.browser() as browser:
        page, script = await browser.get("/"), await browser.get("/assets/page-abc.js")
        outside = [await browser.get(path) for path in ("/assets/..%2f..%2fsecret", "/assets/x", "/assets/")]
    await gateway.manager.close()

    policy = page.headers["content-security-policy"]
    assert page.text == "<p>page</p>"
    assert "frame-ancestors https://notebook" in policy
    assert "unsafe" not in policy
    assert "javascript" in script.headers["content-type"]
    assert "immutable" in script.headers["cache-control"]
    assert [answer.status_code for answer in outside] == [404, 404, 404]
    assert "frame-ancestors 'none'" in dashboard.policy([])


@pytest.mark.guarantees("page files", "A gateway without the page says what to do")
async def test_a_gateway_whose_page_is_not_built_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard.file_routes, "__defaults__", (tmp_path / "nothing",))
    gateway = Gateway(tmp_path)
    async with gateway.browser() as browser:
        answer = await browser.get("/")
    await gateway.manager.close()

    assert answer.status_code == 503
    assert "npm run build" in answer.text
