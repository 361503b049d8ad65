"""The meshes and runs of a session on the page: states, calls, what fails and stops, and what a run prints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.browser import Tab, signed_in
from tests.support.users import House

pytestmark = pytest.mark.slow

BOUND = 40.0

HOSTILE = "<script>alert(1)</script>" + "\u05d0\u05d1\u05d2" + "x" * 60


def item(page: Page, name: str) -> Locator:
    return page.get_by_test_id("mesh-tree").locator(f'[data-name="{name}"]')


def endpoint(page: Page, name: str) -> Locator:
    return page.get_by_test_id("endpoints").locator(f'tr[data-endpoint="{name}"]')


@pytest.mark.guarantees(
    "page actions",
    "The meshes of a session are on the page with their states and calls, for whom the session is shared "
    "with, and for nobody else",
)
def test_the_meshes_of_a_session_are_seen_with_states_and_calls(
    browser: Browser, cluster: LocalCluster, job: loom.Job
) -> None:
    with signed_in(browser, cluster.url, cluster.token) as opened:
        page = opened.page
        opened.open("sessions")
        page.locator(f'tr[data-session="{job.session}"]').get_by_test_id("to-meshes").click()
        expect(page.get_by_text("No processes were spawned yet")).to_be_visible()

        procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="workers")
        counters = procs.spawn("counters", Counter)
        pids = list(counters.pid.call().get(BOUND).values())
        for _ in range(30):
            counters.add.call(1).get(BOUND)
        with pytest.raises(loom.ActorError):
            counters.fail.call("bad luck").get(BOUND)

        expect(item(page, "workers")).to_contain_text("4 alive")
        item(page, "counters").click()
        expect(page.get_by_test_id("mesh")).to_contain_text("Counter")
        expect(endpoint(page, "add")).to_contain_text("30")
        expect(endpoint(page, "add")).to_contain_text("ms")
        expect(endpoint(page, "fail").locator(".badge.bad")).to_have_text("1")

        os.kill(pids[2], signal.SIGKILL)
        expect(item(page, "workers")).to_contain_text("1 failed")
        expect(page.get_by_test_id("mesh-ranks").locator('[data-rank="2"]')).to_have_attribute(
            "data-state", "failed"
        )
        expect(page.get_by_test_id("mesh-failures").locator('tr[data-rank="2"]')).to_contain_text("failed")

        assert not opened.violations()

        procs.stop().get(BOUND)
        expect(item(page, "workers")).to_contain_text("4 stopped")
        expect(page.get_by_text("The calls of a stopped mesh are not kept")).to_be_visible()


def test_the_tree_is_used_with_the_keyboard(browser: Browser, cluster: LocalCluster, job: loom.Job) -> None:
    job.hosts.spawn_procs(name="workers").spawn("counters", Counter).value.call().get(BOUND)
    with signed_in(browser, cluster.url, cluster.token) as opened:
        page = opened.page
        opened.open(f"meshes/{job.session}")
        item(page, "hosts").focus()
        page.keyboard.press("ArrowDown")
        expect(item(page, "workers")).to_be_focused()
        page.keyboard.press("ArrowLeft")
        expect(item(page, "workers")).to_have_attribute("aria-expanded", "false")
        expect(item(page, "counters")).to_have_count(0)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(item(page, "counters")).to_be_focused()
        expect(item(page, "counters")).to_have_attribute("aria-selected", "true")
        expect(endpoint(page, "value")).to_be_visible()


def test_hostile_names_of_meshes_are_text_on_a_narrow_screen(
    browser: Browser, cluster: LocalCluster, job: loom.Job
) -> None:
    hostile = type(HOSTILE, (Counter,), {})
    procs = job.hosts.spawn_procs(name=HOSTILE)
    procs.spawn(HOSTILE, hostile).value.call().get(BOUND)
    with signed_in(browser, cluster.url, cluster.token, viewport={"width": 400, "height": 800}) as opened:
        opened.open(f"meshes/{job.session}")
        tree = opened.page.get_by_test_id("mesh-tree")
        expect(tree.locator('[data-kind="actors"]')).to_contain_text("<script>alert(1)</script>")
        expect(endpoint(opened.page, "value")).to_have_count(1)
        assert opened.page.locator("main script").count() == 0
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_another_users_meshes_are_seen_when_they_are_shared(browser: Browser, house: House) -> None:
    with house.connect("ann") as job, signed_in(browser, house.url, house.tokens["bob"]) as opened:
        job.hosts.spawn_procs(name="workers")
        opened.open(f"meshes/{job.session}")
        expect(opened.page.get_by_test_id("meshes-over")).to_contain_text("no session named")
        job.share("bob", "view")
        opened.open("sessions")
        opened.open(f"meshes/{job.session}")
        expect(item(opened.page, "workers")).to_be_visible()
        job.unshare("bob")
        expect(opened.page.get_by_test_id("meshes-over")).to_be_visible()


def test_a_busy_driver_is_said_and_the_last_meshes_stay(browser: Browser, house: House) -> None:
    with house.connect("ann") as job, signed_in(browser, house.url, house.tokens["ann"]) as opened:
        job.hosts.spawn_procs(name="workers")
        opened.open(f"meshes/{job.session}")
        expect(item(opened.page, "workers")).to_be_visible()
        (pid,) = [one["pid"] for one in house.rest("ann").sessions() if one["name"] == job.session]
        os.kill(pid, signal.SIGSTOP)
        try:
            expect(opened.page.get_by_test_id("meshes-away")).to_contain_text("it is busy")
            expect(item(opened.page, "workers")).to_be_visible()
        finally:
            os.kill(pid, signal.SIGCONT)
        expect(opened.page.get_by_test_id("meshes-away")).to_have_count(0)


def print_until(path: str, name: str) -> None:
    """Print a line, and another one once a file is there."""
    print(f"{name} has begun")
    until = time.monotonic() + BOUND
    while not os.path.exists(path):
        assert time.monotonic() < until
        time.sleep(0.01)
    print(f"{name} is over")


def follow(opened: Tab, name: str) -> None:
    opened.page.get_by_test_id("runs").locator(f'tr[data-run="{name}"]').get_by_test_id("follow-run").click()


@pytest.mark.guarantees(
    "page actions", "What functions of `job.run` print is followed apart, and marked in the log"
)
def test_a_run_is_followed(browser: Browser, cluster: LocalCluster, job: loom.Job, tmp_path: Path) -> None:
    end = str(tmp_path / "end")
    with signed_in(browser, cluster.url, cluster.token) as opened:
        page, log = opened.page, opened.page.get_by_test_id("log")
        opened.open(f"sessions/{job.session}")
        expect(page.get_by_text("Nothing runs")).to_be_visible()
        runs = [job.run(print_until, end, name, name=name, detach=True) for name in ("first", "second")]
        follow(opened, "first")
        expect(log).to_contain_text("first has begun")
        Path(end).touch()
        for run in runs:
            run.result(BOUND)
        expect(log).to_contain_text("first is over")
        expect(log).not_to_contain_text("second")
        expect(page.get_by_test_id("runs").locator('tr[data-run="first"]')).to_have_attribute("data-state", "done")

        follow(opened, "first")  # not any more
        expect(log).to_contain_text("second is over")
        expect(log.locator(".line", has_text="second is over").locator(".who")).to_have_text("second")
