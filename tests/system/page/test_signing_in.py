"""Who comes in to the page, for how long, and what each may see and do there."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from playwright.sync_api import Browser, Page, expect

from loom.rest_client import Gateway as Rest
from loom_proxy.local import LocalCluster
from tests.support.browser import signed_in, tab
from tests.support.gateways import TOKEN, gateway_of
from tests.support.nginx import nginx
from tests.support.users import House
from tests.support.weaver_training import training

SERVER = """
    ssl_certificate {folder}/certificate.pem;
    ssl_certificate_key {folder}/key.pem;
    location /team/loom/ {{
        proxy_pass http://{gateway}/;
        proxy_http_version 1.1;
        proxy_set_header Host $http_host;
        proxy_set_header Upgrade $http_upgrade;
        proxy_set_header Connection upgrade;
        proxy_set_header X-Forwarded-Proto https;
    }}
"""

slow = pytest.mark.slow


def http(url: str) -> str:
    return Rest(url, None).page_url


def give_token(page: Page, token: str) -> None:
    """Fill in the form."""
    page.get_by_label("Token of the gateway").fill(token)
    page.get_by_role("button", name="Sign in").click()


@pytest.mark.guarantees(
    "page access", "A token is shown once; the cookie has neither it nor its hash, and scripts cannot read it"
)
def test_a_token_is_shown_once_and_the_page_stays_signed_in(browser: Browser, cluster: LocalCluster) -> None:
    with tab(browser, http(cluster.url)) as opened:
        give_token(opened.page, "wrong")
        expect(opened.page.get_by_test_id("sign-in-error")).to_contain_text("does not accept the token")
        give_token(opened.page, cluster.token)
        opened.live()
        assert cluster.token not in opened.page.content()
        kept = opened.page.evaluate("document.cookie + JSON.stringify([{...localStorage}, {...sessionStorage}])")
        assert "loom-page" not in kept  # scripts cannot read it

        opened.page.reload()
        opened.live()

        opened.page.get_by_test_id("sign-out").click()
        expect(opened.page.get_by_test_id("sign-in")).to_be_visible()
        opened.page.reload()
        expect(opened.page.get_by_test_id("sign-in")).to_be_visible()


@slow
def test_a_code_is_good_once(browser: Browser, cluster: LocalCluster) -> None:
    address = Rest(cluster.url, cluster.token).page()
    with tab(browser, address) as first:
        first.live()
        assert "code" not in first.page.url
    with tab(browser, address) as second:
        expect(second.page.get_by_test_id("sign-in-error")).to_contain_text("the code is not good")


@pytest.mark.guarantees("page access", 'A revoked or expired token, and "sign out", end the page and its WebSocket')
@slow
def test_a_revoked_token_ends_the_page(browser: Browser, house: House) -> None:
    with signed_in(browser, house.url, house.tokens["ann"]) as opened:
        (ann,) = [token for token in house.file.read() if token.name == "ann"]
        house.file.revoke(ann.id)
        expect(opened.page.get_by_test_id("sign-in-error")).to_contain_text("was revoked")


@pytest.mark.guarantees("page access", 'A revoked or expired token, and "sign out", end the page and its WebSocket')
@slow
def test_an_expired_token_ends_the_page(browser: Browser, house: House) -> None:
    _, token = house.file.create("short", "view", expires_in=12.0)
    with signed_in(browser, house.url, token) as opened:
        expect(opened.page.get_by_test_id("sign-in-error")).to_contain_text("expired")


@pytest.mark.guarantees("page access", "With scope view every control is disabled, and says why")
@slow
def test_with_scope_view_controls_are_disabled_and_say_why(browser: Browser, house: House) -> None:
    _, view = house.file.create("ann looks", "view", user="ann")
    with house.connect("ann") as job:
        address = job.weaver.address()
        with training(address, "replica_1"), signed_in(browser, house.url, view) as opened:
            opened.open("steering")
            expect(opened.page.get_by_test_id("why-disabled")).to_contain_text("operate")
            expect(opened.page.get_by_test_id("pause")).to_be_disabled()
            expect(opened.page.get_by_test_id("stop")).to_be_disabled()


@pytest.mark.guarantees("page access", "Nothing of another user's is on the page")
@slow
def test_what_is_another_users_is_not_there(browser: Browser, house: House) -> None:
    with house.connect("ann") as job, training(job.weaver.address(), "secret_replica"):
        with signed_in(browser, house.url, house.tokens["ann"]) as ann:
            ann.open("replicas")
            expect(ann.page.get_by_test_id("replica-table")).to_contain_text("secret_replica")
            with signed_in(browser, house.url, house.tokens["bob"]) as bob:
                for view in ("overview", "replicas", "devices", "steering", "goodput", "chaos", "sessions"):
                    bob.open(view)
                    expect(bob.page.get_by_test_id(f"nav-{view}")).to_have_attribute("aria-current", "page")
                    assert "secret_replica" not in bob.page.content()
                    assert job.session not in bob.page.content()


@pytest.mark.guarantees("page access", "Where the origin is shared, or in a frame, no cookie is set")
@slow
@pytest.mark.parametrize("own", [False, True], ids=["a shared origin", "an origin of its own"])
def test_behind_nginx_with_a_prefix_and_tls(
    browser: Browser, cluster: LocalCluster, tmp_path: Path, own: bool
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "certificate.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    options = ["--trusted-proxy", "127.0.0.1", *(["--page-path", "/team/loom/"] if own else [])]
    with gateway_of(cluster, *options) as gateway:
        server = SERVER.format(folder=tmp_path, gateway=gateway.url.removeprefix("ws://"))
        with nginx(tmp_path, server, tls=True) as port:
            code = Rest(gateway.url, TOKEN).page().partition("#")[2]
            address = f"https://127.0.0.1:{port}/team/loom/#{code}"
            with tab(browser, address, ignore_https_errors=True) as opened:
                opened.live()
                opened.page.reload()
                if own:
                    opened.live()
                    (cookie,) = opened.page.context.cookies()
                    kept = (cookie["path"], cookie["secure"], cookie["httpOnly"], cookie["sameSite"])
                    assert kept == ("/team/loom/", True, True, "Strict")
                else:
                    expect(opened.page.get_by_test_id("sign-in")).to_be_visible()
                    assert not opened.page.context.cookies()
