"""The view of one run: curves with marks, control, facts, notes, and its end, of a training in real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from loom.rest_client import Gateway as Rest
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.integration.instrument.test_branches import DISTRIBUTED
from tests.support.bending import LATER, RATE, bending
from tests.support.browser import Tab, signed_in, tab
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of
from tests.support.page_training import GROUP, Fitting
from tests.support.weavers import await_weaver

LIVING = "one-that-lives"

ENDED = "one-that-crashed"

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    """One that knows a run that crashed twice, and one of three ranks that lives."""
    with gateway_of(cluster) as running:
        address = await_weaver(WeaverProxy(running.url, TOKEN))
        for again, options in enumerate((("--crash-at", "60"), ("--begin", "40", "--crash-at", "120"))):
            with bending(address, ENDED, 2, *options, again=bool(again)) as processes:
                for process in processes:
                    process.wait(60)
        with bending(address, LIVING, 3):
            await_true(lambda: steps(running) > 20)
            yield running


@pytest.fixture
def weaver(gateway: Gateway) -> WeaverProxy:
    return WeaverProxy(gateway.url, TOKEN)


@pytest.fixture
def seen(browser: Browser, gateway: Gateway) -> Iterator[Tab]:
    with signed_in(browser, gateway.url, TOKEN) as there:
        yield there


def steps(gateway: Gateway) -> int:
    found = WeaverProxy(gateway.url, TOKEN).runs(LIVING)
    return (found[0].step or 0) if found else 0


def curve(page: Page, metric: str = "loss") -> Locator:
    return page.get_by_role("img", name=re.compile(rf"^{re.escape(metric)} by "))


def key(page: Page, name: str) -> Locator:
    return page.locator(f'[data-key="{name}"]')


def mark(page: Page, kind: str, text: str) -> Locator:
    """The first such mark of the timeline: the newest one."""
    return page.locator(f'[data-mark="{kind}"]').filter(has_text=text).first


def test_the_loss_bends_at_the_mark_and_the_change_is_taken_back(seen: Tab, weaver: WeaverProxy) -> None:
    page = seen.page
    seen.open(f"runs/{LIVING}")
    expect(curve(page)).to_be_visible()
    rate = key(page, "learning_rate")
    rate.get_by_test_id("value").fill(str(LATER))
    expect(rate).to_contain_text(f"{RATE} → {LATER}")
    page.get_by_test_id("run-config").get_by_test_id("apply").click()
    status = page.get_by_test_id("run-control").get_by_test_id("command-status")
    expect(status).to_contain_text("3 of 3 replicas applied it")
    change = f"learning_rate {RATE} → {LATER}"
    page.get_by_test_id("flag").filter(has_text="learning_rate").first.click()
    opened = page.get_by_test_id("mark")
    expect(opened).to_contain_text("3 ranks applied it at step")
    expect(opened).to_contain_text("by")
    expect(opened.get_by_test_id("acknowledgements").locator("tbody tr")).to_have_count(3)
    expect(page.get_by_test_id("run-values").get_by_role("row", name="learning_rate")).to_contain_text(
        f"{RATE}{LATER}"
    )

    opened.get_by_test_id("take-back").click()
    expect(opened.get_by_test_id("command-status")).to_contain_text("applied")
    expect(mark(page, "command", f"learning_rate {LATER} → {RATE}")).to_be_visible()
    expect(mark(page, "command", change)).to_be_visible()
    changes = [one["changes"] for one in weaver.run(LIVING).timeline if one["kind"] == "command"]
    assert [one["learning_rate"]["new"] for one in changes] == [LATER, RATE]


def test_values_are_checked_while_they_are_typed(seen: Tab) -> None:
    page = seen.page
    seen.open(f"runs/{LIVING}")
    apply = page.get_by_test_id("run-config").get_by_test_id("apply")
    expect(apply).to_be_disabled()
    field = key(page, "accumulation").get_by_test_id("value")
    field.fill("1.5")
    expect(key(page, "accumulation")).to_contain_text("1.5 is no whole number")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(apply).to_be_disabled()
    field.fill("4")
    key(page, "schedule").get_by_test_id("value").select_option("cosine")
    key(page, "warm").get_by_test_id("value").select_option("false")
    key(page, "betas").get_by_test_id("value").fill("[0.9, 0.99]")
    key(page, "note").get_by_test_id("value").fill("from the page")
    expect(apply).to_have_text("Apply 5 changes")
    apply.click()
    expect(page.get_by_test_id("run-control").get_by_test_id("command-status")).to_have_attribute(
        "data-phase", "done"
    )
    row = page.get_by_test_id("run-values").get_by_role("row", name="schedule")
    expect(row).to_contain_text("constantcosine")


def test_what_a_rank_refuses_says_why_and_is_not_shown_as_done(seen: Tab) -> None:
    page = seen.page
    seen.open(f"runs/{LIVING}")
    key(page, "learning_rate").get_by_test_id("value").fill("-1")
    page.get_by_test_id("run-config").get_by_test_id("apply").click()
    status = page.get_by_test_id("run-control").get_by_test_id("command-status")
    expect(status).to_contain_text("a learning rate is larger than 0")
    expect(key(page, "learning_rate").get_by_test_id("value")).to_have_value("-1")  # to mend it
    refused = mark(page, "command", "learning_rate = -1 refused")
    refused.get_by_role("button").first.click()
    expect(page.get_by_test_id("mark")).to_contain_text("3 ranks refused it")
    expect(page.get_by_test_id("mark").get_by_test_id("take-back")).to_have_count(0)


def test_it_goes_on_by_itself(seen: Tab) -> None:
    seen.open(f"runs/{LIVING}")
    figures = seen.page.get_by_test_id("run-figures")
    for name in ("time left", "steps/s", "tokens/s", "MFU", "gradient norm", "GPU memory"):
        expect(figures).to_contain_text(name)
    before = figures.locator("dd").first.inner_text()
    expect(figures.locator("dd").first).not_to_have_text(before)
    last = curve(seen.page).get_attribute("aria-label")
    assert last
    expect(curve(seen.page)).not_to_have_attribute("aria-label", last)


def test_axes_smoothing_metrics_and_zoom_are_in_the_address(seen: Tab) -> None:
    page = seen.page
    seen.open(f"runs/{ENDED}")
    page.get_by_test_id("pin-metric").select_option("grad_norm")
    expect(curve(page, "grad_norm")).to_be_visible()
    page.get_by_test_id("smoothing").fill("0.6")
    page.get_by_test_id("log-axis").check()
    page.get_by_role("button", name="each rank").click()
    page.get_by_test_id("axis-samples").click()
    box = curve(page).bounding_box()
    assert box
    across = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.4 * box["width"], across)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], across, steps=4)
    page.mouse.up()
    expect(page.get_by_test_id("zoom-out")).to_be_visible()
    address = page.evaluate("location.hash")
    for part in ("m=loss%2Cgrad_norm", "smooth=0.6", "log=1", "ranks=each", "x=samples", "zoom="):
        assert part in address, address
    page.reload()
    seen.live()
    expect(page.get_by_test_id("zoom-out")).to_be_visible()
    expect(curve(page, "grad_norm")).to_be_visible()
    page.get_by_test_id("zoom-out").click()
    assert "zoom=" not in page.evaluate("location.hash")
    seen.open(f"runs/{LIVING}")  # the metrics are kept in the browser
    expect(curve(page, "grad_norm")).to_be_visible()
    page.get_by_role("button", name="Take grad_norm away").click()
    expect(curve(page, "grad_norm")).to_have_count(0)


def test_the_crosshair_is_on_all_curves(seen: Tab) -> None:
    page = seen.page
    seen.open(f"runs/{ENDED}?m=loss%2Cgrad_norm")
    expect(curve(page, "grad_norm")).to_be_visible()
    curve(page).hover(position={"x": 400, "y": 60})
    expect(page.locator("figcaption").filter(has_text=re.compile(r"step \d"))).to_have_count(2)


def test_a_run_that_ended_keeps_its_curves_and_says_why(seen: Tab) -> None:
    page = seen.page
    seen.open(f"runs/{ENDED}")
    cause = page.get_by_test_id("cause")
    expect(cause).to_contain_text(
        re.compile(r"crashed: bend_\d first, .*CUDA out of memory.*, at step 120 of 20,000")
    )
    expect(page.get_by_test_id("why-no-control")).to_be_visible()
    expect(page.get_by_test_id("run-control")).to_have_count(0)
    expect(curve(page)).to_have_attribute("aria-label", re.compile(r"the last value is \d"))
    for kind in ("started", "crashed", "restarted", "ended"):
        expect(page.locator(f'[data-mark="{kind}"]').first).to_be_visible()
    expect(page.get_by_test_id("run-start")).to_contain_text("tests.support.bending")
    expect(page.get_by_test_id("run-ranks")).to_contain_text("CUDA out of memory")
    expect(page.get_by_test_id("remove-run")).to_be_enabled()


def test_it_is_found_by_name_and_by_the_beginning_of_its_id(seen: Tab) -> None:
    for address, found in (("bend", LIVING), (ENDED[:-3], ENDED)):
        seen.open(f"runs/{address}")
        expect(seen.page.locator("h1 + * + code, .title code")).to_have_text(found[:12])
    seen.open("runs/none-such")
    expect(seen.page.get_by_text("no run 'none-such'")).to_be_visible()


def test_notes_and_tags_are_edited_and_a_note_is_never_html(seen: Tab, weaver: WeaverProxy) -> None:
    page = seen.page
    seen.open(f"runs/{ENDED}")
    page.get_by_test_id("add-tag").fill("best")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("tag")).to_have_text(re.compile("best"))
    page.get_by_test_id("edit-note").click()
    page.get_by_test_id("note-text").fill(
        "**half** the <img src=x onerror=alert(1)>\n\n- [x](javascript:alert(1))\n- [y](https://y.example)"
    )
    page.get_by_test_id("save-note").click()
    note = page.get_by_test_id("note")
    expect(note.locator("strong")).to_have_text("half")
    expect(note.locator("img")).to_have_count(0)
    expect(note.locator("a")).to_have_count(1)
    assert weaver.run(ENDED).tags == ("best",)
    assert weaver.run(ENDED).note.startswith("**half**")
    page.get_by_role("button", name="Take the tag best away").click()
    expect(page.get_by_test_id("tag")).to_have_count(0)


def test_a_step_is_picked_on_the_curve_for_a_branch(seen: Tab) -> None:
    page = seen.page
    seen.open(f"runs/{ENDED}")
    curve(page).click(position={"x": 500, "y": 60})
    button = page.get_by_test_id("branch-from")
    expect(button).to_have_text(re.compile(r"Branch from step \d+"))
    step = re.sub(r"\D", "", button.inner_text())
    button.click()
    expect(page.get_by_test_id("branch-step")).to_have_value(step)
    page.get_by_test_id("branch-key").fill("learning_rate")
    page.get_by_test_id("branch-value").fill("0.5x")
    expect(page.get_by_test_id("branch-line")).to_have_text(
        f"loom branch {ENDED} --step {step} --set learning_rate=0.5x"
    )
    assert not seen.violations()


def test_who_may_look_only_changes_nothing(browser: Browser, gateway: Gateway) -> None:
    with tab(browser, Rest(gateway.url, TOKEN).page("view")) as opened:
        opened.live()
        opened.open(f"runs/{LIVING}")
        expect(opened.page.get_by_test_id("why-disabled")).to_contain_text("scope is view")
        expect(key(opened.page, "learning_rate").get_by_test_id("value")).to_be_disabled()
        for name in ("Pause", "Stop", "Archive", "Write a note"):
            expect(opened.page.get_by_role("button", name=name, exact=True)).to_be_disabled()


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, PHONE], ids=["desktop", "dark", "phone"])
def test_axe_core_finds_nothing(browser: Browser, gateway: Gateway, options: dict[str, object]) -> None:
    with signed_in(browser, gateway.url, TOKEN, **options) as opened:
        for run in (LIVING, ENDED):
            opened.open(f"runs/{run}?m=loss%2Cmfu&smooth=0.5")
            expect(curve(opened.page, "mfu")).to_be_visible()
            assert not opened.violations(), run
            assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), run


def test_an_ended_run_is_archived_and_removed(seen: Tab, weaver: WeaverProxy) -> None:
    page = seen.page
    seen.open(f"runs/{ENDED}")
    page.get_by_test_id("archive").click()
    expect(page.get_by_test_id("archive")).to_have_text("Take out of the archive")
    assert ENDED not in [one.id for one in weaver.runs()]
    page.get_by_test_id("remove-run").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Remove").click()
    expect(page).to_have_url(re.compile("#/runs$"))
    assert ENDED not in [one.id for one in weaver.runs(archived=True)]


def test_a_stopped_run_says_by_whom(seen: Tab) -> None:
    page = seen.page
    seen.open(f"runs/{LIVING}")
    page.get_by_test_id("run-control").get_by_role("button", name="Stop").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Stop").click()
    expect(page.get_by_test_id("cause")).to_contain_text("stopped by")
    expect(page.get_by_test_id("run-control")).to_have_count(0)


def test_a_branch_starts_beside_its_run_and_each_leads_to_the_other(
    seen: Tab, gateway: Gateway, weaver: WeaverProxy, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(DISTRIBUTED)
    words = ("run", "--name", "alive", "--", sys.executable, "loop.py", "1000000", "0.02")
    loom = str(Path(sys.executable).with_name("loom"))
    environment = {**os.environ, "LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN}
    process = subprocess.Popen([loom, *words], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        await_true(lambda: any((one.step or 0) > 30 for one in weaver.runs("alive")), 120)
        page = seen.page
        seen.open("runs/alive")
        page.get_by_test_id("branch-from").click()
        page.get_by_test_id("branch-step").fill("9")
        page.get_by_test_id("branch-start").click()
        expect(page.get_by_test_id("branch-error")).to_contain_text("no checkpoint at or before step 9")
        page.get_by_test_id("branch-step").fill("25")
        page.get_by_test_id("branch-key").fill("learning_rate")
        page.get_by_test_id("branch-value").fill("0.5x")
        page.get_by_test_id("branch-start").click()
        page.get_by_test_id("branch").get_by_role("link", name="Open it").click(timeout=120_000)
        expect(page.locator("h1")).to_contain_text("alive-at-20")
        lineage = page.get_by_test_id("lineage")
        expect(lineage).to_contain_text("branch of alive")
        expect(mark(page, "command", "learning_rate")).to_be_visible()
        lineage.get_by_role("link").first.click()
        expect(lineage).to_contain_text(re.compile("continued by .*alive-at-20"))
    finally:
        weaver.stop("alive*").get(60)
        process.kill()
        process.wait(60)


def test_a_run_of_a_session_has_the_log_of_its_lead_and_the_last_lines_of_the_dead(
    browser: Browser, trained: Fitting
) -> None:
    """The last test: it kills a rank."""
    first = trained.replicas[1]
    with signed_in(browser, trained.gateway.url, TOKEN) as opened:
        page = opened.page
        opened.open(f"runs/{GROUP}")
        expect(page.get_by_test_id("log")).to_contain_text(re.compile(r"step \d+ of rank 0"))
        expect(page.get_by_test_id("axis-samples")).to_be_disabled()
        os.kill(trained.job.weaver.replicas()[first].pid, signal.SIGKILL)
        expect(mark(page, "crashed", f"crashed: {GROUP}_1")).to_be_visible()
        expect(page.get_by_test_id("last-lines")).to_contain_text("a hundred more of rank 1")
        expect(curve(page)).to_be_visible()
