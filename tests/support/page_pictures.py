"""Takes the pictures of the page in ``docs/pictures``: ``python -m tests.support.page_pictures [FOLDER]``.

A real training of four processes on two hosts, in which a learning rate was changed and a process was killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect

import loom
from loom_proxy.local import LocalCluster
from tests.support.browser import chromium, signed_in
from tests.support.gateways import BOUND, await_true
from tests.support.paths import ROOT
from tests.support.weaver_actors import Trainers

SIZE = {"width": 1280, "height": 800}

VIEWS = ("overview", "replicas", "devices", "steering", "goodput", "chaos", "sessions")


def take(folder: Path) -> None:
    """Take a picture of each view."""
    folder.mkdir(parents=True, exist_ok=True)
    with LocalCluster(hosts=2) as cluster, loom.connect(cluster.url, cluster.token) as job, chromium() as browser:
        groups = [Trainers(job, name) for name in ("alpha", "beta")]
        for group, rate in zip(groups, (0.25, 0.125), strict=True):
            job.weaver.update_config(group.glob, learning_rate=rate).get(BOUND)
        os.kill(groups[1].pids[1], signal.SIGKILL)
        dead = groups[1].replicas[1]
        await_true(lambda: job.weaver.replicas()[dead].died_of is not None)
        for scheme in ("light", "dark"):
            _of_each_view(browser, cluster, folder, scheme, groups[0].replicas[0])


def _of_each_view(browser: Browser, cluster: LocalCluster, folder: Path, scheme: str, replica: str) -> None:
    with signed_in(browser, cluster.url, cluster.token, viewport=SIZE, color_scheme=scheme) as opened:
        for view in (*VIEWS, f"replicas/{replica}"):
            opened.open(view)
            expect(opened.page.locator("h1")).to_be_visible()
            opened.page.wait_for_timeout(2500)  # curves have to have some points
            name = view if "/" not in view else "replica"
            opened.page.screenshot(path=folder / f"{name}-{scheme}.png")


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
