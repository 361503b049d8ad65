"""Runs on the page: the table, the comparison, the overview, the palette and a phone, of real trainings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

import loom
from loom.rest_client import Gateway as Rest
from loom_proxy.local import LocalCluster
from tests.support import sweep
from tests.support.browser import Tab, signed_in, tab
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}

RANKS = 3

THUMB = 44
"""Pixels of the smallest target on a phone."""


@dataclass(frozen=True)
class Sweep:
    """A gateway with runs that have ended, and two that live: one well, one that diverges."""

    gateway: Gateway
    job: loom.Job
    best: str
    slow: str
    cut: str
    crashed: str

    def run(self, id: str) -> dict[str, Any]:
        return self.gateway.rest(f"/runs/{id}")

    def ids(self, query: str = "") -> set[str]:
        return {one["id"] for one in self.gateway.rest(f"/runs?limit=100{query}")["runs"]}


@pytest.fixture(scope="module")
def swept(cluster: LocalCluster) -> Iterator[Sweep]:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        address = job.weaver.address()
        best = sweep.ended(address, "fit", 0.2, "complete")
        slow = sweep.ended(address, "fit", 0.01, "complete")
        cut = sweep.ended(address, "tune", 0.05, "cut")
        crashed = sweep.ended(address, "boom", 0.1, "crash")
        with (
            sweep.started(address, "alive", 0.001, "stay", RANKS),
            sweep.started(address, "wild", 1.5, "stay"),
        ):
            made = Sweep(gateway, job, best, slow, cut, crashed)
            await_true(lambda: len(made.ids("&state=running")) == 2 and len(made.ids()) == 6)
            yield made


@pytest.fixture
def seen(browser: Browser, swept: Sweep) -> Iterator[Tab]:
    with signed_in(browser, swept.gateway.url, TOKEN) as there:
        yield there


def rows(page: Page) -> Locator:
    return page.get_by_test_id("run-table").locator("[data-run]")


def row(page: Page, run: str) -> Locator:
    return page.get_by_test_id("run-table").locator(f'[data-run="{run}"]')


def cell(page: Page, run: str, column: str) -> Locator:
    return row(page, run).locator(f'[data-column="{column}"]')


def expect_runs(page: Page, runs: set[str]) -> None:
    expect(rows(page)).to_have_count(len(runs))
    assert {one.get_attribute("data-run") for one in rows(page).all()} == runs


def test_each_run_has_its_state_values_and_curve(seen: Tab, swept: Sweep) -> None:
    page = seen.page
    seen.open("runs")
    expect(page.get_by_test_id("run-count")).to_have_text("6 runs")
    states = {swept.best: "completed", swept.cut: "ended early", swept.crashed: "crashed"}
    for run, state in states.items():
        expect(cell(page, run, "state")).to_have_text(state)
        assert swept.run(run)["state"] == state
    expect(cell(page, "wild-1.5-stay", "state")).to_have_text("diverged")
    loss = swept.run(swept.best)["summary"]["train/loss"][0]
    assert float(cell(page, swept.best, "summary.train/loss").inner_text()) == pytest.approx(loss, rel=1e-3)
    expect(cell(page, swept.best, "config.learning_rate")).to_have_text("0.2")
    expect(row(page, swept.best).get_by_test_id("spark")).not_to_have_attribute("data-points", "0")


def test_a_filter_is_an_expression_a_glob_or_a_part_of_a_name(seen: Tab, swept: Sweep) -> None:
    page, written = seen.page, seen.page.get_by_test_id("run-filter")
    seen.open("runs")
    expect(rows(page)).to_have_count(6)
    for text, found in (
        ('train/loss < 0.1 and learning_rate >= 1e-2 and state == "completed"', {swept.best}),
        ('"optim/decay" == 0.1 and not name == "alive"', {swept.slow, swept.cut}),
        ("f?t", {swept.best, swept.slow}),
        ("boo", {swept.crashed}),
    ):
        written.fill(text)
        expect_runs(page, found)
        assert "q=" in page.url
    written.fill('state = "completed"')
    expect(page.get_by_test_id("filter-error")).to_contain_text("= is no operator: write == (at character 7)")
    expect(written).to_have_attribute("aria-invalid", "true")
    written.fill("nothing < 3")
    expect(page.get_by_test_id("filter-error")).to_contain_text("No run has the key nothing")
    assert not seen.violations()


def test_runs_are_sorted_and_grouped(seen: Tab, swept: Sweep) -> None:
    page = seen.page
    seen.open("runs?q=fit&sort=-config.learning_rate")
    expect(rows(page)).to_have_count(2)
    assert [one.get_attribute("data-run") for one in rows(page).all()] == [swept.best, swept.slow]
    page.get_by_test_id("run-table").get_by_role("button", name="learning_rate").click()
    expect(rows(page).first).to_have_attribute("data-run", swept.slow)
    page.get_by_test_id("run-group").select_option("name")
    expect(rows(page)).to_have_count(0)
    group = page.locator('[data-group="fit"]')
    losses = [swept.run(one)["summary"]["train/loss"][0] for one in (swept.best, swept.slow)]
    mean, best = group.locator('[data-column="summary.train/loss"]').inner_text().split("·")
    assert float(mean) == pytest.approx(sum(losses) / 2, rel=1e-3)
    assert float(best) == pytest.approx(min(losses), rel=1e-3)
    group.get_by_role("button").click()
    expect(rows(page)).to_have_count(2)


def test_chosen_columns_are_kept(seen: Tab, swept: Sweep) -> None:
    page = seen.page
    seen.open("runs")
    page.get_by_test_id("choose-columns").click()
    chooser = page.get_by_test_id("columns")
    chooser.get_by_role("searchbox").fill("acc")
    chooser.locator('[data-column="max.eval/acc"]').click()
    chooser.get_by_role("button", name="Hide took").click()
    assert not seen.violations()
    chooser.get_by_role("button", name="Done").click()
    expect(cell(page, swept.best, "max.eval/acc")).to_have_text(re.compile(r"^0\.9|1$"))
    expect(cell(page, swept.best, "took")).to_have_count(0)
    seen.open("overview")
    seen.open("runs")
    page.reload()
    expect(cell(page, swept.best, "max.eval/acc")).to_be_visible()


def test_the_keys_find_select_compare_and_open(seen: Tab, swept: Sweep) -> None:
    page = seen.page
    seen.open("runs?sort=config.learning_rate")
    expect(rows(page)).to_have_count(6)
    page.keyboard.press("/")
    page.keyboard.type("fit")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("run-table")).to_be_focused()
    expect(rows(page)).to_have_count(2)
    page.keyboard.press("x")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("x")
    expect(page.get_by_test_id("run-actions")).to_contain_text("2 selected")
    assert not seen.violations()
    page.keyboard.press("c")
    expect(page.get_by_role("heading", name="Compare")).to_be_visible()
    assert page.url.split("#/compare/")[1].split("?")[0].split("/") == [swept.slow, swept.best]
    page.go_back()
    expect(rows(page)).to_have_count(2)
    page.get_by_test_id("run-table").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("fit")


def test_runs_are_tagged_archived_and_removed(seen: Tab, swept: Sweep) -> None:
    page = seen.page
    extra = sweep.ended(swept.job.weaver.address(), "spare", 0.1, "complete")
    seen.open("runs?q=spare")
    row(page, extra).get_by_role("checkbox").check()
    page.get_by_test_id("tag").click()
    page.get_by_test_id("tags").get_by_label("Add, with commas between them").fill("best, kept")
    page.get_by_test_id("tags").get_by_role("button", name="Apply").click()
    expect(row(page, extra)).to_contain_text("best")
    assert swept.run(extra)["tags"] == ["best", "kept"]
    row(page, extra).get_by_role("checkbox").check()
    page.get_by_test_id("archive").click()
    expect(rows(page)).to_have_count(0)
    page.get_by_test_id("archived").click()
    row(page, extra).get_by_role("checkbox").check()
    page.get_by_test_id("archive").click()
    expect(rows(page)).to_have_count(0)
    page.get_by_test_id("archived").click()
    row(page, extra).get_by_role("checkbox").check()
    page.get_by_test_id("remove").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Remove").click()
    expect(rows(page)).to_have_count(0)
    assert extra not in swept.ids()


def test_a_run_that_lives_is_not_removed_and_who_looks_changes_nothing(browser: Browser, swept: Sweep) -> None:
    with tab(browser, Rest(swept.gateway.url, TOKEN).page("view")) as looks:
        looks.live()
        looks.open("runs")
        row(looks.page, swept.best).get_by_role("checkbox").check()
        for button in ("tag", "archive", "remove"):
            expect(looks.page.get_by_test_id(button)).to_be_disabled()
    with signed_in(browser, swept.gateway.url, TOKEN) as seen:
        seen.open("runs")
        row(seen.page, "wild-1.5-stay").get_by_role("checkbox").check()
        expect(seen.page.get_by_test_id("remove")).to_be_disabled()
        expect(seen.page.get_by_test_id("tag")).to_be_enabled()


def test_runs_are_compared_at_a_step_as_rest_does(seen: Tab, swept: Sweep) -> None:
    page = seen.page
    seen.open(f"compare/{swept.best}/{swept.slow}/{swept.cut}")
    values = page.get_by_test_id("compared-values")
    expect(values).to_contain_text("Last values")
    page.get_by_test_id("at-step").fill("20")
    expect(values.get_by_role("heading")).to_have_text("At step 20")
    pairs = swept.gateway.rest(f"/runs/{swept.best}/compare/{swept.slow}?step=20")["at_step"]
    for metric in ("train/loss", "eval/acc"):
        shown = values.locator(f'[data-metric="{metric}"]')
        for run, value in zip((swept.best, swept.slow), pairs[metric], strict=True):
            text = shown.locator(f'[data-run="{run}"]')
            expect(text).to_have_text(re.compile(r"^[\d.e-]+"))
            found = float(re.match(r"[\d.e]+(?:e-\d+)?", text.locator("span").first.inner_text())[0])  # type: ignore[index]
            assert found == pytest.approx(value, rel=1e-3)
    config = page.get_by_test_id("config-diff")
    expect(config.locator('[data-key="learning_rate"]')).to_contain_text("0.2")
    expect(config.locator('[data-key="optimizer"]')).to_have_count(0)
    page.get_by_test_id("all-keys").check()
    expect(config.locator('[data-key="optimizer"]')).to_be_visible()
    expect(page.get_by_test_id("start-diff").locator('[data-key="host"]')).to_be_visible()
    page.get_by_test_id("by-elapsed").click()
    expect(page.get_by_test_id("compared-curves").get_by_role("img")).to_be_visible()
    page.get_by_role("button", name="Leave out tune").click()
    expect(page.get_by_role("list", name="Runs that are compared").locator("[data-run]")).to_have_count(2)
    assert not seen.violations()


def test_the_overview_begins_with_what_needs_somebody(seen: Tab, swept: Sweep) -> None:
    page = seen.page
    concerns = page.get_by_test_id("concerns")
    expect(concerns.locator('[data-concern="crashed"]')).to_contain_text("boom")
    expect(concerns.locator('[data-concern="diverged"]')).to_contain_text("wild")
    living = page.locator('[data-testid="job"][data-job="alive"]')
    expect(living).to_contain_text("train/loss (mean)")  # the weaver's history, of the run's own metric
    ended = page.get_by_test_id("ended-runs")
    expect(ended.locator(f'[data-run="{swept.cut}"]')).to_contain_text("ended early")
    expect(ended.locator(f'[data-run="{swept.best}"]').get_by_test_id("spark")).not_to_have_attribute(
        "data-points", "0"
    )
    swept.job.weaver.update_config("alive", learning_rate=0.002).get()
    folded = page.get_by_test_id("events").locator(f'[data-replicas="{RANKS}"]').first
    expect(folded).to_contain_text(
        re.compile(rf"{RANKS} replicas\s*applied learning_rate 0.001 → 0.002 at steps? \d+")
    )
    concerns.get_by_role("link", name="boom").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("boom")


def test_the_palette_goes_and_commands(seen: Tab, swept: Sweep) -> None:
    page = seen.page
    expect(page.get_by_test_id("job").first).to_be_visible()
    page.keyboard.press("Control+k")
    field = page.get_by_test_id("palette").get_by_role("combobox")
    expect(field).to_be_focused()
    page.keyboard.type("pause alive")
    expect(page.get_by_test_id("palette").get_by_role("option", selected=True)).to_contain_text("Pause alive")
    assert not seen.violations()
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("acknowledgements").locator("[data-replica]")).to_have_count(RANKS)
    await_true(lambda: all(swept.job.weaver.replicas()[f"alive_{rank}"].state == "paused" for rank in range(RANKS)))
    swept.job.weaver.resume("alive").get()
    page.keyboard.press("Control+k")
    page.keyboard.type("boom")
    page.get_by_role("option", name="boom crashed").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("boom")
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    page.keyboard.press("?")
    expect(page.get_by_test_id("keys")).to_contain_text("compare the selected runs")
    assert not seen.violations()
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("keys")).to_have_count(0)


def views(swept: Sweep) -> tuple[str, ...]:
    compared = f"compare/{swept.best}/{swept.slow}/{swept.cut}"
    rest = ("replicas", "devices", "steering", "goodput", "chaos", "sessions", "meshes")
    return ("overview", "runs", "runs?group=name", compared, *rest)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_core_finds_nothing(browser: Browser, swept: Sweep, scheme: str) -> None:
    with signed_in(browser, swept.gateway.url, TOKEN, color_scheme=scheme) as opened:
        for view in views(swept)[:4]:
            opened.open(view)
            expect(opened.page.locator("h1")).to_be_visible()
            opened.page.wait_for_load_state("networkidle")
            assert not opened.violations(), view


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_cards_and_targets_for_a_thumb(browser: Browser, swept: Sweep, scheme: str) -> None:
    options = {"viewport": PHONE, "color_scheme": scheme, "has_touch": True, "is_mobile": True}
    with signed_in(browser, swept.gateway.url, TOKEN, **options) as opened:
        page = opened.page
        for view in views(swept):
            opened.open(view)
            expect(page.locator("h1")).to_be_visible()
            page.wait_for_load_state("networkidle")
            assert not opened.violations(), view
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
            small = page.evaluate(SMALL, THUMB)
            assert not small, (view, small)
        page.get_by_test_id("nav-more").tap()
        page.get_by_test_id("nav-sessions").tap()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sessions")
        expect(page.get_by_test_id("nav-more")).to_have_attribute("aria-expanded", "false")
        expect(page.locator('main table[role="table"] td[data-label="state"]').first).to_be_visible()


SMALL = """least => [...document.querySelectorAll('.button, nav a, nav button, main select, .find')]
    .filter(one => one.offsetParent !== null && one.getBoundingClientRect().height < least)
    .map(one => one.outerHTML.slice(0, 120))"""


def test_of_a_thousand_runs_only_those_in_sight_are_rows(seen: Tab, swept: Sweep) -> None:
    """A stand-in for the list: a thousand real trainings would take an hour."""
    page = seen.page
    one = swept.gateway.rest("/runs?run=fit*")["runs"][0]
    many = [
        {
            **one,
            "id": f"{at:012x}",
            "name": f"many-{at}",
            "began": one["began"] - at,
            "config": {"learning_rate": at},
        }
        for at in range(1000)
    ]

    def answer(route: Route) -> None:
        route.fulfill(body=json.dumps({"runs": many}), content_type="application/json")

    asked: list[str] = []
    page.route(re.compile(r"/api/v1/runs\?"), answer)
    page.on("request", lambda request: asked.append(request.url) if "/curves/" in request.url else None)
    seen.open("runs")
    page.reload()  # a list that it has loaded before is loaded again only when runs have changed
    seen.live()
    expect(page.get_by_test_id("run-count")).to_have_text("1,000 runs")
    assert rows(page).count() < 60
    page.get_by_test_id("run-table").focus()
    page.keyboard.press("End")
    expect(rows(page).last).to_have_attribute("data-run", f"{999:012x}")
    page.get_by_test_id("run-filter").fill("learning_rate >= 990")
    expect(rows(page)).to_have_count(10)
    page.wait_for_load_state("networkidle")
    assert len(asked) < 100
