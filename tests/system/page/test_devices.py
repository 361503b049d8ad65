"""Devices: the map both ways, a device taken out of use and back, and the chain of a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browser import Tab
from tests.support.gateways import await_true
from tests.support.page_training import GROUP, SHARED_DEVICE, Fitting

pytestmark = pytest.mark.slow


@pytest.fixture
def device(trained: Fitting) -> Iterator[str]:
    """A device that all replicas use; it is in use again afterwards."""
    weaver = trained.job.weaver
    assert set(weaver.devices()[SHARED_DEVICE].replicas) == set(trained.replicas)
    yield SHARED_DEVICE
    weaver.set_policy(GROUP, "notify")
    weaver.reactivate(SHARED_DEVICE)
    weaver.resume(GROUP)
    await_true(lambda: {one.state for one in weaver.replicas().values()} == {"running"})


def row(page: Page, device: str) -> Locator:
    return page.get_by_test_id("devices").locator(f'tr[data-device="{device}"]')


def choose(page: Page, device: str) -> Locator:
    """Open a device's panel."""
    row(page, device).get_by_role("button").click()
    return page.get_by_test_id("device")


def state_of(trained: Fitting, device: str) -> str:
    return trained.job.weaver.devices()[device].state


def test_the_map_leads_both_ways(seen: Tab, trained: Fitting, device: str) -> None:
    page = seen.page
    seen.open("devices")
    for replica in trained.replicas:
        expect(row(page, device)).to_contain_text(replica.partition("@")[0])
    page.get_by_role("button", name="replica → devices").click()
    assert "by=replica" in page.url
    there = page.get_by_role("region", name="Replicas and their devices").get_by_role("row")
    expect(there).to_have_count(1 + len(trained.replicas))
    there.filter(has_text=f"{GROUP}_1").get_by_role("button", name=device).click()
    panel = page.get_by_test_id("device")
    expect(panel.get_by_role("heading", name=device)).to_be_visible()
    panel.get_by_role("link", name=f"{GROUP}_1").click()
    expect(page.get_by_role("heading", name=f"{GROUP}_1")).to_be_visible()
    page.get_by_role("link", name=device).click()
    expect(page.get_by_test_id("device")).to_contain_text(device)


def test_a_search_finds_a_device_by_its_replica_and_says_when_there_is_none(
    seen: Tab, trained: Fitting, device: str
) -> None:
    seen.open("devices")
    search = seen.page.get_by_role("searchbox", name="Search")
    search.fill(f"{GROUP}_1")
    expect(row(seen.page, device)).to_be_visible()
    search.fill("of nobody")
    expect(seen.page.get_by_text("No device matches")).to_be_visible()


@pytest.mark.guarantees("page actions", "A device is taken out of use and back, and a failure's chain is shown")
def test_a_device_is_taken_out_of_use_and_back(seen: Tab, trained: Fitting, device: str) -> None:
    page = seen.page
    seen.open("devices")
    panel = choose(page, device)
    panel.get_by_test_id("deactivate").click()
    status = panel.get_by_test_id("command-status")
    expect(status).to_have_attribute("data-phase", "done")
    expect(status).to_contain_text(f"{len(trained.replicas)} of {len(trained.replicas)} replicas applied it")
    expect(row(page, device)).to_contain_text("inactive")
    assert state_of(trained, device) == "inactive"
    expect(panel.get_by_test_id("deactivate")).to_be_disabled()

    panel.get_by_test_id("reactivate").click()
    expect(row(page, device)).to_contain_text("active")
    expect(panel.get_by_test_id("reactivate")).to_be_disabled()
    await_true(lambda: state_of(trained, device) == "active")


@pytest.mark.guarantees("page actions", "A device is taken out of use and back, and a failure's chain is shown")
def test_a_failure_is_reported_and_its_chain_is_shown(seen: Tab, trained: Fitting, device: str) -> None:
    page = seen.page
    trained.job.weaver.set_policy(GROUP, "pause")
    seen.open("devices")
    panel = choose(page, device)
    panel.get_by_role("button", name="Report a failure").click()
    page.get_by_test_id("confirm").get_by_label("Reason").fill("Xid 79, as the test says")
    page.get_by_test_id("confirm").get_by_role("button", name="Report").click()
    expect(panel).to_contain_text("The failure was reported.")
    chain = page.get_by_test_id("failure").first
    expect(chain).to_contain_text("Xid 79, as the test says")
    expect(chain.get_by_role("button", name=device)).to_be_visible()
    for replica in trained.replicas:
        line = chain.get_by_role("listitem").filter(has_text=replica.partition("@")[0])
        expect(line).to_contain_text("pause")
        expect(line).to_contain_text("applied pause")
    expect(row(page, device)).to_contain_text("failed")
    assert state_of(trained, device) == "failed"
    assert {one.state for one in trained.job.weaver.replicas().values()} == {"paused"}

    page.reload()  # the chain is read from the stored events
    seen.live()
    expect(page.get_by_test_id("failure").first).to_contain_text("Xid 79, as the test says")


def test_a_report_that_is_cancelled_reports_nothing(seen: Tab, trained: Fitting, device: str) -> None:
    seen.open("devices")
    panel = choose(seen.page, device)
    panel.get_by_role("button", name="Report a failure").click()
    seen.page.get_by_test_id("confirm").get_by_role("button", name="Cancel").click()
    expect(seen.page.get_by_test_id("confirm")).to_have_count(0)
    assert state_of(trained, device) == "active"


def test_with_scope_view_no_device_is_taken_out_of_use(only_looks: Tab, device: str) -> None:
    only_looks.open("devices")
    panel = choose(only_looks.page, device)
    expect(panel.get_by_test_id("why-disabled")).to_contain_text("operate")
    expect(panel.get_by_test_id("deactivate")).to_be_disabled()
    expect(panel.get_by_role("button", name="Report a failure")).to_be_disabled()
