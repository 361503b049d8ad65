"""Live cells in JupyterLab's own front end, in Chromium, around a real training.

VS Code's front end cannot run here: it shows the same widget by the same MIME type.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from loom.process.listen import free_ports
from loom.rest_client import Gateway
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.browser import chromium
from tests.support.gateways import await_true
from tests.support.needs import skip_because
from tests.support.weaver_training import training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONNECT = "import loom, pathlib, time\nfrom loom import Actor, endpoint\njob = loom.connect()\njob"

WAITS = """
class Slow(Actor):
    @endpoint
    def wait(self, path):
        while not pathlib.Path(path).exists():
            time.sleep(0.05)
        return 42

slow = job.hosts.slice(hosts=0).spawn_procs(name="slow").spawn("slow", Slow)
future = slow.wait.call_one({path!r})
future
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@contextmanager
def server(
    module: str, folder: Path, options: Callable[[int, str], Sequence[str]], env: dict[str, str]
) -> Iterator[str]:
    """A notebook's server in a folder; yields its address, in which ``TOKEN`` is."""
    if importlib.util.find_spec(module) is None:
        skip_because(f"{module} is not installed")
    port, token = free_ports(1)[0], secrets.token_hex(8)
    homes = {
        name: str(folder / "home") for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "XDG_CONFIG_HOME")
    }
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *options(port, token)],
            cwd=folder,
            env={**os.environ, **homes, "XDG_CACHE_HOME": str(folder / "home"), **env},
            stdout=log,
            stderr=log,
        )
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, (folder / "server.log").read_text()
            with suppress(OSError), urllib.request.urlopen(f"{address}/?token={token}", timeout=5) as answer:
                return bool(answer.status == 200)
            return False

        try:
            await_true(answers, 120)
            yield f"{address} {token}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def jupyter(port: int, token: str) -> list[str]:
    options = [f"--IdentityProvider.token={token}", "--ServerApp.disable_check_xsrf=True", "--allow-root"]
    return ["--no-browser", f"--port={port}", "--ServerApp.port_retries=0", *options]


@pytest.fixture
def lab(cluster: LocalCluster, tmp_path: Path) -> Iterator[str]:
    with server("jupyterlab", tmp_path, jupyter, {"LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}) as address:
        yield address


def notebook(*cells: str) -> str:
    made = [
        {
            "cell_type": "code",
            "id": f"cell{n}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": one,
        }
        for n, one in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": made})


def run_all(browser: Browser, lab: str, folder: Path, *cells: str) -> Page:
    """Open a notebook of these cells in JupyterLab, and run all."""
    (folder / "live.ipynb").write_text(notebook(*cells))
    address, token = lab.split()
    page = browser.new_page()
    page.goto(f"{address}/lab/tree/live.ipynb?reset&token={token}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.get_by_text("Python 3", exact=False).first.wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    return page


def live(page: Page, number: int) -> Locator:
    return page.locator(".jp-CodeCell").nth(number).locator(".loom-live")


def test_a_training_s_cell_shows_its_curve_and_changes_it(
    browser: Browser, lab: str, tmp_path: Path, cluster: LocalCluster
) -> None:
    weaver = WeaverProxy(cluster.url, cluster.token)
    address = Gateway(cluster.url, cluster.token).ask("address")
    with training(address, "celled_0", "celled_1", group="celled"):
        await_true(lambda: any(one.summary for one in weaver.runs("celled")))
        page = run_all(browser, lab, tmp_path, CONNECT, "run = job.weaver.run('celled')\nrun")
        cell = live(page, 1)
        expect(cell.get_by_text("running", exact=True)).to_be_visible(timeout=60_000)
        chart = cell.get_by_role("img")
        expect(chart).to_have_attribute("aria-label", re.compile("loss: "))
        before = chart.get_attribute("aria-label")
        expect(chart).not_to_have_attribute("aria-label", str(before))  # long after the cell has ended

        rate = cell.get_by_label("learning rate")
        expect(rate).to_have_value("0.1")
        rate.fill("0.05")
        cell.get_by_role("button", name="set").click()
        expect(cell.get_by_role("status")).to_contain_text("learning rate: applied by 2 of 2 ranks at step")
        assert weaver.replica("celled_1").config["learning_rate"] == 0.05
        cell.get_by_role("button", name="pause").click()
        expect(cell.get_by_text("paused", exact=True)).to_be_visible()
        expect(cell.get_by_role("status")).to_contain_text("pause: applied by 2 of 2 ranks at step")
        cell.get_by_role("button", name="resume").click()
        expect(cell.get_by_text("running", exact=True)).to_be_visible()
        cell.get_by_role("button", name="stop").click()
        expect(cell.get_by_text("stopped", exact=True)).to_be_visible()
        expect(cell.get_by_role("button", name="stop")).to_be_hidden()
        page.screenshot(path=tmp_path / "run.png")
    page.close()


def test_a_future_and_a_grid_go_on_changing_after_their_cells(browser: Browser, lab: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    page = run_all(
        browser, lab, tmp_path, CONNECT, WAITS.format(path=str(gate)), "slow", "job.hosts.spawn_procs(name='more');"
    )
    future, grid, shown_job = live(page, 1), live(page, 2), live(page, 0)
    expect(future.get_by_text("pending")).to_be_visible(timeout=60_000)
    expect(grid.get_by_text("1 actor: 1 starting")).to_be_visible()
    expect(shown_job.get_by_text("more", exact=True)).to_be_visible()  # spawned by a later cell
    gate.touch()
    expect(future.get_by_text("arrived")).to_be_visible()
    grid.scroll_into_view_if_needed()  # a cell out of sight is not kept up to date
    expect(grid.get_by_text("1 actor: 1 alive")).to_be_visible()
    page.close()


MARIMO = """
import marimo

app = marimo.App()


@app.cell
def _():
    import loom

    job = loom.connect()
    return (job,)


@app.cell
def _(job):
    job.weaver.run("in_marimo")
    return
"""


def marimo(port: int, token: str) -> list[str]:
    return ["run", "live.py", f"--port={port}", "--headless", "--no-token"]


def test_marimo_shows_the_same_cell(browser: Browser, tmp_path: Path, cluster: LocalCluster) -> None:
    (tmp_path / "live.py").write_text(MARIMO)
    weaver = WeaverProxy(cluster.url, cluster.token)
    address = Gateway(cluster.url, cluster.token).ask("address")
    environment = {"LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}
    with (
        training(address, "in_marimo_0", group="in_marimo"),
        server("marimo", tmp_path, marimo, environment) as found,
    ):
        await_true(lambda: any(one.summary for one in weaver.runs("in_marimo")))
        page = browser.new_page()
        page.goto(found.split()[0])
        cell = page.locator(".loom-live").first
        expect(cell.get_by_text("running", exact=True)).to_be_visible(timeout=60_000)
        chart = cell.get_by_role("img")
        before = chart.get_attribute("aria-label")
        expect(chart).not_to_have_attribute("aria-label", str(before))
        cell.get_by_role("button", name="stop").click()
        expect(cell.get_by_text("stopped", exact=True)).to_be_visible()
        page.close()
