"""Debian's Chromium, driven by Playwright, on a gateway's page. What the page may never do fails the test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from loom.rest_client import Gateway
from tests.support.needs import skip_because
from tests.support.paths import ROOT

BOUND = 30.0
"""Seconds within which what is waited for has come."""

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

_AXE = ROOT / "gateway/dashboard/node_modules/axe-core/axe.min.js"

_EXPECTED = ("WebSocket connection to", "Failed to load resource")
"""Parts of what Chromium itself says of a gateway that is away or refuses: tests break connections."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, which ends with the test."""
    program = shutil.which("chromium")
    if program is None:
        skip_because("the program chromium (Debian package chromium) is not installed")
    expect.set_options(timeout=BOUND * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A tab of a browser of its own, with a gateway's page, and what went wrong in it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.wrong: list[str] = []
        self._origin = urlsplit(address).netloc
        page.set_default_timeout(BOUND * 1000)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("request", self._look)

    def _note(self, message: ConsoleMessage) -> None:
        # A violation of the Content-Security-Policy is an error, too.
        if message.type in ("error", "warning") and not any(known in message.text for known in _EXPECTED):
            self.wrong.append(f"{message.type}: {message.text}")

    def _look(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self._origin:
            self.wrong.append(f"a request to another origin: {request.url}")

    def open(self, view: str) -> None:
        """Open a view by its address, without loading the page again."""
        self.page.evaluate("view => { location.hash = view }", f"#/{view}")

    def violations(self) -> list[str]:
        """What axe-core finds."""
        if not _AXE.is_file():
            skip_because("axe-core is not installed: npm ci in gateway/dashboard")
        self.page.evaluate(_AXE.read_text() + ";null")
        found: list[dict[str, Any]] = self.page.evaluate("async () => (await axe.run(document)).violations")
        return [f"{one['id']}: {[node['target'] for node in one['nodes']]}" for one in found]

    def live(self) -> None:
        """Wait until the page is signed in and connected."""
        expect(self.page.get_by_test_id("connection")).to_have_attribute("data-state", "open")


@contextmanager
def tab(browser: Browser, address: str, **options: object) -> Iterator[Tab]:
    """A tab on a page's address, in a context without any other's cookies.

    Args:
        browser: the browser.
        address: where the page is; with a code it is signed in.
        options: those of Playwright's ``new_context``.
    """
    context = browser.new_context(**options)  # type: ignore[arg-type]
    try:
        opened = Tab(context.new_page(), address)
        opened.page.goto(address)
        yield opened
        assert not opened.wrong, opened.wrong
    finally:
        context.close()


@contextmanager
def signed_in(browser: Browser, url: str, token: str, **options: object) -> Iterator[Tab]:
    """A tab that `loom dashboard` would open, once it is connected."""
    with tab(browser, Gateway(url, token).page(), **options) as opened:
        opened.live()
        yield opened
