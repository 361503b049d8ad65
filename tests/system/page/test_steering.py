"""A training is watched and steered on the page: the story that Loom comes from, and what goes wrong meanwhile."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import loom
from loom_gateway.sessions.state_dir import DriverFiles
from loom_proxy.local import LocalCluster
from tests.support.browser import Tab, signed_in
from tests.support.gateways import TOKEN as OWN
from tests.support.gateways import Gateway, gateway_of
from tests.support.processes import start
from tests.support.weaver_actors import FIRST_RATE, Trainers
from tests.support.weaver_training import Training, training

slow = pytest.mark.slow

RATE = 0.125


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    """A gateway that a test may break."""
    with gateway_of(cluster) as running:
        yield running


@pytest.fixture
def two(gateway: Gateway) -> Iterator[list[Training]]:
    """Two processes that train, which Loom did not spawn."""
    with gateway.connect() as job, training(job.weaver.address(), "replica_1", "replica_2") as both:
        yield both


@pytest.fixture
def opened(gateway: Gateway, two: list[Training], browser: Browser) -> Iterator[Tab]:
    with signed_in(browser, gateway.url, OWN) as there:
        yield there


def change(page: Page, key: str, value: str, target: str = "*") -> None:
    """Fill in the form for a change of the configuration, and send it."""
    page.get_by_test_id("target").fill(target)
    page.get_by_test_id("key").select_option(key)
    page.get_by_test_id("value").fill(value)
    page.get_by_test_id("apply").click()


def row(page: Page, replica: str) -> Locator:
    """The row of a replica among the acknowledgements."""
    return page.get_by_test_id("outcome").locator(f'tr[data-replica="{replica}"]')


@pytest.mark.guarantees(
    "page actions", "A change on the page is applied in the optimizer, and its acknowledgement seen"
)
def test_a_learning_rate_is_changed_on_the_page_and_applied_in_the_optimizer(
    browser: Browser, cluster: LocalCluster, job: loom.Job
) -> None:
    trainers = Trainers(job, "story")
    with signed_in(browser, cluster.url, cluster.token) as opened:
        opened.open("steering")
        change(opened.page, "learning_rate", str(RATE), trainers.glob)
        steps = {}
        for replica in trainers.replicas:
            expect(row(opened.page, replica)).to_contain_text(f"{FIRST_RATE} → {RATE}")
            steps[replica] = int(row(opened.page, replica).locator("td.number").inner_text().replace(",", ""))

    trained = trainers.stop()
    for replica, step in steps.items():
        assert [rate for _, rate in trained[replica].rates] == [FIRST_RATE, RATE]
        assert trained[replica].calls[-1][1] == RATE
        assert abs(trained[replica].rates[1][0] - step) <= 1


@pytest.mark.guarantees("page actions", "A refusal says why, and a change is taken back with one click")
@slow
def test_a_change_that_is_refused_says_why_and_one_is_taken_back_with_one_click(
    opened: Tab, two: list[Training]
) -> None:
    page = opened.page
    opened.open("steering")
    change(page, "learning_rate", "-1", "replica_1")
    expect(row(page, "replica_1")).to_contain_text("a learning rate is larger than 0")

    change(page, "learning_rate", "0.25")
    assert [one.learning_rate()[0] for one in two] == [0.25, 0.25]
    page.get_by_test_id("history").get_by_test_id("take-back").first.click()
    assert [one.learning_rate()[0] for one in two] == [0.1, 0.1]


@slow
def test_a_training_is_paused_resumed_drained_and_stopped(opened: Tab, two: list[Training]) -> None:
    page = opened.page
    opened.open("replicas/replica_1")
    expect(page.get_by_role("heading", name="replica_1")).to_be_visible()
    opened.open("steering?target=replica_1")
    page.get_by_test_id("pause").click()
    expect(page.get_by_test_id("preview")).to_contain_text("paused")
    page.get_by_test_id("resume").click()
    expect(page.get_by_test_id("preview")).to_contain_text("running")
    page.get_by_test_id("stop").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Stop").click()
    two[0].process.wait(30)
    opened.open("steering?target=replica_2")
    page.get_by_test_id("drain").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Drain").click()
    two[1].process.wait(30)


@pytest.mark.guarantees(
    "page actions", "The page asks no other origin and violates no content policy, or each browser test fails"
)
@slow
def test_a_policy_is_chosen(opened: Tab) -> None:
    opened.open("steering")
    opened.page.get_by_label("Group or glob", exact=True).fill("trainers")
    opened.page.get_by_label("Action").select_option("pause")
    opened.page.get_by_test_id("set-policy").click()
    expect(opened.page.get_by_test_id("policies")).to_contain_text("trainers")


@pytest.mark.guarantees(
    "page actions", "A gateway or a weaver that is killed is said to be away, and the page goes on when it is back"
)
@slow
def test_the_gateway_is_killed_and_back(opened: Tab, gateway: Gateway) -> None:
    gateway.end(signal.SIGKILL)
    expect(opened.page.get_by_test_id("lost")).to_be_visible()
    gateway.start()
    opened.live()
    expect(opened.page.get_by_test_id("lost")).to_have_count(0)
    opened.open("replicas")
    expect(opened.page.get_by_test_id("replica-table")).to_contain_text("replica_2")


@pytest.mark.guarantees(
    "page actions", "A gateway or a weaver that is killed is said to be away, and the page goes on when it is back"
)
@slow
def test_the_weaver_is_killed_and_back(opened: Tab, gateway: Gateway, two: list[Training]) -> None:
    os.kill(DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid, signal.SIGKILL)
    opened.open("steering")
    change(opened.page, "learning_rate", "0.5")
    assert [one.learning_rate()[0] for one in two] == [0.5, 0.5]
    for replica in ("replica_1", "replica_2"):
        expect(row(opened.page, replica)).to_contain_text("0.5")


@slow
def test_a_process_that_dies_is_seen_with_what_it_costs(opened: Tab, two: list[Training]) -> None:
    two[0].process.kill()
    opened.open("replicas")
    expect(opened.page.get_by_test_id("replica-table")).to_contain_text("failed")
    opened.open("goodput")
    expect(opened.page.get_by_test_id("faults")).to_contain_text("replica_1")


LOOP = """
import time
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


@slow
def test_a_save_that_no_replica_offers_is_disabled_with_its_reason(
    browser: Browser, gateway: Gateway, tmp_path: Path
) -> None:
    (tmp_path / "plain.py").write_text(LOOP)
    command = ("-c", "from loom.cli import main; main()", "run", sys.executable, str(tmp_path / "plain.py"))
    environment = {**os.environ, "LOOM_URL": gateway.url, "LOOM_TOKEN": OWN}
    with gateway.connect() as job, training(job.weaver.address(), "trainer_0"):
        plain = start(*command, env=environment)
        try:
            with signed_in(browser, gateway.url, OWN) as opened:
                check_offers(opened)
        finally:
            plain.kill()
            plain.wait()


def check_offers(opened: Tab) -> None:
    """Check what the page offers of a plain loop, of a training that saves, and of both."""
    page = opened.page
    save, why = page.get_by_test_id("save"), page.get_by_test_id("not-offered")
    opened.open("steering?target=plain_0")
    expect(save).to_be_disabled()
    expect(save).to_have_attribute("title", SAVES_NOTHING)
    expect(save).to_have_accessible_description(SAVES_NOTHING)
    expect(why).to_contain_text(SAVES_NOTHING)
    expect(page.get_by_test_id("pause")).to_be_enabled()
    assert opened.violations() == []

    opened.open("steering?target=trainer_0")
    expect(save).to_be_enabled()
    save.focus()
    page.keyboard.press("Enter")
    expect(row(page, "trainer_0")).to_contain_text("applied")

    opened.open("steering")
    expect(page.get_by_test_id("preview")).to_contain_text("2 living replicas")
    expect(save).to_be_enabled()


SAVES_NOTHING = re.compile("nothing here saves|no checkpointer")
