"""Takes the pictures of the page in ``docs/pictures``: ``python -m tests.support.page_pictures [FOLDER]``.

Of a real training of eight processes in two groups, in which learning rates were changed and a process was killed.
And of a run that crashed and went on, whose loss bends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Browser, expect

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.bending import LATER, bending
from tests.support.browser import BOUND, chromium, signed_in
from tests.support.gateways import await_true
from tests.support.paths import ROOT
from tests.support.weaver_training import training

SIZE = {"width": 1280, "height": 800}

VIEWS = (
    *("overview", "runs", "replicas", "devices", "steering", "goodput", "chaos", "sessions", "meshes"),
    "replicas/pretrain_0",
)

SEEN_IN_BOTH = ("overview", "steering")
"""Views of which there is a picture in dark, too."""


def take(folder: Path) -> None:
    """Take a picture of each view."""
    folder.mkdir(parents=True, exist_ok=True)
    first, second = (tuple(f"{group}_{rank}" for rank in range(4)) for group in ("pretrain", "finetune"))
    with LocalCluster(hosts=2) as cluster, loom.connect(cluster.url, cluster.token) as job, chromium() as browser:
        address = job.weaver.address()
        with training(address, *first, group="pretrain"), training(address, *second, group="finetune") as tuned:
            await_true(lambda: len(job.weaver.replicas()) == len(first + second))
            for group, rate in (("pretrain", 0.05), ("finetune", 0.025), ("pretrain", 0.2)):
                job.weaver.update_config(group, learning_rate=rate).get(BOUND)
            tuned[3].process.kill()
            await_true(lambda: job.weaver.replicas()[second[3]].died_of is not None)
            counters = job.hosts.spawn_procs(per_host={"gpus": 2}, name="evaluation").spawn("counters", Counter)
            for _ in range(200):
                counters.add.call(1).get(BOUND)
            for scheme in ("light", "dark"):
                _of_each_view(browser, cluster, folder, scheme)


def take_run(folder: Path) -> None:
    """Take pictures of a run whose loss bends, after it crashed and went on."""
    with LocalCluster() as cluster, loom.connect(cluster.url, cluster.token) as job, chromium() as browser:
        address = job.weaver.address()
        with bending(address, "bend", 4, "--crash-at", "500") as processes:
            for process in processes:
                process.wait(BOUND)
        with bending(address, "bend", 4, "--begin", "400", again=True):
            await_true(lambda: (job.weaver.run("bend").info.step or 0) > 1200)
            job.weaver.update_config("bend", learning_rate=LATER).get(BOUND)
            await_true(lambda: (job.weaver.run("bend").info.step or 0) > 2200)
            for scheme in ("light", "dark"):
                with signed_in(browser, cluster.url, cluster.token, viewport=SIZE, color_scheme=scheme) as opened:
                    opened.open("runs/bend?smooth=0.7")
                    expect(opened.page.get_by_test_id("flag").first).to_be_visible()
                    opened.page.wait_for_timeout(2_000)
                    opened.page.screenshot(path=folder / f"run-{scheme}.png")


def _of_each_view(browser: Browser, cluster: LocalCluster, folder: Path, scheme: str) -> None:
    with signed_in(browser, cluster.url, cluster.token, viewport=SIZE, color_scheme=scheme) as opened:
        opened.page.wait_for_timeout(30_000 if scheme == "light" else 5_000)  # curves have to have some points
        for view in VIEWS if scheme == "light" else SEEN_IN_BOTH:
            opened.open(view)
            expect(opened.page.locator("h1")).to_be_visible()
            if view == "steering":
                opened.page.get_by_test_id("target").fill("pretrain")
                opened.page.get_by_test_id("key").select_option("learning_rate")
                opened.page.get_by_test_id("value").fill("0.1")
                opened.page.get_by_test_id("apply").click()
                expect(opened.page.get_by_test_id("acknowledgements").locator("tr")).to_have_count(5)
            opened.page.wait_for_timeout(2_000)
            name = "replica" if "/" in view else view
            opened.page.screenshot(path=folder / f"{name}-{scheme}.png")


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    take(where)
    take_run(where)
