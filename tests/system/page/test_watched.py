"""Watched tensors: lines and histograms on the page while a program trains."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import loom
from loom.rest_client import Gateway as Rest
from loom_proxy.local import LocalCluster
from tests.support.browser import signed_in, tab

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"


def tensor(page: Page, name: str) -> Locator:
    return page.get_by_test_id("watched").locator(f'[data-name="{name}"]')


def test_watched_tensors_are_seen_while_they_are_trained(browser: Browser, cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job, signed_in(browser, cluster.url, cluster.token) as there:
        lt = job.tensors()
        model = lt.nn.Linear(3, 1)
        w = lt.ones(4, requires_grad=True)
        lt.watch(model, "net", bins=16)
        lt.watch(w, HOSTILE)

        def train(steps: int) -> None:
            for _ in range(steps):
                (model(lt.ones(2, 3)).sum() + (w * w).sum()).backward()

        there.open(f"sessions/{job.session}")
        page = there.page
        expect(page.get_by_test_id("runs").or_(page.get_by_text("Nothing runs"))).to_be_visible()
        expect(page.get_by_test_id("watched")).to_have_count(0)

        train(2)
        weight = tensor(page, "net.weight")
        expect(weight).to_contain_text("2 gradients")
        expect(weight.locator("svg")).to_have_count(4)
        expect(tensor(page, HOSTILE)).to_contain_text("2 gradients")
        train(3)
        expect(weight).to_contain_text("5 gradients")
        expect(weight.get_by_role("img", name="norm of the gradient from gradient 1 to 5")).to_be_visible()
        assert there.violations() == []

        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_with_scope_view_they_are_seen_too(browser: Browser, cluster: LocalCluster) -> None:
    rest = Rest(cluster.url, cluster.token)
    with loom.connect(cluster.url, cluster.token) as job, tab(browser, rest.page("view")) as there:
        lt = job.tensors()
        w = lt.ones(4, requires_grad=True)
        lt.watch(w, "w")
        (w * w).sum().backward()
        there.live()
        there.open(f"sessions/{job.session}")
        expect(tensor(there.page, "w")).to_contain_text("1 gradient")
