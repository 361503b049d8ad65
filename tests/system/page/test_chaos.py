"""Chaos: a fault of each kind of target, its end, and what cannot be struck."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browser import Tab
from tests.support.gateways import await_true
from tests.support.page_training import Fitting
from tests.support.weaver_training import training

pytestmark = pytest.mark.slow


def choose(seen: Tab, fault: str, **params: str) -> Page:
    """Open a fault's form and fill in its parameters."""
    seen.open(f"chaos?fault={fault}")
    expect(seen.page.get_by_role("heading", name=fault, exact=True)).to_be_visible()
    for name, value in params.items():
        seen.page.locator(f"#param-{name}").fill(value)
    return seen.page


def inject(page: Page) -> Locator:
    """Inject the fault that the form describes, once that is confirmed; return what is said of it."""
    page.get_by_test_id("inject").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Inject").click()
    return page.get_by_role("region").locator("form").get_by_test_id("command-status")


@pytest.mark.guarantees("page actions", "Faults strike what is injectable, and end when they are removed")
def test_a_fault_of_a_replica_lasts_until_it_is_removed(seen: Tab, trained: Fitting) -> None:
    page = choose(seen, "slow_rank", seconds="0.1")
    page.get_by_test_id("victim").fill(trained.replicas[1])
    page.get_by_label("Seconds that it lasts").fill("300")
    expect(inject(page)).to_have_attribute("data-phase", "done")
    struck = page.get_by_test_id("acknowledgements").locator(f'tr[data-replica="{trained.replicas[1]}"]')
    expect(struck).to_contain_text("applied")
    present = page.get_by_test_id("injections").locator("tbody tr")
    expect(present).to_have_count(1)
    expect(present).to_contain_text("slow_rank")
    await_true(lambda: (trained.job.weaver.replica(trained.replicas[1]).step_time or 0) > 0.1)

    present.get_by_test_id("remove-fault").click()
    expect(page.get_by_text("No fault that lasts is present.")).to_be_visible()
    (removed,) = trained.job.weaver.events(kind="fault_removed", limit=1)
    assert removed.replica == trained.replicas[1]
    expect(page.get_by_role("region", name="What the training makes of it")).to_contain_text(
        "has no injected fault"
    )


def test_a_fault_of_a_host_is_carried_out_by_one_of_its_replicas(
    seen: Tab, trained: Fitting, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "step-1"
    checkpoint.write_bytes(b"weights" * 100)
    page = choose(seen, "corrupt_checkpoint", folder=str(tmp_path))
    host = trained.job.weaver.replica(trained.replicas[0]).host
    page.get_by_test_id("victim").select_option(host)
    expect(inject(page)).to_have_attribute("data-phase", "done")
    assert checkpoint.read_bytes() != b"weights" * 100
    page.get_by_test_id("injections").get_by_test_id("remove-fault").click()
    expect(page.get_by_text("No fault that lasts is present.")).to_be_visible()
    assert checkpoint.read_bytes() == b"weights" * 100


def test_a_fault_that_a_host_cannot_have_says_why(seen: Tab, trained: Fitting) -> None:
    page = choose(seen, "corrupt_checkpoint", folder="/nowhere")
    page.get_by_test_id("victim").select_option(trained.job.weaver.replica(trained.replicas[0]).host)
    expect(inject(page)).to_contain_text("there is no folder '/nowhere'")


def test_the_driver_of_a_session_is_killed(seen: Tab, trained: Fitting) -> None:
    other = trained.gateway.connect()
    page = choose(seen, "dead_driver")
    page.get_by_test_id("victim").select_option(other.session)
    expect(inject(page)).to_have_attribute("data-phase", "done")
    expect(page.locator(f'#victim option[value="{other.session}"]')).to_have_count(0)
    assert "SIGKILL" in trained.gateway.ended(other.session)["reason"]
    other.close()


def test_the_weaver_is_killed_and_another_one_starts(seen: Tab, trained: Fitting) -> None:
    before = trained.job.weaver.status()["weaver"]
    page = choose(seen, "dead_weaver")
    inject(page)
    expect(page.get_by_role("region", name="What the training makes of it")).to_contain_text("the weaver started")
    assert trained.job.weaver.status()["weaver"] != before
    await_true(lambda: {one.state for one in trained.job.weaver.replicas().values()} == {"running"})


def test_the_gateway_is_killed_and_comes_back(seen: Tab, trained: Fitting) -> None:
    page = choose(seen, "dead_gateway")
    inject(page)
    expect(page.get_by_test_id("lost")).to_be_visible()
    trained.gateway.end()
    trained.gateway.start()
    seen.live()
    expect(page.get_by_test_id("lost")).to_have_count(0)
    await_true(lambda: {one.state for one in trained.job.weaver.replicas().values()} == {"running"})


PLAN = """\
name: gentle
settle: 0.2 s
faults:
  - fault: slow_rank
    when: {time: 0.5 s}
    target: {mesh: fitters, rank: 1}
    for: FOR
    with: {seconds: 0.05}
    expect: recovers within 25 s
expect: [loss is finite, no step lost twice]
"""


def carry_out(seen: Tab, text: str) -> Locator:
    """Have a plan carried out, once that is confirmed; return what is shown of its run."""
    page = seen.page
    seen.open("chaos")
    page.get_by_test_id("plan-text").fill(text)
    page.get_by_test_id("plan-run").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Run").click()
    return page.get_by_test_id("plan")


@pytest.mark.guarantees(
    "page actions",
    "A plan shows its expectations live, and leaves no fault when it is cancelled, its token is revoked "
    "or the gateway stops",
)
def test_a_plan_is_carried_out_with_its_expectations_live(seen: Tab, trained: Fitting) -> None:
    page = seen.page
    run = carry_out(seen, PLAN.replace("FOR", "3 s"))
    expect(run.get_by_test_id("plan-faults")).to_contain_text("present")
    expect(run.get_by_test_id("plan-expectations")).to_contain_text("holds so far")
    expect(run).to_have_attribute("data-state", "held")
    expect(run.get_by_test_id("plan-faults")).to_contain_text("recovered")
    verdicts = run.get_by_test_id("plan-expectations").locator("tbody tr")
    expect(verdicts).to_have_count(3)
    for verdict in verdicts.all():
        expect(verdict.locator(".badge")).to_have_text("holds")
    expect(run.get_by_test_id("plan-lines")).to_contain_text(f"slow_rank strikes {trained.replicas[1]}")
    page.reload()  # the gateway has it
    seen.live()
    expect(page.get_by_test_id("plan")).to_have_attribute("data-state", "held")


@pytest.mark.guarantees(
    "page actions",
    "A plan shows its expectations live, and leaves no fault when it is cancelled, its token is revoked "
    "or the gateway stops",
)
def test_a_plan_is_cancelled_and_its_faults_are_removed(seen: Tab, trained: Fitting) -> None:
    run = carry_out(seen, PLAN.replace("FOR", "600 s"))
    expect(run.get_by_test_id("plan-faults")).to_contain_text("present")
    expect(seen.page.get_by_test_id("plan-run")).to_be_disabled()  # one at a time
    run.get_by_test_id("plan-cancel").click()
    expect(run).to_have_attribute("data-state", "cancelled")
    expect(run).to_contain_text("it was cancelled")
    expect(seen.page.get_by_text("No fault that lasts is present.")).to_be_visible()
    (removed,) = trained.job.weaver.events(kind="fault_removed", limit=1)
    assert removed.replica == trained.replicas[1]


def test_a_plan_that_makes_no_sense_is_refused_by_its_line(seen: Tab, trained: Fitting, tmp_path: Path) -> None:
    page = seen.page
    seen.open("chaos")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(PLAN.replace("FOR", "-5 s"))
    page.get_by_test_id("plan-file").set_input_files(wrong)
    text = page.get_by_test_id("plan-text")
    expect(text).to_have_value(wrong.read_text())
    page.get_by_test_id("plan-check").click()
    expect(page.get_by_test_id("plan-error")).to_contain_text("plan:7:10: a time is not negative")
    chosen = text.evaluate("one => one.value.slice(one.selectionStart, one.selectionEnd)")
    assert chosen == "    for: -5 s"
    text.fill(PLAN.replace("FOR", "1 s"))
    page.get_by_test_id("plan-check").click()
    expect(page.get_by_text("The plan makes sense: 1 fault with targets, 3 expectations, seed 0.")).to_be_visible()
    expect(page.get_by_test_id("plan-error")).to_have_count(0)
    text.fill(PLAN.replace("FOR", "1 s").replace("fitters", "nothing"))
    page.get_by_test_id("plan-check").click()
    expect(page.get_by_test_id("plan-error")).to_contain_text("matches no replica that lives")


@pytest.mark.guarantees("page actions", "Faults strike what is injectable, and end when they are removed")
def test_what_is_not_injectable_is_not_struck(seen: Tab, trained: Fitting) -> None:
    with training(trained.job.weaver.address(), "safe"):
        page = choose(seen, "sigkill")
        expect(page.get_by_test_id("connection")).to_have_attribute("data-state", "open")
        page.get_by_test_id("victim").fill("safe")
        expect(page.get_by_text("1 of 1 replica are not injectable.")).to_be_visible()
        expect(page.get_by_test_id("inject")).to_be_disabled()
        page.get_by_test_id("victim").fill("nobody")
        expect(page.get_by_text("No living replica is named so.")).to_be_visible()
        expect(page.get_by_test_id("inject")).to_be_disabled()


def test_a_parameter_that_makes_no_sense_is_refused_before_it_is_sent(seen: Tab, trained: Fitting) -> None:
    page = choose(seen, "slow_rank", seconds="many")
    page.get_by_test_id("victim").fill(trained.replicas[0])
    page.get_by_test_id("inject").click()
    expect(page.get_by_role("alert")).to_contain_text("seconds is a number from 0 to 600")
    expect(page.get_by_test_id("confirm")).to_have_count(0)


def test_with_scope_view_nothing_is_injected(only_looks: Tab) -> None:
    page = choose(only_looks, "slow_rank")
    expect(page.get_by_test_id("why-disabled")).to_contain_text("operate")
    expect(page.get_by_test_id("victim")).to_be_disabled()
    expect(page.locator("#param-seconds")).to_be_disabled()
    expect(page.get_by_test_id("inject")).to_be_disabled()
    for part in ("plan-text", "plan-run", "plan-check", "plan-file"):
        expect(page.get_by_test_id(part)).to_be_disabled()
    expect(page.get_by_test_id("remove-fault").filter(has_not=page.locator(":disabled"))).to_have_count(0)


def test_every_kind_of_fault_has_a_form(seen: Tab) -> None:
    seen.open("chaos")
    kinds = seen.page.get_by_role("region", name="Fault", exact=True).get_by_role("button")
    expect(kinds).to_have_count(21)
    for kind in kinds.all():
        kind.click()
        expect(kind).to_have_attribute("aria-pressed", "true")
        name = re.escape(kind.locator("code").inner_text())
        expect(seen.page.get_by_role("heading", name=re.compile(f"^{name}$"))).to_be_visible()
