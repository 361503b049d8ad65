"""Alerts of a real training on the page: a notice, and after a click a notification while the page is hidden."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import signed_in
from tests.support.gateways import await_true
from tests.support.users import House
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver

pytestmark = pytest.mark.slow

RECORD = """
window.told = [];
window.Notification = class {
  static permission = 'default';
  static async requestPermission() { return 'granted'; }
  constructor(title, options) { window.told.push(title + ': ' + options.body); }
};
"""
"""Notifications of a browser whose user allows them: a headless one shows none."""


@pytest.mark.guarantees(
    "page actions", "An alert is a notice on the page, and after a click a notification elsewhere"
)
def test_an_alert_is_a_notice_and_after_a_click_a_notification(browser: Browser, house: House) -> None:
    weaver = house.weaver("ann")
    await_weaver(weaver)
    weaver.alerts().add("crashed")
    weaver.alerts().add("not_a_number", quiet=True)
    with signed_in(browser, house.url, house.tokens["ann"]) as opened:
        page = opened.page
        page.add_init_script(RECORD)
        page.reload()
        opened.live()
        with training(weaver.address(), "told_0", group="told"):
            run = wait_for_run(house, "told")
        alerts = page.get_by_test_id("alerts")
        expect(alerts.get_by_role("alert")).to_have_count(1)
        expect(alerts).to_contain_text("run 'told'")
        expect(alerts.get_by_role("link")).to_have_attribute("href", f"#/runs/{run}")
        page.get_by_test_id("allow-notifications").click()
        expect(page.get_by_test_id("allow-notifications")).to_have_count(0)
        alerts.get_by_role("button", name="Dismiss this alert").click()
        expect(alerts).to_have_count(0)

        page.evaluate("() => Object.defineProperty(document, 'hidden', { get: () => true })")
        with training(weaver.address(), "again_0", group="again"):
            wait_for_run(house, "again")
        page.wait_for_function("() => window.told.length === 1 && window.told[0].includes(\"run 'again'\")")


def wait_for_run(house: House, name: str) -> str:
    """Wait until a run has made some steps; return its id."""
    weaver = house.weaver("ann")
    await_true(lambda: any((run.step or 0) > 3 for run in weaver.runs(name)))
    return str(weaver.run(name).info.id)
