"""Tokens of an OpenID issuer: what is accepted, and each refusal. The issuer is a stand-in with real keys."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

import loom
from loom.token_file import TokenFile, digest
from loom_gateway.access import issuer_keys
from loom_gateway.access.control import AccessControl
from loom_gateway.access.openid import OpenIdIssuer
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.settings import Limits

NOW = 1_800_000_000.0
ANY = JWSRegistry(algorithms=["RS256", "PS256", "ES256", "ES384", "Ed25519", "HS256", "none"])
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})
EC = ECKey.generate_key("P-256", {"kid": "ec"})
SMALL = {"kty": "RSA", "kid": "small", "e": "AQAB", "n": RSA.as_dict(private=False)["n"][:171]}


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Stand:
    """An issuer on loopback that serves its description and its keys, as long as it is told to."""

    def __init__(self) -> None:
        self.keys: list[Any] = [RSA, EC]
        self.answers = True
        self.fetches = 0
        self.described: dict[str, Any] = {}
        self.gate = threading.Event()
        self.gate.set()
        stand = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand.gate.wait(20)
                if not stand.answers:
                    self.send_error(500)
                    return
                if self.path == "/moved":
                    self.send_response(302)
                    self.send_header("location", f"{stand.url}/keys")
                    self.end_headers()
                    return
                if self.path == "/keys":
                    stand.fetches += 1
                    body: dict[str, Any] = {"keys": [public(key) for key in stand.keys]}
                else:
                    assert self.path == "/.well-known/openid-configuration"
                    body = {"issuer": stand.url, "jwks_uri": f"{stand.url}/keys", **stand.described}
                content = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


def public(key: Any) -> Any:
    return key.as_dict(private=isinstance(key, OctKey)) if hasattr(key, "as_dict") else key


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand()
    yield stand
    stand.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def issuer(stand: Stand, clock: Clock) -> OpenIdIssuer:
    issuer = issuer_of(stand, clock, scope="drive")
    await issuer.keys.fetch("rsa")
    return issuer


def issuer_of(stand: Stand, clock: Clock, **options: Any) -> OpenIdIssuer:
    keys = issuer_keys.IssuerKeys(stand.url, clock=clock)
    return OpenIdIssuer(stand.url, ["loom", "loom-cli"], keys=keys, clock=clock, **options)


def signed(stand: Stand, key: Any = RSA, header: dict[str, Any] | None = None, **claims: Any) -> str:
    said = {"iss": stand.url, "aud": "loom", "sub": "alice", "iat": NOW, "exp": NOW + 600, **claims}
    said = {name: value for name, value in said.items() if value is not None}
    algorithm = {"RSA": "RS256", "EC": "ES256", "OKP": "Ed25519", "oct": "HS256"}[key.key_type]
    head = {"alg": algorithm, "kid": key.kid, **(header or {})}
    return jwt.encode({k: v for k, v in head.items() if v is not None}, said, key, registry=ANY)


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {token}".encode())]


def request(token: str) -> dict[str, Any]:
    return {"type": "http", "headers": bearer(token), "client": ("10.0.0.1", 1)}


# -- who comes in -------------------------------------------------------------------------------------------


async def test_the_user_is_the_tokens_subject(issuer: OpenIdIssuer, stand: Stand) -> None:
    token = issuer.check(signed(stand))

    assert (token.id, token.name, token.scope, token.expires) == ("oidc:alice", "oidc:alice", "drive", NOW + 600)


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        (RSA, "RS256"),
        (RSA, "PS256"),
        (EC, "ES256"),
        (OKPKey.generate_key("Ed25519", {"kid": "okp"}), "Ed25519"),
        (ECKey.generate_key("P-384", {"kid": "p384"}), "ES384"),
    ],
)
async def test_signatures_with_public_keys_are_accepted(
    stand: Stand, clock: Clock, key: Any, algorithm: str
) -> None:
    stand.keys = [key, SMALL]
    issuer = issuer_of(stand, clock, scope="view")
    await issuer.keys.fetch(key.kid)

    assert issuer.check(signed(stand, key, {"alg": algorithm})).name == "oidc:alice"
    assert issuer.check(signed(stand, key, {"alg": algorithm, "kid": None})).name == "oidc:alice"


async def test_one_audience_of_several_is_enough(issuer: OpenIdIssuer, stand: Stand) -> None:
    assert issuer.check(signed(stand, aud=["account", "loom-cli"])).scope == "drive"


async def test_a_token_is_verified_once(
    issuer: OpenIdIssuer, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = signed(stand)
    first = issuer.check(text)
    monkeypatch.setattr(issuer.keys, "find", lambda *_: pytest.fail("it was verified again"))

    assert issuer.check(text) is first


@pytest.mark.parametrize(
    ("claims", "scope"),
    [
        ({"roles": ["loom:view", "loom:drive", "staff"]}, "drive"),
        ({"roles": "openid loom:operate profile"}, "operate"),
        ({"roles": ["ml-team"]}, "drive"),
        ({"roles": ["drive", "admin", 7, {"loom:drive": 1}]}, "view"),
        ({"roles": {"loom:drive": True}}, "view"),
        ({}, "view"),
    ],
)
async def test_a_claim_gives_a_larger_scope(stand: Stand, clock: Clock, claims: dict[str, Any], scope: str) -> None:
    issuer = issuer_of(stand, clock, scope="view", scope_claim="roles", grants={"ml-team": "drive"})
    await issuer.keys.fetch("rsa")

    assert issuer.check(signed(stand, **claims)).scope == scope


async def test_a_claim_may_lie_within_another_or_have_dots_in_its_name(stand: Stand, clock: Clock) -> None:
    issuer = issuer_of(stand, clock, scope_claim="realm_access.roles")
    await issuer.keys.fetch("rsa")

    assert issuer.check(signed(stand, realm_access={"roles": ["loom:drive"]})).scope == "drive"
    assert issuer.check(signed(stand, **{"realm_access.roles": ["loom:view"]})).scope == "view"


async def test_without_a_default_scope_only_those_with_the_claim_come_in(stand: Stand, clock: Clock) -> None:
    issuer = issuer_of(stand, clock, scope_claim="roles")
    await issuer.keys.fetch("rsa")

    with pytest.raises(loom.ScopeError, match=r"'oidc:alice' is valid, but nothing in its claim roles"):
        issuer.check(signed(stand, roles=["staff"]))


async def test_another_claim_may_name_the_user(stand: Stand, clock: Clock) -> None:
    issuer = issuer_of(stand, clock, scope="view", user_claim="email")
    await issuer.keys.fetch("rsa")

    assert issuer.check(signed(stand, email="a@b.example", email_verified=True)).name == "oidc:a@b.example"
    with pytest.raises(loom.AuthenticationError, match="did not verify the address"):
        issuer.check(signed(stand, email="a@b.example", email_verified=False))


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.guarantees(
    "ports", "A token with a wrong issuer, audience or time, without a subject, or of another kind is refused"
)
@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ({"iss": "https://other.example"}, r"its issuer is 'https://other.example', and not 'http://127"),
        ({"iss": None}, "it lacks the claim .*iss"),
        ({"aud": "other"}, r"it is for 'other' \(aud\), and not for this gateway"),
        ({"aud": ["other", 1]}, r"it is for \['other', 1\]"),
        ({"aud": None}, "it lacks the claim .*aud"),
        ({"exp": None}, "it lacks the claim .*exp"),
        ({"exp": "tomorrow"}, "its claim exp is 'tomorrow'"),
        ({"exp": 10**400}, "its claim exp is 1000"),
        ({"nbf": NOW + 120}, "it is not valid yet"),
        ({"iat": NOW + 120}, "it is not valid yet"),
        ({"sub": None}, "it lacks the claim .*sub"),
        ({"sub": ""}, "claim sub is"),
        ({"sub": "a\nb"}, "its claim sub is no user's name"),
        ({"sub": " "}, "its claim sub is no user's name"),
        ({"sub": "a" * 256}, "its claim sub is no user's name"),
        ({"sub": 7}, "its claim sub is 7"),
        ({"events": {"http://schemas.openid.net/event/backchannel-logout": {}}}, "neither an ID token nor"),
    ],
)
async def test_claims_that_are_wrong_are_refused(
    issuer: OpenIdIssuer, stand: Stand, claims: dict[str, Any], text: str
) -> None:
    with pytest.raises(loom.AuthenticationError, match=text) as caught:
        issuer.check(signed(stand, **claims))
    assert not isinstance(caught.value, loom.TokenRevoked)


@pytest.mark.parametrize("ago", [0, 30])  # within the clocks' difference, too
async def test_a_token_that_has_expired_is_refused(issuer: OpenIdIssuer, stand: Stand, ago: float) -> None:
    with pytest.raises(loom.TokenRevoked, match="'oidc:alice' has expired: get a new one"):
        issuer.check(signed(stand, exp=NOW - ago))


async def test_clocks_may_differ_a_little(issuer: OpenIdIssuer, stand: Stand) -> None:
    assert issuer.check(signed(stand, nbf=NOW + 50, iat=NOW + 50)).name == "oidc:alice"


async def test_a_key_of_another_with_the_same_id_is_refused(issuer: OpenIdIssuer, stand: Stand) -> None:
    with pytest.raises(loom.AuthenticationError, match="its signature is wrong"):
        issuer.check(signed(stand, RSAKey.generate_key(2048, {"kid": "rsa"})))


async def test_changed_claims_are_refused(issuer: OpenIdIssuer, stand: Stand) -> None:
    head, _, signature = signed(stand).split(".")
    claims = encoded({"iss": stand.url, "aud": "loom", "sub": "root", "exp": NOW + 600})

    with pytest.raises(loom.AuthenticationError, match="its signature is wrong"):
        issuer.check(f"{head}.{claims}.{signature}")


@pytest.mark.guarantees("ports", "Only signatures that nobody but the issuer can make are accepted")
async def test_who_can_check_a_token_cannot_make_one(issuer: OpenIdIssuer, stand: Stand) -> None:
    # The attack of RFC 8725, section 2.1: the public key, which everybody has, as the secret of an HMAC.
    _, claims, _ = signed(stand).split(".")
    said = f"{encoded({'alg': 'HS256', 'kid': 'rsa'})}.{claims}"
    mac = hmac.digest(RSA.as_pem(private=False), said.encode(), "sha256")

    with pytest.raises(loom.AuthenticationError, match="signed with 'HS256', and not with a public key"):
        issuer.check(f"{said}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}")


async def test_a_token_without_a_signature_is_refused(issuer: OpenIdIssuer, stand: Stand) -> None:
    head = encoded({"alg": "none"})
    _, claims, _ = signed(stand).split(".")

    with pytest.raises(loom.AuthenticationError, match="signed with 'none'"):
        issuer.check(f"{head}.{claims}.")


async def test_the_algorithm_is_the_keys(issuer: OpenIdIssuer, stand: Stand) -> None:
    stand.keys = [RSA.as_dict(private=False) | {"alg": "PS256"}]
    await issuer.keys.fetch("rsa")

    with pytest.raises(loom.AuthenticationError, match="the issuer has no key 'rsa' for RS256"):
        issuer.check(signed(stand))
    assert issuer.check(signed(stand, header={"alg": "PS256"})).name == "oidc:alice"


@pytest.mark.parametrize("kind", ["logout+jwt", "secevent+jwt", 7])
async def test_tokens_of_another_type_are_refused(issuer: OpenIdIssuer, stand: Stand, kind: object) -> None:
    with pytest.raises(loom.AuthenticationError, match="neither an ID token nor an access token"):
        issuer.check(signed(stand, header={"typ": kind}) if isinstance(kind, str) else forged({"typ": kind}))


def forged(header: dict[str, Any]) -> str:
    return encoded({"alg": "RS256", "kid": "rsa", **header}) + ".e30.AAAA"


def encoded(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "text",
    ["a.b.c", "..", "e30.e30.e30", "é.é.é", "W10.e30.AA", forged({"kid": 7}), forged({"crit": ["x"]}), "a" * 20_000]
    + [forged({"alg": ["RS256"]}), forged({"b64": False, "crit": ["b64"]})],
)
async def test_garbage_is_refused(issuer: OpenIdIssuer, text: str) -> None:
    with pytest.raises(loom.AuthenticationError):
        issuer.check(text)


async def test_keys_that_sign_no_tokens_are_not_used(stand: Stand, clock: Clock) -> None:
    secret = OctKey.generate_key(256, {"kid": "oct"})
    encrypts = RSA.as_dict(private=False) | {"use": "enc", "kid": "enc"}
    stand.keys = [SMALL, secret, encrypts, {"kty": "RSA"}, {"kty": 7}, 7, EC]
    issuer = issuer_of(stand, clock, scope="view")
    await issuer.keys.fetch(None)

    assert issuer.check(signed(stand, EC)).name == "oidc:alice"
    for kid in ("small", "oct", "enc"):
        with pytest.raises((loom.AuthenticationError, loom.IssuerUnreachable)):
            issuer.check(signed(stand, RSA, {"kid": kid}))


# -- keys ---------------------------------------------------------------------------------------------------


async def entered(control: AccessControl, token: str) -> str:
    return (await control.enter(request(token))).token.name


def control_of(issuer: OpenIdIssuer) -> AccessControl:
    return AccessControl(TokenAuthority("own", issuer=issuer), Limits(login_failures=0))


async def test_a_new_key_is_fetched_when_a_token_names_it(issuer: OpenIdIssuer, stand: Stand, clock: Clock) -> None:
    control = control_of(issuer)
    fresh = RSAKey.generate_key(2048, {"kid": "fresh"})
    stand.keys.append(fresh)
    clock.now += issuer_keys.RETRY

    assert await entered(control, signed(stand, fresh)) == "oidc:alice"
    assert stand.fetches == 2


async def test_all_who_wait_share_one_fetch(stand: Stand, clock: Clock) -> None:
    control = control_of(issuer_of(stand, clock, scope="view"))

    names = await asyncio.gather(*(entered(control, signed(stand, sub=f"u{n}")) for n in range(20)))

    assert names == [f"oidc:u{n}" for n in range(20)]
    assert stand.fetches == 1


@pytest.mark.guarantees("ports", "Tokens of unknown keys make no flood of fetches")
async def test_unknown_keys_make_no_flood_of_fetches(issuer: OpenIdIssuer, stand: Stand, clock: Clock) -> None:
    control = control_of(issuer)
    clock.now += issuer_keys.RETRY
    for number in range(10):
        with pytest.raises((loom.AuthenticationError, loom.IssuerUnreachable)):
            await entered(control, signed(stand, RSA, {"kid": f"unknown{number}"}))

    assert stand.fetches == 2
    with pytest.raises(loom.AuthenticationError, match="the issuer has no key 'unknown0' for RS256"):
        await entered(control, signed(stand, RSA, {"kid": "unknown0"}))
    # That nobody has asked for this one is no reason to send its user away for good.
    with pytest.raises(loom.IssuerUnreachable, match="was asked just now: try again in 10 s"):
        await entered(control, signed(stand, RSA, {"kid": "unknown9"}))


async def test_while_the_issuer_is_away_its_known_keys_go_on(
    issuer: OpenIdIssuer, stand: Stand, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    control = control_of(issuer)
    stand.answers = False
    clock.now += issuer_keys.RETRY
    fresh = RSAKey.generate_key(2048, {"kid": "fresh"})

    with pytest.raises(loom.IssuerUnreachable, match=r"the issuer http.* does not give its keys") as caught:
        await entered(control, signed(stand, fresh))
    assert caught.value.http_status == 503
    assert await entered(control, signed(stand)) == "oidc:alice"
    assert "answers with HTTP status 500; older keys stay valid" in caplog.text

    stand.answers = True
    stand.keys.append(fresh)
    clock.now += issuer_keys.RETRY
    assert await entered(control, signed(stand, fresh)) == "oidc:alice"


@pytest.mark.guarantees("ports", "A key that the issuer takes back ends the connections of its tokens")
async def test_a_key_that_the_issuer_took_back_ends_its_tokens(
    issuer: OpenIdIssuer, stand: Stand, clock: Clock
) -> None:
    token = issuer.check(signed(stand, exp=NOW + 86400))
    issuer.confirm(token)
    stand.keys = [EC]
    clock.now += issuer_keys.REFRESH - 60
    issuer.refresh()
    issuer.confirm(token)  # the keys are not old yet
    clock.now += 60
    issuer.refresh()
    await issuer.keys.fetch("ec")  # waits for the one that has begun

    assert stand.fetches == 2
    with pytest.raises(loom.TokenRevoked, match="is no key of the issuer any more"):
        issuer.confirm(token)


@pytest.mark.guarantees("ports", "The gateway's own tokens never wait for the issuer")
async def test_the_gateways_own_tokens_do_not_wait_for_the_issuer(
    stand: Stand, clock: Clock, tmp_path: Path
) -> None:
    stand.gate.clear()  # it accepts connections and says nothing
    file = TokenFile(tmp_path / "tokens.json")
    _, text = file.create("ci", "view")
    control = AccessControl(TokenAuthority("own.with.dots", file, issuer_of(stand, clock, scope="view")))
    waiting = asyncio.ensure_future(entered(control, signed(stand)))
    await asyncio.sleep(0)

    assert await entered(control, "own.with.dots") == "gateway"
    assert await entered(control, text) == "ci"
    assert not waiting.done()
    stand.gate.set()
    assert await waiting == "oidc:alice"


@pytest.mark.parametrize(
    ("described", "text"),
    [
        ({"issuer": "https://other.example"}, "it names itself 'https://other.example'"),
        ({"jwks_uri": None}, "has no jwks_uri"),
        ({"jwks_uri": "http://other.example/keys"}, "is no https URL"),
        ({"jwks_uri": "file:///etc/passwd"}, "is no https URL"),
    ],
)
async def test_a_description_that_is_wrong_gives_no_keys(
    stand: Stand, clock: Clock, described: dict[str, Any], text: str
) -> None:
    stand.described = described
    issuer = issuer_of(stand, clock, scope="view")
    await issuer.keys.fetch("rsa")

    assert text in issuer.keys.trouble
    with pytest.raises(loom.IssuerUnreachable):
        issuer.check(signed(stand))


async def test_the_issuer_cannot_send_the_gateway_elsewhere(stand: Stand, clock: Clock) -> None:
    stand.described = {"jwks_uri": f"{stand.url}/moved"}
    issuer = issuer_of(stand, clock, scope="view")
    await issuer.keys.fetch("rsa")

    assert "/moved answers with HTTP status 302" in issuer.keys.trouble


async def test_an_endless_document_is_not_read(stand: Stand, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_keys, "MAX_DOCUMENT", 200)
    issuer = issuer_of(stand, clock, scope="view")
    await issuer.keys.fetch("rsa")

    assert "has more than 200 bytes" in issuer.keys.trouble


# -- users --------------------------------------------------------------------------------------------------


def test_the_token_file_has_no_users_of_openid(tmp_path: Path) -> None:
    with pytest.raises(
        loom.errors.WrongArguments, match="names that begin with oidc: are those of users of OpenID"
    ):
        TokenFile(tmp_path / "tokens.json").create("oidc:alice", "view")


@pytest.mark.guarantees("ports", "A token of the file never has the name of an OpenID user")
def test_a_token_of_the_file_with_such_a_name_is_refused(
    tmp_path: Path, stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    _, text = file.create("Alice", "drive")
    file.path.write_text(file.path.read_text().replace("Alice", "oidc:alice"))
    file.path.chmod(0o600)
    authority = TokenAuthority("own", file)

    with pytest.raises(loom.AuthenticationError):
        authority.check(digest(text), text)
    assert "has the name of a user of OpenID, 'oidc:alice': it is refused" in caplog.text


async def test_a_session_outlives_the_token_with_which_it_was_opened(
    issuer: OpenIdIssuer, stand: Stand, clock: Clock
) -> None:
    authority = TokenAuthority("own", issuer=issuer)
    token = issuer.check(signed(stand))
    clock.now += 601

    with pytest.raises(loom.TokenRevoked, match="has expired"):
        authority.confirm_shown(token)
    authority.confirm(token.id)  # the session's owner
    with pytest.raises(loom.TokenRevoked, match="accepts no OpenID tokens any more"):
        TokenAuthority("own").confirm(token.id)


# -- settings -----------------------------------------------------------------------------------------------

HTTPS = "https://issuer.example"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: OpenIdIssuer("http://issuer.example", ["a"], "view"), "is no https URL"),
        (lambda: OpenIdIssuer("issuer.example", ["a"], "view"), "is no https URL"),
        (lambda: OpenIdIssuer("https://h:x", ["a"], "view"), "is no URL"),
        (lambda: OpenIdIssuer(HTTPS, [], "view"), "needs --oidc-audience"),
        (lambda: OpenIdIssuer(HTTPS, ["a"]), "needs --oidc-scope, .* or --oidc-scope-claim"),
        (lambda: OpenIdIssuer(HTTPS, ["a"], "root"), "there is no scope 'root'"),
        (lambda: OpenIdIssuer(HTTPS, ["a"], "view", "c", {"x": "root"}), "there is no scope 'root'"),
        (lambda: OpenIdIssuer(HTTPS, ["a"], "view", grants={"x": "view"}), "needs --oidc-scope-claim"),
        (lambda: OpenIdIssuer(HTTPS, ["a"], "view", ca="/no/such/file"), "cannot read --oidc-ca"),
        (lambda: OpenIdIssuer(HTTPS, ["a"], "view", ca=__file__), "has no certificate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(loom.errors.WrongArguments, match=text):
        make()
