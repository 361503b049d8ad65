"""A browser, and a gateway with a page for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from loom.rest_client import Gateway as Rest
from loom_gateway.dashboard import STATIC
from loom_proxy.local import LocalCluster
from tests.support.browser import Tab, chromium, signed_in, tab
from tests.support.gateways import TOKEN
from tests.support.needs import skip_because
from tests.support.page_training import Fitting, fitting
from tests.support.users import House


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not (STATIC / "index.html").is_file():
        skip_because("the page is not built: npm was missing when Loom was installed")
    with chromium() as opened:
        yield opened


@pytest.fixture
def house(cluster: LocalCluster, tmp_path: Path) -> Iterator[House]:
    """A gateway of several users, which a test may break."""
    made = House(cluster.workers, tmp_path)
    try:
        yield made
    finally:
        made.gateway.close()


@pytest.fixture(scope="module")
def trained(cluster: LocalCluster) -> Iterator[Fitting]:
    """One training for all tests of a module, on a gateway of its own."""
    with fitting(cluster, "--injectable") as running:
        yield running


@pytest.fixture
def seen(browser: Browser, trained: Fitting) -> Iterator[Tab]:
    """The page of the module's training, signed in."""
    with signed_in(browser, trained.gateway.url, TOKEN) as there:
        yield there


@pytest.fixture
def only_looks(browser: Browser, trained: Fitting) -> Iterator[Tab]:
    """The page of the module's training, signed in with scope view."""
    with tab(browser, Rest(trained.gateway.url, TOKEN).page("view")) as there:
        there.live()
        yield there
