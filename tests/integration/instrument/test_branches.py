"""Branches of real trainings: the first loss is the run's, the run's files stay as they are, and values change."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loom.errors import BranchRefused
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from loom_proxy.weaver.runs import TrainingRun
from tests.support.gateways import BOUND, await_true
from tests.support.processes import run_loom

HALF = {"learning_rate_factor": {"old": None, "new": 0.5, "back": {"learning_rate": None}}}
"""The change of a branch with half the rate, and what gives the schedule back."""

DISTRIBUTED = """
import pathlib, sys, time
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

folder, steps, pause = pathlib.Path("kept"), int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)

def state(step):
    parts = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return {**parts, "schedule": schedule.state_dict(), "step": step}

first = 0
if found := sorted(folder.glob("step-*"), key=lambda one: int(one.name[5:])):
    loaded = state(0)
    dcp.load(loaded, checkpoint_id=found[-1], no_dist=True)
    model.load_state_dict(loaded["model"])
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    schedule.load_state_dict(loaded["schedule"])
    first = loaded["step"]
for step in range(first, steps):
    torch.manual_seed(step)
    batch = torch.randn(8, 4)
    loss = ((model(batch).squeeze(1) - batch.sum(1)) ** 2).mean()
    print("loss", step, f"{loss.item():.9f}", flush=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("rate", step, optimizer.param_groups[0]["lr"], flush=True)
    schedule.step()
    if (step + 1) % 10 == 0:
        dcp.save(state(step + 1), checkpoint_id=folder / f"step-{step + 1}", no_dist=True)
    time.sleep(pause)
"""

TRAINER = """
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x, labels=None):
        loss = ((self.layer(self.dropout(x)).squeeze(-1) - labels) ** 2).mean()
        print("loss", trainer.state.global_step, f"{loss.item():.9f}", flush=True)
        return {"loss": loss}

torch.manual_seed(0)
data = [{"x": x, "labels": x.sum()} for x in torch.randn(400, 4)]
settings = TrainingArguments(
    "kept", num_train_epochs=2, per_device_train_batch_size=8, save_steps=10, save_total_limit=3, logging_steps=1,
    report_to=[], learning_rate=0.01, use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(Model(), settings, train_dataset=data)
trainer.train()
trainer.save_model("kept/final")
"""

LIGHTNING = """
import sys
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, n):
        (x,) = batch
        loss = ((self.layer(x).squeeze(-1) - x.sum(1)) ** 2).mean()
        print("loss", self.trainer.global_step, f"{loss.item():.9f}", flush=True)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 4)), batch_size=8)
keeper = ModelCheckpoint(dirpath="kept", save_top_k=3, monitor="loss", save_last=True)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
pl.Trainer(max_epochs=6, accelerator="cpu", callbacks=[keeper], **quiet).fit(Module(), data)
"""


@pytest.fixture
def weaver(cluster: LocalCluster) -> WeaverProxy:
    return WeaverProxy(cluster.url, cluster.token)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts ``loom`` with these words in the test's folder, and kills what is left after the test."""
    for name, value in (("LOOM_URL", cluster.url), ("LOOM_TOKEN", cluster.token), ("LOOM_RUN_ID", None)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, **options: Any) -> subprocess.Popen[str]:
        loom = str(Path(sys.executable).with_name("loom"))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([loom, *words], cwd=tmp_path, **{**pipes, **options})
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def output(process: subprocess.Popen[str], within: float = 120) -> str:
    out, err = process.communicate(timeout=within)
    assert process.returncode == 0, err
    return out


def losses(text: str) -> dict[int, str]:
    """Return the losses that a training has printed, by step, as text of 9 digits."""
    return {int(step): loss for step, loss in re.findall(r"^loss (\d+) (\S+)$", text, re.MULTILINE)}


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def change(run: TrainingRun) -> dict[str, Any]:
    """Return the mark of a run's first change of values."""
    return next(dict(mark) for mark in run.timeline if mark["kind"] == "command")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_loop_goes_on_from_a_distributed_checkpoint_with_half_the_rate(
    weaver: WeaverProxy, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(DISTRIBUTED)
    whole = output(start("run", "--name", "loop", "--", sys.executable, "loop.py", "40", "0"))
    before = hashes(tmp_path / "kept")

    shown = output(start("branch", "loop", "--step", "29", "--set", "learning_rate=0.5x", "--dry-run"))
    branch = output(start("branch", "loop", "--step", "29", "--set", "learning_rate=0.5x"))

    assert "would start loop-at-20 from step 20 of loop" in shown
    assert min(losses(branch)) == 20
    assert losses(branch)[20] == losses(whole)[20]
    assert losses(branch)[21] != losses(whole)[21]  # made with the other rate
    assert "rate 20 0.0125\n" in branch  # half of the schedule's, which goes on
    assert "rate 30 0.00625\n" in branch
    assert hashes(tmp_path / "kept") == before
    (own,) = tmp_path.glob("kept-branch-*")
    assert {one.name for one in own.iterdir()} == {"beginning", "step-20", "step-30", "step-40"}
    parent, run = weaver.run("loop"), weaver.run("loop-at-20")
    assert run.parent == {"run": parent.id, "step": 20, "kind": "branch", "name": "loop"}
    assert [child["run"] for child in parent.children] == [run.id]
    mark = change(run)
    assert (mark["step"], mark["applied"], mark["params"]) == (20, 1, {"learning_rate": "0.5x"})
    assert mark["changes"] == HALF
    assert run.step == 40
    assert "└─ loop-at-20" in run_loom("runs", "show", parent.id).stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_living_run_starts_its_branch_beside_it_and_in_its_place(
    weaver: WeaverProxy, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(DISTRIBUTED)
    process = start("run", "--name", "alive", "--", sys.executable, "loop.py", "1000000", "0.02", stdout=None)
    await_true(lambda: any((one.step or 0) > 30 for one in weaver.runs("alive")))
    run = weaver.run("alive")
    try:
        weaver.update_config("alive_0", momentum=0.8).get(BOUND)
        beside = run.branch(step=25, set={"learning_rate": "0.5x"})
        later = run.branch()
        with pytest.raises(BranchRefused, match=r"no checkpoint at or before step 9: .*loom branch \w+ --step 9"):
            run.branch(step=9)
        instead = run.branch(step=30, replace=True)

        assert process.wait(BOUND) == 0
        assert (beside.name, beside.parent["step"], change(beside)["step"]) == ("alive-at-20", 20, 20)
        assert change(beside)["changes"] == HALF
        assert change(later)["changes"]["momentum"]["new"] == 0.8  # as it was set in the run
        assert (instead.name, instead.parent["step"]) == ("alive", 30)
        assert run.refresh().state == "stopped"
        assert {child["run"] for child in run.children} == {beside.id, later.id, instead.id}
        assert [mark["applied"] for mark in run.timeline if mark.get("do") == "branch"] == [1, 1, 0, 1]
    finally:
        weaver.stop("alive*").get(BOUND)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_that_loads_no_checkpoint_does_not_begin_anew(start: Start, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(DISTRIBUTED.replace("if found :=", "if False and"))
    output(start("run", "--name", "forgetful", "--", sys.executable, "loop.py", "20", "0"))

    process = start("branch", "forgetful", "--step", "10")
    out, err = process.communicate(timeout=120)

    assert process.returncode == 1
    assert "has loaded no checkpoint of" in err
    assert "rate" not in out


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("package", "script"), [("transformers", TRAINER), ("lightning", LIGHTNING)])
def test_a_stock_script_goes_on_from_its_trainers_checkpoint(
    package: str, script: str, weaver: WeaverProxy, start: Start, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    (tmp_path / "train.py").write_text(script)
    whole = output(start("run", "--name", package, "--", sys.executable, "train.py"))
    before = hashes(tmp_path / "kept")
    step = {"transformers": 85, "lightning": 59}[package]

    branch = output(start("branch", package, "--step", str(step), "--set", "learning_rate=0.5x"))

    first = step - step % 10 if package == "transformers" else 50
    assert min(losses(branch)) == first
    assert losses(branch)[first] == losses(whole)[first]
    assert losses(branch)[first + 2] != losses(whole)[first + 2]
    assert max(losses(branch)) == max(losses(whole))
    assert hashes(tmp_path / "kept") == before
    run = weaver.run(f"{package}-at-{first}")
    mark = change(run)
    assert (mark["step"], mark["changes"]["learning_rate_factor"]["new"]) == (first, 0.5)
    (own,) = tmp_path.glob("kept-branch-*")
    assert len(list(own.iterdir())) > 1
    assert os.path.isdir(own / "beginning")
