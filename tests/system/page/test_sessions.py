"""Sessions: who runs what, the log of every rank, and the end of a session."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browser import Tab
from tests.support.gateways import await_true
from tests.support.page_training import GROUP, RANKS, Fitting

pytestmark = pytest.mark.slow


def session(page: Page, name: str) -> Locator:
    return page.get_by_test_id("sessions").locator(f'tr[data-session="{name}"]')


def lines(page: Page) -> Locator:
    """The lines of the log that are in sight."""
    return page.get_by_test_id("log").locator(".line")


def follow(seen: Tab, trained: Fitting) -> Page:
    """Open the log of the training's session."""
    seen.open("sessions")
    session(seen.page, trained.job.session).get_by_role("link", name=trained.job.session).click()
    expect(lines(seen.page).first).to_be_visible()
    return seen.page


def colour(page: Page, rank: int) -> str:
    who = lines(page).filter(has_text=f"of rank {rank}").first.locator(".who")
    expect(who).to_have_css("color", re.compile("rgb"))  # while it is drawn anew, a line has none
    name: str = who.evaluate("one => getComputedStyle(one).color")
    return name or colour(page, rank)


def test_a_session_is_shown_with_its_replicas(seen: Tab, trained: Fitting) -> None:
    seen.open("sessions")
    there = session(seen.page, trained.job.session)
    expect(there).to_contain_text("connected")
    expect(there.locator("td.number").first).to_have_text(str(RANKS))
    expect(seen.page.get_by_test_id("workers")).to_contain_text("yes")


def test_each_rank_has_a_colour_and_escapes_are_not_shown(seen: Tab, trained: Fitting) -> None:
    page = follow(seen, trained)
    for rank in range(RANKS):
        expect(lines(page).filter(has_text=f"of rank {rank}").first).to_contain_text(f"{GROUP}.{rank}")
    assert colour(page, 0) != colour(page, 1)
    assert "[32m" not in page.get_by_test_id("log").inner_text()


def test_the_log_follows_what_is_printed_and_holds_when_it_is_paused(seen: Tab, trained: Fitting) -> None:
    page = follow(seen, trained)
    last = lines(page).last
    before = last.inner_text()
    expect(last).not_to_have_text(before)  # new lines come
    pause = page.get_by_test_id("log-pause")
    pause.click()
    expect(pause).to_have_attribute("aria-pressed", "true")
    held = lines(page).last.inner_text()
    expect(page.get_by_text(re.compile(r"paused; [1-9]\d* new lines?"))).to_be_visible()
    assert lines(page).last.inner_text() == held
    pause.click()
    expect(lines(page).last).not_to_have_text(held)


@pytest.mark.guarantees(
    "page actions",
    "Logs are searched, paused, coloured and narrowed to a rank, and a session ends when that is confirmed",
)
def test_a_search_shows_and_marks_the_lines_that_have_a_text(seen: Tab, trained: Fitting) -> None:
    page = follow(seen, trained)
    page.get_by_test_id("log-search").fill("OF RANK 1")
    expect(lines(page).locator("mark").first).to_have_text("of rank 1")
    expect(lines(page).filter(has_text="of rank 0")).to_have_count(0)
    assert "find=OF" in page.url
    page.get_by_test_id("log-search").fill("nobody printed this")
    expect(page.get_by_text("No line has this text")).to_be_visible()


@pytest.mark.guarantees(
    "page actions",
    "Logs are searched, paused, coloured and narrowed to a rank, and a session ends when that is confirmed",
)
def test_a_log_is_narrowed_to_a_mesh_a_rank_and_a_stream(seen: Tab, trained: Fitting) -> None:
    page = follow(seen, trained)
    mesh = page.get_by_label("Mesh")
    rank = page.get_by_label("Rank")
    expect(rank).to_be_disabled()
    expect(page.locator(f'#meshes option[value="{GROUP}"]')).to_have_count(1)  # it is offered by its name
    mesh.fill(GROUP)
    mesh.press("Enter")
    rank.fill("1")
    rank.press("Enter")
    expect(lines(page).filter(has_text="of rank 1").first).to_be_visible()
    expect(lines(page).filter(has_text="of rank 0")).to_have_count(0)
    scrolled_far = page.get_by_role("status").filter(has_text=re.compile(r"follows, ([6-9]\d|\d{3,}) lines"))
    expect(scrolled_far).to_be_visible(timeout=60_000)  # the few lines of the other stream are seen all the same
    page.get_by_label("Stream").select_option("stderr")
    expect(lines(page).filter(has_text="a hundred more of rank 1").first).to_be_visible()
    expect(lines(page).filter(has_text="step")).to_have_count(0)
    rank.fill("7")
    rank.press("Enter")
    expect(page.get_by_role("status").filter(has_text="no rank 7 in")).to_be_visible()


@pytest.mark.guarantees(
    "page actions",
    "Logs are searched, paused, coloured and narrowed to a rank, and a session ends when that is confirmed",
)
def test_a_session_is_ended_once_that_is_confirmed(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    with trained.gateway.connect() as other:
        seen.open("sessions")
        session(page, other.session).get_by_test_id("end-session").click()
        page.get_by_test_id("confirm").get_by_role("button", name="Cancel").click()
        expect(page.get_by_test_id("confirm")).to_have_count(0)
        expect(session(page, other.session)).to_be_visible()

        session(page, other.session).get_by_test_id("end-session").click()
        expect(page.get_by_test_id("confirm")).to_contain_text(other.session)
        page.get_by_test_id("confirm").get_by_role("button", name="End it").click()
        expect(session(page, other.session)).to_have_count(0)
        ended = page.get_by_role("region", name="Ended").get_by_role("row").filter(has_text=other.session)
        expect(ended).to_be_visible()
        await_true(lambda: [one["name"] for one in trained.gateway.rest("/sessions")["sessions"]] == [
            trained.job.session
        ])  # fmt: skip


def test_with_scope_view_no_session_is_ended(only_looks: Tab, trained: Fitting) -> None:
    only_looks.open("sessions")
    end = session(only_looks.page, trained.job.session).get_by_test_id("end-session")
    expect(end).to_be_disabled()
    expect(only_looks.page.get_by_test_id("why-disabled")).to_contain_text("operate")
