"""Replicas: found, selected and steered; a replica's curves, stacks and log."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browser import Tab
from tests.support.page_training import GROUP, Fitting
from tests.support.weaver_training import training

pytestmark = pytest.mark.slow


def rows(page: Page) -> Locator:
    return page.get_by_test_id("replica-table").locator("tr[data-replica]")


def cell(page: Page, index: int) -> tuple[float, float]:
    """The middle of a cell of the grid, in the page."""
    grid = page.get_by_test_id("replica-grid")
    box = grid.bounding_box()
    assert box is not None
    size, columns = (float(grid.get_attribute(name) or 0) for name in ("data-cell", "data-columns"))
    label = 24  # the group's name stands above its cells
    return box["x"] + (index % columns + 0.5) * size, box["y"] + label + (index // columns + 0.5) * size


def test_a_search_takes_a_part_of_a_name_and_a_glob(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    seen.open("replicas")
    expect(rows(page)).to_have_count(2)
    search = page.get_by_test_id("replica-search")
    search.fill("ers_1")
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_have_attribute("data-replica", trained.replicas[1])
    search.fill("*_0*")
    expect(rows(page)).to_have_attribute("data-replica", trained.replicas[0])
    search.fill("of nobody")
    expect(page.get_by_text("No replica matches")).to_be_visible()
    page.get_by_role("button", name="Show all").click()
    expect(rows(page)).to_have_count(2)
    page.get_by_label("State", exact=True).select_option("failed")
    expect(page.get_by_text("No replica matches")).to_be_visible()


def test_the_grid_is_coloured_in_four_ways(seen: Tab) -> None:
    seen.open("replicas")
    for mode in ("lag", "loss", "pace", "state"):
        button = seen.page.get_by_test_id(f"colour-{mode}")
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")


def test_the_table_is_sorted_by_a_column(seen: Tab, trained: Fitting) -> None:
    seen.open("replicas")
    header = seen.page.get_by_test_id("replica-table").get_by_role("button", name="replica")
    expect(rows(seen.page).first).to_have_attribute("data-replica", trained.replicas[0])
    header.click()
    expect(rows(seen.page).first).to_have_attribute("data-replica", trained.replicas[1])


def test_what_is_dragged_over_is_selected_and_steered(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    seen.open("replicas")
    expect(page.get_by_test_id("replica-grid")).to_have_attribute("data-columns", re.compile(r"\d+"))
    page.get_by_test_id("replica-grid").scroll_into_view_if_needed()
    (x0, y0), (x1, y1) = cell(page, 0), cell(page, 1)
    page.mouse.move(x0, y0)
    page.mouse.down()
    page.mouse.move(x1, y1, steps=4)
    page.mouse.up()
    expect(page.get_by_test_id("selection")).to_contain_text("2 selected")
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_test_id("selection")).to_contain_text("Drag over the grid")

    page.keyboard.down("Shift")
    page.mouse.click(x1, y1)
    page.keyboard.up("Shift")
    expect(page.get_by_test_id("selection")).to_contain_text("1 selected")
    page.get_by_label("only the selection").check()
    expect(rows(page)).to_have_count(1)
    page.get_by_test_id("steer").click()
    expect(page.get_by_test_id("preview")).to_contain_text(f"{GROUP}_1")
    expect(page.get_by_test_id("preview")).not_to_contain_text(f"{GROUP}_0")
    page.get_by_test_id("key").select_option("learning_rate")
    page.get_by_test_id("value").fill("0.125")
    page.get_by_test_id("apply").click()
    changed = page.get_by_test_id("outcome").locator(f'tr[data-replica="{trained.replicas[1]}"]')
    expect(changed).to_contain_text("→ 0.125")
    known = trained.job.weaver.replicas()
    assert known[trained.replicas[1]].config["learning_rate"] == 0.125
    assert known[trained.replicas[0]].config["learning_rate"] != 0.125


def test_a_cell_opens_its_replica_by_mouse_and_by_keyboard(seen: Tab) -> None:
    page = seen.page
    seen.open("replicas")
    expect(rows(page)).to_have_count(2)
    page.get_by_test_id("replica-grid").scroll_into_view_if_needed()
    page.mouse.click(*cell(page, 1))
    expect(page.get_by_role("heading", name=f"{GROUP}_1")).to_be_visible()
    page.go_back()
    page.get_by_test_id("replica-grid").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=f"{GROUP}_1")).to_be_visible()


def test_a_curve_is_zoomed_and_zoomed_out_again(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    seen.open(f"replicas/{trained.replicas[0]}")
    curve = page.get_by_role("img", name=re.compile("^loss by time"))
    curve.hover(position={"x": 118, "y": 40})
    page.mouse.down()
    curve.hover(position={"x": 218, "y": 40})
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    with page.expect_request(re.compile(r"metrics/loss\?.*until=")):
        page.mouse.up()
    assert "zoom=" in page.url
    page.get_by_test_id("zoom-out").click()
    expect(page.get_by_test_id("zoom-out")).to_have_count(0)
    page.get_by_role("button", name="5 min").click()
    page.wait_for_url(re.compile("range=5"))


@pytest.mark.guarantees(
    "page actions", "A flame graph shows where a process's time goes; of one that ends meanwhile the page says so"
)
def test_a_flame_graph_of_ten_seconds_is_zoomed_and_searched(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    seen.open(f"replicas/{trained.replicas[0]}")
    page.get_by_test_id("ask-profile").click()
    expect(page.get_by_test_id("ask-profile")).to_have_text(re.compile(r"Looking, \d+ s of 10 s"))
    expect(page.get_by_test_id("ask-profile")).to_be_disabled()
    graph = page.get_by_test_id("flame-graph")
    expect(graph).to_be_visible()
    expect(page.get_by_text(re.compile(r"samples in 10 s, by (py-spy|threadlet)"))).to_be_visible()
    expect(page.get_by_test_id("flame-table")).to_contain_text("gradient_of_the_squares")
    hot = graph.locator('[data-function$="gradient_of_the_squares"]').first
    before = hot.locator("rect").bounding_box()
    hot.click()
    expect(page.get_by_test_id("flame-out")).to_be_visible()
    after = graph.locator('[data-function$="gradient_of_the_squares"]').first.locator("rect").bounding_box()
    assert before is not None
    assert after is not None
    assert after["width"] >= before["width"]
    page.get_by_test_id("flame-out").click()
    expect(page.get_by_test_id("flame-out")).to_have_count(0)

    table = page.get_by_test_id("flame-table")
    expect(table).to_contain_text("page_training.py")
    page.get_by_test_id("flame-search").fill("gradient")
    expect(page.get_by_text(re.compile(r"^\d.* of the samples$"))).to_be_visible()
    for row in table.locator("tbody tr").all():
        expect(row).to_contain_text("gradient")


@pytest.mark.guarantees(
    "page actions", "A flame graph shows where a process's time goes; of one that ends meanwhile the page says so"
)
def test_a_profile_of_a_replica_that_has_ended_is_refused_with_a_reason(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    with training(trained.job.weaver.address(), "ends_soon") as (ending,):
        seen.open("replicas/ends_soon")
        expect(page.get_by_test_id("ask-profile")).to_be_enabled()
        page.get_by_test_id("ask-profile").click()
        expect(page.get_by_test_id("ask-profile")).to_have_text(re.compile("Looking, [1-9]"))
        ending.process.kill()
        expect(page.get_by_test_id("profile-error")).to_contain_text("during the profile")
        expect(page.get_by_test_id("ask-profile")).to_be_disabled()  # there is no process any more


def test_the_stack_of_each_thread_is_shown(seen: Tab, trained: Fitting) -> None:
    seen.open(f"replicas/{trained.replicas[0]}")
    seen.page.get_by_test_id("ask-stacks").click()
    expect(seen.page.get_by_test_id("stacks")).to_contain_text("train")
    expect(seen.page.get_by_test_id("ask-stacks")).to_have_text("Ask again")


def test_a_replicas_log_has_its_lines_and_no_others(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    seen.open(f"replicas/{trained.replicas[1]}")
    expect(page.get_by_test_id("log")).to_contain_text("of rank 1")
    expect(page.get_by_test_id("log")).not_to_contain_text("of rank 0")
    page.get_by_role("link", name="All of it").click()
    expect(page.get_by_test_id("log")).to_contain_text("of rank 1")
    expect(page.get_by_label("Mesh")).to_have_value(GROUP)


def test_a_replica_is_paused_and_resumed_on_its_page(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    seen.open(f"replicas/{trained.replicas[0]}")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.get_by_test_id("command-status")).to_contain_text("1 of 1 replica applied it")
    assert trained.job.weaver.replica(trained.replicas[0]).state == "paused"
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_test_id("command-status")).to_have_attribute("data-phase", "done")
    expect(page.locator("h1 + *")).to_contain_text("running")


def test_its_configuration_is_that_of_the_weaver(seen: Tab, trained: Fitting) -> None:
    known = trained.job.weaver.replica(trained.replicas[0])
    seen.open(f"replicas/{trained.replicas[0]}")
    config = seen.page.get_by_test_id("config")
    expect(config).to_contain_text("learning_rate")
    expect(config).to_contain_text(json.dumps(known.config["learning_rate"]))


def test_with_scope_view_a_replica_can_be_looked_at_only(only_looks: Tab, trained: Fitting) -> None:
    page = only_looks.page
    only_looks.open(f"replicas/{trained.replicas[0]}")
    expect(page.get_by_test_id("why-disabled").first).to_contain_text("operate")
    for name in ("Pause", "Resume", "Drain", "Stop"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
    page.get_by_test_id("ask-stacks").click()
    expect(page.get_by_test_id("stacks")).to_contain_text("train")


def test_an_unknown_replica_says_so(seen: Tab) -> None:
    seen.open("replicas/nobody")
    expect(seen.page.get_by_text("No replica has this name")).to_be_visible()
