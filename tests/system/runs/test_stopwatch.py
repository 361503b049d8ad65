"""From two trainings to a branch of the better one and a change taken back: by commands, and by the page's keys."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from loom_gateway.dashboard import STATIC
from loom_proxy.weaver.client import WeaverProxy
from tests.support.browser import chromium, signed_in
from tests.support.gateways import await_true
from tests.support.needs import skip_because
from tests.support.processes import LOOM, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 20_000
"""Of a training that goes on: a quarter of an hour at least."""

TOKEN = "a token of the tests"

BOUND = 300.0
"""Seconds in which a script has imported its libraries and trained, on a busy machine."""

SCRIPT = """
import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

class Words(torch.utils.data.Dataset):
    tokens = (torch.arange(10_000).unsqueeze(1) * 7 + 3 * torch.arange(16)) % 64

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        time.sleep(given.pause)
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


parser = argparse.ArgumentParser()
parser.add_argument("--pause", type=float, default=0)
parser.add_argument("--lr", type=float)
parser.add_argument("--max-steps", type=int)
parser.add_argument("--output-dir")
given = parser.parse_args()
set_seed(42)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=1))
arguments = TrainingArguments(
    given.output_dir, max_steps=given.max_steps, learning_rate=given.lr, per_device_train_batch_size=2,
    logging_steps=1, save_steps=20, report_to="none", use_cpu=True, disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=Words()).train()
"""


@dataclass
class Terminal:
    """A user's terminal beside a ``loom up``, in a folder with the script."""

    folder: Path
    environment: dict[str, str]
    url: str
    weaver: WeaverProxy
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def loom(self, *words: str) -> str:
        """Run a command to its end; return what it prints."""
        ended = subprocess.run(self._command(words), capture_output=True, text=True, timeout=BOUND, **self._place())
        assert ended.returncode == 0, (words, ended.stdout[-2000:], ended.stderr[-2000:])
        return ended.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.loom(*words, "--json"))

    def train(self, name: str, rate: float, steps: int) -> tuple[str, ...]:
        """Return the words that train, under a name, with a learning rate."""
        script = (
            sys.executable,
            "train.py",
            f"--lr={rate}",
            f"--max-steps={steps}",
            f"--output-dir=out-{name}-{rate}",
        )
        return "run", "--name", name, "--", *script

    def begin(self, name: str) -> None:
        """Begin a training that goes on, and wait until it can be branched."""
        self.started.append(
            subprocess.Popen(
                self._command((*self.train(name, 0.001, STEPS), "--pause=0.02")),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                **self._place(),
            )
        )
        await_true(lambda: any((one.step or 0) > 25 for one in self.weaver.runs(name)), BOUND)

    def end(self) -> None:
        self.weaver.stop("*")
        for process in self.started:
            process.kill()
            process.communicate()

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [str(Path(sys.executable).with_name("loom")), *words]

    def _place(self) -> dict[str, Any]:
        return {"cwd": self.folder, "env": self.environment}


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A terminal with two runs, the second one better. It names no address: ``loom up`` is found."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("story")
    (folder / "train.py").write_text(SCRIPT)
    left_out = ("LOOM_URL", "LOOM_TOKEN", "LOOM_RUN_ID")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    environment = {
        **kept,
        "XDG_CONFIG_HOME": str(folder / "config"),
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    up = start("-c", LOOM, "up", "--port", "0", env={**environment, "LOOM_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"})
    try:
        assert up.stdout is not None
        url = next(line.split("=", 1)[1].strip() for line in up.stdout if "LOOM_URL=" in line)
        made = Terminal(folder, environment, url, WeaverProxy(url, TOKEN))
        made.loom(*made.train("train", 0.0002, 200))
        made.loom(*made.train("train", 0.003, 200))
        yield made
        made.end()
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=BOUND)


def last(terminal: Terminal, run: str, metric: str) -> tuple[int, float]:
    """Return step and value of a run's last point."""
    _, step, value = terminal.weaver.run(run).history(metric)[-1]
    return step or 0, value


def at(terminal: Terminal, run: str, metric: str, step: int) -> float:
    """Return a run's last value of a step: the Trainer's, after the one that Loom samples within the step."""
    return [point.value for point in terminal.weaver.run(run).history(metric) if point.step == step][-1]


def scheduled(rate: float, step: int) -> float:
    """Return the Trainer's own learning rate after a step of a training that goes on."""
    return rate * (1 - step / STEPS)


def test_the_better_run_is_branched_and_a_change_of_a_living_one_is_taken_back(terminal: Terminal) -> None:
    (best,) = terminal.json("runs", "list", "--since", "1d", "--sort", "summary.loss", "--limit", "1")["runs"]
    other = next(one.id for one in terminal.weaver.runs("train") if one.id != best["id"])
    compared = terminal.json("runs", "compare", best["id"], other)
    assert compared["summary"]["loss"][0][0] < compared["summary"]["loss"][1][0]
    assert compared["config"]["learning_rate"] == pytest.approx([0.003 * (199 / 200), 0.0002 * (199 / 200)])

    terminal.loom("branch", best["id"], "--step", "185", "--set", "learning_rate=0.5x")

    branch = terminal.weaver.run("train-at-180")
    (mark,) = (one for one in branch.timeline if one["kind"] == "command")
    assert (mark["step"], mark["applied"], mark["changes"]["learning_rate_factor"]["new"]) == (180, 1, 0.5)
    assert branch.parent["run"] == best["id"]
    assert at(terminal, branch.id, "loss", 181) == at(terminal, best["id"], "loss", 181)
    assert at(terminal, branch.id, "loss", 190) != at(terminal, best["id"], "loss", 190)
    for step in (181, 190):
        whole = at(terminal, best["id"], "learning_rate", step)
        assert at(terminal, branch.id, "learning_rate", step) == pytest.approx(whole / 2)

    terminal.begin("lives")
    terminal.loom("config", "set", "learning_rate=0.00001", "--replica", "lives")
    await_true(lambda: last(terminal, "lives", "learning_rate")[1] == 0.00001)
    terminal.loom("config", "back", "--replica", "lives")

    def is_back() -> bool:
        step, rate = last(terminal, "lives", "learning_rate")
        return rate == pytest.approx(scheduled(0.001, step), rel=1e-3)

    await_true(is_back)
    assert terminal.weaver.replicas()["lives_0"].config["learning_rate_schedule"] is None
    terminal.loom("stop", "--replica", "lives")


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def go_to(page: Page, name: str) -> None:
    """Open a run with the palette."""
    press(page, "Control+k")
    page.keyboard.type(name)
    expect(page.get_by_test_id("palette").get_by_role("option", selected=True)).to_contain_text(name)
    press(page, "Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text(name)


def test_the_keys_of_the_page_do_the_same(terminal: Terminal) -> None:
    if not (STATIC / "index.html").is_file():
        skip_because("the page is not built: npm was missing when Loom was installed")
    terminal.begin("paged")
    with chromium() as browser, signed_in(browser, terminal.url, TOKEN) as seen:
        page = seen.page
        press(page, "g", "r")
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        press(page, "/")
        page.keyboard.type('name == "train"')
        press(page, "Enter", "x", "ArrowDown", "x", "c")
        expect(page.get_by_role("heading", name="Compare")).to_be_visible()
        expect(page.get_by_test_id("config-diff").locator('[data-key="learning_rate"]')).to_be_visible()

        go_to(page, "paged")
        rate = page.locator('[data-key="learning_rate"]').get_by_test_id("value")
        expect(rate).to_be_enabled()
        rate.focus()
        press(page, "Control+a")
        page.keyboard.type("0.00001")
        press(page, "Enter")
        status = page.get_by_test_id("run-control").get_by_test_id("command-status")
        expect(status).to_contain_text("applied")
        await_true(lambda: last(terminal, "paged", "learning_rate")[1] == 0.00001)

        change = page.locator('[data-mark="command"]').filter(has_text="learning_rate").first
        change.get_by_role("button").first.focus()
        press(page, "Enter")
        page.get_by_test_id("take-back").focus()
        press(page, "Enter")

        def is_back() -> bool:
            step, now = last(terminal, "paged", "learning_rate")
            return now == pytest.approx(scheduled(0.001, step), rel=1e-3)

        await_true(is_back)

        press(page, "b")
        expect(page.get_by_test_id("branch-step")).to_be_focused()
        page.keyboard.type("25")
        press(page, "Tab")
        page.keyboard.type("learning_rate")
        press(page, "Tab")
        page.keyboard.type("0.5x")
        press(page, "Enter")
        link = page.get_by_test_id("branch").get_by_role("link", name="Open it")
        link.wait_for(timeout=BOUND * 1000)
        link.focus()
        press(page, "Enter")
        expect(page.get_by_role("heading", level=1)).to_contain_text(re.compile(r"paged-at-20"))
        expect(page.locator('[data-mark="command"]').filter(has_text="learning_rate_factor")).to_be_visible()
        at_start = terminal.weaver.run("paged-at-20")
        assert at_start.parent["step"] == 20
