"""Users of a real OpenID issuer at a real gateway: who comes in, new keys, and the end of a token."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from loom.rest_client import Gateway as Rest
from loom.token_file import TokenFile
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, Gateway, await_true, gateway_of
from tests.support.openid_issuer import OpenIdIssuerProcess


class Counter(Actor):
    def __init__(self) -> None:
        self.number = 0

    @endpoint
    def add(self) -> int:
        self.number += 1
        return self.number


@pytest.fixture
def issuer() -> Iterator[OpenIdIssuerProcess]:
    with OpenIdIssuerProcess({"alice": ["loom:drive"]}) as running:
        yield running


@pytest.fixture
def gateway(cluster: LocalCluster, issuer: OpenIdIssuerProcess, tmp_path: Path) -> Iterator[Gateway]:
    options = ["--oidc-audience", "loom", "--oidc-scope", "view", "--oidc-scope-claim", "roles"]
    options += ["--tokens", str(tmp_path / "tokens.json")]
    with gateway_of(cluster, "--oidc-issuer", issuer.url, *options) as running:
        yield running


def ask(gateway: Gateway, token: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(gateway.url.replace("ws:", "http:") + "/api/v1/status")
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=BOUND) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]


@pytest.mark.guarantees(
    "ports",
    "A client that is given a function for its token goes on when one expires, and no call is lost or made twice",
)
@pytest.mark.parametrize(
    ("transport", "times"),
    [("websocket", 1), ("http", 1), ("websocket", 3)],
)
@pytest.mark.slow
def test_a_function_that_gives_the_next_token_keeps_the_connection(
    gateway: Gateway, issuer: OpenIdIssuerProcess, transport: str, times: int
) -> None:
    assert ask(gateway, issuer.sign_in("alice"))[0] == 200
    issuer.token_seconds = 6
    issuer.stop()
    issuer.start()
    given: list[str] = []

    def token() -> str:
        given.append(issuer.sign_in("alice"))
        return given[-1]

    with loom.connect(gateway.url, token, transport=transport) as job:
        counter = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}, name="p").spawn("counter", Counter)
        numbers = []
        opened = len(given)
        while sum(event.name == "resumed" for event in job.events(timeout=0)) < times:
            numbers.append(counter.add.call_one().get(BOUND))
        assert len(given) >= opened + times
        assert numbers == list(range(1, len(numbers) + 1))
        assert job.weaver.replicas() == {}


def call_on(job: loom.Job) -> None:
    """Call until a call raises."""
    while True:
        job.run(max, 1, 2)


@pytest.mark.guarantees(
    "ports",
    "A user of an OpenID issuer comes in with its token, as the token's subject and with the scope of its claim",
)
def test_a_user_who_signed_in_drives_as_the_claim_says(gateway: Gateway, issuer: OpenIdIssuerProcess) -> None:
    with loom.connect(gateway.url, issuer.sign_in("alice")) as job:
        assert job.run(max, 1, 2) == 2

    with pytest.raises(loom.ScopeError, match=r"'oidc:bob'.* has scope view"):
        loom.connect(gateway.url, issuer.sign_in("bob"))


@pytest.mark.guarantees("users", "An OpenID user whose subject is a user's name is another user")
@pytest.mark.slow
def test_a_subject_that_is_the_name_of_a_user_is_another_user(
    gateway: Gateway, issuer: OpenIdIssuerProcess, tmp_path: Path
) -> None:
    own = TokenFile(tmp_path / "tokens.json").create("alice", "drive")[1]
    signed = issuer.sign_in("alice")

    with loom.connect(gateway.url, own) as job, loom.connect(gateway.url, signed) as other:
        seen = [
            {one["name"]: one["user"] for one in Rest(gateway.url, token).sessions()} for token in (own, signed)
        ]
        assert seen == [{job.session: "alice"}, {other.session: "oidc:alice"}]
        with pytest.raises(loom.UnknownSession):
            loom.connect(gateway.url, signed, job.session, take_over=True)
        with pytest.raises(loom.UnknownSession):
            loom.connect(gateway.url, own, other.session, take_over=True)
        job.share("oidc:alice")
        loom.connect(gateway.url, signed, job.session, mode="watch").detach()


@pytest.mark.guarantees(
    "ports",
    "A new key of the issuer is fetched when a token names it, known ones go on without the issuer, and "
    "unknown ones get a 503",
)
@pytest.mark.slow
def test_a_key_of_the_issuers_is_taken_when_it_is_new_and_known_ones_go_on_without_it(
    gateway: Gateway, issuer: OpenIdIssuerProcess
) -> None:
    old = issuer.sign_in("alice")
    assert ask(gateway, old)[0] == 200

    issuer.rotate("second")
    new = issuer.sign_in("alice")
    await_true(lambda: ask(gateway, new)[0] == 200)  # it asks the issuer every few seconds at most
    assert ask(gateway, old)[0] == 200

    issuer.rotate("third")
    unknown = issuer.sign_in("alice")
    issuer.stop()
    status, error = ask(gateway, unknown)
    assert (status, error["code"]) == (503, "issuer_unreachable")
    with pytest.raises(loom.IssuerUnreachable, match="'third'"):
        loom.connect(gateway.url, unknown)
    assert ask(gateway, new)[0] == 200
    with loom.connect(gateway.url, new) as job:
        assert job.run(max, 1, 2) == 2


def test_a_token_for_another_program_or_from_another_issuer_is_refused(
    gateway: Gateway, issuer: OpenIdIssuerProcess
) -> None:
    with OpenIdIssuerProcess({"alice": ["loom:drive"]}) as another:
        status, error = ask(gateway, another.sign_in("alice"))  # its key has the same id

    assert (status, error["code"]) == (401, "authentication")


@pytest.mark.guarantees("ports", "A connection ends with its OpenID token, and the session goes on")
@pytest.mark.slow
def test_the_connection_ends_with_the_token_and_the_session_goes_on_with_the_next(
    gateway: Gateway, issuer: OpenIdIssuerProcess
) -> None:
    assert ask(gateway, issuer.sign_in("alice"))[0] == 200
    issuer.token_seconds = 6
    issuer.stop()
    issuer.start()
    job = loom.connect(gateway.url, issuer.sign_in("alice"))
    counter = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}, name="p").spawn("counter", Counter)
    assert counter.add.call_one().get(BOUND) == 1
    with pytest.raises(loom.TokenRevoked, match="'oidc:alice' has expired: get a new one"):
        call_on(job)

    issuer.token_seconds = 600
    issuer.stop()
    issuer.start()
    with loom.connect(gateway.url, issuer.sign_in("alice"), session=job.session, take_over=True) as again:
        assert again.meshes["counter"].add.call_one().get(BOUND) == 2
