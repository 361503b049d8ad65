"""An admin's page shows another user's training; nobody else's does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import signed_in
from tests.support.gateways import await_true
from tests.support.users import House
from tests.support.weaver_training import training

pytestmark = pytest.mark.slow


@pytest.fixture
def trains(house: House) -> Iterator[House]:
    """A gateway on which ann and the admin train."""
    with house.connect("ann") as ann, house.connect("root") as root:
        with training(ann.weaver.address(), "of_ann"), training(root.weaver.address(), "of_root"):
            await_true(lambda: "of_ann" in ann.weaver.replicas() and "of_root" in root.weaver.replicas())
            yield house


@pytest.mark.guarantees("page access", "An admin's page shows another user's training, and nobody else's does")
def test_an_admin_chooses_a_user_whose_training_is_then_shown_and_steered(browser: Browser, trains: House) -> None:
    with signed_in(browser, trains.url, trains.tokens["root"]) as opened:
        page = opened.page
        opened.open("replicas")
        table = page.get_by_test_id("replica-table")
        expect(table).to_contain_text("of_root")
        expect(table).not_to_contain_text("of_ann")
        page.get_by_test_id("user-chooser").select_option("ann")
        expect(table).to_contain_text("of_ann")
        expect(table).not_to_contain_text("of_root")
        assert "user=ann" in page.url

        page.get_by_test_id("nav-sessions").click()  # each address has the choice
        assert "user=ann" in page.url
        expect(page.get_by_test_id("sessions").locator("tbody tr")).to_have_count(1)
        expect(page.get_by_test_id("sessions")).to_contain_text("ann")
        opened.open("steering?target=of_ann&user=ann")
        page.get_by_test_id("pause").click()
        expect(page.get_by_test_id("preview")).to_contain_text("paused")
        assert trains.weaver("ann").replica("of_ann").state == "paused"
        page.get_by_test_id("nav-replicas").click()
        page.get_by_role("link", name="of_ann").click()
        page.get_by_test_id("ask-stacks").click()  # by REST, of the same user
        expect(page.get_by_test_id("stacks")).to_contain_text("weaver_training")

        page.reload()
        opened.live()
        expect(page.get_by_role("heading", name="of_ann")).to_be_visible()
        page.get_by_test_id("user-chooser").select_option("")
        expect(page.get_by_test_id("replica-table")).to_contain_text("of_root")
        page.wait_for_url(re.compile(r"#/replicas$"))


@pytest.mark.guarantees("page access", "An admin's page shows another user's training, and nobody else's does")
def test_who_is_no_admin_has_no_choice(browser: Browser, trains: House) -> None:
    with signed_in(browser, trains.url, trains.tokens["ann"]) as opened:
        opened.open("replicas?user=root")
        expect(opened.page.get_by_test_id("replica-table")).to_contain_text("of_ann")
        expect(opened.page.get_by_test_id("replica-table")).not_to_contain_text("of_root")
        expect(opened.page.get_by_test_id("user-chooser")).to_have_count(0)
