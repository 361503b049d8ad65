"""Jobs of 2, 8 and 64 ranks: one row with its ranks inside, a view that leads on, and no control that fails."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from loom.rest_client import Gateway as Rest
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.browser import Tab, signed_in, tab
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of
from tests.support.processes import start
from tests.support.weavers import await_weaver

JOBS = {"duo": 2, "octet": 8, "crowd": 64}
LINK = "https://mlflow.example/#/experiments/1/runs/7"

RANKS = f"""
import threading
from loom.threadlet import Threadlet

config = {{"learning_rate": 0.1, "learning_rate_schedule": 0.2}}
jobs = [
    [Threadlet(f"{{job}}_{{rank}}", group=job, config={{**config, "seed": rank}}) for rank in range(size)]
    for job, size in {JOBS}.items()
]
for job in jobs:
    for one in job:
        one.handler("learning_rate")(float)
step, never = 0, threading.Event()
while not never.wait(0.5):
    for job in jobs:
        for rank, one in enumerate(job):
            one.publish_status(step=step, max_step=100_000, metrics={{"loss": 1.0 / (1 + step) + (rank == 1)}})
            one.check_and_apply_updates()
    step += 1
"""
"""Threadlets of one process: where each runs makes no difference to the page."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running:
        weaver = WeaverProxy(running.url, TOKEN)
        ranks = start("-c", RANKS, env={**os.environ, "LOOM_WEAVER": await_weaver(weaver)})
        try:
            await_true(
                lambda: sum(one.step is not None for one in weaver.replicas().values()) == sum(JOBS.values())
            )
            weaver.link("crowd_0", "mlflow", LINK)
            yield running
        finally:
            ranks.kill()
            ranks.communicate()


@pytest.fixture
def seen(browser: Browser, gateway: Gateway) -> Iterator[Tab]:
    with signed_in(browser, gateway.url, TOKEN) as there:
        yield there


def test_each_job_is_one_row_that_opens_with_keys(seen: Tab) -> None:
    page = seen.page
    seen.open("replicas")
    for job, size in JOBS.items():
        row = page.locator(f'tr[data-job="{job}"]')
        row.scroll_into_view_if_needed()
        expect(row).to_contain_text(f"{size} ranks")
        expect(row).to_contain_text("left")
        turn = row.get_by_role("button")
        expect(turn).to_have_attribute("aria-expanded", "false" if size > 8 else "true")
    turn.focus()
    page.keyboard.press("Enter")
    expect(turn).to_have_attribute("aria-expanded", "true")
    first = page.locator('tr[data-replica="crowd_0"]')
    expect(first).to_be_visible()
    expect(page.locator('tr[data-job="crowd"] + tr + tr + tr')).to_have_attribute("data-replica", "crowd_2")


@pytest.mark.parametrize("job", JOBS)
def test_a_job_has_a_view_with_what_differs(seen: Tab, gateway: Gateway, job: str) -> None:
    page = seen.page
    seen.open(f"overview/{job}")
    config = page.get_by_test_id("job-config")
    expect(config.get_by_role("row", name="learning_rate")).to_contain_text(re.compile(r"0\.1 override0\.2"))
    expect(config.get_by_role("row", name="seed")).to_contain_text(f"{job}_1: 1")
    expect(page.get_by_test_id("job-figures")).to_contain_text("time left")
    expect(page.get_by_test_id("run-link")).to_have_count(int(job == "crowd"))
    page.get_by_test_id("to-run").click()
    WeaverProxy(gateway.url, TOKEN).update_config(job, learning_rate=0.05).get(60)
    expect(page.get_by_test_id("flag").filter(has_text=re.compile("learning_rate|2")).first).to_be_visible()
    expect(page.get_by_test_id("run-control")).to_contain_text(f"all {JOBS[job]} ranks")
    expect(page.get_by_test_id("run-link")).to_have_count(int(job == "crowd"))
    assert not seen.violations()


def test_a_link_to_a_run_leads_out_and_tells_nothing_of_the_page(seen: Tab) -> None:
    for view in ("overview/crowd", "replicas/crowd_0"):
        seen.open(view)
        link = seen.page.get_by_test_id("run-link").get_by_role("link", name="mlflow")
        expect(link).to_have_attribute("href", LINK)
        expect(link).to_have_attribute("rel", "noopener noreferrer")


@pytest.mark.parametrize("job", JOBS)
def test_a_narrow_screen_is_wide_enough(browser: Browser, gateway: Gateway, job: str) -> None:
    with signed_in(browser, gateway.url, TOKEN, viewport={"width": 400, "height": 800}) as opened:
        for view in (f"overview/{job}", f"replicas/{job}_1", "replicas"):
            opened.open(view)
            expect(opened.page.locator("h1")).to_be_visible()
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400, view


def test_who_may_look_only_has_no_control_that_fails(browser: Browser, gateway: Gateway) -> None:
    with tab(browser, Rest(gateway.url, TOKEN).page("view")) as opened:
        opened.live()
        for view in ("overview/duo", "replicas/duo_0"):
            opened.open(view)
            expect(opened.page.get_by_test_id("why-disabled")).to_contain_text("scope is view")
            for name in ("Pause", "Resume", "Stop"):
                expect(opened.page.get_by_role("button", name=name, exact=True)).to_be_disabled()
            expect(opened.page.get_by_text("Change its configuration")).to_have_count(0)
