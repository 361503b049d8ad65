"""Overview and Goodput: what they show is what REST says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browser import Tab
from tests.support.gateways import await_true
from tests.support.page_training import GROUP, RANKS, STEP, Fitting
from tests.support.weaver_training import training

pytestmark = pytest.mark.slow

NEAR = 0.05
"""How far a share may be off that is read a little later."""


def goodput(trained: Fitting, job: str) -> dict[str, Any]:
    (found,) = [one for one in trained.gateway.rest("/weaver/goodput")["jobs"] if one["job"] == job]
    return dict(found)


def replicas(trained: Fitting) -> list[dict[str, Any]]:
    return [one for one in trained.gateway.rest("/weaver/replicas")["replicas"] if one["group"] == GROUP]


def figure(card: Locator, name: str) -> float:
    """A figure of a job."""
    text = card.locator("dl.figures div").filter(has=card.page.locator("dt", has_text=re.compile(f"^{name}$")))
    return number(text.locator("dd").inner_text())


def number(text: str) -> float:
    return float(text.replace(",", "").removesuffix("%"))


def job_of(trained: Fitting) -> str:
    return f"{GROUP}@{trained.job.session}"


def card(page: Page, trained: Fitting) -> Locator:
    return page.locator(f'[data-testid="job"][data-job="{job_of(trained)}"]')


@pytest.mark.guarantees("page actions", "The figures are those of REST")
def test_a_job_is_shown_as_rest_has_it(seen: Tab, trained: Fitting) -> None:
    seen.open("overview")
    shown = card(seen.page, trained)
    before = replicas(trained)
    steps = [one["step"] for one in before]
    await_true(lambda: figure(shown, "step") > max(steps))  # the page is behind, and the loss falls
    expect(shown).to_contain_text(f"{RANKS} replicas")
    expect(shown).to_contain_text(f"{RANKS} running")
    expect(shown.locator("dl.figures")).to_contain_text(re.compile(r"steps/s\s*\d"))
    loss, step, rate = (figure(shown, name) for name in ("loss", "step", "steps/s"))
    share = figure(shown, "goodput") / 100
    after = replicas(trained)

    losses = [one["metrics"]["loss"] for one in (*before, *after)]
    assert min(losses) - 1e-3 <= loss <= max(losses) + 1e-3
    assert max(steps) < step <= max(one["step"] for one in after)
    assert 0 < rate <= 1 / STEP * 2
    assert abs(share - goodput(trained, job_of(trained))["ratio"]) < NEAR


def test_what_there_is_at_a_glance_is_counted(seen: Tab, trained: Fitting) -> None:
    seen.open("overview")
    glance = seen.page.get_by_role("region", name="At a glance")
    devices = trained.gateway.rest("/weaver/devices")["devices"]
    expect(glance.get_by_role("link", name="Devices").locator(".big")).to_have_text(str(len(devices)))
    expect(glance.get_by_role("link", name="Sessions").locator(".big")).to_have_text("1")
    expect(glance.get_by_role("link", name="Sessions")).to_contain_text("2 workers of 2 answer")
    expect(glance).to_contain_text(f"{RANKS} running")


def test_what_happened_names_replicas_and_no_numbers_of_meshes(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    seen.open("overview")
    with trained.gateway.connect() as other:
        other.hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 2}, name="others").initialized.get()
        expect(page.get_by_test_id("events")).to_contain_text(re.compile("processes were started: [12] of others"))
    expect(page.get_by_test_id("events")).to_contain_text(re.compile(r"rank \d of others: stopped"))
    trained.job.weaver.update_config(trained.replicas[0], learning_rate=0.125).get()
    row = page.get_by_test_id("events").get_by_role("listitem").filter(has_text="applied update_config").first
    expect(row.get_by_role("link")).to_have_text(f"{GROUP}_0")


def test_a_process_that_dies_is_named_by_its_replica(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    seen.open("overview")
    with training(trained.job.weaver.address(), "victim_0", group="victims") as (victim,):
        expect(page.get_by_test_id("events")).to_contain_text(re.compile(r"victims\s*began"))
        victim.process.kill()
        row = page.get_by_test_id("events").get_by_role("listitem").filter(has_text="failed: ").first
        expect(row.get_by_role("link")).to_have_text("victim_0")


@pytest.mark.guarantees("page actions", "The figures are those of REST")
def test_goodput_is_that_of_rest_and_a_death_has_its_times(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    with training(trained.job.weaver.address(), "mortal_0", group="mortals") as (mortal,):
        await_true(lambda: "mortal_0" in trained.job.weaver.replicas())
        mortal.process.kill()
        await_true(lambda: bool(goodput(trained, "mortals")["faults"]))
        seen.open("goodput?job=mortals")
        shown = page.locator('[data-testid="goodput"][data-job="mortals"]')
        (fault,) = goodput(trained, "mortals")["faults"]
        row = shown.get_by_test_id("faults").locator("tbody tr")
        expect(row).to_contain_text("mortal_0")
        expect(row).to_contain_text(fault["reason"])
        detection = fault["detected"] - fault["time"]
        text = row.locator("td.number").first.inner_text()
        value, unit = text.split(" ")
        factor = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
        assert abs(float(value) * factor - detection) <= 0.02 * detection + 0.001

    seen.open(f"goodput?job={job_of(trained)}")
    ratio = page.get_by_test_id("ratio")
    expect(ratio).to_have_text(re.compile(r"^[\d.]+ %$"))
    assert abs(number(ratio.inner_text()) / 100 - goodput(trained, job_of(trained))["ratio"]) < NEAR
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_test_id("ratio")).to_have_count(len(trained.gateway.rest("/weaver/goodput")["jobs"]))
