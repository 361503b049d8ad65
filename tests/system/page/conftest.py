"""A browser, and a gateway with a page for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from loom_gateway.dashboard.files import STATIC
from loom_proxy.local import LocalCluster
from tests.support.browser import chromium
from tests.support.needs import skip_because
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
