"""Records the story of the README: ``python -m tests.support.page_story [FILE]`` writes `docs/pictures/story.webp`.

Four processes learn handwritten digits, far too slowly. The learning rate is changed while they train, and the loss
bends at the mark. One of them is killed; a spare takes its place, and the others go on.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

import loom
from loom.train import LiveConfig, digits
from loom_proxy.local import LocalCluster
from tests.support.browser import chromium, signed_in
from tests.support.gateways import BOUND, await_true
from tests.support.paths import ROOT

NAME = "digits"
SIZE = {"width": 1200, "height": 720}
EVERY = 0.4
"""Seconds between two frames."""

SHOWN_FOR, LAST_SHOWN_FOR = 160, 4000
"""Milliseconds that a frame is shown, so that the story is told in a third of its time, and the last one."""

RATES = (0.004, 0.12)
CHANGED_AT, KILLED_AT, STEPS = 110, 230, 340


def record(path: Path) -> None:
    """Record the training from its first points to its end."""
    path = path.resolve()
    frames: list[bytes] = []
    with (
        _in_a_folder() as folder,
        LocalCluster(hosts=2) as cluster,
        loom.connect(cluster.url, cluster.token) as job,
        chromium() as browser,
        signed_in(browser, cluster.url, cluster.token, viewport=SIZE) as opened,
    ):
        config = LiveConfig(learning_rate=RATES[0], batch_size=64)
        training = digits.digits_job(
            4, STEPS, name=NAME, pace=0.07, config=config, spares=1, checkpoints=folder, injectable=True
        )
        run = training.start(job)
        await_true(lambda: any(one.summary for one in job.weaver.runs(NAME)), timeout=3 * BOUND)
        (shown,) = job.weaver.runs(NAME)
        opened.open(f"runs/{shown.id}")

        def until(step: int) -> None:
            while not run.done() and (shown.refresh().step or 0) < step:
                frames.append(opened.page.screenshot())
                opened.page.wait_for_timeout(EVERY * 1000)

        until(CHANGED_AT)
        _change_rate(opened.page)
        until(KILLED_AT)
        job.weaver.inject("sigkill", f"{NAME}_3").get(BOUND)
        until(STEPS)
        run.result()
        time.sleep(3)
        frames.append(opened.page.screenshot())
    images = [Image.open(io.BytesIO(one)).convert("RGB") for one in frames]
    durations = [SHOWN_FOR] * (len(images) - 1) + [LAST_SHOWN_FOR]
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0, quality=70, method=4)


@contextmanager
def _in_a_folder() -> Iterator[str]:
    """Be in a folder of its own, which the page shows."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="digits-") as folder:
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def _change_rate(page: Page) -> None:
    """Change the learning rate on the page, in the control beside the curve."""
    form = page.get_by_test_id("run-config")
    form.locator('[data-key="learning_rate"]').get_by_test_id("value").fill(str(RATES[1]))
    form.get_by_test_id("apply").click()


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures" / "story.webp")
