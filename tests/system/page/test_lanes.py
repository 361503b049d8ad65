"""Who waits for whom: lanes of the steps that an orchestrator and its trainers report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, Page, expect

import loom
from loom_proxy.local import LocalCluster
from tests.support.browser import signed_in
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of

pytestmark = pytest.mark.slow

TRAINER = {"wait_for_batch": 1.24, "load_batch": 0.06, "train": 0.6, "trainer_step": 2.0}

RATIOS = {
    f"perf/trainer/step_time_ratio/{name}": TRAINER[name] / 2 for name in ("wait_for_batch", "load_batch", "train")
}

ORCHESTRATOR = {"wait_for_policy": 0.1, "generate": 1.7, "step": 2.0}


class Run:
    """A run whose steps are made up: the orchestrator's reports have the first trainer's times, too."""

    def __init__(self, job: loom.Job, stack: ExitStack) -> None:
        weaver = job.weaver.address()

        def threadlet(replica: str, group: str) -> loom.Threadlet:
            return stack.enter_context(loom.Threadlet(replica, group=group, weaver=weaver, devices=[]))

        self._orchestrator = threadlet("orchestrator", "orchestrator")
        self._others = [threadlet(f"trainer_{rank}", "trainer") for rank in range(2)]
        self._without_times = threadlet("plain_0", "plain")
        self._next = 0
        await_true(lambda: len(job.weaver.replicas()) == 4)

    def step(self) -> None:
        trainer = {f"time/{name}": seconds for name, seconds in TRAINER.items()} | RATIOS
        own = {f"time/{name}": seconds for name, seconds in ORCHESTRATOR.items()}
        reports = [(self._orchestrator, trainer | own), (self._without_times, {"loss": 1.0})]
        for threadlet, metrics in [*reports, *((one, trainer) for one in self._others)]:
            with threadlet.step(self._next) as step:
                step.metrics.update(metrics)
        self._next += 1


@pytest.fixture
def running(cluster: LocalCluster) -> Iterator[tuple[Gateway, Run]]:
    with gateway_of(cluster) as gateway, gateway.connect() as job, ExitStack() as stack:
        yield gateway, Run(job, stack)


def expect_boxes(page: Page, replica: str, part: int, count: int) -> None:
    """Wait until the lane of a replica has so many boxes of a part, by its place in the legend."""
    path = page.locator(f'[data-testid="lane"][data-replica="{replica}"] path').nth(part)
    expect(path).to_have_attribute("d", re.compile(f"^(M[^M]+){{{count}}}$"))


@pytest.mark.guarantees("page actions", "Who waits for whom is said and drawn by the times that replicas report")
def test_the_page_says_who_waits_and_draws_each_step(browser: Browser, running: tuple[Gateway, Run]) -> None:
    gateway, run = running
    with signed_in(browser, gateway.url, TOKEN) as opened:
        page = opened.page
        opened.open("goodput")
        expect(page.locator("h1")).to_be_visible()
        expect(page.get_by_test_id("lanes")).to_have_count(0)

        run.step()
        expect(page.get_by_test_id("who-waits")).to_have_text("The trainers wait 62 % of their step for batches.")
        lanes = page.get_by_test_id("lane")
        expect(lanes).to_have_count(3)
        legend = page.locator(".legend li").all_inner_texts()
        assert legend == ["generate", "load_batch", "train", "wait_for_batch", "wait_for_policy", "unaccounted"]
        for steps in (2, 3):
            run.step()
            expect_boxes(page, "trainer_1", 3, steps)
        expect_boxes(page, "orchestrator", 3, 0)
        expect_boxes(page, "orchestrator", 4, 3)
        expect(page.get_by_role("img", name="The last 3 steps, 2 s on average: generate 1.70 s")).to_be_visible()

        page.locator("summary").focus()
        page.keyboard.press("Enter")
        row = page.get_by_test_id("lanes-table").locator("tbody tr").nth(1)
        cells = ["trainer_0", "62 %", "2 s", "0 s", "60 ms", "600 ms", "1.24 s", "0 s", "100 ms"]
        expect(row.locator("td")).to_have_text(cells)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert not opened.violations(), scheme
        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.get_by_role("link", name="orchestrator").first.click()
        expect(page.locator("h1")).to_have_text("orchestrator")
