"""What axe-core finds on the page, hostile names, narrow screens and the keyboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from loom_proxy.local import LocalCluster
from tests.support.browser import signed_in
from tests.support.gateways import TOKEN, Gateway, gateway_of
from tests.support.weaver_training import training

VIEWS = (
    "overview",
    "runs",
    "compare/trainers",
    "replicas",
    "devices",
    "steering",
    "goodput",
    "chaos",
    "sessions",
    "meshes",
    "replicas/replica_1",
    "overview/trainers",
)

HOSTILE = "<script>alert(1)</script>" + "\u05d0\u05d1\u05d2" + "x" * 60
"""Ends nothing, and turns nothing around, though a part of it is written from right to left."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running, running.connect() as job:
        with training(job.weaver.address(), "replica_1", "replica_2", group="trainers"):
            yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_core_finds_nothing(browser: Browser, gateway: Gateway, scheme: str) -> None:
    with signed_in(browser, gateway.url, TOKEN, color_scheme=scheme) as opened:
        for view in VIEWS:
            opened.open(view)
            expect(opened.page.locator("h1")).to_be_visible()
            assert not opened.violations(), view


def test_no_view_is_wider_than_a_narrow_screen(browser: Browser, gateway: Gateway) -> None:
    with signed_in(browser, gateway.url, TOKEN, viewport={"width": 400, "height": 800}) as opened:
        for view in VIEWS:
            opened.open(view)
            expect(opened.page.locator("h1")).to_be_visible()
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400, view


def test_the_first_key_goes_to_the_content(browser: Browser, gateway: Gateway) -> None:
    with signed_in(browser, gateway.url, TOKEN) as opened:
        opened.page.keyboard.press("Tab")
        expect(opened.page.get_by_role("link", name="To the content")).to_be_focused()
        opened.page.keyboard.press("Enter")
        expect(opened.page.locator("main")).to_be_focused()


def test_hostile_names_are_text(browser: Browser, cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        with training(job.weaver.address(), HOSTILE, group=HOSTILE):
            with signed_in(browser, gateway.url, TOKEN) as opened:
                for view in VIEWS[:-1]:
                    opened.open(view)
                    expect(opened.page.locator("h1")).to_be_visible()
                    assert opened.page.locator("main script").count() == 0
                opened.open("replicas")
                expect(opened.page.get_by_test_id("replica-table")).to_contain_text("<script>alert(1)</script>")
                assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
